"""Compares texts and logits, bit for bit, of requests alone and in company, plain and with trees.

    PYTHONPATH=src:. python workshop/gpu/company.py --data DIR --target GGUF --draft GGUF --out FILE

Every prompt is answered by one engine plain among others, which is the reference as it is the fastest to
have; with trees among others; with trees and alone; and --alone of them, all unless told, plain and alone.
A 64-bit hash of the logits is taken on the device at every position of a text. Prompts of all suites in
--data, greedy and at temperature 0.8 in turns; with --long N every fourth has N tokens, those of others
before its own: it is processed in parts while others decode. Also says how many tokens a second each way
gives in all.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Tokens
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Request
from bough.engine.sequence import Sequence as Running
from bough.session.loading import load_session
from tests.gpu.texts import embedded_pair
from workshop.gpu.exact import GREEDY, SAMPLED, LogitHashes, suite_prompts
from workshop.gpu.report import Report


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the suites")
    parser.add_argument("--target", type=Path, default=embedded_pair()[0])
    parser.add_argument("--draft", type=Path, default=embedded_pair()[1])
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--alone", type=int, metavar="PROMPTS", help="also plain and alone")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="of every fourth prompt; at most 3500")
    parser.add_argument("--n-gen", type=int, default=256)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report = Report(options.out, device=options.device)
    kv = options.kv if options.device != "cpu" else "f32"
    config = EngineConfig(
        options.device,
        max_ctx=4096,
        kv_k=kv,
        kv_v=kv,
        speculation=SpecConfig(budget=63),
        draft=DraftConfig(options.draft),
        prefix_cache=0,
        parallel=options.together,
    )
    session = load_session(options.target, config)
    engine, stops = session.engine, session.tokenizer.stop_ids
    hashes = LogitHashes(engine)
    prompts = suite_prompts(session, options.data, options.prompts)
    if options.long:
        every = [token for prompt in prompts for token in prompt] * (1 + options.long // 100)
        for index in range(3, len(prompts), 4):
            own = prompts[index]
            prompts[index] = every[index : index + options.long - len(own)] + own

    def requests(budget: int | None) -> list[Request]:
        samplings: list[SamplingParams] = [SAMPLED if index % 2 else GREEDY for index in range(len(prompts))]
        return [
            Request(ids, options.n_gen, sampling, stops, may_stop=False, draft_budget=budget)
            for ids, sampling in zip(prompts, samplings, strict=True)
        ]

    while engine.runner.capture_next():
        pass
    count, alone = options.together, len(prompts) if options.alone is None else options.alone
    plain = answer(engine, hashes, requests(0), count)
    report.log(f"plain, {count} at once", tokens=plain.tokens, tok_s=round(plain.tokens / plain.seconds, 1))
    if alone:
        compare(report, "plain, alone", plain, answer(engine, hashes, requests(0)[:alone], 1))
    compare(report, f"trees, {count} at once", plain, answer(engine, hashes, requests(None), count))
    compare(report, "trees, alone", plain, answer(engine, hashes, requests(None), 1))
    print("FAIL" if report.failed else "PASS", json.dumps({"prompts": len(prompts), "kv": kv}), flush=True)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
