"""What one request cost: the only definition of throughput, TTFT and acceptance length."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from bough.compress.compressor import Report
from bough.spec.drafter import Shares

_REPORTED = (  # by `RequestStats.as_dict`
    *("prompt_tokens", "cached_tokens", "cached_after_answer", "generated_tokens", "reasoning_tokens"),
    *("reasoning_loops", "answer_loops", "avoided_sentences", "steps", "plain_steps"),
    *("acceptance_length", "accepted_by_position"),
    *("rows_per_step", "ttft_s", "prefill_tok_s", "decode_tok_s", "draft_s", "verify_s", "commit_s"),
    *("seed", "notes"),
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step."""

    rows: int  # of the tree
    tokens: int  # sampled
    seconds: float  # draft, forward, acceptance and commit


@dataclass(slots=True)
class RequestStats:
    """Filled by the engine while the request runs; times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Decoding computed some of the cached state: it differs in the last bits from processing all as a prompt.
    cached_after_answer: bool = False
    generated_tokens: int = 0
    reasoning_tokens: int = 0  # of the generated ones
    reasoning_loops: int = 0  # reasoning that was ended because it repeated itself
    answer_loops: int = 0  # an answer that was
    avoided_sentences: int = 0  # of a chat's answers, that would have stood there too often
    steps: int = 0
    step_tokens: int = 0  # committed by steps; the first token comes from prefill and is not among them
    plain_steps: int = 0  # with a tree that was only its root
    verified_rows: int = 0  # of all steps, roots included
    accepted_by_position: list[int] = field(
        default_factory=list
    )  # [i]: steps that accepted more than i nodes
    step_log: list[StepRecord] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    seed: int = 0
    approximate: tuple[str, ...] = ()  # lossy settings, which may change the text
    shares: Shares = field(default_factory=Shares)  # accepted tokens by proposer
    images: int = 0  # of the prompt
    image_tokens: int = 0  # that they take of it
    encoded_images: int = 0  # the others were cached
    image_s: float = 0.0  # of encoding them
    notes: list[str] = field(default_factory=list)  # what the user should know, in sentences
    compression: Report | None = None  # None: the prompt was read as it is, and nothing else was asked for
    _start: float = field(default_factory=time.perf_counter)
    _first: float | None = None
    _last: float | None = None
    _last_step: float | None = None

    def compressed(self, report: Report) -> None:
        """Note what compression did to the prompt."""
        self.compression = report
        if report.approximate:
            self.approximate = (*self.approximate, report.approximate)

    def token_arrived(self) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def step_done(self, step: StepRecord, *, committed: int) -> None:
        """`committed`: rows of the step, the root included."""
        self._last_step = time.perf_counter()
        self.step_log.append(step)
        self.steps += 1
        self.plain_steps += step.rows == 1
        self.verified_rows += step.rows
        self.step_tokens += committed
        self._accepted(max(0, committed - 1), 1)

    def step_revoked(self, *, committed: int, kept: int) -> None:
        """Take back the last of the `committed` rows of the last step."""
        self.step_tokens -= committed - kept
        self._accepted(max(0, committed - 1), -1)
        self._accepted(max(0, kept - 1), 1)
        while self.accepted_by_position and not self.accepted_by_position[-1]:
            self.accepted_by_position.pop()

    def _accepted(self, nodes: int, steps: int) -> None:
        self.accepted_by_position += [0] * (nodes - len(self.accepted_by_position))
        for index in range(nodes):
            self.accepted_by_position[index] += steps

    @property
    def rows_per_step(self) -> float:
        return self.verified_rows / self.steps if self.steps else 0.0

    @property
    def sent_tokens(self) -> int:
        """Return the tokens of the prompt before compression."""
        return self.prompt_tokens if self.compression is None else self.compression.sent_tokens

    @property
    def prefill_s(self) -> float:
        """Return the time from the start to the first token, without that of compression."""
        return (self._first - self._start) if self._first is not None else 0.0

    @property
    def ttft_s(self) -> float:
        """Time to first token, that of compression included."""
        scored = self.compression.score_s if self.compression is not None else 0.0
        return self.prefill_s + scored if self._first is not None else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per step; exactly 1 for plain decoding."""
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def proposers(self) -> str:
        """The parts of the acceptance length, where something that prompt lookup proposed was accepted."""
        shares, steps = self.shares, max(1, self.steps)
        if not shares.lookup:
            return ""
        return f" (draft {shares.draft / steps:.2f}, lookup {shares.lookup / steps:.2f})"

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first over the time since the first."""
        if self._first is None or self._last is None or self._last <= self._first:
            return 0.0
        return (self.generated_tokens - 1) / (self._last - self._first)

    @property
    def decode_s(self) -> float:
        """From the first token to the end of the last step."""
        if self._first is None or self._last_step is None:
            return 0.0
        return max(0.0, self._last_step - self._first)

    @property
    def prefill_tok_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    def compression_dict(self) -> dict[str, Any]:
        """Return what compression did; empty where it was not asked for."""
        if self.compression is None:
            return {}
        report = self.compression
        found = {
            "sent_tokens": report.sent_tokens,
            "kept_tokens": report.kept_tokens,
            "scorer": report.scorer,
            "score_ms": round(1000 * report.score_s, 1),
            "prefill_ms": round(1000 * self.prefill_s, 1),
        }
        return found | ({"exact": report.reason} if report.reason else {})

    def images_dict(self) -> dict[str, Any]:
        return {
            "count": self.images,
            "tokens": self.image_tokens,
            "encoded": self.encoded_images,
            "encode_ms": round(1000 * self.image_s, 1),
        }

    def as_dict(self) -> dict[str, Any]:
        report = {name: getattr(self, name) for name in _REPORTED}
        report |= {"accepted_by": asdict(self.shares), "approximate": list(self.approximate)}
        report |= {"images": self.images_dict()} if self.images else {}
        return report | ({"compression": compression} if (compression := self.compression_dict()) else {})
