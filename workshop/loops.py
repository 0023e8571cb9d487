"""The share of a target's greedy outputs that loop: all prompts of a suite in one batch, plain decoding.

    python -m workshop loops --data FOLDER --model FILE [--most 0.2]

Prints a JSON line: the shares of outputs that loop, that end with an end token, and of HumanEval heads that
the output copies verbatim. --texts FILE stores the outputs. Exits with 1 if more than --most loop.
"""

import json
import time
from pathlib import Path
from typing import Annotated

from bough.bench.measure import loop_start
from bough.bench.suites import load
from bough.engine.sampler import SamplingParams
from bough.train.draft_data import encode_prompt
from bough.train.draft_target import load_target
from bough.train.generation import Asked, generate_batch, many_engine
from workshop.case import case
from workshop.report import Report

FENCE = "```python\n"


@case(device="auto")
def main(
    report: Report,
    *,
    data: Path,
    model: Path,
    suite: str = "humaneval",
    prompts: int = 164,
    n_gen: int = 256,
    most: Annotated[float, "largest share of outputs that may loop"] = 1.0,
    texts: Annotated[Path | None, "file for the outputs"] = None,
) -> bool:
    target = load_target(model, device=report.device)
    items = load(suite, prompts, data=data)
    encoded = [encode_prompt({"messages": list(prompt.messages)}, target) for prompt in items]
    began = time.perf_counter()
    engine = many_engine(target.decoder, max_ctx=max(map(len, encoded)) + n_gen)
    asked = [Asked(ids, SamplingParams(seed=0)) for ids in encoded]
    stops = target.tokenizer.stop_ids
    found = generate_batch(engine, asked, max_tokens=n_gen, stop_ids=stops)
    outputs = {each.index: each.tokens for each in found}
    looping = [loop_start(outputs[number]) is not None for number in range(len(items))]
    decoded = [target.tokenizer.decode(outputs[number]) for number in range(len(items))]
    copied = [
        head(prompt.messages[-1]["content"]) in text for prompt, text in zip(items, decoded, strict=True)
    ]
    share = sum(looping) / len(items)
    report.line(
        model=model.name,
        suite=suite,
        prompts=len(items),
        loop=round(share, 3),
        end=round(sum(len(output) < n_gen for output in outputs.values()) / len(items), 3),
        copied=round(sum(copied) / len(items), 3) if suite == "humaneval" else None,
        tokens=sum(map(len, outputs.values())),
        seconds=round(time.perf_counter() - began, 1),
    )
    if texts is not None:
        with texts.open("w", encoding="utf-8") as file:
            for prompt, text, loops in zip(items, decoded, looping, strict=True):
                file.write(json.dumps({"prompt": prompt.name, "loops": loops, "text": text}) + "\n")
    return share > most


def head(request: str) -> str:
    """Return the content of the request's code block."""
    return request.partition(FENCE)[2].removesuffix("\n```").strip()
