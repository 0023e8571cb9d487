"""One worker's share of the data: generates or reads items and encodes them. Writes no files."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from workshop.training import corpus, python_code
from workshop.training.documents import (
    END_OF_TEXT,
    TURN_START,
    Dialogue,
    Document,
    fingerprint,
    spells_special,
)
from workshop.training.heads import head_dialogue
from workshop.training.mathematics import mathematics_dialogue
from workshop.training.overlap import benchmark_runs, overlaps
from workshop.training.talk import talk_dialogue
from workshop.training.task_documents import task_dialogue, task_source

Item = Document | Dialogue
Prompt = tuple[str, int, list[dict[str, str]]]  # kind, hash of the key, messages
# Dialogue kinds that share a part; every other kind has its own part.
PART_OF_KIND = {
    "code": "task_dialogues",
    "completion": "task_dialogues",
    "explanation": "task_dialogues",
    "story": "mathematics",
    "drill": "mathematics",
    "algebra": "mathematics",
}
GENERATORS: dict[str, Callable[[random.Random], Item]] = {
    "heads": head_dialogue,
    "task_dialogues": task_dialogue,
    "task_sources": task_source,
    "mathematics": mathematics_dialogue,
    "talk": talk_dialogue,
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "Answer briefly.",
)
SYSTEM_SHARE = 0.06
CHUNK = 256
# One document in this many is never trained on.
HELD_OUT = 256
# A turn that repeats an n-gram of LOOP tokens this often would teach the model to loop.
LOOP, LOOP_TIMES = 12, 3


@dataclass(frozen=True, slots=True)
class Job:
    """`source` is "corpus", "code" or a generator's name; the fields after the seed are its input."""

    source: str
    seed: str
    records: tuple[tuple[str, dict[str, Any]], ...] = ()
    files: tuple[Path, ...] = ()
    tokens: int = 0
    documents: int | None = None
    prompts: int = 0


@dataclass(slots=True)
class Encoded:
    """Concatenated documents, each with its end token, and the hashes of their keys and texts."""

    ids: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    texts: np.ndarray


