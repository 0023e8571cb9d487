"""Builds the small target's training data from the corpus, installed sources and generators.

    python -m workshop training.prepare --corpus workshop/training/work/text.jsonl.xz

Writes parts/*.bin, instruct.bin, instruct.mask, heldout.bin, prompts.jsonl and prepare.json into --work.
Tokens are uint16, little-endian; every document ends with <|endoftext|>. The trainer samples parts by weight.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tokenizers import Tokenizer

from workshop.case import case
from workshop.report import Report
from workshop.training import corpus, python_code
from workshop.training.documents import TURN_END, TURN_START
from workshop.training.shards import HELD_OUT, Encoded, Job, Shard, is_held_out, make_shard, start_worker

WORK = Path(__file__).parent / "work"
# Percent of the tokens seen: 36 short Python, 21 library functions, 22 mathematics, 14 chat, 7 English.
WEIGHTS = {
    "task_dialogues": 13.0, "task_sources": 3.5, "heads": 16.0, "code_io": 3.0, "mbpp": 0.2,
    "library": 4.5, "library_plain": 2.5, "library_completions": 11.0,
    "mathematics": 11.5, "gsm8k": 6.0, "math": 1.5, "worked": 3.5,
    "library_dialogues": 3.0, "topical": 4.0, "chatter": 0.15, "talk": 4.0, "wordnet": 1.5, "tldr": 3.5,
    "manual_dialogues": 0.85,
    "novels": 3.5, "manual": 2.5, "prose": 0.8,
}  # fmt: skip
# Percent of the tokens of the instruction phase.
INSTRUCT = {
    "task_dialogues": 18, "heads": 32, "code_io": 2.5, "mbpp": 1, "library_dialogues": 3.5,
    "library_completions": 14, "mathematics": 10, "gsm8k": 8, "math": 3, "topical": 1.5, "chatter": 0.3,
    "talk": 4, "wordnet": 0.5, "tldr": 1, "manual_dialogues": 0.7,
}  # fmt: skip
# A short part is repeated in the instruction phase at most this often.
MAX_REPEATS = 4
# Percent of the prompts.
PROMPTS = {
    "code": 7, "completion": 6, "heads": 22, "explanation": 1, "code_io": 2, "mbpp": 0.5,
    "library_dialogues": 3, "library_completions": 16, "story": 3, "gsm8k": 16, "algebra": 3, "drill": 1,
    "math": 13.5, "talk": 2, "topical": 2, "chatter": 0.5, "wordnet": 0.5, "tldr": 0.5,
    "manual_dialogues": 0.5,
}  # fmt: skip
GENERATED = ("task_dialogues", "task_sources", "heads", "mathematics", "talk")
# Talk is generated from short lists: more of it would only repeat.
MAX_GENERATED = {"talk": 4_000_000}
# Copies of a function under other class names have other texts but one key.
KEYED = ("library", "library_plain", "library_completions", "library_dialogues")
JOB_TOKENS, JOB_RECORDS, JOB_FILES = 400_000, 2_000, 200
HELD_OUT_TOKENS = 200_000

log = logging.getLogger("prepare")


@dataclass(frozen=True)
class Options:
    corpus: Path = WORK / "text.jsonl.xz"
    work: Path = WORK
    code_dirs: Annotated[Sequence[Path], "additional folders of Python sources"] = ()
    math_documents: Annotated[int | None, "default: by the token budget"] = None
    prompts: int = 40_000
    budget_tokens: Annotated[int, "training tokens"] = 200_000_000
    instruct_tokens: Annotated[float, "tokens of the instruction phase, as a share of the budget"] = 0.12
    benchmarks: Annotated[Path | None, "text that shares 13 words with benchmarks in it is dropped"] = None
    jobs: int = os.cpu_count() or 1
    seed: int = 1


@dataclass(slots=True)
class Part:
    """Return a part's training documents, shuffled, and its held-out documents."""

    ids: np.ndarray
    lengths: np.ndarray
    held_ids: np.ndarray
    held_lengths: np.ndarray


