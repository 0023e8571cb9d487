"""What one request cost: the only definition of tok/s, time to first token and acceptance length."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestStats:
    """Filled by the engine as it goes; times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0  # of the generated ones
    steps: int = 0
    step_tokens: int = (
        0  # tokens committed by steps; the first token comes from prefill and is not among them
    )
    plain_steps: int = 0  # of the root alone: nothing was proposed, or nothing promised to pay
    verified_rows: int = 0  # of all steps together, roots included
    accepted_by_position: list[int] = field(default_factory=list)  # steps that accepted at least so many
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    seed: int = 0
    approximate: tuple[str, ...] = ()  # what may make the text another than that of an exact cache
    notes: list[str] = field(default_factory=list)  # what the user should know, in words
    _start: float = field(default_factory=time.perf_counter)
    _first: float | None = None
    _last: float | None = None

    def token_came(self) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def step_done(self, *, rows: int, committed: int) -> None:
        """`committed` of the step's rows, the root among them."""
        self.steps += 1
        self.plain_steps += rows == 1
        self.verified_rows += rows
        self.step_tokens += committed
        accepted = max(0, committed - 1)
        self.accepted_by_position += [0] * (accepted - len(self.accepted_by_position))
        for place in range(accepted):
            self.accepted_by_position[place] += 1

    @property
    def rows_per_step(self) -> float:
        return self.verified_rows / self.steps if self.steps else 0.0

    @property
    def ttft_s(self) -> float:
        """From the request to its first token."""
        return (self._first - self._start) if self._first is not None else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a step; exactly 1 for plain decoding."""
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first over the time since the first."""
        if self._first is None or self._last is None or self._last <= self._first:
            return 0.0
        return (self.generated_tokens - 1) / (self._last - self._first)

    @property
    def prefill_tok_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.ttft_s if self.ttft_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "acceptance_length": self.acceptance_length,
            "accepted_by_position": self.accepted_by_position,
            "rows_per_step": self.rows_per_step,
            "ttft_s": self.ttft_s,
            "prefill_tok_s": self.prefill_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "commit_s": self.commit_s,
            "seed": self.seed,
            "approximate": list(self.approximate),
            "notes": self.notes,
        }
