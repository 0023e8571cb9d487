"""The loop: prefill a prompt, then propose, verify, walk, commit. Knows no text, no threads, no I/O."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from treeflash.engine.sampler import SamplingParams
from treeflash.engine.stats import RequestStats
from treeflash.errors import PromptTooLong, UsageError
from treeflash.models.decoder import Decoder
from treeflash.models.step import MAX_ROWS, Step
from treeflash.spec.draft import Drafter, NoDrafter
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


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    stats: RequestStats


Event = Progress | Tokens | Done


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
        self._max_rows = max_rows
        self.states = SequenceStates(target.spec, max_ctx=max_ctx, max_rows=max_rows, device=target.device)

    def generate(self, request: Request) -> Generator[Event]:
        """Progress while the prompt is read, Tokens as they are committed, and Done at the end.

        Closing the iterator early, or an error, frees the sequence's memory like any other end.
        """
        self._check(request)
        sampling = request.sampling.seeded()
        stats = RequestStats(prompt_tokens=len(request.prompt), seed=sampling.seed or 0)
        slot = self.states.open()
        try:
            yield from self._run(request, sampling, stats, slot)
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
    def _run(
        self, request: Request, sampling: SamplingParams, stats: RequestStats, slot: int
    ) -> Iterator[Event]:
        hidden = None
        for last, done in self._prefill(request, slot):
            hidden = last
            yield Progress(done, len(request.prompt))
        if hidden is None or request.cancelled():
            yield Done("cancelled", stats)
            return
        position = torch.tensor([len(request.prompt)], device=self.target.device)
        anchor = int(sampling.draw(self.target.logits(hidden), position)[0])
        # The last token needs no room in the cache: nothing is computed from it.
        limit = min(request.max_tokens, self.max_ctx - len(request.prompt) + 1)
        fresh = [anchor]
        while True:
            stats.token_came()
            kept, reason = _cut(fresh, request, limit - stats.generated_tokens)
            stats.generated_tokens += len(kept)
            if kept:
                yield Tokens(kept)
            if reason is None and request.cancelled():
                reason = "cancelled"
            if reason is not None:
                yield Done(reason, stats)
                return
            fresh = self._step(slot, fresh[-1], sampling)
            stats.steps += 1
            stats.step_tokens += len(fresh)

    def _prefill(self, request: Request, slot: int) -> Iterator[tuple[torch.Tensor | None, int]]:
        """After each chunk, the last row's hidden state [1, width] and the tokens done; None: cancelled."""
        device = self.target.device
        prompt = torch.tensor([request.prompt], device=device)
        slots = torch.tensor([slot], device=device)
        for start in range(0, prompt.shape[1], self._chunk):
            if request.cancelled():
                yield None, start
                return
            tokens = prompt[:, start : start + self._chunk]
            self.states.reserve(slot, tokens.shape[1])
            step = Step.chunk(slots, tokens, self.states.buffers.lengths[slots])
            output = self.target.forward(step, self.states.buffers)
            self.states.advance(step)
            yield output.hidden[:, -1], start + tokens.shape[1]

    def _step(self, slot: int, anchor: int, sampling: SamplingParams) -> list[int]:
        """Propose, verify, walk, commit: the tokens behind the anchor that it decides, at least one."""
        device, position = self.target.device, self.states.lengths[slot]
        tree = self._drafter.propose(anchor, position, min(self._max_rows, self.max_ctx - position))
        slots = torch.tensor([slot], device=device)
        self.states.reserve(slot, len(tree))
        step = Step.tree(slots, tree.tokens[None], tree.parents[None], self.states.buffers.lengths[slots])
        output = self.target.forward(step, self.states.buffers)
        chosen = sampling.draw(self.target.logits(output.hidden[0]), step.positions[0] + 1)
        path = walk(tree.tokens.tolist(), tree.parents.tolist(), chosen.tolist())
        self.states.commit(step, torch.tensor([path.rows[-1]], device=device))
        return [int(tree.tokens[row]) for row in path.rows[1:]] + [path.next_token]


def _cut(fresh: list[int], request: Request, room: int) -> tuple[list[int], Literal["stop", "length"] | None]:
    """The tokens that plain decoding would have delivered, and why it would have ended there."""
    kept = fresh[:room]
    reason: Literal["stop", "length"] | None = "length" if len(fresh) >= room else None
    for count, token in enumerate(kept):
        if token in request.stop_ids:
            kept, reason = kept[:count], "stop"
            break
    count = request.cut(kept)
    return (kept, reason) if count is None else (kept[:count], "stop")
