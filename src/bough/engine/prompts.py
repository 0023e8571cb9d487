"""PromptReader: processes prompts in chunks or by steps of decoding, and samples the token after them."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.engine.chunk import ChunkForward, Pace
from bough.engine.delivery import done, token_events
from bough.engine.events import Event, Failed
from bough.engine.images import offset_at
from bough.engine.inputs import Verify, tree_rows
from bough.engine.paging import Paging, Parts
from bough.engine.runner import Forward
from bough.engine.scheduler import PrefillChunk
from bough.engine.sequence import Phase, Sequence
from bough.errors import ModelFileError
from bough.kernels.runtime.device import on_device
from bough.kernels.tree import MAX_ROWS
from bough.models.step import Step
from bough.prefix_cache.boundaries import SnapshotKind, snapshot_positions
from bough.spec.tree import Tree
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import SavedSequence

SHORT = 512  # tokens of a chunk that decode steps process, on a GPU: a chunk's launches take longer
# Of a step that also verifies trees, at most. Many users with short answers wait for their prompts to be
# read, and rows beside those of others cost less than steps of their own.
_PROMPT_ROWS = 3 * MAX_ROWS // 4


@dataclass(frozen=True, slots=True)
class PromptState:
    """The state after a prompt, for other sequences with the same one."""

    state: SavedSequence
    draft: SavedRings | None
    logits: Tensor  # [1, V] after its last token


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens of a prompt that a step reads beside the trees of others."""

    sequence: Sequence
    tokens: list[int]

    @property
    def ends(self) -> bool:
        """Whether a token is sampled after it."""
        return self.sequence.processed + len(self.tokens) == len(self.sequence.request.prompt)

    @property
    def part(self) -> Verify:
        return Verify(self.sequence.slot, Tree.chain(self.tokens), len(self.tokens), given=True)


