"""Prompt and decode speed of a model alone, as llama-bench measures them: pp512 and tg128."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from bough.engine.stats import RequestStats
from bough.session.events import Finished
from bough.session.requests import TextRequest
from bough.session.session import Session

PROMPT, GENERATED = 512, 128  # tokens
TIMES, SECONDS = 3, 10.0  # repeat up to so often, and no longer than this


def measure(session: Session, cancelled: Callable[[], bool]) -> dict[str, dict[str, Any]]:
    """Return mean and standard deviation of tokens per second, by test; plain decoding, no cached prompt."""
    vocabulary = session.tokenizer.vocab_size
    prompt = [(7919 * index) % vocabulary for index in range(PROMPT)]
    if len(prompt) + 1 > session.max_ctx:
        return {}

    def prefill() -> float:
        stats = _run(session, prompt, 1, cancelled)
        return stats.prompt_tokens / stats.ttft_s if stats.ttft_s else 0.0

    def decode() -> float:
        return _run(session, prompt[:1], GENERATED + 1, cancelled).decode_tok_s

    tests = {f"pp{PROMPT}": prefill, f"tg{GENERATED}": decode}
    return {name: _repeated(test) for name, test in tests.items() if not cancelled()}


def _run(session: Session, prompt: list[int], tokens: int, cancelled: Callable[[], bool]) -> RequestStats:
    session.engine.prefixes.clear()
    request = TextRequest(
        prompt=prompt, max_tokens=tokens, draft_budget=0, ignore_eos=True, cancelled=cancelled
    )
    return next(event.stats for event in session.generate(request) if isinstance(event, Finished))


def _repeated(test: Callable[[], float]) -> dict[str, Any]:
    test()  # warms up
    end = time.monotonic() + SECONDS
    times = [test()]
    while len(times) < TIMES and time.monotonic() < end:
        times.append(test())
    spread = statistics.stdev(times) if len(times) > 1 else 0.0
    return {"mean": statistics.fmean(times), "sd": spread, "n": len(times)}
