"""The loop: prefill a prompt, then propose, verify, walk, commit. Knows no text, no threads, no I/O."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from treeflash.engine.cut import cut_text, guessed_rows
from treeflash.engine.events import Progress
from treeflash.engine.prefill import compile_chunk, read_chunk, rows_wanted
from treeflash.engine.runner import Looked, StepParts
from treeflash.engine.sampler import Sampler, SamplingParams, TokenLogprob
from treeflash.engine.stats import RequestStats
from treeflash.errors import ModelFileError, PromptTooLong, UsageError
from treeflash.kernels.kv_cache.format import KVFormat
from treeflash.memory.device import kv_formats, total_memory
from treeflash.memory.estimate import chunk_size
from treeflash.models.decoder import Decoder, check_taps
from treeflash.models.step import MAX_ROWS, Step, padded_rows
from treeflash.prefix_cache.boundaries import SnapshotKind, chunk_ends, snapshot_positions
from treeflash.prefix_cache.cache import PrefixCache
from treeflash.prefix_cache.files import SnapshotFiles
from treeflash.spec.draft import Drafter, NoDrafter, Outcome, Rank, TreeGuide
from treeflash.spec.tree import DraftTree
from treeflash.state.sequences import SequenceStates
from treeflash.state.snapshots import SnapshotStore

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    # Sees each batch of committed tokens; a number ends the request with that many of them delivered.
    cut: Callable[[list[int]], int | None] = lambda tokens: None
    may_cut: bool = True  # whether it ever gives a number
    cancelled: Callable[[], bool] = lambda: False  # asked at every prefill chunk and every step
    guide: TreeGuide | None = None  # which tokens may follow
    draft_budget: int | None = None  # nodes of a tree, at most; None: as many as the engine was made for
    trees: bool = False  # report every step's tree
    # Behind how many of the prompt's tokens turns begin; None: nothing of this request is worth keeping.
    boundaries: Mapping[int, SnapshotKind] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens, in order; end tokens are not among them."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one for each, when asked for


@dataclass(frozen=True, slots=True)
class Tree:
    """One step's tree, and which of its rows were kept."""

    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    draft_s: float
    step_s: float  # the draft included


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    stats: RequestStats


Event = Progress | Tokens | Tree | Done


@dataclass(frozen=True, slots=True)
class _Verified:
    """A tree that the target has looked at and walked: the whole path is kept so far."""

    anchor: int
    size: int  # rows of the tree
    looked: Looked
    rows: list[int]  # accepted, the root first
    tokens: list[int]  # decided: those of the accepted rows below the root, and the target's own next
    draft_s: float  # until its tree was there
    verify_s: float  # from then on
    behind: Looked | None  # a pass over the next tree, which can only be the next token