@dataclass(slots=True)
class Shard:
    parts: dict[str, Encoded]
    prompts: list[Prompt]
    # Hashes of the inputs, for the record.
    bytes_read: int = 0
    sha256: str = ""
    # Dropped documents, by part and reason.
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Builder:
    tokenizer: Tokenizer
    benchmarks: frozenset[str]
    dropped: Counter[str] = field(default_factory=Counter)
    pieces: dict[str, list[np.ndarray]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    seen: set[tuple[str, int]] = field(default_factory=set)

    def add(self, items: list[tuple[str, str, str]]) -> int:
        """Encode the (part, text, key) triples that are new; return the number of tokens."""
        fresh = []
        for part, text, key in items:
            print_ = fingerprint(text)
            if (part, print_) in self.seen:
                continue
            self.seen.add((part, print_))
            if self.benchmarks and overlaps(text, self.benchmarks):
                self.dropped[f"{part}: overlap"] += 1
            else:
                fresh.append((part, text, fingerprint(key), print_))
        encodings = self.tokenizer.encode_batch_fast([text + END_OF_TEXT for _, text, _, _ in fresh])
        total = 0
        for (part, _, key, print_), encoding in zip(fresh, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint16)
            if loops(ids, self.tokenizer.token_to_id(TURN_START)):
                self.dropped[f"{part}: loop"] += 1
                continue
            self.pieces.setdefault(part, []).append(ids)
            self.lengths.setdefault(part, []).append(len(ids))
            self.keys.setdefault(part, []).append(key)
            self.texts.setdefault(part, []).append(print_)
            total += len(ids)
        return total

    def unknown(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the triples that do not overlap with a benchmark."""
        if not self.benchmarks:
            return prompts
        kept = [each for each in prompts if not overlaps(each[2][-1]["content"], self.benchmarks)]
        self.dropped["prompts: overlap"] += len(prompts) - len(kept)
        return kept

    def parts(self) -> dict[str, Encoded]:
        return {
            part: Encoded(
                np.concatenate(self.pieces[part]),
                np.array(self.lengths[part], np.int64),
                np.array(self.keys[part], np.uint64),
                np.array(self.texts[part], np.uint64),
            )
            for part in self.pieces
        }


def loops(ids: np.ndarray, turn_start: int) -> bool:
    """Return whether a turn, or the text if it has none, loops."""
    weights = np.cumprod(np.full(LOOP, 0x9E3779B97F4A7C15, np.uint64))  # of a hash that wraps around
    for turn in np.split(ids, np.flatnonzero(ids == turn_start)):
        if len(turn) < LOOP + LOOP_TIMES - 1:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(turn.astype(np.uint64), LOOP)
        if np.unique(windows @ weights, return_counts=True)[1].max() >= LOOP_TIMES:
            return True
    return False


class _Worker:
    """Per-process state."""

    tokenizer: Tokenizer
    benchmarks: frozenset[str]


def start_worker(tokenizer_file: str, benchmarks: Path | None = None) -> None:
    # one thread per process: the processes already fill the cores
    os.environ["RAYON_NUM_THREADS"] = "1"
    _Worker.tokenizer = Tokenizer.from_file(tokenizer_file)
    _Worker.benchmarks = benchmark_runs(benchmarks) if benchmarks is not None else frozenset()


def make_shard(job: Job) -> Shard:
    """Return all items of a job, encoded, and its prompts."""
    rng = random.Random(job.seed)
    builder = _Builder(_Worker.tokenizer, _Worker.benchmarks)
    prompts: list[Prompt] = []
    if job.source in GENERATORS:
        _generate(job, builder, rng)
        fresh = (GENERATORS[job.source](rng) for _ in range(job.prompts))
        prompts += (_prompt(item, rng) for item in fresh if isinstance(item, Dialogue))
        return Shard(builder.parts(), builder.unknown(prompts), dropped=builder.dropped)
    digest, count = hashlib.sha256(), 0
    for items, text in _read(job, rng):
        digest.update(text.encode("utf-8", "replace"))
        count += len(text)
        kept = [item for item in items if not _forged(item)]
        builder.add([_triple(item, rng) for item in kept])
        prompts += (_prompt(item, rng) for item in kept if isinstance(item, Dialogue))
    for part, record in job.records:
        for question, key in corpus.more_prompts(part, record, rng):
            prompts.append((part, fingerprint(key), [{"role": "user", "content": question}]))
    return Shard(builder.parts(), builder.unknown(prompts), count, digest.hexdigest(), builder.dropped)


def _generate(job: Job, builder: _Builder, rng: random.Random) -> None:
    make = GENERATORS[job.source]
    tokens = documents = 0
    while documents < job.documents if job.documents is not None else tokens < job.tokens:
        left = CHUNK if job.documents is None else min(CHUNK, job.documents - documents)
        gained = builder.add([_triple(make(rng), rng) for _ in range(left)])
        documents += left
        tokens += gained
        # the generator is exhausted
        if gained == 0:
            break


def _read(job: Job, rng: random.Random) -> Iterator[tuple[list[Item], str]]:
    for part, record in job.records:
        yield list(corpus.items(part, record, rng)), repr(record)
    for path in job.files:
        text = python_code.read_source(path)
        if text is not None:
            yield list(python_code.items(text, rng)), text


def _forged(item: Item) -> bool:
    """Return whether the text spells special tokens, as tokenizers' sources do."""
    texts: Iterable[str] = (
        (content for _, content in item.messages) if isinstance(item, Dialogue) else (item.text,)
    )
    return any(map(spells_special, texts))


def _triple(item: Item, rng: random.Random) -> tuple[str, str, str]:
    if isinstance(item, Document):
        return item.part, item.text, item.key
    part = PART_OF_KIND.get(item.kind, item.kind)
    if rng.random() < SYSTEM_SHARE:
        item = Dialogue(item.kind, (("system", rng.choice(SYSTEM_PROMPTS)), *item.messages), item.key)
    return part, item.text(), item.key


def _prompt(item: Dialogue, rng: random.Random) -> Prompt:
    """Return the conversation before one of its assistant messages."""
    turns = rng.randrange(len(item.messages) // 2) * 2 + 1
    messages = [{"role": role, "content": content} for role, content in item.messages[:turns]]
    if rng.random() < SYSTEM_SHARE:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return item.kind, fingerprint(item.key), messages


def is_held_out(key: int) -> bool:
    return key % HELD_OUT == 0
