"""Engine: adds requests, runs one step at a time, returns events. No text, no threads, no I/O.

One idea: the scheduler picks the work, the runner runs it, the sampler decides, the sequence commits.
"""

import time
from collections.abc import Callable, Generator, Iterable
from typing import Literal

import torch
from torch import Tensor

from treeflash.engine.events import Done, Event, Progress, Tokens, VerifiedTree
from treeflash.engine.runner import EagerRunner, Forward, GraphRunner, Masks, StepTimes
from treeflash.engine.sampler import token_logprobs
from treeflash.engine.scheduler import Admit, Decode, PrefillChunk, Scheduler
from treeflash.engine.sequence import Launched, Phase, Request, Sequence
from treeflash.engine.stats import RequestStats, StepRecord
from treeflash.errors import ModelFileError, PromptTooLong, UsageError
from treeflash.kernels.tree import MAX_ROWS
from treeflash.memory.device import kv_formats, total_memory
from treeflash.memory.estimate import chunk_size
from treeflash.models.decoder import Target, check_taps
from treeflash.models.step import Step
from treeflash.prefix_cache.boundaries import SnapshotKind, chunk_ends, snapshot_positions
from treeflash.prefix_cache.cache import PrefixCache, PrefixCacheConfig
from treeflash.spec.drafter import Drafter, NoDrafter, StepOutcome
from treeflash.spec.tree import Tree
from treeflash.state.sequences import CacheConfig, SequenceStates
from treeflash.state.snapshots import SnapshotStore

__all__ = ["Done", "Engine", "Event", "Progress", "Request", "Sequence", "Tokens", "VerifiedTree"]


