"""Decontamination: whether a text shares an n-gram of words with a benchmark item."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

RUN = 13  # words
WORD = re.compile(r"[a-z0-9]+")
# File, and the fields with the problem and its solution.
BENCHMARKS = {
    "humaneval/test.jsonl.gz": ("prompt", "canonical_solution"),
    "gsm8k/test.jsonl.gz": ("question", "answer"),
    "math500/test.jsonl.gz": ("problem", "solution"),
    "mbpp/all.jsonl.gz": ("text", "code"),
}
# Read where they are.
MORE = {"mt_bench/question.jsonl": ("turns",)}
MBPP_TRAINING = 601  # its first training task


def benchmark_runs(folder: Path) -> frozenset[str]:
    """The n-grams of words in the benchmarks' items."""
    found: set[str] = set()
    for name, fields in (BENCHMARKS | MORE).items():
        path = folder / name
        if not path.exists() and name in MORE:
            continue
        if not path.exists():
            raise SystemExit(f"{path} is missing: --benchmarks names a folder with {', '.join(BENCHMARKS)}")
        raw = path.read_bytes()
        for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").split("\n"):
            item = json.loads(line) if line.strip() else {}
            if name.startswith("mbpp") and item.get("task_id", 0) >= MBPP_TRAINING:
                continue
            for field in fields:
                texts = item.get(field, "")
                for text in [texts] if isinstance(texts, str) else texts:
                    found.update(runs(text))
    return frozenset(found)


def runs(text: str) -> Iterator[str]:
    words = WORD.findall(text.lower())
    return (" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1))


def overlaps(text: str, benchmarks: frozenset[str]) -> bool:
    return any(run in benchmarks for run in runs(text))
