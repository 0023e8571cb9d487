"""Sessions of the embedded pair, their texts, and where two greedy texts diverge."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.hub.catalog import named
from bough.session import loading
from bough.session.events import Finished
from bough.session.requests import TextRequest
from bough.session.session import Session

GREEDY = SamplingParams(seed=1)
GREEDY_WITH_LOGPROBS = SamplingParams(seed=1, logprobs=2)
TREE = SpecConfig(adaptive=False)
NEAR_TIE = 0.05  # a gap between the two highest logits that rounding may close
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """A greedy text of the embedded pair on a CPU in float32."""

    prompt: str
    tokens: list[int]
    gaps: list[float]  # between the two highest logits, at each token


def expected_texts() -> list[ExpectedText]:
    entries = json.loads(Path(__file__).with_name("expected_texts.json").read_text())
    return [ExpectedText(**entry) for entry in entries]


def embedded_pair() -> tuple[Path, Path]:
    """Return the target and the draft that are part of the package."""
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    return found[0].pair.target, found[0].pair.draft


def load_session(
    target: Path, draft: Path | None, *, graphs: bool = True, device: str = "cuda", **settings: Any
) -> Session:
    """Load a session; with `graphs` its steps must have been captured."""
    options = {"max_ctx": 2048, "speculation": TREE if draft else None, **settings}
    config = EngineConfig(device=device, draft=DraftConfig(draft) if draft else None, **options)
    session = loading.load_session(target, config, graphs=False)
    if graphs and device != "cpu":
        assert session.engine.warmup.capture(), "no CUDA graphs"
    return session


def generate(session: Session, messages: str | Messages, **settings: Any) -> Finished:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    request = TextRequest(messages=messages, **{"max_tokens": 48, "sampling": GREEDY, **settings})
    *_, last = session.generate(request)
    assert isinstance(last, Finished)
    return last


def divergence(found: list[int], expected: list[int]) -> int | None:
    """Return the index of the first token that differs, or of the end of the shorter text."""
    if found == expected:
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))


def assert_same_text(found: list[int], expected: ExpectedText, count: int) -> None:
    """Let a text diverge from the CPU's only at a near tie."""
    index = divergence(found, expected.tokens[:count])
    if index is None:
        return
    gap = expected.gaps[index] if index < len(expected.gaps) else None
    assert gap is not None and gap < NEAR_TIE, f"diverges at token {index}, gap {gap}"


def assert_same_text_as(found: Finished, uncached: Finished) -> None:
    """Let a text diverge only at a near tie of `uncached`, which has log probabilities and no cache hit."""
    assert uncached.logprobs is not None and uncached.stats.cached_tokens == 0
    index = divergence(found.tokens, uncached.tokens)
    if index is None:
        return
    assert index < min(len(found.tokens), len(uncached.tokens)), "one text is the beginning of the other"
    first, second = (logprob for _, logprob in uncached.logprobs[index].top[:2])
    assert abs(first - second) < NEAR_TIE, f"diverges at token {index}, gap {abs(first - second):.5f}"
