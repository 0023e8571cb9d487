"""Throughput of grammar-constrained generation (random JSON schemas) against unconstrained generation.

    python -m workshop constrained [--schemas 60] [--device auto] [--out FILE]

Run from the root of a checkout. For every schema one constrained output, then an unconstrained one for the
same prompt. Prints one line: tokens per second of both and their ratio (goal: at least 0.7), the ratio of
step times, and the time to the first token, which includes compiling the schema.
"""

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import jsonschema

import bough
from bough.config import DraftConfig, EngineConfig
from bough.engine.sampler import SamplingParams
from bough.engine.stats import RequestStats
from bough.memory.device import device_name
from bough.session.loading import load_session
from bough.session.requests import Finished, Grammar, Text, TextRequest
from bough.session.session import Session
from tests.session.schemas import random_schema
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report

QUESTIONS = [
    "Describe a person as JSON.",
    "Write a Python function that merges two sorted lists.",
    "List three colours and a number for each.",
    "What is the sum of 17 and 25?",
]
WARM_UP = 5
LONG_ENOUGH = 4  # tokens: shorter outputs give no meaningful throughput
FREE = 48  # tokens of an unconstrained output: long enough for its steady throughput


@dataclass(slots=True)
class Sum:
    tokens: int = 0
    seconds: float = 0.0  # from the first token to the last
    first: float = 0.0  # before the first token
    steps: int = 0

    def add(self, finished: Finished, wall: float) -> None:
        stats = finished.stats
        self.tokens += stats.generated_tokens
        self.seconds += self._decode_seconds(stats)
        self.first += wall - self._decode_seconds(stats)
        self.steps += stats.steps

    @staticmethod
    def _decode_seconds(stats: RequestStats) -> float:
        return (stats.generated_tokens - 1) / stats.decode_tok_s if stats.decode_tok_s else 0.0

    def line(self, outputs: int) -> dict[str, float]:
        after_first = self.tokens - outputs
        return {
            "tokens": self.tokens,
            "tok_s": after_first / self.seconds,
            "ms_to_first_token": 1000 * self.first / outputs,
            "ms_per_step": 1000 * self.seconds / self.steps,
            "tokens_per_step": after_first / self.steps,
        }


def answer(session: Session, **options: Any) -> tuple[Finished, str, float]:
    begun = time.perf_counter()
    text, last = "", None
    for last in session.generate(TextRequest(**options)):
        text += last.text if isinstance(last, Text) else ""
    assert isinstance(last, Finished)
    return last, text, time.perf_counter() - begun


@case(device="auto")
def main(report: Report, *, schemas: int = 60) -> None:
    session = load_session(
        TARGET,
        # No prefix cache: both outputs prefill their prompt.
        EngineConfig(device=report.device, max_ctx=1024, draft=DraftConfig(DRAFT), prefix_cache=0),
    )
    choose = random.Random(11)
    held, free = Sum(), Sum()
    measured = valid = tried = 0
    while measured < schemas:
        schema = random_schema(choose)
        messages = [{"role": "user", "content": QUESTIONS[tried % len(QUESTIONS)]}]
        sampling = SamplingParams(temperature=choose.choice([0.0, 1.0]), seed=tried)
        tried += 1
        common: dict[str, Any] = {"messages": messages, "sampling": sampling}
        grammar = Grammar("json_schema", schema)
        fitting, text, wall = answer(session, grammar=grammar, max_tokens=300, **common)
        if fitting.stats.generated_tokens < LONG_ENOUGH:
            continue
        # End tokens are banned, so that the output has the full length.
        ends = dict.fromkeys(session.tokenizer.stop_ids, float("-inf"))
        common["sampling"] = SamplingParams(
            temperature=sampling.temperature, seed=sampling.seed, logit_bias=ends
        )
        loose, _, loose_wall = answer(session, max_tokens=FREE, **common)
        if tried <= WARM_UP:
            continue
        jsonschema.validate(json.loads(text), schema)
        valid += 1
        measured += 1
        held.add(fitting, wall)
        free.add(loose, loose_wall)
    constrained, unconstrained = held.line(measured), free.line(measured)
    result = {
        "case": "constrained",
        "version": bough.__version__,
        "device": device_name(session.engine.target.device),
        "schemas": measured,
        "valid": valid,
        "constrained": constrained,
        "unconstrained": unconstrained,
        "ratio": constrained["tok_s"] / unconstrained["tok_s"],
        "ratio_of_steps": unconstrained["ms_per_step"] / constrained["ms_per_step"],
    }
    report.line(**result)
