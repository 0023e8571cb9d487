"""Which facts compression keeps with the attention of a model, and with other rules.

python -m workshop.compression model.gguf [--prompts 8] [--context 2k,8k] [--lines FILE] [--plot FOLDER]
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from bough.bench import machine
from bough.memory.device import pick_device
from workshop.compression import run


def lengths(text: str) -> list[int]:
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=8, help="texts of each length")
    parser.add_argument("--context", type=lengths, default=[4096], help="tokens of a text: 2k,8k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lines", type=Path, default=Path("benchmarks/results/compress.jsonl"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    facts = {"suites": "compress", "model": options.model.name, "texts": options.prompts}
    command = shlex.join(["python -m workshop.compression", *sys.argv[1:]])
    head = machine.head({**facts, "seed": options.seed, "device": str(device)}, command)
    for length, rows in run.run(
        options.model, options.context, options.prompts, device=device, seed=options.seed
    ):
        columns, cells = run.table(rows)
        print(f"Facts kept of {length:,} tokens, {options.model.stem}")
        for cell in (columns, *cells):
            print("  ".join(f"{text:16s}" for text in cell))
        with options.lines.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(head | row)}\n" for row in rows)
        if options.plot is not None:
            options.plot.mkdir(parents=True, exist_ok=True)
            title = f"{options.model.stem}, {length:,} tokens"
            run.plot(rows, options.plot / f"compress-{length}.svg", title)


if __name__ == "__main__":
    main()