def plan(options: Options) -> list[Job]:
    """Return the jobs; independent of the number of processes, and small enough to balance them."""
    jobs = []
    files = python_code.source_files(options.code_dirs)
    # adjacent files are similar; spreading them balances the jobs
    random.Random(options.seed).shuffle(files)
    for i in range(0, len(files), JOB_FILES):
        jobs.append(Job("code", f"{options.seed}/code/{i}", files=tuple(files[i : i + JOB_FILES])))
    records = corpus.label(corpus.read_records(options.corpus))
    for i in range(0, len(records), JOB_RECORDS):
        chunk = tuple(records[i : i + JOB_RECORDS])
        jobs.append(Job("corpus", f"{options.seed}/corpus/{i}", records=chunk))
    for name in GENERATED:
        wanted = min(WEIGHTS[name] / 100 * options.budget_tokens, MAX_GENERATED.get(name, np.inf))
        count = max(1, round(wanted / JOB_TOKENS))
        documents = options.math_documents if name == "mathematics" else None
        for i in range(count):
            jobs.append(
                Job(
                    name,
                    f"{options.seed}/{name}/{i}",
                    tokens=int(wanted / count),
                    documents=None if documents is None else -(-documents // count),
                    prompts=-(-options.prompts // count) if name != "task_sources" else 0,
                )
            )
    return jobs


def merge(shards: list[Shard], *, budget: float, seed: int) -> dict[str, Part]:
    """Return the deduplicated, shuffled parts; long parts are cut to their weight."""
    parts = {}
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        found = [shard.parts[name] for shard in shards if name in shard.parts]
        if not found:
            raise SystemExit(f"part {name} has no text, needed: {weight}% of the mix")
        parts[name] = _merge(
            found,
            keyed=name in KEYED,
            limit=weight / 100 * budget if name in (*GENERATED, *KEYED) else np.inf,
            rng=np.random.default_rng([seed, number]),
        )
    return parts


def _merge(found: list[Encoded], *, keyed: bool, limit: float, rng: np.random.Generator) -> Part:
    ids = np.concatenate([encoded.ids for encoded in found])
    lengths = np.concatenate([encoded.lengths for encoded in found])
    keys = np.concatenate([encoded.keys for encoded in found])
    identity = keys if keyed else np.concatenate([encoded.texts for encoded in found])
    first = np.unique(identity, return_index=True)[1]
    order = rng.permutation(np.sort(first))
    held = keys[order] % HELD_OUT == 0
    kept = order[~held]
    kept = kept[: np.searchsorted(np.cumsum(lengths[kept]), limit) + 1]
    begins = np.cumsum(lengths) - lengths
    held_order = order[held]
    return Part(
        _gather(ids, begins, lengths, kept), lengths[kept],
        _gather(ids, begins, lengths, held_order), lengths[held_order],
    )  # fmt: skip


def _gather(ids: np.ndarray, begins: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    pieces = [ids[begins[i] : begins[i] + lengths[i]] for i in order]
    return np.concatenate(pieces) if pieces else ids[:0]


def instructions(parts: dict[str, Part], *, tokens: float, seed: int) -> tuple[np.ndarray, dict[str, int]]:
    """Return the instruction phase's dialogues, shuffled, and the number of tokens of each part."""
    rng = np.random.default_rng([seed, 1000])
    pieces: list[np.ndarray] = []
    shares = {}
    for name, percent in INSTRUCT.items():
        part = parts[name]
        begins = np.cumsum(part.lengths) - part.lengths
        wanted, taken = percent / 100 * tokens, 0
        for _ in range(MAX_REPEATS):
            order = rng.permutation(len(part.lengths))
            order = order[: np.searchsorted(np.cumsum(part.lengths[order]), wanted - taken) + 1]
            pieces += (part.ids[begins[i] : begins[i] + part.lengths[i]] for i in order)
            taken += int(part.lengths[order].sum())
            if taken >= wanted:
                break
        shares[name] = taken
    return np.concatenate([pieces[i] for i in rng.permutation(len(pieces))]), shares


def answer_mask(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return 1 for every assistant token, the end of its turn included."""
    opening = np.array(tokenizer.encode(f"{TURN_START}assistant\n").ids)
    starts = np.flatnonzero(ids == opening[0])
    starts = starts[starts + len(opening) <= len(ids)]
    for offset, token in enumerate(opening):
        starts = starts[ids[starts + offset] == token]
    ends = np.flatnonzero(ids == tokenizer.token_to_id(TURN_END))
    starts += len(opening)
    after = ends[np.searchsorted(ends, starts)] + 1
    steps = np.zeros(len(ids) + 1, np.int8)
    steps[starts] = 1
    np.add.at(steps, after, -1)
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.uint8)


def held_out(parts: dict[str, Part]) -> tuple[np.ndarray, dict[str, int]]:
    """Return up to the wanted number of held-out tokens in the mix's shares, and the tokens of each part."""
    pieces, counts = [], {}
    for name, part in parts.items():
        wanted = WEIGHTS[name] / 100 * HELD_OUT_TOKENS
        count = int(np.searchsorted(np.cumsum(part.held_lengths), wanted)) + 1
        counts[name] = int(part.held_lengths[:count].sum())
        pieces.append(part.held_ids[: counts[name]])
    return np.concatenate(pieces), counts


def choose_prompts(shards: list[Shard], *, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return prompts for the target, none of them held out, in the shares of the kinds."""
    rng = random.Random(f"{seed}/prompts")
    by_kind: dict[str, dict[str, list[dict[str, str]]]] = {kind: {} for kind in PROMPTS}
    for shard in shards:
        for kind, key, messages in shard.prompts:
            if not is_held_out(key):
                by_kind[kind][json.dumps(messages)] = messages
    chosen = []
    for kind, percent in PROMPTS.items():
        texts = list(by_kind[kind])
        wanted = min(len(texts), round(percent / 100 * count))
        chosen += [{"kind": kind, "messages": by_kind[kind][text]} for text in rng.sample(texts, wanted)]
    rng.shuffle(chosen)
    yield from chosen


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(options: Options, shards: list[Shard], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write all output files; return the record without times."""
    work: Path = options.work
    (work / "parts").mkdir(parents=True, exist_ok=True)
    parts = merge(shards, budget=options.budget_tokens, seed=options.seed)
    record: dict[str, Any] = {"parts": {}}
    for name, part in parts.items():
        file = f"parts/{name}.bin"
        part.ids.astype("<u2").tofile(work / file)
        record["parts"][name] = {
            "file": file,
            "tokens": len(part.ids),
            "documents": len(part.lengths),
            "weight": WEIGHTS[name] / 100,
            "epochs_in_budget": round(WEIGHTS[name] / 100 * options.budget_tokens / len(part.ids), 2),
            "sha256": sha256(work / file),
        }
    ids, shares = instructions(
        parts, tokens=options.instruct_tokens * options.budget_tokens, seed=options.seed
    )
    mask = answer_mask(ids, tokenizer)
    ids.astype("<u2").tofile(work / "instruct.bin")
    mask.tofile(work / "instruct.mask")
    record["instruct"] = {"tokens": len(ids), "learnt": int(mask.sum()), "tokens_of_part": shares}
    held, counts = held_out(parts)
    held.astype("<u2").tofile(work / "heldout.bin")
    record["heldout"] = {"tokens": len(held), "tokens_of_part_in_order": counts}
    kinds: dict[str, int] = {}
    with (work / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for prompt in choose_prompts(shards, count=options.prompts, seed=options.seed):
            kinds[prompt["kind"]] = kinds.get(prompt["kind"], 0) + 1
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")
    record["prompts"] = {"count": sum(kinds.values()), "kinds": kinds}
    names = ("instruct.bin", "instruct.mask", "heldout.bin", "prompts.jsonl")
    record["outputs"] = {name: sha256(work / name) for name in names}
    return record


def inputs(options: Options, shards: list[Shard], jobs: list[Job]) -> dict[str, Any]:
    """Return the hashes of the inputs."""
    templates = hashlib.sha256()
    folder = Path(__file__).parent / "templates"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        templates.update(path.read_bytes())
    code = [shard for job, shard in zip(jobs, shards, strict=True) if job.source == "code"]
    return {
        "corpus_sha256": sha256(options.corpus),
        "tokenizer_sha256": sha256(options.work / "tokenizer.json"),
        "templates_sha256": templates.hexdigest(),
        "code_bytes": sum(shard.bytes_read for shard in code),
        "code_sha256": hashlib.sha256("".join(shard.sha256 for shard in code).encode()).hexdigest(),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "numpy": np.__version__,
    }


@case()
def main(report: Report, options: Options) -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    jobs = plan(options)
    log.info(f"{len(jobs)} jobs for {options.jobs} processes, planned in {time.monotonic() - began:.0f} s")
    tokenizer_file = str(options.work / "tokenizer.json")
    context = multiprocessing.get_context("spawn")
    shards = []
    with ProcessPoolExecutor(
        options.jobs, context, start_worker, (tokenizer_file, options.benchmarks)
    ) as pool:
        for shard in pool.map(make_shard, jobs):
            shards.append(shard)
            if len(shards) % 50 == 0:
                log.info(f"{len(shards)} of {len(jobs)} jobs after {time.monotonic() - began:.0f} s")
    log.info(f"encoded after {time.monotonic() - began:.0f} s")
    record = write(options, shards, Tokenizer.from_file(tokenizer_file))
    record["dropped"] = dict(sorted(sum((shard.dropped for shard in shards), Counter()).items()))
    record["inputs"] = inputs(options, shards, jobs)
    record["benchmarks_compared"] = options.benchmarks is not None
    record |= {"seed": options.seed, "budget_tokens": options.budget_tokens}
    record["seconds"] = round(time.monotonic() - began, 1)
    (options.work / "prepare.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, part in record["parts"].items():
        log.info(f"{name:18} {part['tokens']:>11,} tokens, seen {part['epochs_in_budget']:.1f} times")
    log.info(
        f"instruct {record['instruct']['tokens']:,} tokens, held out {record['heldout']['tokens']:,} tokens"
    )
    log.info(f"{record['prompts']['count']:,} prompts; {record['seconds']} s in all")
