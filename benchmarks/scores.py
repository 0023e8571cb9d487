"""Task scores of a target, greedy, one answer each: pass@1 for code, the exact answer for mathematics.

    python benchmarks/scores.py --data FOLDER --model FILE [--device cuda] [--prompts 50]

FOLDER holds humaneval, gsm8k, math500 (test.jsonl.gz each) and mbpp/sanitized.jsonl.gz. Answers come from
root-only steps over many sequences at once. Code is run in a process of its own with little time and memory.
Appends a line a suite to benchmarks/results/scores.jsonl.
"""

import argparse
import gzip
import json
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from treeflash.engine.batch import generate_batch
from treeflash.engine.memory import device_name, pick_device
from treeflash.engine.sampler import SamplingParams
from treeflash.gguf.reader import GGUFFile
from treeflash.models.decoder import Decoder
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import Tokenizer

SECONDS, BYTES = 5, 1 << 30
Item = dict[str, Any]


def code_of(answer: str) -> str:
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    return fenced[1] if fenced else answer


def passes(program: str) -> bool:
    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=2 * SECONDS,
            preexec_fn=limits,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def humaneval(item: Item, answer: str) -> bool:
    # The prompt's own imports and helpers stand before the answer, which may repeat only the function.
    head = item["prompt"][: item["prompt"].rindex("def " + item["entry_point"])]
    return passes(f"{head}\n{code_of(answer)}\n{item['test']}\ncheck({item['entry_point']})\n")


def mbpp(item: Item, answer: str) -> bool:
    return passes("\n".join([*item["test_imports"], code_of(answer), *item["test_list"]]))


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return numbers[-1].replace(",", "").rstrip(".") if numbers else None


def gsm8k(item: Item, answer: str) -> bool:
    return last_number(answer) == last_number(item["answer"].rpartition("####")[2])


def math500(item: Item, answer: str) -> bool:
    found = re.search(r"\\boxed\{(.*)\}", answer, re.DOTALL)
    return found is not None and "".join(found[1].split()) == "".join(item["answer"].split())


def trained_on(suite: str, item: Item) -> bool:
    """MBPP from 601 on is training data."""
    return suite == "mbpp" and int(item["task_id"]) > 600


SUITES: dict[str, tuple[str, Callable[[Item], str], Callable[[Item, str], bool]]] = {
    "humaneval": (
        "test",
        lambda item: "Complete this function:\n```python\n" + item["prompt"].rstrip() + "\n```",
        humaneval,
    ),
    "mbpp": (
        "sanitized",
        lambda item: f"{item['prompt']}\nYour code should pass: {item['test_list'][0]}",
        mbpp,
    ),
    "gsm8k": ("test", lambda item: item["question"], gsm8k),
    "math500": ("test", lambda item: item["problem"], math500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--prompts", type=int, default=10_000, help="at most so many of each suite")
    parser.add_argument("--n-gen", type=int, default=384)
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
        file_name, ask, is_right = SUITES[name]
        with gzip.open(options.data / name / f"{file_name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            items = [item for item in map(json.loads, lines) if not trained_on(name, item)]
        del items[options.prompts :]
        start = time.perf_counter()
        prompts = []
        for item in items:
            rendered = template.render([{"role": "user", "content": ask(item)}])
            prompts.append(tokenizer.encode(rendered.text, literals=rendered.literals))
        answers = generate_batch(
            target,
            prompts,
            max_tokens=options.n_gen,
            sampling=SamplingParams(),
            stop_ids=tokenizer.stop_ids,
            slots=1024 if device.type == "cuda" else 16,
        )
        texts = {index: tokenizer.decode(tokens) for index, tokens in answers}
        with ThreadPoolExecutor(8) as pool:
            right = sum(pool.map(is_right, items, [texts[index] for index in range(len(items))]))
        line = {
            "suite": name,
            "prompts": len(items),
            "right": right,
            "share": round(right / len(items), 4),
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