class PromptReader:
    def __init__(self, parts: Parts, paging: Paging, *, short: int):
        """`short`: chunks of at most this many tokens are processed by decode steps."""
        self._target, self._states, self._runner = parts.target, parts.states, parts.runner
        self._drafter, self._prefixes, self._scheduler = parts.drafter, parts.prefixes, parts.scheduler
        self._paging, self._pace = paging, Pace(parts.target.device)
        self._encoder = parts.encoder
        self.short = short
        self._shared: dict[Sequence, PromptState] = {}  # of sequences whose prompt others wait for

    def process(self, chunk: PrefillChunk) -> list[Event]:
        """Process a chunk, or some layers of it.

        Which way a chunk is processed follows from its tokens alone: its bits do not depend on load.
        """
        sequence = chunk.sequence
        if sequence.chunk is None and not self._paging.provide(sequence, self._needed_rows(chunk)):
            return []
        short = chunk.stop - chunk.start <= self.short and not sequence.sees
        logits = self._read_by_steps(chunk) if short else self._run_layers(chunk)
        if logits is None:
            return [sequence.progress]
        return self._processed(sequence, chunk.stop, logits)

    def pieces(self, readers: list[Sequence], decoding: int) -> list[PromptPiece]:
        """Return the prompt tokens that a step reads beside its trees: those of the oldest readers first."""
        rows = min(_PROMPT_ROWS, MAX_ROWS - decoding)
        together = tree_rows(decoding + len(readers))
        most = min(together, self._runner.read_rows, self._drafter.features.commit_rows)
        pieces = []
        for sequence in readers:
            stop = min(sequence.chunk_end, sequence.processed + min(most, rows))
            if stop > sequence.processed:
                pieces.append(PromptPiece(sequence, sequence.request.prompt[sequence.processed : stop]))
                rows -= stop - sequence.processed
        return pieces

    def piece_read(self, piece: PromptPiece, logits: Tensor) -> list[Event]:
        """Note that a step has read a piece of a prompt; logits [rows, V] after its tokens.

        What fails here is this sequence alone: the others' tokens are committed.
        """
        sequence, tokens = piece.sequence, piece.tokens
        self._states.lengths[sequence.slot] += len(tokens)
        self._drafter.prefill(sequence.slot, tokens, None)
        try:
            stop = sequence.processed + len(tokens)
            return self._processed(sequence, stop, logits[len(tokens) - 1 :])
        except Exception as error:  # of any kind: memory, damaged weights, a constraint
            return [Failed(error)]

    def read_piece(self, slot: int, tokens: list[int]) -> Forward:
        """Process some tokens by one step, for whose rows there are pages."""
        forward = self._runner.read(slot, tokens)
        self._drafter.prefill(slot, tokens, forward.features[: len(tokens)])
        return forward

    def prefilled(self, sequence: Sequence) -> list[Event]:
        """End a request for prefill alone after its last chunk; its release takes the snapshot."""
        if not sequence.request.prefill_only or sequence.processed < max(sequence.chunk_ends, default=0):
            return []
        sequence.finish("stop")
        return [done(self._drafter, sequence)]

    def begin_decoding(self, sequence: Sequence) -> None:
        """Set how the sequence's tokens are sampled and where they end."""
        slot, request = sequence.slot, sequence.request
        self._runner.begin(slot, sorted(request.stop_ids))
        masked = request.constraint is not None
        generated = sequence.tokens[len(request.prompt) : -1]
        self._runner.sampler.begin(slot, sequence.sampling, request.text, masked=masked, generated=generated)

    def follow(self, sequence: Sequence) -> list[Event] | None:
        """Go on after the prompt that another sequence has processed; None: none has."""
        leader = sequence.leader
        if leader not in self._shared:
            return None
        prompt, slot = self._shared[leader], sequence.slot
        self._prefixes.reserve_for(slot, prompt.state)
        self._prefixes.store.restore(slot, prompt.state)
        self._drafter.open(slot, sequence.request.prompt, prompt.draft)
        sequence.processed = sequence.stats.cached_tokens = prompt.state.length
        sequence.stats.cached_after_answer = leader.stats.cached_after_answer
        sequence.phase = Phase.DECODE
        self.drop_shared()
        return [sequence.progress, *self._first_token(sequence, prompt.logits)]

    def drop_shared(self) -> None:
        """Drop the states after prompts that nobody waits for any more."""
        leaders = {sequence.leader for sequence in self._scheduler.waiting}
        for leader in [leader for leader in self._shared if leader not in leaders]:
            self._prefixes.store.release(self._shared.pop(leader).state)

    def cache(self, sequence: Sequence, tokens: list[int], kind: SnapshotKind, slot: int) -> None:
        """Put a snapshot after the tokens into the prefix cache, unless they end inside an image."""
        if any(image.start < len(tokens) < image.end for image in sequence.request.images):
            return
        if sequence.request.boundaries is not None and tokens and self._prefixes.enabled:
            self._prefixes.insert(
                slot,
                tokens,
                kind,
                lambda: self._drafter.save(slot),
                after_answer=sequence.stats.cached_after_answer,
                unused_s=sequence.request.prefill_for_s,
            )

    def cache_progress(self, sequence: Sequence, slot: int) -> None:
        """Take a snapshot after the last chunk, unless it failed in its middle or nothing is new."""
        if not self._finish_chunk(sequence, slot):
            return
        length = sequence.processed
        if sequence.stats.cached_tokens < length == self._states.lengths[slot]:
            self.cache(sequence, sequence.request.prompt[:length], "turn", slot)

    def _finish_chunk(self, sequence: Sequence, slot: int) -> bool:
        """Run a chunk that was begun to its end; return whether the sequence's state is whole."""
        if sequence.chunk is None:
            return True
        try:
            sequence.chunk.run()
        except Exception:  # of any kind: what is cached is a help, no more
            return False
        sequence.processed, sequence.chunk = self._states.lengths[slot], None
        return True

    def _needed_rows(self, chunk: PrefillChunk) -> int:
        """Return the rows that need pages for a chunk: the last of the steps that read it is padded."""
        count, most = chunk.stop - chunk.start, self._runner.read_rows
        if count > self.short or chunk.sequence.sees:
            return count
        whole = (count - 1) // most * most
        return whole + self._runner.step_rows(count - whole)

    def _processed(self, sequence: Sequence, stop: int, logits: Tensor) -> list[Event]:
        """Note that the prompt is processed up to `stop`; at its end decode, from the logits [1, V] there."""
        request, sequence.processed = sequence.request, stop
        if request.prefill_only:
            return [sequence.progress, *self.prefilled(sequence)]
        saved = snapshot_positions(sequence.chunk_ends, request.boundaries or {})
        if stop in saved:
            self.cache(sequence, request.prompt[:stop], saved[stop], sequence.slot)
        if stop < len(request.prompt):
            return [sequence.progress]
        sequence.phase = Phase.DECODE
        if any(follower.leader is sequence for follower in self._scheduler.waiting):
            state, draft = self._prefixes.store.save(sequence.slot), self._drafter.save(sequence.slot)
            self._shared[sequence] = PromptState(state, draft, logits.clone())
        return [sequence.progress, *self._first_token(sequence, logits)]

    def _first_token(self, sequence: Sequence, logits: Tensor) -> list[Event]:
        """Sample the token after the prompt, from its last row's logits [1, V]."""
        request = sequence.request
        if not bool(logits.isfinite().all()):
            raise ModelFileError(
                "the model's logits after this prompt are not finite numbers: its weights are damaged",
                "download the file again, or set `device` to cpu",
            )
        self.begin_decoding(sequence)
        sampler = self._runner.sampler
        if sequence.constraint is not None:
            sampler.set_masks(0, sequence.constraint.masks([request.prompt[-1]], [-1]))
        sampled = sampler.sample_first(logits, sequence.slot, len(request.prompt)).tolist()
        delivered = sequence.deliver(sampled).tokens
        return token_events(self._drafter, sequence, delivered, lambda: logits, [0])

    def _run_layers(self, chunk: PrefillChunk) -> Tensor | None:
        """Run some layers of a chunk; return the logits [1, V] after the prompt, else nothing of use.

        None: not all layers have run.
        """
        sequence, rows = chunk.sequence, chunk.stop - chunk.start
        if sequence.chunk is None:
            layers = len(self._target.spec.layers)
            if self._encoder is not None and sequence.sees:
                layers += self._encoder.steps
            sequence.chunk = ChunkForward(self._forward_chunk(chunk), rows=rows, total=layers)
        self._pace.run(sequence.chunk)
        hidden = sequence.chunk.hidden
        if hidden is None:
            return None
        sequence.chunk = None
        return self._target.logits(hidden) if chunk.stop == len(sequence.request.prompt) else hidden

    def _read_by_steps(self, chunk: PrefillChunk) -> Tensor:
        """Process a few tokens by the captured forward of decode steps: a chunk's launches take longer."""
        slot, logits, most = chunk.sequence.slot, torch.empty(0), self._runner.read_rows
        for first in range(chunk.start, chunk.stop, most):
            tokens = chunk.sequence.request.prompt[first : min(first + most, chunk.stop)]
            forward = self.read_piece(slot, tokens)
            logits = forward.logits_of(0)[len(tokens) - 1 :]
        return logits

    def _forward_chunk(self, chunk: PrefillChunk) -> Generator[None, None, Tensor]:
        """Return the last row's hidden state [1, width]; all else of a chunk is large and freed here."""
        sequence, device = chunk.sequence, self._target.device
        slot, images = sequence.slot, sequence.request.images
        seen = None
        if self._encoder is not None and images:
            before = self._encoder.seconds, self._encoder.encoded
            seen = yield from self._encoder.chunk(images, chunk.start, chunk.stop)
            sequence.stats.image_s += self._encoder.seconds - before[0]
            sequence.stats.encoded_images += self._encoder.encoded - before[1]
        prompt = sequence.request.prompt[chunk.start : chunk.stop]
        tokens = prompt if seen is None else [max(0, token) for token in prompt]
        slots = on_device([slot], device)
        lengths = self._states.buffers.lengths[slots]
        span = self._states.lengths[slot] + len(tokens)
        step = Step.chunk(slots, on_device([tokens], device), lengths, span=span)
        step = step if seen is None else replace(step, images=seen)
        saved = snapshot_positions(sequence.chunk_ends, sequence.request.boundaries or {})
        ends = {*saved, len(sequence.request.prompt)}
        if sequence.request.prefill_only:
            ends = {chunk.stop}  # it may have to give way here
        rows = feature_rows(chunk.start, chunk.stop, ends, self._drafter.features.context_length)
        output = yield from self._target.forward_by_layers(
            step, lambda: self._states.buffers, self._drafter.features.taps, rows
        )
        self._states.advance(step, [slot])
        if images:
            self._states.set_offset(slot, offset_at(images, chunk.stop))
        self._drafter.prefill(slot, prompt, output.features.flatten(0, -2))
        return output.hidden.flatten(0, -2)[-1:].clone()


def feature_rows(start: int, stop: int, ends: Iterable[int], context: int) -> int:
    """Return how many of a chunk's last positions a draft with `context` positions still needs features of.

    ends: positions where its state is used or saved, the prompt's end among them.
    """
    needed = min(end for end in ends if end >= stop) - context
    return min(stop - start, max(0, stop - needed))
