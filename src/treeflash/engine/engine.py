"""The loop: prefill a prompt, then propose, verify, walk, commit. Knows no text, no threads, no I/O."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from treeflash.engine.memory import kv_dtype
from treeflash.engine.sampler import Sampler, SamplingParams, TokenLogprob
from treeflash.engine.stats import RequestStats
from treeflash.errors import ModelFileError, PromptTooLong, UsageError
from treeflash.models.decoder import Decoder, check_taps
from treeflash.models.step import MAX_ROWS, Step
from treeflash.spec.draft import Drafter, NoDrafter, Outcome
from treeflash.spec.verify import walk
from treeflash.state.sequences import SequenceStates

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    # Sees each batch of committed tokens; a number ends the request with that many of them delivered.
    cut: Callable[[list[int]], int | None] = lambda tokens: None
    cancelled: Callable[[], bool] = lambda: False  # asked at every prefill chunk and every step


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens processed so far."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens, in order; end tokens are not among them."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one for each, when asked for


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    stats: RequestStats


Event = Progress | Tokens | Done


@dataclass(frozen=True, slots=True)
class _Verified:
    """A tree that the target has looked at; nothing of it is committed."""

    step: Step
    features: Tensor  # [T, taps * width]
    logits: Tensor  # [T, vocabulary]
    rows: list[int]  # accepted, the root first
    tokens: list[int]  # decided: those of the accepted rows below the root, and the target's own next
    start: float  # when the step began
    proposed: float  # when its tree was there


class Engine:
    def __init__(
        self,
        target: Decoder,
        *,
        max_ctx: int,
        prefill_chunk: int = 512,
        drafter: Drafter | None = None,
        max_rows: int = 1,
    ):
        assert 1 <= max_rows <= MAX_ROWS
        self.target = target
        self.max_ctx = max_ctx
        self._chunk = prefill_chunk
        self._drafter = drafter or NoDrafter(target.device)
        check_taps(target.spec, self._drafter.taps)
        self._max_rows = max_rows
        self.states = SequenceStates(
            target.spec,
            max_ctx=max_ctx,
            max_rows=max_rows,
            device=target.device,
            kv_dtype=kv_dtype(target.device),
            input_dtype=target.dtype,
        )

    def generate(self, request: Request) -> Generator[Event]:
        """Progress while the prompt is read, Tokens as they are committed, and Done at the end.

        Closing the iterator early, or an error, frees the sequence's memory like any other end.
        """
        self._check(request)
        sampling = request.sampling.seeded()
        stats = RequestStats(prompt_tokens=len(request.prompt), seed=sampling.seed or 0)
        sampler = Sampler(sampling, request.prompt, self.target.spec.vocab_size, self.target.device)
        slot = self.states.open()
        self._drafter.open()
        try:
            yield from self._run(request, sampler, stats, slot)
        finally:
            self.states.close(slot)

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
        for last, count in self._prefill(request, slot):
            hidden, done = last, count
            yield Progress(done, len(request.prompt))
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
        fresh, verified = self._first(logits, len(request.prompt), sampler), None
        undecided: list[int] = []  # the anchor, which the sampler meets again as the root of the next tree
        while True:
            cut = _cut(fresh, request, limit - stats.generated_tokens)
            if cut.tokens:
                stats.token_came()
            if verified is not None:
                logits = verified.logits[verified.rows]
                self._commit(slot, verified, cut.rows, stats)
            stats.generated_tokens += len(cut.tokens)
            if cut.tokens:
                yield Tokens(cut.tokens, _logprobs(sampler, logits, cut.tokens))
            reason = cut.reason or ("cancelled" if request.cancelled() else None)
            if reason is not None:
                stats.notes = self._drafter.notes()
                yield Done(reason, stats)
                return
            undecided += fresh
            sampler.accept(undecided[:-1])
            undecided = undecided[-1:]
            verified = self._step(slot, undecided[0], sampler, stats)
            fresh = verified.tokens

    def _prefill(self, request: Request, slot: int) -> Iterator[tuple[Tensor | None, int]]:
        """At the start and after each chunk: the last row's hidden state [1, width] and the tokens done."""
        device = self.target.device
        prompt = torch.tensor([request.prompt], device=device)
        slots = torch.tensor([slot], device=device)
        yield None, 0
        for start in range(0, prompt.shape[1], self._chunk):
            if request.cancelled():
                return
            tokens = prompt[:, start : start + self._chunk]
            self.states.reserve(slot, tokens.shape[1])
            step = Step.chunk(slots, tokens, self.states.buffers.lengths[slots])
            output = self.target.forward(step, self.states.buffers, taps=self._drafter.taps)
            self.states.advance(step)
            self._drafter.append(request.prompt[start : start + self._chunk], output.features[0])
            yield output.hidden[:, -1], start + tokens.shape[1]

    def _first(self, logits: Tensor, position: int, sampler: Sampler) -> list[int]:
        """The token that prefill gives: logits [1, vocabulary] of the prompt's last row."""
        device = self.target.device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        at = torch.tensor([position], device=device)
        return sampler.draw(logits, at, nothing, nothing[None].bool()).tolist()

    def _step(self, slot: int, anchor: int, sampler: Sampler, stats: RequestStats) -> _Verified:
        """Propose, verify, walk: the tokens behind the anchor that this step decides, at least one."""
        device, position = self.target.device, self.states.lengths[slot]
        start = time.perf_counter()
        limit = min(self._max_rows, self.max_ctx - position)
        tree = self._drafter.propose(anchor, position, limit, sampler.rank)
        proposed = time.perf_counter()
        slots = torch.tensor([slot], device=device)
        self.states.reserve(slot, len(tree))
        step = Step.tree(slots, tree.tokens[None], tree.parents[None], self.states.buffers.lengths[slots])
        output = self.target.forward(step, self.states.buffers, taps=self._drafter.taps)
        logits = self.target.logits(output.hidden[0])
        chosen = sampler.draw(logits, step.positions[0] + 1, tree.tokens, step.visible()[0]).tolist()
        tokens = tree.tokens.tolist()
        path = walk(tokens, tree.parents.tolist(), chosen)
        stats.draft_s += proposed - start
        stats.verify_s += time.perf_counter() - proposed
        decided = [tokens[row] for row in path.rows[1:]] + [path.next_token]
        return _Verified(step, output.features[0], logits, path.rows, decided, start, proposed)

    def _commit(self, slot: int, verified: _Verified, count: int, stats: RequestStats) -> None:
        """Keeps the first `count` accepted rows: what plain decoding would have processed by now."""
        start = time.perf_counter()
        rows = verified.rows[:count]
        stats.step_done(rows=verified.step.rows, committed=len(rows))
        last = torch.tensor([rows[-1] if rows else -1], device=self.target.device)
        self.states.commit(verified.step, last)
        if rows:
            self._drafter.append(verified.step.tokens[0, rows].tolist(), verified.features[rows])
        stats.commit_s += time.perf_counter() - start
        self._drafter.learn(
            Outcome(
                verified=verified.step.rows,
                rows=verified.rows,
                tokens=verified.tokens,
                draft_seconds=verified.proposed - verified.start,
                step_seconds=time.perf_counter() - verified.proposed,
            )
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    tokens: list[int]  # delivered
    reason: Literal["stop", "length"] | None
    rows: int  # of the step, processed by the time plain decoding would have ended


def _cut(fresh: list[int], request: Request, room: int) -> _Cut:
    """The tokens that plain decoding would have delivered, and why it would have ended there."""
    kept = fresh[:room]
    cut = _Cut(kept, "length" if len(fresh) >= room else None, len(kept))
    for count, token in enumerate(kept):
        if token in request.stop_ids:
            # An end token is drawn from the row before it, which has therefore been processed.
            cut = _Cut(kept[:count], "stop", count + 1)
            break
    count = request.cut(cut.tokens)
    return cut if count is None else _Cut(cut.tokens[:count], "stop", count)


def _logprobs(sampler: Sampler, logits: Tensor, tokens: list[int]) -> list[TokenLogprob] | None:
    """Of tokens drawn behind the rows of `logits`, in order."""
    if sampler.params.logprobs is None:
        return None
    return sampler.logprobs(logits[: len(tokens)], tokens)
