"""Task scores of a target, greedy, one output each, and the share of its outputs that loop.

    python -m workshop scores --data FOLDER --model FILE [--device cuda] [--prompts 50] [--most 0.2]

FOLDER holds humaneval, gsm8k, math500 (test.jsonl.gz each) and mbpp/sanitized.jsonl.gz. Outputs are generated
in batches with plain decoding; prompts and scores (pass@1 for code, the exact answer for mathematics) are
those of `bough bench`. Appends a line per suite to benchmarks/results/scores.jsonl; --texts FILE stores the
outputs. Exits with 1 if more than --most loop.
"""

import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import torch

from bough.bench import scores
from bough.bench.measure import SCORED, loop_start
from bough.bench.suites import SuitePrompt, load
from bough.engine.sampler import SamplingParams
from bough.memory.device import device_name
from bough.train.draft_data import encode_prompt
from bough.train.draft_target import load_target
from bough.train.generation import Asked, generate_batch, many_engine
from workshop.case import RESULTS, case
from workshop.report import Report


def is_right(prompt: SuitePrompt, answer: str) -> bool:
    return bool(scores.score(prompt.score, prompt.item, answer))


@case(out=RESULTS / "scores.jsonl", device="auto")
def main(
    report: Report,
    *,
    data: Path,
    model: Path,
    suites: str = "humaneval,mbpp,gsm8k,math500",
    prompts: Annotated[int, "at most this many of each suite"] = 10_000,
    n_gen: Annotated[int, "a score of answers that were cut is too low"] = SCORED,
    most: Annotated[float, "largest share of outputs that may loop"] = 1.0,
    texts: Annotated[Path | None, "file for the outputs"] = None,
) -> None:
    target = load_target(model, device=report.device)
    for name in suites.split(","):
        items, start = load(name, prompts, data=data), time.perf_counter()
        encoded = [encode_prompt({"messages": list(item.messages)}, target) for item in items]
        outputs = sorted(
            generate_batch(
                many_engine(target.decoder, max_ctx=max(map(len, encoded)) + n_gen),
                [Asked(ids, SamplingParams(seed=0)) for ids in encoded],
                max_tokens=n_gen,
                stop_ids=target.tokenizer.stop_ids,
            ),
            key=lambda output: output.index,
        )
        answers = [target.tokenizer.decode(output.tokens) for output in outputs]
        loops = [loop_start(output.tokens) is not None for output in outputs]
        with ThreadPoolExecutor(8) as pool:
            right = sum(
                pool.map(lambda item, text: bool(scores.score(item.score, item.item, text)), items, answers)
            )
        report.failed |= sum(loops) / len(items) > most
        report.line(
            suite=name,
            prompts=len(items),
            right=right,
            share=round(right / len(items), 4),
            cut=sum(not output.ended for output in outputs),
            loop=round(sum(loops) / len(items), 3),
            n_gen=n_gen,
            seconds=round(time.perf_counter() - start, 1),
            model=model.name,
            device=device_name(target.device) if target.device.type == "cuda" else platform.machine(),
            torch=torch.__version__,
        )
        if texts is not None:
            lines = (
                {"prompt": item.name, "loops": repeats, "text": text}
                for item, text, repeats in zip(items, answers, loops, strict=True)
            )
            with texts.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
