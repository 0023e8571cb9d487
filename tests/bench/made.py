"""Measurements without a model, and results of made-up runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from bough.bench.measure import Measurement
from bough.bench.suites import SuitePrompt
from bough.errors import PromptTooLong


def a_measurement(text: str = "yes", **values: Any) -> Measurement:
    facts: dict[str, Any] = {"finish": "stop", "tokens": 11, "prompt_tokens": 5, "cached_tokens": 0}
    return Measurement(text=text, **(facts | {"ttft_s": 0.5, "tok_s": 20.0} | values))


class Parrot:
    """An endpoint that repeats the last message; cancelled after `limit` generations."""

    def __init__(self, limit: int = 10**6):
        self.limit = limit
        self.requests: list[tuple[str, int | None, float]] = []
        self.messages: list[list[str]] = []
        self.cleared = 0

    def clear_cache(self) -> None:
        self.cleared += 1

    def generate(
        self,
        prompt: SuitePrompt,
        messages: Sequence[Mapping[str, Any]],
        *,
        budget: int | None,
        temperature: float,
    ) -> Measurement:
        self.requests.append((prompt.name, budget, temperature))
        self.messages.append([message["content"] for message in messages])
        if "too long" in prompt.name:
            raise PromptTooLong(10, 5)
        finish = "stop" if len(self.requests) <= self.limit else "cancelled"
        return a_measurement(f"{messages[-1]['content']}!", finish=finish, tok_s=10.0 + (budget or 0))


def a_line(prompt: str = "builtin/0", budget: int | None = 22, **values: Any) -> dict[str, Any]:
    """Return a result with an acceptance length of 4, twice as fast as plain decoding."""
    suite = prompt.partition("/")[0]
    facts: dict[str, Any] = {
        "suite": suite, "prompt": prompt, "budget": budget, "temperature": 0.0, "context": 0, "text": "yes",
        "finish": "stop", "tokens": 41, "prompt_tokens": 9, "cached_tokens": 0, "ttft_s": 0.1,
        "tok_s": 50.0 if budget == 0 else 100.0, "acceptance_length": 1.0 if budget == 0 else 4.0,
        "loops": False, "steps": 40 if budget == 0 else 10, "rows_per_step": 1.0 + (budget or 0),
        "draft_s": 0.0 if budget == 0 else 0.1, "verify_s": 0.2, "rest_s": 0.05,
        "accepted_by_position": [] if budget == 0 else [9, 8, 6, 5, 2],
        "steps_by_rows": {str(1 + (budget or 0)): [10, 250.0]}, "memory": 1 << 30, "right": True,
    }  # fmt: skip
    return facts | values


def a_head(**settings: Any) -> dict[str, Any]:
    facts = {"model": "tiny", "draft": None, "suites": "builtin", "n_gen": 64, "seed": 0}
    return {
        "date": "2026-01-01T00:00:00+00:00", "command": "bough bench", "bough": "1", "commit": "abc",
        "device": "a machine", "torch": "2", "threads": 2, "weights_bytes": 10**8, "read_bandwidth": 1e10,
        "settings": facts | settings,
    }  # fmt: skip
