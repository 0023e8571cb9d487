"""Task scores of a target, greedy, one output each: pass@1 for code, the exact answer for mathematics.

    python -m workshop scores --data FOLDER --model FILE [--device cuda] [--prompts 50]

FOLDER holds humaneval, gsm8k, math500 (test.jsonl.gz each) and mbpp/sanitized.jsonl.gz. Outputs are generated
in batches with plain decoding; prompts and scores are those of `bough bench`.
Appends a line per suite to benchmarks/results/scores.jsonl.
"""

import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import torch

from bough.bench.suites import SuitePrompt, load
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.memory.device import device_name, pick_device
from bough.models.decoder import Decoder
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer
from bough.train.generation import Asked, generate_batch, many_engine
from workshop.case import RESULTS, case
from workshop.report import Report


def is_right(prompt: SuitePrompt, answer: str) -> bool:
    assert prompt.score is not None
    return prompt.score(prompt.item, answer)


@case(out=RESULTS / "scores.jsonl", device="auto")
def main(
    report: Report,
    *,
    data: Path,
    model: Path,
    suites: str = "humaneval,mbpp,gsm8k,math500",
    prompts: Annotated[int, "at most this many of each suite"] = 10_000,
    n_gen: Annotated[int, "a score of answers that were cut is too low"] = 640,
) -> None:
    device = pick_device(report.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(model))
        template = ChatTemplate.from_metadata(file.metadata, source=str(model))
        target = Decoder.load(file, device=device, dtype=dtype)
    for name in suites.split(","):
        items = load(name, prompts, data=data)
        start = time.perf_counter()
        encoded = []
        for item in items:
            rendered = template.render(item.messages)
            encoded.append(tokenizer.encode(rendered.text, literals=rendered.literals))
        outputs = generate_batch(
            many_engine(target, max_ctx=max(map(len, encoded)) + n_gen),
            [Asked(ids, SamplingParams(seed=0)) for ids in encoded],
            max_tokens=n_gen,
            stop_ids=tokenizer.stop_ids,
        )
        texts = {each.index: tokenizer.decode(each.tokens) for each in outputs}
        with ThreadPoolExecutor(8) as pool:
            right = sum(pool.map(is_right, items, [texts[index] for index in range(len(items))]))
        line = {
            "suite": name,
            "prompts": len(items),
            "right": right,
            "share": round(right / len(items), 4),
            "cut": sum(not each.ended for each in outputs),
            "n_gen": n_gen,
            "seconds": round(time.perf_counter() - start, 1),
            "model": model.name,
            "device": device_name(device) if device.type == "cuda" else platform.machine(),
            "torch": torch.__version__,
            **report.head("commit", "date"),
        }
        report.line(**line)