class Engine:
    def __init__(
        self,
        target: Target,
        *,
        max_ctx: int,
        prefill_chunk: int | None = None,
        drafter: Drafter | None = None,
        max_rows: int = 1,
        cache: CacheConfig | None = None,
        prefix_cache: PrefixCacheConfig | None = None,
        runner: Literal["auto", "eager", "graph"] = "auto",
    ):
        """`max_rows` of a tree, the root included; `runner` auto: graph on a GPU, eager on a CPU."""
        assert 1 <= max_rows <= MAX_ROWS
        self.target = target
        self.max_ctx = max_ctx
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk or chunk_size(target.device.type, total_memory(target.device))
        self.drafter = drafter or NoDrafter()
        check_taps(target.spec, self.drafter.taps)
        graphs = target.device.type == "cuda" if runner == "auto" else runner == "graph"
        kind = GraphRunner if graphs else EagerRunner
        self.states = SequenceStates(
            target.spec,
            max_ctx=max_ctx,
            max_rows=kind.step_rows(max_rows),
            device=target.device,
            cache=cache or CacheConfig(*kv_formats(target.spec, target.device)),
            input_dtype=target.dtype,
            static=kind.asynchronous,
        )
        self.runner = kind(target, self.states, self.drafter, max_rows=max_rows)
        self.prefixes = PrefixCache(SnapshotStore(self.states), prefix_cache or PrefixCacheConfig())
        self._scheduler = Scheduler()

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Capture the steps as CUDA graphs, between requests; return whether that was possible."""
        slot = self.states.open()
        self.drafter.begin()
        try:
            # Pages of its own: those that the slot had before may hold a cached prefix.
            self._reserve(slot, min(3 * MAX_ROWS, self.max_ctx + self.runner.step_rows(self.max_rows)))
            captured = self.runner.capture(progress)
            self._warm_up_prefill(slot)
            return captured
        finally:
            self.states.close(slot)

    def add(self, request: Request) -> Sequence:
        """Queue a request; raises if it cannot run."""
        self.check(request)
        sampling = request.sampling.seeded()
        stats = RequestStats(len(request.prompt), seed=sampling.seed or 0)
        stats.approximate = self.states.approximate
        sequence = Sequence(
            request,
            sampling,
            stats,
            launch_ahead=self._launch_ahead(request),
            # The last token needs no room in the KV cache: nothing is computed from it.
            max_tokens=min(request.max_tokens, self.max_ctx - len(request.prompt) + 1),
            tokens=list(request.prompt),
        )
        self._scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Event]]:
        """Run one step: admit a sequence, process a prompt chunk, or verify a tree; return what happened.

        Finished sequences are released at the beginning.
        """
        running = self._scheduler.running
        if running is not None and running.finished:
            self.release(running)
        match self._scheduler.next():
            case Admit(sequence):
                return _tagged(sequence, self._admit(sequence))
            case PrefillChunk(sequence) as chunk:
                return _tagged(sequence, self._prefill(chunk))
            case Decode(sequence):
                return _tagged(sequence, self._decode(sequence))
        return []

    def cancel(self, sequence: Sequence) -> Done:
        """End a sequence where it is."""
        if sequence.phase is Phase.WAITING:
            self._scheduler.remove(sequence)
        sequence.finish("cancelled")
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
        if slot < 0:
            sequence.phase = Phase.FINISHED
            return
        try:
            if sequence.finished and sequence.processed == len(sequence.request.prompt):
                processed = sequence.tokens[: self.states.lengths[slot]]
                self._cache_prefix(sequence.request, processed, "answer", slot)
        finally:
            sequence.phase, sequence.launched = Phase.FINISHED, None
            self.states.close(slot)
        self.prefixes.write()

    def generate(self, request: Request) -> Generator[Event]:
        """Run one request to its end: Progress during prefill, Tokens as they are committed, Done.

        Closing the generator, or an error, frees the sequence's memory.
        """
        sequence = self.add(request)
        try:
            while not sequence.finished:
                for owner, event in self.step():
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
        path, sampled, times = self.runner.read_back()
        self.states.lengths[sequence.slot] += len(path)
        sequence.tokens += sampled
        return times

    @property
    def max_ctx_raisable(self) -> bool:
        """Return whether the model was made for a longer context than this engine has."""
        return self.max_ctx < self.target.spec.context_length

    def check(self, request: Request) -> None:
        vocabulary = self.target.spec.vocab_size
        if not request.prompt:
            raise UsageError("the prompt has no tokens", "give some text", param="prompt")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}, needed at least 1", param="max_tokens")
        if len(request.prompt) > self.max_ctx:
            raise PromptTooLong(len(request.prompt), self.max_ctx, raisable=self.max_ctx_raisable)
        outside = [token for token in request.prompt if not 0 <= token < vocabulary]
        if outside:
            raise UsageError(
                f"token {outside[0]} in the prompt, the vocabulary has ids 0 to {vocabulary - 1}",
                param="prompt",
            )
        request.sampling.check_vocabulary(vocabulary)

    def _launch_ahead(self, request: Request) -> Literal["nothing", "draft", "forward"]:
        """Return what of a next step may be launched before the caller has seen this one's tokens."""
        # A constraint reads proposals on the host; the others read buffers that the next step overwrites.
        reads = request.constraint is not None or request.sampling.logprobs is not None or request.trees
        if reads or not self.runner.asynchronous:
            return "nothing"
        return "draft" if request.may_stop else "forward"

    # -- Prefill

    def _admit(self, sequence: Sequence) -> list[Event]:
        """Open a slot and restore the longest cached prefix."""
        request = sequence.request
        slot = sequence.slot = self.states.open()
        self.drafter.begin()
        self.runner.begin(sorted(request.stop_ids))
        masked = request.constraint is not None
        self.runner.sampler.begin(sequence.sampling, request.prompt, masked=masked)
        sequence.chunk_ends = chunk_ends(len(request.prompt), request.boundaries or {}, self.prefill_chunk)
        found = self.prefixes.restore(slot, request.prompt, sequence.chunk_ends)
        if found is not None:
            self.drafter.restore(request.prompt[: found.length], found.draft)
            sequence.processed = sequence.stats.cached_tokens = found.length
        sequence.phase = Phase.PREFILL
        return [self._progress(sequence)]

    def _prefill(self, chunk: PrefillChunk) -> list[Event]:
        sequence, request = chunk.sequence, chunk.sequence.request
        kept = snapshot_positions(sequence.chunk_ends, request.boundaries or {})
        hidden = self._forward_chunk(chunk, {*kept, len(request.prompt)})
        sequence.processed = chunk.stop
        if chunk.stop in kept:
            self._cache_prefix(request, request.prompt[: chunk.stop], kept[chunk.stop], sequence.slot)
        if chunk.stop < len(request.prompt):
            return [self._progress(sequence)]
        sequence.phase = Phase.DECODE
        return [self._progress(sequence), *self._first_token(sequence, hidden)]

    def _forward_chunk(self, chunk: PrefillChunk, ends: Iterable[int]) -> Tensor:
        """Return the last row's hidden state [1, width]; all else of a chunk is large and freed here."""
        sequence, device = chunk.sequence, self.target.device
        tokens = sequence.request.prompt[chunk.start : chunk.stop]
        self._reserve(sequence.slot, len(tokens))
        slots = torch.tensor([sequence.slot], device=device)
        lengths = self.states.buffers.lengths[slots]
        step = Step.chunk(slots, torch.tensor([tokens], device=device), lengths)
        rows = feature_rows(chunk.start, chunk.stop, ends, self.drafter.context_length)
        output = self.target.forward(step, self.states.buffers, taps=self.drafter.taps, tapped=rows)
        self.states.advance(step)
        self.drafter.append(tokens, output.features[0])
        return output.hidden[:, -1].clone()

    def _first_token(self, sequence: Sequence, hidden: Tensor) -> list[Event]:
        """Sample the token after the prompt, from the last row's hidden state [1, width]."""
        request, device = sequence.request, self.target.device
        logits = self.target.logits(hidden)
        if not bool(logits.isfinite().all()):
            raise ModelFileError(
                "the model's logits after this prompt are not finite numbers: its weights are damaged",
                "download the file again, or set `device` to cpu",
            )
        if request.constraint is not None:
            self.runner.sampler.set_masks(request.constraint.masks([request.prompt[-1]], [-1]))
        position = torch.tensor([len(request.prompt)], device=device)
        no_rows = torch.zeros(1, dtype=torch.int64, device=device)
        sampled = self.runner.sampler.sample(logits, position, no_rows, no_rows).tolist()
        return self._token_events(sequence, sequence.deliver(sampled).tokens, logits, [0])

    def _warm_up_prefill(self, slot: int) -> None:
        """Run a small chunk and discard it, so that the first prompt does not wait for compilation."""
        rows = min(2 * MAX_ROWS, self.max_ctx)
        self.states.reserve(slot, rows)
        slots = torch.tensor([slot], device=self.target.device)
        step = Step.chunk(slots, torch.zeros_like(slots).expand(1, rows), self.states.buffers.lengths[slots])
        self.target.forward(step, self.states.buffers)

    # -- Decode

    def _decode(self, sequence: Sequence) -> list[Event]:
        """Finish a step, perhaps launched before: draft, verify, sample, accept, commit; launch the next."""
        launched = sequence.launched or Launched(self._draft(sequence, self._row_limit(sequence)), None)
        sequence.launched = None
        tree = launched.tree
        forward = launched.forward or self._verify(sequence, tree, max_accepted=sequence.room)
        self.runner.accept(forward, self._masks(sequence, tree))
        next_forward = self._verify_ahead(sequence, tree)
        path, sampled, times = self.runner.read_back()
        self.states.lengths[sequence.slot] += len(path)
        outcome = StepOutcome(tree.size, path, sampled, times.draft_s, times.verify_s)
        delivered = self._deliver(sequence, outcome)
        events: list[Event] = []
        if sequence.request.trees:
            step_s = times.draft_s + times.verify_s
            verified = VerifiedTree(*tree.lists(), path, sampled, times.draft_s, step_s)
            events.append(verified.cut(sequence.committed_rows))
        events += self._token_events(sequence, delivered, forward.logits, path)
        if not sequence.finished and sequence.launch_ahead != "nothing":
            sequence.launched = self._launch(sequence, next_forward)
        return events

    def _draft(self, sequence: Sequence, max_rows: int) -> Tree:
        position, constraint = self.states.lengths[sequence.slot], sequence.request.constraint
        return self.runner.draft(
            lambda: self.drafter.propose(sequence.anchor, position, max_rows, constraint)
        )

    def _row_limit(self, sequence: Sequence) -> int:
        budget = sequence.request.draft_budget
        rows = self.max_rows if budget is None else min(self.max_rows, budget + 1)
        return min(rows, self.max_ctx - self.states.lengths[sequence.slot])

    def _masks(self, sequence: Sequence, tree: Tree) -> Masks:
        constraint = sequence.request.constraint
        return constraint.masks(*tree.lists()) if constraint is not None else ()

    def _verify(self, sequence: Sequence, tree: Tree, *, max_accepted: int) -> Forward:
        self._reserve(sequence.slot, self.runner.step_rows(tree.size))
        return self.runner.verify(tree, max_accepted=max_accepted)

    def _verify_ahead(self, sequence: Sequence, tree: Tree) -> Forward | None:
        """Launch the next forward before the read-back, where the next tree can only be its root.

        Wasted if this step's token is the last one.
        """
        if sequence.launch_ahead != "forward" or tree.size > 1 or sequence.room < 2:
            return None
        if sequence.request.draft_budget != 0 and self.max_rows > 1 and not self.drafter.plan_root():
            return None
        self._reserve(sequence.slot, 1 + self.runner.step_rows(1))
        return self.runner.verify_sampled()

    def _launch(self, sequence: Sequence, forward: Forward | None) -> Launched:
        """Enqueue the next step's draft and, unless the caller may stop here, its forward."""
        tree = self._draft(sequence, 1 if forward is not None else self._row_limit(sequence))
        if forward is None and sequence.launch_ahead == "forward":
            forward = self._verify(sequence, tree, max_accepted=sequence.room)
        return Launched(tree, forward)

    def _deliver(self, sequence: Sequence, outcome: StepOutcome) -> list[int]:
        """Return the tokens that plain decoding would have delivered, and leave its state and statistics."""
        start, stats = time.perf_counter(), sequence.stats
        delivered = sequence.deliver(outcome.tokens)
        sequence.committed_rows = delivered.rows
        record = StepRecord(outcome.rows, len(outcome.tokens), outcome.draft_s + outcome.verify_s)
        stats.step_done(record, committed=delivered.rows)
        self.drafter.observe(outcome)
        self._rollback(sequence, len(outcome.path) - delivered.rows)
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        stats.commit_s += time.perf_counter() - start
        return delivered.tokens

    def _rollback(self, sequence: Sequence, rows: int) -> None:
        """Remove the last rows of the last commit: plain decoding would not have processed them.

        Happens only where a sequence ends inside a step's tokens.
        """
        if rows:
            in_flight = sequence.launched is not None and sequence.launched.forward is not None
            assert not in_flight, f"{rows} rows to roll back, but the next forward is in flight"
            self.states.rollback(sequence.slot, rows)
            self.drafter.rollback(rows)

    # -- Both

    def _token_events(
        self, sequence: Sequence, tokens: list[int], logits: Tensor, path: list[int]
    ) -> list[Event]:
        """Return events of the delivered tokens, sampled after the rows `path` of the logits [T, V]."""
        events: list[Event] = []
        if tokens:
            logprobs, alternatives = None, sequence.sampling.logprobs
            if alternatives is not None:
                logprobs = token_logprobs(logits[path[: len(tokens)]], tokens, alternatives)
            events.append(Tokens(tokens, logprobs))
        if sequence.finished:
            events.append(self._done(sequence))
        return events

    def _progress(self, sequence: Sequence) -> Progress:
        return Progress(sequence.processed, len(sequence.request.prompt), sequence.stats.cached_tokens)

    def _done(self, sequence: Sequence) -> Done:
        assert sequence.reason is not None
        sequence.stats.notes = self.drafter.warnings()
        return Done(sequence.reason, sequence.stats)

    def _cache_prefix(self, request: Request, tokens: list[int], kind: SnapshotKind, slot: int) -> None:
        if request.boundaries is not None and tokens and self.prefixes.enabled:
            self.prefixes.insert(slot, tokens, kind, self.drafter.save)

    def _reserve(self, slot: int, rows: int) -> None:
        """Allocate pages for the rows, if need be at the expense of cached prefixes."""
        self.prefixes.reserve(slot, rows)
        self.states.reserve(slot, rows)


def feature_rows(start: int, stop: int, ends: Iterable[int], context: int) -> int:
    """Return how many of a chunk's last positions a draft with `context` positions still needs features of.

    ends: positions where its state is used or saved, the prompt's end among them.
    """
    needed = min(end for end in ends if end >= stop) - context
    return min(stop - start, max(0, stop - needed))


def _tagged(sequence: Sequence, events: list[Event]) -> list[tuple[Sequence, Event]]:
    return [(sequence, event) for event in events]
