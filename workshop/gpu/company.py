"""Compares texts and logits, bit for bit, of requests alone and in company, plain and with trees.

    python -m workshop gpu.company --data DIR --target GGUF --draft GGUF --out FILE

Every prompt is answered by one engine plain among others, which is the reference as it is the fastest to
have; with trees among others; with trees and alone; and --alone of them, all unless told, plain and alone.
A 64-bit hash of the logits is taken on the device at every position of a text. Prompts of all suites in
--data, greedy and at temperature 0.8 in turns; with --long N every fourth has N tokens, those of others
before its own: it is processed in parts while others decode. Also says how many tokens a second each way
gives in all.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Tokens
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Request
from bough.engine.sequence import Sequence as Running
from bough.session.loading import load_session
from workshop.case import DRAFT, TARGET, case
from workshop.gpu.exact import GREEDY, SAMPLED, LogitHashes, suite_prompts
from workshop.report import Report


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    hashes: list[Tensor] = field(default_factory=list)

    def numbers(self) -> list[int]:
        return torch.cat(self.hashes).tolist() if self.hashes else []


@dataclass(slots=True)
class Result:
    answers: list[Answer]
    seconds: float
    steps: int

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def answer(engine: Engine, hashes: LogitHashes, requests: Sequence[Request], together: int) -> Result:
    """Answer the requests, at most `together` at a time, in order."""
    answers, waiting = [Answer() for _ in requests], list(enumerate(requests))
    running: dict[Running, Answer] = {}
    begin, steps = time.perf_counter(), 0
    while waiting or running:
        while waiting and len(running) < together:
            index, request = waiting.pop(0)
            running[engine.add(request)] = answers[index]
        hashes.owners.update({each.slot: own.hashes for each, own in running.items() if each.slot >= 0})
        steps += 1
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                running[sequence].tokens += event.ids
        for sequence in [each for each in running if each.finished]:
            engine.release(sequence)
            del running[sequence]
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()
    return Result(answers, time.perf_counter() - begin, steps)


def compare(report: Report, name: str, reference: Result, found: Result) -> None:
    rows = different = same = 0
    for plain, other in zip(reference.answers[: len(found.answers)], found.answers, strict=True):
        same += plain.tokens == other.tokens
        # A step may accept rows beyond the end of the text.
        before, after = plain.numbers()[: len(plain.tokens)], other.numbers()
        pairs = list(zip(before, after, strict=False))
        rows += len(pairs)
        different += sum(a != b for a, b in pairs) + max(0, len(before) - len(after))
    facts = {"texts": len(found.answers), "same_texts": same, "tokens": found.tokens}
    facts |= {"rows": rows, "different_rows": different, "steps": found.steps}
    speed = {"seconds": round(found.seconds, 2), "tok_s": round(found.tokens / found.seconds, 1)}
    report.check(name, same == len(found.answers) and rows > 0 and not different, **facts, **speed)


@case()
def main(
    report: Report,
    *,
    data: Annotated[Path, "folder of the suites"],
    target: Path = TARGET,
    draft: Path = DRAFT,
    prompts: int = 300,
    together: int = 16,
    alone: Annotated[int | None, "prompts, also plain and alone"] = None,
    long: Annotated[int, "tokens of every fourth prompt; at most 3500"] = 0,
    n_gen: int = 256,
    kv: str = "f16",
) -> None:
    kv = kv if report.device != "cpu" else "f32"
    config = EngineConfig(
        report.device,
        max_ctx=4096,
        kv_k=kv,
        kv_v=kv,
        speculation=SpecConfig(budget=63),
        draft=DraftConfig(draft),
        prefix_cache=0,
        parallel=together,
    )
    session = load_session(target, config)
    engine, stops = session.engine, session.tokenizer.stop_ids
    hashes = LogitHashes(engine)
    questions = suite_prompts(session, data, prompts)
    if long:
        every = [token for prompt in questions for token in prompt] * (1 + long // 100)
        for index in range(3, len(questions), 4):
            own = questions[index]
            questions[index] = every[index : index + long - len(own)] + own

    def requests(budget: int | None) -> list[Request]:
        samplings: list[SamplingParams] = [
            SAMPLED if index % 2 else GREEDY for index in range(len(questions))
        ]
        return [
            Request(ids, n_gen, sampling, stops, may_stop=False, draft_budget=budget)
            for ids, sampling in zip(questions, samplings, strict=True)
        ]

    while engine.runner.capture_next():
        pass
    count, alone = together, len(questions) if alone is None else alone
    plain = answer(engine, hashes, requests(0), count)
    report.log(f"plain, {count} at once", tokens=plain.tokens, tok_s=round(plain.tokens / plain.seconds, 1))
    if alone:
        compare(report, "plain, alone", plain, answer(engine, hashes, requests(0)[:alone], 1))
    compare(report, f"trees, {count} at once", plain, answer(engine, hashes, requests(None), count))
    compare(report, "trees, alone", plain, answer(engine, hashes, requests(None), 1))
    print("FAIL" if report.failed else "PASS", json.dumps({"prompts": len(questions), "kv": kv}), flush=True)
