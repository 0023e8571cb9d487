"""Task scores of a target, greedy, one output each: pass@1 for code, the exact answer for mathematics.

    python workshop/scores.py --data FOLDER --model FILE [--device cuda] [--prompts 50]

FOLDER holds humaneval, gsm8k, math500 (test.jsonl.gz each) and mbpp/sanitized.jsonl.gz. Outputs are generated
in batches with plain decoding; prompts and scores are those of `bough bench`.
Appends a line per suite to benchmarks/results/scores.jsonl.
"""

import argparse
import json
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch

from bough.bench.suites import Prompt, load
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.memory.device import device_name, pick_device
from bough.models.decoder import Decoder
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer
from bough.train.generation import Asked, generate_batch, many_engine


def is_right(prompt: Prompt, answer: str) -> bool:
    assert prompt.score is not None
    return prompt.score(prompt.item, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--suites", default="humaneval,mbpp,gsm8k,math500")
    parser.add_argument("--prompts", type=int, default=10_000, help="at most this many of each suite")
    parser.add_argument("--n-gen", type=int, default=640, help="a score of answers that were cut is too low")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = pick_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with GGUFFile.open(options.model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(options.model))
        template = ChatTemplate.from_metadata(file.metadata, source=str(options.model))
        target = Decoder.load(file, device=device, dtype=dtype)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    for name in options.suites.split(","):
        items = load(name, options.prompts, data=options.data)
        start = time.perf_counter()
        prompts = []
        for item in items:
            rendered = template.render(item.messages)
            prompts.append(tokenizer.encode(rendered.text, literals=rendered.literals))
        outputs = generate_batch(
            many_engine(target, max_ctx=max(map(len, prompts)) + options.n_gen),
            [Asked(ids, SamplingParams(seed=0)) for ids in prompts],
            max_tokens=options.n_gen,
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
            "n_gen": options.n_gen,
            "seconds": round(time.perf_counter() - start, 1),
            "model": options.model.name,
            "device": device_name(device) if device.type == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "commit": commit.strip(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        print(json.dumps(line), flush=True)
        with Path("benchmarks/results/scores.jsonl").open("a") as results:
            results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
