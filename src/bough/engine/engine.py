"""Engine: adds requests, runs one step at a time, returns events. No text, no threads, no I/O.

One idea: the scheduler picks the work, the runner runs it, the sampler decides, the sequence commits.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bough.engine.chunk import ChunkForward, Pace
from bough.engine.events import Done, Event, Failed, Progress, Tokens, VerifiedTree
from bough.engine.runner import Accepted, EagerRunner, Forward, GraphRunner, Masks, StepTimes, Verify
from bough.engine.sampler import SamplingParams, token_logprobs
from bough.engine.scheduler import Admit, Decode, PrefillChunk, Scheduler, Work
from bough.engine.sequence import (
    LaunchAhead,
    Launched,
    Limits,
    OwnConstraint,
    Parked,
    Phase,
    Request,
    Sequence,
)
from bough.engine.stats import RequestStats, StepRecord
from bough.errors import ModelFileError
from bough.kernels.runtime.device import on_device
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import kv_formats
from bough.memory.estimate import chunk_size
from bough.models.decoder import Target, check_taps
from bough.models.step import Step
from bough.prefix_cache.boundaries import SnapshotKind, chunk_ends, snapshot_positions
from bough.prefix_cache.cache import PrefixCache, PrefixCacheConfig
from bough.spec.drafter import Drafter, NoDrafter, StepOutcome, Turn
from bough.spec.tree import Tree
from bough.state.draft_ring import SavedRings
from bough.state.sequences import PAGE, CacheConfig, SequenceStates
from bough.state.snapshots import SavedSequence, SnapshotStore

SHORT = 512  # tokens of a chunk that decode steps process, on a GPU: a chunk's launches take longer
# Of a step that also verifies trees, at most. Many users with short answers wait for their prompts to be
# read, and rows beside those of others cost less than steps of their own.
_PROMPT_ROWS = 3 * MAX_ROWS // 4
_PARKED_PAGES = 4  # free for each that runs before a parked sequence comes back, so that it stays

__all__ = ["Done", "Engine", "Event", "Progress", "Request", "Sequence", "Tokens", "VerifiedTree"]


class Engine:
    def __init__(  # noqa: PLR0913 (what an engine is made of)
        self,
        target: Target,
        *,
        max_ctx: int,
        slots: int = 1,
        prefill_chunk: int | None = None,
        drafter: Drafter | None = None,
        max_rows: int = 1,
        cache: CacheConfig | None = None,
        prefix_cache: PrefixCacheConfig | None = None,
        runner: Literal["auto", "eager", "graph"] = "auto",
    ):
        """`slots`: sequences that run at once; `max_rows` of a tree, the root included.

        `runner` auto: graph on a GPU, eager on a CPU.
        """
        assert 1 <= max_rows <= MAX_ROWS and 1 <= slots <= MAX_ROWS
        self.target = target
        self.slots = slots
        self.max_ctx = max_ctx
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk or chunk_size(target.device.type)
        self.drafter = drafter or NoDrafter()
        check_taps(target.spec, self.drafter.taps)
        graphs = target.device.type == "cuda" if runner == "auto" else runner == "graph"
        kind = GraphRunner if graphs else EagerRunner
        cache = cache or CacheConfig(*kv_formats(target.spec, target.device))
        self.states = SequenceStates(
            target.spec,
            max_ctx=max_ctx,
            slots=slots,
            max_rows=kind.most_rows(max_rows),
            device=target.device,
            cache=cache,
            input_dtype=target.dtype,
            static=kind.asynchronous,
        )
        self.runner = kind(target, self.states, self.drafter, max_rows=max_rows)
        self.prefixes = PrefixCache(SnapshotStore(self.states), prefix_cache or PrefixCacheConfig())
        # On a CPU a chunk of a few tokens takes no longer than a step.
        self.short = SHORT if graphs and target.device.type == "cuda" else 0
        self._scheduler, self._pace = Scheduler(slots), Pace(target.device)
        self._pool_pages = cache.pages or self.states.buffers.page_table.numel()
        self._prompts: dict[Sequence, PromptState] = {}  # of sequences whose prompt others wait for
        self._asked_ahead = False  # the draft was launched for the next step of several sequences
        # The sequences that the current step works for: if it raises, they have failed, and no others.
        self.working: list[Sequence] = []

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Capture the steps as CUDA graphs, between requests; return whether that was possible."""
        with self._fresh_slot() as slot:
            captured = self.runner.capture(progress, slot=slot)
            if not captured:
                self.short = 0  # steps that are not captured take as long as chunks
            # Whole chunks: their memory is taken now, and not by the first long prompt.
            self._rehearse(slot, [min(self.prefill_chunk, self.max_ctx)])
            self.runner.rehearse(slot)
            return captured

    @torch.inference_mode()
    def measure_steps(self) -> dict[int, StepTimes]:
        """Return the times of steps of one sequence by rows, between requests: as padded, once captured."""
        with self._fresh_slot() as slot:
            found = self.runner.measure(slot)
            return {min(rows, self.max_rows): times for rows, times in found.items()}

    @torch.inference_mode()
    def measure_draft(self) -> float:
        """Return the seconds of a draft call, between requests."""
        with self._fresh_slot() as slot:
            return self.runner.measure_draft(slot)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run every kind of work once, in a dry run, which finds the kernels of all of it."""
        chunks = sorted({min(rows, self.max_ctx) for rows in (2 * MAX_ROWS, self.prefill_chunk)})
        with self._fresh_slot() as slot:
            self._rehearse(slot, chunks)
            self.runner.rehearse(slot, batched=self.slots > 1)

    @contextmanager
    def _fresh_slot(self) -> Generator[int]:
        """Give a slot for steps between requests.

        It has pages of its own: those that the slot had before may hold a cached prefix.
        """
        slot = self.states.open()
        self.drafter.begin(slot)
        try:
            self._reserve(slot, min(3 * MAX_ROWS, self.max_ctx + self.runner.step_rows(self.max_rows)))
            yield slot
        finally:
            self.states.close(slot)

    @property
    def running(self) -> int:
        """Return how many sequences have a slot."""
        return sum(not sequence.finished for sequence in self._scheduler.running)

    @property
    def idle(self) -> bool:
        """Return whether `step` has nothing to do."""
        return self._scheduler.idle

    @property
    def amid_chunk(self) -> bool:
        """Return whether a chunk has been begun: it holds the memory that is planned for prefill."""
        return any(sequence.chunk is not None for sequence in self._scheduler.running)

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Do a piece of work that later steps will profit from; return whether there was any."""
        return self.runner.capture_next() or self.prefixes.use_idle_time()

    def add(self, request: Request, *, leader: Sequence | None = None) -> Sequence:
        """Queue a request; raises if it cannot run.

        leader: a sequence that may have the same prompt, which is then processed only once.
        """
        self.limits.check(request)
        sampling = request.sampling.seeded()
        stats = RequestStats(len(request.prompt), seed=sampling.seed or 0)
        stats.approximate = self.approximate
        sequence = Sequence(
            request,
            sampling,
            stats,
            launch_ahead=self._launch_ahead(request),
            # The last token needs no room in the KV cache: nothing is computed from it.
            max_tokens=min(request.max_tokens, self.max_ctx - len(request.prompt) + 1),
            constraint=None if request.constraint is None else OwnConstraint(request.constraint),
            tokens=list(request.prompt),
        )
        if leader is not None and leader.request.prompt == request.prompt:
            sequence.leader = leader
        self._scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Event]]:
        """Run one step: admit a sequence, process layers of a chunk, or verify a tree of each that decodes.

        Short chunks are processed by the steps of those that decode, if there are any.

        Return what happened. Finished sequences are released at the beginning: their readers have the end of
        the text before anything else is done.
        """
        for sequence in [each for each in self._scheduler.running if each.finished]:
            self.working = [sequence]
            self.release(sequence)
        for sequence in self._scheduler.preempted:
            self.working = [sequence]
            self._give_way(sequence)
        work = self._next_work()
        if work is None:
            return []
        start = time.perf_counter()
        try:
            return self._run(work)
        finally:
            if (
                not isinstance(work, Decode)
                and self._scheduler.contended
                and self.target.device.type == "cuda"
            ):
                torch.cuda.synchronize(self.target.device)  # decode steps wait for what a chunk really took
            self._scheduler.took(work, time.perf_counter() - start)

    def _next_work(self) -> Work | None:
        """Return what is next; a forward in flight is finished before others run."""
        in_flight = next((each for each in self._scheduler.running if each.in_flight), None)
        if in_flight is not None and self._scheduler.contended:
            return Decode([in_flight])
        return self._scheduler.next(self._fits, short=self.short)

    def _run(self, work: Work) -> list[tuple[Sequence, Event]]:
        self.working = [*work.sequences, *work.readers] if isinstance(work, Decode) else [work.sequence]
        match work:
            case Admit(sequence):
                return _tagged(sequence, self._admit(sequence))
            case PrefillChunk(sequence) as chunk:
                return _tagged(sequence, self._prefill(chunk))
            case Decode([sequence], []):
                self._asked_ahead = False
                return _tagged(sequence, self._decode(sequence))
            case Decode(sequences, readers):
                return self._decode_all(sequences, readers)

    def cancel(self, sequence: Sequence) -> Done:
        """End a sequence where it is."""
        sequence.finish("cancelled")
        if sequence.slot < 0:
            self.release(sequence)
        return self._done(sequence)

    @torch.inference_mode()
    def stop(self, sequence: Sequence, *, keep: int) -> Done:
        """End a sequence after the first `keep` of the tokens that the last step returned.

        Its state is then that of plain decoding up to there. Needs `Request.may_stop`, unless all are kept.
        """
        assert 1 <= keep <= sequence.new_tokens, f"{keep} of {sequence.new_tokens} tokens"
        revoked = sequence.new_tokens - keep
        rows = min(sequence.committed_rows, keep)
        if revoked:
            del sequence.tokens[-revoked:]
            sequence.stats.generated_tokens -= revoked
        if sequence.committed_rows > rows:
            sequence.stats.step_revoked(committed=sequence.committed_rows, kept=rows)
            self._rollback(sequence, sequence.committed_rows - rows)
        sequence.new_tokens, sequence.committed_rows = keep, rows
        sequence.finish("stop")
        return self._done(sequence)

    @torch.inference_mode()
    def release(self, sequence: Sequence) -> None:
        """Free a sequence's slot and pages; the state of a finished one goes to the prefix cache.

        May be called at any time, any number of times.
        """
        self._scheduler.remove(sequence)
        slot, sequence.slot = sequence.slot, -1
        try:
            complete = sequence.processed == len(sequence.request.prompt) and sequence.error is None
            if slot >= 0 and sequence.finished and complete:
                processed = sequence.tokens[: self.states.lengths[slot]]
                self._cache_prefix(sequence, processed, "answer", slot)
            elif slot >= 0 and sequence.request.prefill_only:
                self._cache_progress(sequence, slot)
        finally:
            sequence.phase, sequence.launched, sequence.chunk = Phase.FINISHED, None, None
            if slot >= 0:
                self.states.close(slot)
            self._drop_parked(sequence)
            self._drop_prompts()
        self.prefixes.write()

    def generate(self, request: Request) -> Generator[Event]:
        """Run one request to its end: Progress during prefill, Tokens as they are committed, Done.

        Closing the generator, or an error, frees the sequence's memory.
        """
        sequence = self.add(request)
        try:
            while not sequence.finished:
                for owner, event in self.step():
                    if owner is sequence and isinstance(event, Failed):
                        raise event.error
                    if owner is sequence:
                        yield event
        finally:
            self.release(sequence)

    @torch.inference_mode()
    def probe(self, sequence: Sequence, tree: Tree, *, draft: bool = True) -> StepTimes:
        """Run one decode step that verifies `tree` and commits its root alone, and return its times.

        For benchmarks of a step's size. The draft runs as usual unless `draft` is off; its tree is discarded.
        """
        assert sequence.phase is Phase.DECODE and sequence.launched is None
        if draft:
            self._draft(sequence, self._row_limit(sequence))
        forward = self._verify(sequence, tree, max_accepted=1)
        self.runner.accept(forward)
        [accepted], times = self.runner.read_back()
        self.states.lengths[sequence.slot] += len(accepted.path)
        sequence.tokens += accepted.tokens
        return times

    @property
    def approximate(self) -> tuple[str, ...]:
        """Return what makes output differ from that of the reference over an 8-bit KV cache, in words."""
        return (*self.target.approximate, *self.states.approximate)

    @property
    def limits(self) -> Limits:
        spec = self.target.spec
        return Limits(self.max_ctx, spec.context_length, spec.vocab_size)

    def _launch_ahead(self, request: Request) -> LaunchAhead:
        """Return what of a next step may be launched before the caller has seen this one's tokens."""
        # These read buffers that the next step overwrites.
        reads = request.sampling.logprobs is not None or request.trees
        if reads or not self.runner.asynchronous:
            return "nothing"
        return "draft" if request.may_stop else "forward"

    # -- Prefill

    def _admit(self, sequence: Sequence) -> list[Event]:
        """Open a slot: go on where a sequence was parked, after its leader's prompt, or a cached prefix."""
        request = sequence.request
        slot = sequence.slot = self.states.open()
        self.drafter.begin(slot)
        self.runner.begin(slot)
        # Rows of its prompt may be sampled, for nothing: not by what the slot's last request left.
        self.runner.sampler.begin(slot, SamplingParams(seed=0), [], masked=False)
        if sequence.parked is not None:
            return self._unpark(sequence, sequence.parked)
        if sequence.leader in self._prompts:
            return self._follow(sequence, self._prompts[sequence.leader])
        sequence.chunk_ends = chunk_ends(len(request.prompt), request.boundaries or {}, self.prefill_chunk)
        if request.prefill_only:
            sequence.chunk_ends.pop()  # where this prompt ends, the chunk of a longer one does not
        found = self.prefixes.restore(slot, request.prompt, sequence.chunk_ends)
        if found is not None:
            self.drafter.restore(slot, request.prompt[: found.length], found.draft)
            sequence.processed = sequence.stats.cached_tokens = found.length
            sequence.stats.cached_after_answer = found.after_answer
        sequence.phase = Phase.PREFILL
        return [self._progress(sequence), *self._prefilled(sequence)]

    def _follow(self, sequence: Sequence, prompt: "PromptState") -> list[Event]:
        """Go on after the prompt that another sequence has processed."""
        slot = sequence.slot
        self.prefixes.reserve_for(slot, prompt.state)
        self.prefixes.store.restore(slot, prompt.state)
        self.drafter.restore(slot, sequence.request.prompt, prompt.draft)
        sequence.processed = sequence.stats.cached_tokens = prompt.state.length
        assert sequence.leader is not None
        sequence.stats.cached_after_answer = sequence.leader.stats.cached_after_answer
        sequence.phase = Phase.DECODE
        self._drop_prompts()
        return [self._progress(sequence), *self._first_token(sequence, prompt.logits)]

    def _prefill(self, chunk: PrefillChunk) -> list[Event]:
        sequence = chunk.sequence
        if sequence.chunk is None and not self._provide(sequence, self._needed_rows(chunk)):
            return []
        logits = self._process(chunk)
        return [self._progress(sequence)] if logits is None else self._processed(sequence, chunk.stop, logits)

    def _needed_rows(self, chunk: PrefillChunk) -> int:
        """Return the rows that need pages for a chunk: the last of the steps that read it is padded."""
        count, most = chunk.stop - chunk.start, self.runner.read_rows
        if count > self.short:
            return count
        whole = (count - 1) // most * most
        return whole + self.runner.step_rows(count - whole)

    def _processed(self, sequence: Sequence, stop: int, logits: Tensor) -> list[Event]:
        """Note that the prompt is processed up to `stop`; at its end decode, from the logits [1, V] there."""
        request, sequence.processed = sequence.request, stop
        if request.prefill_only:
            return [self._progress(sequence), *self._prefilled(sequence)]
        kept = snapshot_positions(sequence.chunk_ends, request.boundaries or {})
        if stop in kept:
            self._cache_prefix(sequence, request.prompt[:stop], kept[stop], sequence.slot)
        if stop < len(request.prompt):
            return [self._progress(sequence)]
        sequence.phase = Phase.DECODE
        if any(each.leader is sequence for each in self._scheduler.waiting):
            state, draft = self.prefixes.store.save(sequence.slot), self.drafter.save(sequence.slot)
            self._prompts[sequence] = PromptState(state, draft, logits.clone())
        return [self._progress(sequence), *self._first_token(sequence, logits)]

    def _prefilled(self, sequence: Sequence) -> list[Event]:
        """End a request for prefill alone after its last chunk; its release takes the snapshot."""
        if not sequence.request.prefill_only or sequence.processed < max(sequence.chunk_ends, default=0):
            return []
        sequence.finish("stop")
        return [self._done(sequence)]

    def _give_way(self, sequence: Sequence) -> None:
        """Free the slot of a request for prefill alone; it will go on from the snapshot of its last chunk."""
        slot = sequence.slot
        try:
            self._cache_progress(sequence, slot)
        finally:
            self._scheduler.put_back(sequence)
            sequence.slot, sequence.phase, sequence.processed, sequence.chunk = -1, Phase.WAITING, 0, None
            sequence.stats.cached_tokens = 0
            self.states.close(slot)

    def _cache_progress(self, sequence: Sequence, slot: int) -> None:
        """Take a snapshot after the last chunk, unless it failed in its middle or nothing is new."""
        if not self._finish_chunk(sequence, slot):
            return
        done = sequence.processed
        if sequence.stats.cached_tokens < done == self.states.lengths[slot]:
            self._cache_prefix(sequence, sequence.request.prompt[:done], "turn", slot)

    def _drop_prompts(self) -> None:
        """Drop the states after prompts that nobody waits for any more."""
        wanted = {each.leader for each in self._scheduler.waiting}
        for leader in [each for each in self._prompts if each not in wanted]:
            self.prefixes.store.release(self._prompts.pop(leader).state)

    def _finish_chunk(self, sequence: Sequence, slot: int) -> bool:
        """Run a chunk that was begun to its end; return whether the sequence's state is whole."""
        if sequence.chunk is None:
            return True
        try:
            sequence.chunk.run()
        except Exception:  # of any kind: what is cached is a help, no more
            return False
        sequence.processed, sequence.chunk = self.states.lengths[slot], None
        return True

    def _process(self, chunk: PrefillChunk) -> Tensor | None:
        """Process a chunk; return the logits [1, V] after the prompt, nothing of use before its end.

        None: not all layers have run. Which way a chunk is processed follows from its tokens alone: its bits
        do not depend on load.
        """
        if chunk.stop - chunk.start <= self.short:
            return self._read_short(chunk)
        sequence, rows = chunk.sequence, chunk.stop - chunk.start
        if sequence.chunk is None:
            layers = len(self.target.spec.layers)
            sequence.chunk = ChunkForward(self._forward_chunk(chunk), rows=rows, total=layers)
        self._pace.run(sequence.chunk)
        hidden = sequence.chunk.hidden
        if hidden is None:
            return None
        sequence.chunk = None
        return self.target.logits(hidden) if chunk.stop == len(sequence.request.prompt) else hidden

    def _read_short(self, chunk: PrefillChunk) -> Tensor:
        """Process a few tokens by the captured forward of decode steps: a chunk's launches take longer."""
        slot, logits, most = chunk.sequence.slot, torch.empty(0), self.runner.read_rows
        for first in range(chunk.start, chunk.stop, most):
            tokens = chunk.sequence.request.prompt[first : min(first + most, chunk.stop)]
            forward = self._read_piece(slot, tokens)
            logits = forward.logits_of(0)[len(tokens) - 1 :]
        return logits

    def _read_piece(self, slot: int, tokens: list[int]) -> Forward:
        """Process some tokens by one step, for whose rows there are pages."""
        forward = self.runner.read(slot, tokens)
        self.drafter.append(slot, tokens, forward.features[: len(tokens)])
        return forward

    def _forward_chunk(self, chunk: PrefillChunk) -> Generator[None, None, Tensor]:
        """Return the last row's hidden state [1, width]; all else of a chunk is large and freed here."""
        sequence, device = chunk.sequence, self.target.device
        slot = sequence.slot
        tokens = sequence.request.prompt[chunk.start : chunk.stop]
        slots = on_device([slot], device)
        lengths = self.states.buffers.lengths[slots]
        span = self.states.lengths[slot] + len(tokens)
        step = Step.chunk(slots, on_device([tokens], device), lengths, span=span)
        kept = snapshot_positions(sequence.chunk_ends, sequence.request.boundaries or {})
        ends = {*kept, len(sequence.request.prompt)}
        if sequence.request.prefill_only:
            ends = {chunk.stop}  # it may have to give way here
        rows = feature_rows(chunk.start, chunk.stop, ends, self.drafter.context_length)
        output = yield from self.target.forward_by_layers(
            step, lambda: self.states.buffers, self.drafter.taps, rows
        )
        self.states.advance(step, [slot])
        self.drafter.append(slot, tokens, output.features.flatten(0, -2))
        return output.hidden.flatten(0, -2)[-1:].clone()

    def _first_token(self, sequence: Sequence, logits: Tensor) -> list[Event]:
        """Sample the token after the prompt, from its last row's logits [1, V]."""
        request = sequence.request
        if not bool(logits.isfinite().all()):
            raise ModelFileError(
                "the model's logits after this prompt are not finite numbers: its weights are damaged",
                "download the file again, or set `device` to cpu",
            )
        self._begin_decoding(sequence)
        if sequence.constraint is not None:
            self.runner.sampler.set_masks(0, sequence.constraint.masks([request.prompt[-1]], [-1]))
        sampler = self.runner.sampler
        sampled = sampler.sample_first(logits, sequence.slot, len(request.prompt)).tolist()
        return self._token_events(sequence, sequence.deliver(sampled).tokens, lambda: logits, [0])

    def _begin_decoding(self, sequence: Sequence) -> None:
        """Set how the sequence's tokens are sampled and where they end."""
        slot, request = sequence.slot, sequence.request
        self.runner.begin(slot, sorted(request.stop_ids))
        masked = request.constraint is not None
        generated = sequence.tokens[len(request.prompt) : -1]
        self.runner.sampler.begin(slot, sequence.sampling, request.prompt, masked=masked, generated=generated)

    def _rehearse(self, slot: int, chunks: Iterable[int]) -> None:
        """Process chunks of these sizes and a short prompt in a fresh slot, and discard them.

        A request does nothing for the first time then: its statistics are those of any other.
        """
        for rows in chunks:
            self._restart(slot)
            self.states.reserve(slot, rows)
            slots = torch.tensor([slot], device=self.target.device)
            tokens = torch.zeros_like(slots).expand(1, rows)
            step = Step.chunk(slots, tokens, self.states.buffers.lengths[slots])
            output = self.target.forward(step, self.states.buffers, taps=self.drafter.taps)
            self.drafter.append(slot, [0] * rows, output.features.flatten(0, -2))
            logits = self.target.logits(output.hidden.flatten(0, -2)[-1:].clone())
            self.runner.sampler.sample_first(logits, slot, rows)
        self._restart(slot)
        if self.short:
            rows = min(self.runner.read_rows, self.max_ctx)
            self.states.reserve(slot, self.runner.step_rows(rows))
            self._read_piece(slot, [0] * rows)
            self._restart(slot)

    def _restart(self, slot: int) -> None:
        """Make a slot's sequence empty again; its pages stay."""
        self.states.lengths[slot] = 0
        self.states.buffers.lengths[slot] = 0
        self.states.buffers.pending.count[slot] = 0
        self.drafter.begin(slot)

    # -- Decode

    def _decode(self, sequence: Sequence) -> list[Event]:
        """Finish a step of one sequence, perhaps launched before, and launch what may be of the next."""
        launched = sequence.launched or Launched(self._draft(sequence, self._row_limit(sequence)), None)
        sequence.launched = None
        tree, forward = launched.tree, launched.forward
        if forward is None:
            if not self._provide(sequence, self.runner.step_rows(tree.size)):
                return []
            forward = self.runner.verify([Verify(sequence.slot, tree, sequence.room)])
        self.runner.accept(forward, [self._masks(sequence, tree)])
        # A constraint reads proposals on the host.
        waits = self._scheduler.contended or self._constraint(sequence) is not None
        ahead = "nothing" if waits else sequence.launch_ahead
        next_forward = self._verify_ahead(sequence, tree) if ahead == "forward" else None
        [accepted], times = self.runner.read_back()
        outcome = self._outcome(sequence, tree, accepted, times)
        self.drafter.observe(sequence.slot, outcome)
        delivered = self._deliver(sequence, outcome)
        events = self._step_events(sequence, tree, outcome, delivered, partial(forward.logits_of, 0))
        if not sequence.finished and ahead != "nothing":
            sequence.launched = self._launch(sequence, next_forward, ahead)
        return events

    def _decode_all(self, sequences: list[Sequence], readers: list[Sequence]) -> list[tuple[Sequence, Event]]:
        """Run one step of several sequences: their trees and the readers' prompts share one forward pass."""
        pieces = self._pieces(readers, len(sequences))
        sequences = [each for each in sequences if self._provide(each, self._row_limit(each))]
        pieces = [each for each in pieces if self._provide(each.sequence, len(each.tokens))]
        sequences = [each for each in sequences if each.parked is None]
        pieces = [each for each in pieces if each.sequence.parked is None]
        if not pieces and len(sequences) < 2:
            return [pair for each in sequences for pair in _tagged(each, self._decode(each))]
        if not sequences:
            return []  # the readers go on alone
        self.working = [*sequences, *(piece.sequence for piece in pieces)]
        turns = [self._turn(each, len(self.working)) for each in sequences]
        if not self._asked_ahead:
            self.runner.draft(lambda: self.drafter.ask(turns))
        self._asked_ahead = False
        prompts = [len(piece.tokens) for piece in pieces]
        pairs = list(zip(sequences, self.drafter.share(turns, prompts), strict=True))
        parts = [Verify(each.slot, tree, each.room) for each, tree in pairs]
        forward = self.runner.verify([*parts, *(piece.part for piece in pieces)])
        self.runner.accept(forward, [self._masks(each, tree) for each, tree in pairs])
        accepted, times = self.runner.read_back()
        outcomes = {
            each.slot: self._outcome(each, tree, found, times)
            for (each, tree), found in zip(pairs, accepted, strict=False)
        }
        self.drafter.observe_all(outcomes, prompts)
        delivered = [self._deliver(each, outcomes[each.slot]) for each in sequences]
        self._ask_ahead([each for each in sequences if not each.finished])
        # While the draft runs.
        return [
            *(
                (each, event)
                for index, ((each, tree), found) in enumerate(zip(pairs, delivered, strict=True))
                for event in self._step_events(
                    each, tree, outcomes[each.slot], found, partial(forward.logits_of, index)
                )
            ),
            *(
                (piece.sequence, event)
                for index, piece in enumerate(pieces, len(pairs))
                for event in self._piece_read(piece, forward.logits_of(index))
            ),
        ]

    def _pieces(self, readers: list[Sequence], decoding: int) -> list["PromptPiece"]:
        """Return the prompt tokens that a step reads beside its trees: those of the oldest readers first."""
        rows = min(_PROMPT_ROWS, MAX_ROWS - decoding)
        together = self.runner.tree_rows(decoding + len(readers))
        most = min(together, self.runner.read_rows, self.drafter.commit_rows)
        pieces = []
        for each in readers:
            stop = min(each.chunk_end, each.processed + min(most, rows))
            if stop > each.processed:
                pieces.append(PromptPiece(each, each.request.prompt[each.processed : stop]))
                rows -= stop - each.processed
        return pieces

    def _piece_read(self, piece: "PromptPiece", logits: Tensor) -> list[Event]:
        """Note that a step has read a piece of a prompt; logits [rows, V] after its tokens.

        What fails here is this sequence alone: the others' tokens are committed.
        """
        sequence, tokens = piece.sequence, piece.tokens
        self.states.lengths[sequence.slot] += len(tokens)
        self.drafter.read(sequence.slot, tokens)
        try:
            return self._processed(sequence, sequence.processed + len(tokens), logits[len(tokens) - 1 :])
        except Exception as error:  # of any kind: memory, damaged weights, a constraint
            return [Failed(error)]

    def _turn(self, sequence: Sequence, sequences: int) -> Turn:
        slot = sequence.slot
        sequence.launched = None  # a draft of its own, from when it was alone
        limit = min(self._row_limit(sequence), self.runner.tree_rows(max(2, sequences)))
        position = self.states.lengths[slot]
        return Turn(slot, sequence.anchor, position, limit, self._constraint(sequence))

    def _ask_ahead(self, sequences: list[Sequence]) -> None:
        """Launch the next step's draft, so that it overlaps with the host's work on the text."""
        if self.runner.asynchronous and len(sequences) > 1:
            turns = [self._turn(each, len(sequences)) for each in sequences]
            self.runner.draft(lambda: self.drafter.ask(turns))
            self._asked_ahead = True

    def _outcome(self, sequence: Sequence, tree: Tree, accepted: Accepted, times: StepTimes) -> StepOutcome:
        self.states.lengths[sequence.slot] += len(accepted.path)
        seconds = (times.draft_s, times.verify_s, *times.cpu_shares)
        return StepOutcome(tree.size, accepted.path, accepted.tokens, *seconds)

    def _draft(self, sequence: Sequence, max_rows: int) -> Tree:
        position, constraint = self.states.lengths[sequence.slot], self._constraint(sequence)
        return self.runner.draft(
            lambda: self.drafter.propose(sequence.slot, sequence.anchor, position, max_rows, constraint)
        )

    def _row_limit(self, sequence: Sequence) -> int:
        budget = sequence.request.draft_budget
        rows = self.max_rows if budget is None else min(self.max_rows, budget + 1)
        return min(rows, self.max_ctx - self.states.lengths[sequence.slot])

    def _constraint(self, sequence: Sequence) -> OwnConstraint | None:
        """Return the constraint that may exclude tokens of the next step; None: no token of any tree."""
        constraint = sequence.constraint
        # One row more: what is launched ahead follows a token that the host has not seen.
        return None if constraint is None or constraint.idle(self.max_rows + 1) else constraint

    def _masks(self, sequence: Sequence, tree: Tree) -> Masks:
        constraint = self._constraint(sequence)
        if sequence.constraint is not None:
            self.runner.sampler.use_masks(sequence.slot, constraint is not None)
        return constraint.masks(*tree.lists()) if constraint is not None else ()

    def _verify(self, sequence: Sequence, tree: Tree, *, max_accepted: int) -> Forward:
        self._reserve(sequence.slot, self.runner.step_rows(tree.size))
        return self.runner.verify([Verify(sequence.slot, tree, max_accepted)])

    def _verify_ahead(self, sequence: Sequence, tree: Tree) -> Forward | None:
        """Launch the next forward before the read-back, where the next tree can only be its root.

        Wasted if this step's token is the last one.
        """
        if tree.size > 1 or sequence.room < 2:
            return None
        drafts = sequence.request.draft_budget != 0 and self.max_rows > 1
        if drafts and not self.drafter.plan_root(sequence.slot):
            return None
        self._reserve(sequence.slot, 1 + self.runner.step_rows(1))
        return self.runner.verify_sampled()

    def _launch(self, sequence: Sequence, forward: Forward | None, ahead: LaunchAhead) -> Launched:
        """Enqueue the next step's draft and, unless the caller may stop here, its forward."""
        tree = self._draft(sequence, 1 if forward is not None else self._row_limit(sequence))
        if forward is None and ahead == "forward":
            forward = self._verify(sequence, tree, max_accepted=sequence.room)
        return Launched(tree, forward)

    def _deliver(self, sequence: Sequence, outcome: StepOutcome) -> list[int]:
        """Return the tokens that plain decoding would have delivered, and leave its state."""
        start = time.perf_counter()
        delivered = sequence.deliver(outcome.tokens)
        sequence.committed_rows = delivered.rows
        self._rollback(sequence, len(outcome.path) - delivered.rows)
        sequence.stats.commit_s += time.perf_counter() - start
        return delivered.tokens

    def _step_events(
        self,
        sequence: Sequence,
        tree: Tree,
        outcome: StepOutcome,
        tokens: list[int],
        logits: Callable[[], Tensor],
    ) -> list[Event]:
        """Return a step's events with the delivered tokens, and count the step."""
        stats, step_s = sequence.stats, outcome.draft_s + outcome.verify_s
        record = StepRecord(outcome.rows, len(outcome.tokens), step_s)
        stats.step_done(record, committed=sequence.committed_rows)
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        events: list[Event] = []
        if sequence.request.trees:
            verified = VerifiedTree(*tree.lists(), outcome.path, outcome.tokens, outcome.draft_s, step_s)
            events.append(verified.cut(sequence.committed_rows))
        return [*events, *self._token_events(sequence, tokens, logits, outcome.path)]

    def _rollback(self, sequence: Sequence, rows: int) -> None:
        """Remove the last rows of the last commit: plain decoding would not have processed them.

        Happens only where a sequence ends inside a step's tokens.
        """
        if rows:
            assert not sequence.in_flight, f"{rows} rows to roll back, but the next forward is in flight"
            self.states.rollback(sequence.slot, rows)
            self.drafter.rollback(sequence.slot, rows)

    # -- Both

    def _token_events(
        self, sequence: Sequence, tokens: list[int], logits: Callable[[], Tensor], path: list[int]
    ) -> list[Event]:
        """Return events of the delivered tokens, sampled after the rows `path` of the logits [T, V].

        logits: a view takes a microsecond, and few requests need it.
        """
        events: list[Event] = []
        if tokens:
            logprobs, alternatives = None, sequence.sampling.logprobs
            if alternatives is not None:
                logprobs = token_logprobs(logits()[path[: len(tokens)]], tokens, alternatives)
            events.append(Tokens(tokens, logprobs))
        if sequence.finished:
            events.append(self._end(sequence))
        return events

    def _progress(self, sequence: Sequence) -> Progress:
        whole, total, cached = sequence.processed, len(sequence.request.prompt), sequence.stats.cached_tokens
        done = whole + (sequence.chunk.processed if sequence.chunk is not None else 0)
        return Progress(done, total, cached, whole)

    def _end(self, sequence: Sequence) -> Done | Failed:
        return self._done(sequence) if sequence.error is None else Failed(sequence.error)

    def _done(self, sequence: Sequence) -> Done:
        assert sequence.reason is not None
        sequence.stats.notes = self.drafter.warnings(sequence.slot)
        sequence.stats.shares = self.drafter.shares(sequence.slot)
        return Done(sequence.reason, sequence.stats)

    def _cache_prefix(self, sequence: Sequence, tokens: list[int], kind: SnapshotKind, slot: int) -> None:
        if sequence.request.boundaries is not None and tokens and self.prefixes.enabled:
            self.prefixes.insert(
                slot,
                tokens,
                kind,
                lambda: self.drafter.save(slot),
                after_answer=sequence.stats.cached_after_answer,
                unused_s=sequence.request.prefill_for_s,
            )

    # -- Pages

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether pages for a sequence that has no slot are free, and some for each that runs."""
        running = len(self._scheduler.running) - (sequence in self._scheduler.running)
        if not running:
            return True
        length = sequence.parked.state.length if sequence.parked is not None else len(sequence.request.prompt)
        ahead = _PARKED_PAGES if sequence.parked is not None else 1
        needed = -(-(length + self.runner.step_rows(self.max_rows)) // PAGE) + ahead * running
        owned = self.states.pages.owned
        # Pages that slots share are counted once only where that decides.
        if needed <= self._pool_pages - sum(map(len, owned)):
            return True
        return needed <= self._pool_pages - len(set().union(*owned))

    def _provide(self, sequence: Sequence, rows: int) -> bool:
        """Allocate pages for a sequence's next rows, at the expense of cached prefixes and younger sequences.

        Return whether it still runs: the youngest is parked, which may be itself.
        """
        if sequence.parked is not None:
            return False
        if self.states.has_pages(sequence.slot, rows):
            return True
        self.prefixes.reserve(sequence.slot, rows)
        while self.states.shortage(sequence.slot, rows) and len(self._scheduler.running) > 1:
            youngest = self._scheduler.youngest()
            self._park(youngest)
            if youngest is sequence:
                return False
        self.states.reserve(sequence.slot, rows)
        return True

    def _park(self, sequence: Sequence) -> None:
        """Move a sequence's state to host memory, whole, until there are pages for it again."""
        assert not sequence.in_flight
        if sequence.chunk is not None:
            working, self.working = self.working, [sequence]
            sequence.chunk.run()  # what it returns is read when the sequence is back
            self.working = working
        self._scheduler.park(sequence)
        slot, sequence.slot, sequence.launched = sequence.slot, -1, None
        draft = self.drafter.save(slot)
        sequence.parked = Parked(self.prefixes.store.park(slot), draft)

    def _unpark(self, sequence: Sequence, parked: Parked) -> list[Event]:
        self.prefixes.reserve_for(sequence.slot, parked.state)
        self.prefixes.store.unpark(sequence.slot, parked.state)
        sequence.parked = None
        if sequence.phase is Phase.DECODE:
            self._begin_decoding(sequence)
        self.drafter.restore(sequence.slot, sequence.tokens[: parked.state.length], parked.draft)
        return []

    def _drop_parked(self, sequence: Sequence) -> None:
        if sequence.parked is not None:
            self.prefixes.store.release(sequence.parked.state)
            sequence.parked = None

    def _reserve(self, slot: int, rows: int) -> None:
        """Allocate pages for the rows, if need be at the expense of cached prefixes."""
        self.prefixes.reserve(slot, rows)
        self.states.reserve(slot, rows)


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
    def part(self) -> Verify:
        return Verify(self.sequence.slot, Tree.chain(self.tokens), len(self.tokens), given=True)


def feature_rows(start: int, stop: int, ends: Iterable[int], context: int) -> int:
    """Return how many of a chunk's last positions a draft with `context` positions still needs features of.

    ends: positions where its state is used or saved, the prompt's end among them.
    """
    needed = min(end for end in ends if end >= stop) - context
    return min(stop - start, max(0, stop - needed))


def _tagged(sequence: Sequence, events: list[Event]) -> list[tuple[Sequence, Event]]:
    return [(sequence, event) for event in events]