class Engine:
    def __init__(
        self,
        target: Decoder,
        *,
        max_ctx: int,
        prefill_chunk: int | None = None,
        drafter: Drafter | None = None,
        max_rows: int = 1,
        kv: tuple[KVFormat, KVFormat] | None = None,
        window: int | None = None,
        prefix_cache: int = 0,
        prefix_files: SnapshotFiles | None = None,
        padded: bool | None = None,
    ):
        """`prefix_cache`: bytes of host memory for states of earlier requests; `prefix_files`: of other runs.

        `padded`: steps of a few sizes over tensors that stay where they are, as CUDA graphs need them; None:
        on a GPU.
        """
        assert 1 <= max_rows <= MAX_ROWS
        padded = target.device.type == "cuda" if padded is None else padded
        self.target = target
        self.max_ctx = max_ctx
        self._chunk = prefill_chunk or chunk_size(target.device.type, total_memory(target.device))
        self.drafter = drafter or NoDrafter()
        check_taps(target.spec, self.drafter.taps)
        self.max_rows = max_rows
        self.states = SequenceStates(
            target.spec,
            max_ctx=max_ctx,
            max_rows=padded_rows(max_rows) if padded else max_rows,
            device=target.device,
            kv=kv or kv_formats(target.spec, target.device),
            window=window,
            input_dtype=target.dtype,
            whole=padded,
        )
        self.steps = StepParts(target, self.states, self.drafter, max_rows=max_rows, padded=padded)
        self.prefixes = PrefixCache(SnapshotStore(self.states), budget=prefix_cache, files=prefix_files)

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Makes CUDA graphs of the steps, between requests; whether it could be done."""
        slot = self.states.open()
        self.drafter.open()
        try:
            # Pages of its own: those that the slot had before may hold what is remembered of a prompt.
            self._reserve(slot, min(3 * MAX_ROWS, self.max_ctx + self.steps.size(self.max_rows)))
            captured = self.steps.capture(progress)
            compile_chunk(self.target, self.states, slot)
            return captured
        finally:
            self.states.close(slot)

    def generate(self, request: Request) -> Generator[Event]:
        """Progress while the prompt is read, Tokens as they are committed, and Done at the end.

        Closing the iterator early, or an error, frees the sequence's memory like any other end.
        """
        self._check(request)
        sampling = request.sampling.seeded()
        stats = RequestStats(len(request.prompt), seed=sampling.seed or 0)
        stats.approximate = self.states.approximate
        sampler = Sampler(
            sampling,
            request.prompt,
            self.target.spec.vocab_size,
            self.target.device,
            fixed=self.steps.draws,
            masked=request.guide is not None,
        )
        slot = self.states.open()
        self.drafter.open()
        self.steps.begin(sorted(request.stop_ids))
        try:
            yield from self._run(request, sampler, stats, slot)
        finally:
            self.states.close(slot)
            self.prefixes.write()

    def _check(self, request: Request) -> None:
        vocabulary = self.target.spec.vocab_size
        if not request.prompt:
            raise UsageError("the prompt has no tokens", "give some text with --prompt or on standard input")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}, needed at least 1")
        if len(request.prompt) > self.max_ctx:
            raise PromptTooLong(len(request.prompt), self.max_ctx)
        outside = [token for token in request.prompt if not 0 <= token < vocabulary]
        if outside:
            raise UsageError(
                f"token {outside[0]} in the prompt, the vocabulary has ids 0 to {vocabulary - 1}"
            )

    @torch.inference_mode()
    def _run(self, request: Request, sampler: Sampler, stats: RequestStats, slot: int) -> Iterator[Event]:
        hidden, done = None, 0
        ends = chunk_ends(len(request.prompt), request.boundaries or {}, self._chunk)
        stats.cached_tokens = self._resume(request, slot, ends)
        for last, count in self._prefill(request, slot, ends):
            hidden, done = last, count
            yield Progress(done, len(request.prompt), stats.cached_tokens)
        if hidden is None or done < len(request.prompt) or request.cancelled():
            yield Done("cancelled", stats)
            return
        # The last token needs no room in the cache: nothing is computed from it.
        limit = min(request.max_tokens, self.max_ctx - len(request.prompt) + 1)
        logits = self.target.logits(hidden)
        if not bool(logits.isfinite().all()):
            raise ModelFileError(
                "the model's logits behind this prompt are not finite numbers: its weights are damaged",
                "fetch the file again, or try --device cpu",
            )
        fresh: list[int] = self._first(logits, request, sampler)
        verified: _Verified | None = None
        text = list(request.prompt)
        undecided: list[int] = []  # the anchor, which the sampler meets again as the root of the next tree
        while True:
            ahead: DraftTree | None = None
            looked: Looked | None = None
            if verified is not None and self.steps.draws is not None:
                self._settle(verified, len(fresh), None)
                room = limit - stats.generated_tokens - len(fresh)
                if room > 0 and self._may_go_on(request, fresh):
                    # The device goes on while the host looks at the text; if it ends here, for nothing.
                    alone = verified.behind is not None
                    ahead = self._propose(slot, fresh[-1], request, sampler, alone=alone)
                    if not request.may_cut:  # rows that a pass has been made behind cannot be taken back
                        looked = verified.behind or self._look(slot, ahead, room)
            cut = cut_text(fresh, request, limit - stats.generated_tokens)
            assert looked is None or cut.reason is None, f"{cut.reason} at {cut.rows} of {len(fresh)} rows"
            if cut.tokens:
                stats.token_came()
            if verified is not None:
                self._commit(slot, verified, cut.rows, stats)
            stats.generated_tokens += len(cut.tokens)
            text += cut.tokens
            if verified is not None and request.trees:
                yield self._shown(verified, cut.rows)
            if cut.tokens:
                logprobs = None
                if sampler.params.logprobs is not None:
                    rows = logits if verified is None else verified.looked.logits[verified.rows]
                    logprobs = sampler.logprobs(rows[: len(cut.tokens)], cut.tokens)
                yield Tokens(cut.tokens, logprobs)
            reason = cut.reason or ("cancelled" if request.cancelled() else None)
            if reason is not None:
                stats.notes = self.drafter.notes()
                self._remember(request, text[: self.states.lengths[slot]], "answer", slot)
                yield Done(reason, stats)
                return
            undecided += fresh
            sampler.accept(undecided[:-1])
            undecided = undecided[-1:]
            tree = self._propose(slot, undecided[0], request, sampler) if ahead is None else ahead
            room = limit - stats.generated_tokens
            looked = self._look(slot, tree, room) if looked is None else looked
            verified = self._decide(slot, undecided[0], tree, looked, room, request, sampler)
            fresh = verified.tokens

    def _resume(self, request: Request, slot: int, ends: list[int]) -> int:
        """Puts the slot where an earlier request left a beginning of this prompt; how many tokens that is."""
        found = self.prefixes.restore(slot, request.prompt, ends)
        if found is None:
            return 0
        self.drafter.restore(request.prompt[: found.length], found.draft)
        return found.length

    def _remember(self, request: Request, tokens: list[int], kind: SnapshotKind, slot: int) -> None:
        if request.boundaries is not None and tokens and self.prefixes.enabled:
            self.prefixes.insert(slot, tokens, kind, self.drafter.save)

    def _reserve(self, slot: int, rows: int) -> None:
        """Room for the rows, if need be for the price of what is remembered of other requests."""
        self.prefixes.reserve(slot, rows)
        self.states.reserve(slot, rows)

    def _prefill(self, request: Request, slot: int, ends: list[int]) -> Iterator[tuple[Tensor | None, int]]:
        """At the start and after each chunk: the last row's hidden state [1, width] and the tokens done."""
        device, start = self.target.device, self.states.lengths[slot]
        prompt = torch.tensor([request.prompt], device=device)
        slots = torch.tensor([slot], device=device)
        kept = snapshot_positions(ends, request.boundaries or {})
        yield None, start
        for stop in (end for end in ends if end > start):
            if request.cancelled():
                return
            tokens = prompt[:, start:stop]
            self._reserve(slot, tokens.shape[1])
            step = Step.chunk(slots, tokens, self.states.buffers.lengths[slots])
            wanted = rows_wanted(start, stop, {*kept, ends[-1]}, self.drafter.reach)
            last = read_chunk(
                self.target, self.states, self.drafter, step, request.prompt[start:stop], wanted
            )
            if stop in kept:
                self._remember(request, request.prompt[:stop], kept[stop], slot)
            yield last, stop
            start = stop

    def _first(self, logits: Tensor, request: Request, sampler: Sampler) -> list[int]:
        """The token that prefill gives: logits [1, vocabulary] of the prompt's last row."""
        device, last = self.target.device, request.prompt[-1]
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        at = torch.tensor([len(request.prompt)], device=device)
        masks = request.guide.masks([last], [-1]) if request.guide else []
        if sampler.fixed is None:
            return sampler.draw(logits, at, nothing, nothing[None].bool(), masks).tolist()
        sampler.fixed.allow(masks)
        return sampler.fixed.draw(logits, at, nothing, nothing).tolist()

    def _look(self, slot: int, tree: DraftTree, room: int) -> Looked:
        """The target's pass over a tree, of which at most `room` rows may stay."""
        self._reserve(slot, self.steps.size(len(tree)))
        self.steps.load(tree, room)
        return self.steps.look(len(tree))

    def _look_behind(self, slot: int, tree: DraftTree, room: int, request: Request) -> Looked | None:
        """The next pass before a walk is read, where one token comes of it; for nothing if it is last."""
        alone = self.steps.draws is not None and len(tree) == 1
        if not alone or room < 2 or request.may_cut or not self._may_go_on(request, []):
            return None
        if self._most_rows(request) > 1 and not self.drafter.rests():
            return None
        self._reserve(slot, 1 + self.steps.size(1))
        return self.steps.look_behind()

    def _decide(
        self,
        slot: int,
        anchor: int,
        tree: DraftTree,
        looked: Looked,
        room: int,
        request: Request,
        sampler: Sampler,
    ) -> _Verified:
        """Draws and walks: the tokens behind the anchor that this step decides; keeps their rows."""
        steps, guide = self.steps, request.guide
        # Whatever the masks take is spent while a device is busy with the pass.
        masks = guide.masks(tree.tokens.tolist(), tree.parents.tolist()) if guide else None
        walked, clock = steps.walk(looked, sampler, masks), steps.clock
        behind = self._look_behind(slot, tree, room, request)
        clock.wait()  # the only wait for the device
        decided = walked.flat.tolist()
        count = decided[0]
        self.states.lengths[slot] += count
        draft_s, verify_s = clock.seconds(0, 1), clock.seconds(2, 3) + clock.seconds(4, 5)
        rows, tokens = decided[4 : 4 + count], decided[4 + MAX_ROWS : 4 + MAX_ROWS + count]
        return _Verified(anchor, len(tree), looked, rows, tokens, draft_s, verify_s, behind)

    def _may_go_on(self, request: Request, fresh: list[int]) -> bool:
        """Whether the next step can begin before the text is looked at."""
        if request.guide is not None or request.sampling.logprobs is not None or request.trees:
            return False  # the first decides over proposals, the others read what a step writes over
        return request.stop_ids.isdisjoint(fresh)

    def _most_rows(self, request: Request) -> int:
        return self.max_rows if request.draft_budget is None else min(self.max_rows, request.draft_budget + 1)

    def _propose(
        self, slot: int, anchor: int, request: Request, sampler: Sampler, *, alone: bool = False
    ) -> DraftTree:
        position, guide, clock = self.states.lengths[slot], request.guide, self.steps.clock
        clock.mark(0)
        limit = 1 if alone else min(self._most_rows(request), self.max_ctx - position)
        rank: Rank = sampler.rank
        if guide is not None and sampler.fixed is None:
            rank = partial(sampler.rank, first=guide.masks([anchor], [-1])[0])
        tree = self.drafter.propose(anchor, position, limit, rank, guide)
        clock.mark(1)
        return tree

    def _commit(self, slot: int, verified: _Verified, count: int, stats: RequestStats) -> None:
        """Leaves of the kept rows the first `count`: what plain decoding would have processed by now."""
        start = time.perf_counter()
        excess = len(verified.rows) - count
        stats.step_done(rows=verified.size, committed=count)
        stats.draft_s += verified.draft_s
        stats.verify_s += verified.verify_s
        if excess:
            self.states.trim(slot, excess)
        if self.steps.draws is None:
            self._settle(verified, count, verified.looked.features[verified.rows[:count]])
        elif excess:
            self.drafter.trim(excess)
        stats.commit_s += time.perf_counter() - start

    def _settle(self, verified: _Verified, count: int, features: Tensor | None) -> None:
        """Tells the drafter what came of its tree, of which `count` rows stay."""
        if count:
            self.drafter.append([verified.anchor, *verified.tokens][:count], features)
        self.drafter.learn(
            Outcome(
                verified=verified.size,
                rows=verified.rows,
                tokens=verified.tokens,
                draft_seconds=verified.draft_s,
                step_seconds=verified.verify_s,
            )
        )

    def _shown(self, verified: _Verified, count: int) -> Tree:
        """The step's tree, with the first `count` of the accepted rows."""
        tokens, parents = self.steps.shown(verified.size)
        accepted = guessed_rows(tokens, parents, verified.rows[:count], verified.tokens[:count])
        return Tree(tokens, parents, accepted, verified.draft_s, verified.draft_s + verified.verify_s)
