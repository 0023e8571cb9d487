"""Engine: adds requests, runs one step at a time, returns events. No text, no threads, no I/O.

One idea: the scheduler picks the work, the runner runs it, the sampler decides, the sequence commits.
"""

import time
from collections.abc import Generator
from typing import Literal

import torch

from bough.engine.delivery import done
from bough.engine.events import Done, Event, Failed, Progress, Tokens, VerifiedTree
from bough.engine.images import PictureEncoder
from bough.engine.paging import Paging, Parts
from bough.engine.pipeline import Pipeline, tagged
from bough.engine.prompts import SHORT, PromptReader
from bough.engine.runner import GraphRunner, StepRunner
from bough.engine.sampler import SamplingParams
from bough.engine.scheduler import Admit, Decode, PrefillChunk, Scheduler, Work
from bough.engine.sequence import LaunchAhead, Limits, OwnConstraint, Phase, Request, Sequence
from bough.engine.stats import RequestStats
from bough.engine.warmup import Warmup
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import kv_formats
from bough.memory.estimate import chunk_size
from bough.models.decoder import Target, check_taps
from bough.models.vision import VisionTower
from bough.prefix_cache.boundaries import chunk_ends
from bough.prefix_cache.cache import PrefixCache, PrefixCacheConfig
from bough.spec.drafter import Drafter, NoDrafter
from bough.state.sequences import CacheConfig, SequenceStates
from bough.state.snapshots import SnapshotStore

__all__ = ["Done", "Engine", "Event", "Progress", "Request", "Sequence", "Tokens", "VerifiedTree"]


class Engine:
    working: list[Sequence]  # see `Parts`

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
        tower: VisionTower | None = None,
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
        check_taps(target.spec, self.drafter.features.taps)
        graphs = target.device.type == "cuda" if runner == "auto" else runner == "graph"
        kind = GraphRunner if graphs else StepRunner
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
        self._sees = tower is not None
        self._scheduler, self.working = Scheduler(slots), []
        parts = Parts(
            target,
            self.drafter,
            self.states,
            self.runner,
            self.prefixes,
            self._scheduler,
            max_rows,
            None if tower is None else PictureEncoder(tower),
            self.working,
        )
        self.paging = Paging(parts, pool=cache.pages or self.states.buffers.page_table.numel())
        # On a CPU a chunk of a few tokens takes no longer than a step.
        short = SHORT if graphs and target.device.type == "cuda" else 0
        self.prompts = PromptReader(parts, self.paging, short=short)
        self.pipeline = Pipeline(parts, self.prompts, self.paging)
        self.warmup = Warmup(parts, self.prompts, self.paging, chunk=self.prefill_chunk)

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
        assert not request.images or self._sees, "images for an engine without a vision tower"
        sampling = request.sampling.seeded()
        stats = RequestStats(len(request.prompt), seed=sampling.seed or 0)
        stats.approximate = self.approximate
        stats.images = len(request.images)
        stats.image_tokens = sum(image.picture.tokens for image in request.images)
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
            self.working[:] = [sequence]
            self.release(sequence)
        for sequence in self._scheduler.preempted:
            self.working[:] = [sequence]
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
        """Return what is next; a step in flight is finished before others run."""
        if (batch := self.pipeline.in_flight) is not None:
            return Decode(batch.sequences, [piece.sequence for piece in batch.pieces])
        return self._scheduler.next(self.paging.fits, short=self.prompts.short)

    def _run(self, work: Work) -> list[tuple[Sequence, Event]]:
        self.working[:] = [*work.sequences, *work.readers] if isinstance(work, Decode) else [work.sequence]
        match work:
            case Admit(sequence):
                return tagged(sequence, self._admit(sequence))
            case PrefillChunk(sequence) as chunk:
                return tagged(sequence, self.prompts.process(chunk))
            case Decode(sequences, readers):
                return self.pipeline.step(sequences, readers)

    def cancel(self, sequence: Sequence) -> Done:
        """End a sequence where it is."""
        sequence.finish("cancelled")
        if sequence.slot < 0:
            self.release(sequence)
        return done(self.drafter, sequence)

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
            self.pipeline.rollback(sequence, sequence.committed_rows - rows)
        sequence.new_tokens, sequence.committed_rows = keep, rows
        sequence.finish("stop")
        return done(self.drafter, sequence)

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
                self.prompts.cache(sequence, processed, "answer", slot)
            elif slot >= 0 and sequence.request.prefill_only:
                self.prompts.cache_progress(sequence, slot)
        finally:
            sequence.phase, sequence.in_flight, sequence.chunk = Phase.FINISHED, False, None
            if slot >= 0:
                self.states.close(slot)
            self.paging.drop(sequence)
            self.prompts.drop_shared()
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

    def _admit(self, sequence: Sequence) -> list[Event]:
        """Open a slot: go on where a sequence was parked, after its leader's prompt, or a cached prefix."""
        request = sequence.request
        slot = sequence.slot = self.states.open()
        self.runner.begin(slot)
        # Rows of its prompt may be sampled, for nothing: not by what the slot's last request left.
        self.runner.sampler.begin(slot, SamplingParams(seed=0), [], masked=False)
        if sequence.parked is not None:
            self.paging.unpark(sequence, sequence.parked)
            if sequence.phase is Phase.DECODE:
                self.prompts.begin_decoding(sequence)
            return []
        if (events := self.prompts.follow(sequence)) is not None:
            return events
        sequence.chunk_ends = chunk_ends(len(request.prompt), request.boundaries or {}, self.prefill_chunk)
        if request.prefill_only:
            sequence.chunk_ends.pop()  # where this prompt ends, the chunk of a longer one does not
        found = self.prefixes.restore(slot, request.prompt, sequence.chunk_ends)
        if found is None:
            self.drafter.open(slot)
        else:
            self.drafter.open(slot, request.prompt[: found.length], found.draft)
            sequence.processed = sequence.stats.cached_tokens = found.length
            sequence.stats.cached_after_answer = found.after_answer
        sequence.phase = Phase.PREFILL
        return [sequence.progress, *self.prompts.prefilled(sequence)]

    def _give_way(self, sequence: Sequence) -> None:
        """Free the slot of a request for prefill alone; it will go on from the snapshot of its last chunk."""
        slot = sequence.slot
        try:
            self.prompts.cache_progress(sequence, slot)
        finally:
            self._scheduler.put_back(sequence)
            sequence.slot, sequence.phase, sequence.processed, sequence.chunk = -1, Phase.WAITING, 0, None
            sequence.stats.cached_tokens = 0
            self.states.close(slot)
