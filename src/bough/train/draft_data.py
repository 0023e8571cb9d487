"""Training data: the target's own outputs for a set of prompts, stored as token ids, batched into blocks.

Shards are written as outputs finish; a killed run loses only what was not written yet.
"""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bough.engine.sampler import SamplingParams
from bough.errors import BoughError, UsageError
from bough.session.loops import loop_start
from bough.train.draft_target import TrainingTarget
from bough.train.files import read_json, write_json
from bough.train.generation import Asked, generate_batch, many_engine
from bough.train.shards import Job, ShardText, read_shard, shard_files, write_shard

INDEX = "index.json"
_FORMAT = 2
# Outputs of a shard; after a minute it is written with fewer.
_SHARD = {"cuda": 2048, "cpu": 64}
_SHARD_SECONDS = 60.0
_MIN_OUTPUT = 2  # tokens: an anchor and a label
_PADDING = 64  # batch lengths are rounded up to multiples of it, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Regeneration:
    """How the target generates outputs for the prompts."""

    length: int = 512  # tokens of prompt and output that are stored
    max_tokens: int = 384  # per output
    temperatures: tuple[float, ...] = (0.0, 0.8)  # one output per prompt at each temperature
    top_p: float = 0.95
    top_k: int = 64  # 0: all; a full sort of the vocabulary costs as much as the target's forward pass
    seed: int = 0
    minutes: float | None = None  # stop after this time; None: when all prompts have their outputs


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read lines of {"messages": [...]}, optionally with "thinking": true or false, or {"prompt": text}."""
    prompts = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts.append(_prompt(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not readable: {error}", "set `prompts` to a JSONL file") from error
    if not prompts:
        raise UsageError(f"{path} holds no prompts, needed lines of JSON with messages or prompt")
    return prompts


def _prompt(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict) or ("messages" in value) == ("prompt" in value):
        raise UsageError(f'{where}: needed an object with either "messages" or "prompt"')
    if "prompt" in value and not (isinstance(value["prompt"], str) and value["prompt"]):
        raise UsageError(f"{where}: prompt is {value['prompt']!r}, needed text")
    if value.get("thinking") not in (None, True, False):
        raise UsageError(f"{where}: thinking is {value['thinking']!r}, needed true or false")
    return value


def encode_prompt(prompt: dict[str, Any], target: TrainingTarget) -> list[int]:
    """Return the prompt's token ids; trailing assistant messages are dropped."""
    tokenizer = target.tokenizer
    if "prompt" in prompt:
        ids = tokenizer.encode(prompt["prompt"])
        return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
    messages = list(prompt["messages"]) if isinstance(prompt["messages"], list) else prompt["messages"]
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages.pop()
    rendered = target.template.render(messages, thinking=prompt.get("thinking"))
    return tokenizer.encode(rendered.text, literals=rendered.literals)


def regenerate(
    target: TrainingTarget,
    prompts: Path,
    folder: Path,
    settings: Regeneration,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    rank: int = 0,
    ranks: int = 1,
) -> bool:
    """Generate an output for every prompt of a file at every temperature; those in the folder are kept.

    An output depends on its prompt and the seed alone, so that it does not matter which of them a stopped run
    had finished. `progress` and `cancelled` are called after each. Returns False if cancelled. Each rank
    generates its share.
    """
    fitting = _fitting(target, prompts, settings)
    _open_folder(folder, _index(target, prompts, settings))
    existing = shard_files(folder)
    have = {job for path in existing for job in read_shard(path).jobs}
    total, answered = len(settings.temperatures) * len(fitting), len(have)
    facts = {
        (number, index): ids
        for number, ids in fitting[rank::ranks]
        for index in range(len(settings.temperatures))
        if (number, index) not in have
    }
    shards = _ShardWriter(folder, _SHARD[target.device.type], rank, ranks)
    deadline = time.monotonic() + 60 * (settings.minutes if settings.minutes is not None else math.inf)
    for done, text in enumerate(_generated(target, facts, settings) if facts else (), 1):
        shards.add(*text)
        if progress is not None:
            progress(answered + done, total)
        if cancelled():
            shards.flush()
            return False
        if time.monotonic() > deadline:
            break
    shards.flush()
    if progress is not None and settings.minutes is None:
        progress(total, total)
    return True


def _fitting(target: TrainingTarget, prompts: Path, settings: Regeneration) -> list[tuple[int, list[int]]]:
    """Return the numbers and tokens of the prompts that leave room for an output."""
    lines = read_prompts(prompts)
    encoded = []
    for number, line in enumerate(lines, 1):
        try:
            encoded.append(encode_prompt(line, target))
        except BoughError as error:
            raise type(error)(f"{prompts}: prompt {number}: {error.message}", error.hint) from error
    room = settings.length - _MIN_OUTPUT
    fitting = [(number, ids) for number, ids in enumerate(encoded) if 0 < len(ids) <= room]
    if not fitting:
        shortest = min(map(len, encoded))
        raise UsageError(
            f"{prompts}: no prompt leaves room for an output: the shortest has {shortest} tokens, "
            f"needed at most {room}",
            "raise `seq`",
        )
    return fitting


def _generated(
    target: TrainingTarget, jobs: dict[Job, list[int]], settings: Regeneration
) -> Iterator[tuple[Job, ShardText | None]]:
    """Yield each job and its text; None if the output is too short."""
    ways = list(jobs)
    outputs = generate_batch(
        many_engine(target.decoder, max_ctx=settings.length),
        [Asked(jobs[job], _sampling(settings, job)) for job in ways],
        max_tokens=settings.max_tokens,
        stop_ids=target.tokenizer.stop_ids,
    )
    for output in outputs:
        job = ways[output.index]
        end = target.tokenizer.eos_id if output.ended else None
        text = (jobs[job] + _finished(output.tokens, end))[: settings.length]
        boundary = len(jobs[job])
        yield job, ShardText(*job, text, boundary) if len(text) - boundary >= _MIN_OUTPUT else None


def _sampling(settings: Regeneration, job: Job) -> SamplingParams:
    number, index = job
    temperature = settings.temperatures[index]
    return SamplingParams(
        temperature=temperature,
        top_p=settings.top_p if temperature else 1.0,
        top_k=settings.top_k if temperature else 0,
        seed=((settings.seed << 40) + (number << 8) + index) % (1 << 64),
    )


class _ShardWriter:
    """Collects outputs and writes a shard of them from time to time: a kill loses what is not written."""

    def __init__(self, folder: Path, size: int, rank: int, ranks: int):
        self._folder, self._size = folder, size
        # Each rank has its own numbers, and those of earlier runs are not used again.
        taken = {path.name.split(".")[0] for path in shard_files(folder)}
        numbers = (number for number in itertools.count(rank, ranks))
        self._names = (name for name in (f"tokens-{number:05}" for number in numbers) if name not in taken)
        self._begin()

    def _begin(self) -> None:
        self._texts: list[ShardText] = []
        self._skipped: list[Job] = []
        self._since = time.monotonic()

    def add(self, job: Job, text: ShardText | None) -> None:
        if text is None:
            self._skipped.append(job)
        else:
            self._texts.append(text)
        full = len(self._texts) + len(self._skipped) >= self._size
        if full or time.monotonic() - self._since > _SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._texts or self._skipped:
            write_shard(self._folder / f"{next(self._names)}.npz", self._texts, self._skipped)
        self._begin()


def _finished(output: list[int], end: int | None) -> list[int]:
    """Return the output cut where it starts to loop, otherwise with the token that ended it, if any."""
    if (loop := loop_start(output)) is not None:
        return output[:loop]
    return output if end is None else [*output, end]


def _index(target: TrainingTarget, prompts: Path, settings: Regeneration) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "target": target.path.name,
        "target_bytes": target.size,
        "vocabulary": target.spec.vocab_size,
        "prompts": prompts.name,
        "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        **{name: value for name, value in asdict(settings).items() if name != "minutes"},
        "temperatures": list(settings.temperatures),
    }


def _open_folder(folder: Path, index: dict[str, Any]) -> None:
    """Write the index, or check it against an existing one."""
    path = folder / INDEX
    if not path.exists():
        write_json(path, index)
        return
    facts = read_json(path)
    for key, value in index.items():
        if facts.get(key) != value:
            raise UsageError(
                f"{folder} was made with {key} {facts.get(key)!r}, now it is {value!r}",
                "choose another `output`, remove this folder, or reuse it with `tokens`",
            )


@dataclass(frozen=True, slots=True)
class TokenData:
    """Texts (a prompt and its output each), concatenated."""

    tokens: np.ndarray  # int32
    starts: np.ndarray  # [N + 1]
    boundaries: np.ndarray  # [N] prompt lengths: the output's offset in its text
    prompts: np.ndarray  # [N] prompt number; several texts may share one

    def __len__(self) -> int:
        return len(self.boundaries)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def text(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    @classmethod
    def load(cls, path: Path, *, vocabulary: int, length: int) -> "TokenData":
        files = shard_files(path) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise UsageError(f"{path} holds no tokens-*.npz", "set `prompts` to generate them")
        texts, boundaries, prompts = [], [], []
        for file in files:
            for text, border, number in read_shard(file, vocabulary=vocabulary).texts():
                if min(len(text), length) - border >= _MIN_OUTPUT:
                    texts.append(text[:length])
                    boundaries.append(border)
                    prompts.append(number)
        if not texts:
            raise UsageError(f"{path} holds no text with an output within {length} tokens", "raise `seq`")
        starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
        return cls(np.concatenate(texts), starts, np.array(boundaries), np.array(prompts))

    def split(self, held_out: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the training texts and those of about `held_out` evenly spaced prompts."""
        prompts = np.unique(self.prompts)
        count = min(held_out, len(prompts) // 2)
        evaluated = prompts[np.linspace(0, len(prompts) - 1, count).astype(int)] if count else prompts[:0]
        held = np.isin(self.prompts, evaluated)
        return np.flatnonzero(~held), np.flatnonzero(held)


@dataclass(frozen=True, slots=True)
class TextBatch:
    texts: np.ndarray  # [B] their numbers
    tokens: Tensor  # [B, n], padded at the end
    anchors: Tensor  # [B, M] positions where blocks begin, ascending
    labels: Tensor  # [B, M, K] tokens after the anchor
    valid: Tensor  # [B, M, K] bool: false past the end of the text
    real: int  # tokens without padding

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def split(self, size: int) -> Iterator["TextBatch"]:
        """Yield micro-batches of at most `size` texts."""
        fields = (part.split(size) for part in (self.tokens, self.anchors, self.labels, self.valid))
        for index, (tokens, anchors, labels, valid) in enumerate(zip(*fields, strict=True)):
            texts = self.texts[index * size : (index + 1) * size]
            yield TextBatch(texts, tokens, anchors, labels, valid, 0)

    def to(self, device: torch.device) -> "TextBatch":
        moved = (part.to(device) for part in (self.tokens, self.anchors, self.labels, self.valid))
        return TextBatch(self.texts, *moved, real=self.real)


def make_batch(data: TokenData, numbers: Sequence[int], *, anchors: int, block: int, seed: int) -> TextBatch:
    """Return texts with up to `anchors` blocks each, at random positions of their outputs."""
    generator = np.random.default_rng(seed)
    texts = [data.text(number) for number in numbers]
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), -(-lengths.max() // _PADDING) * _PADDING), np.int64)
    rooms = lengths - 1 - data.boundaries[list(numbers)]  # anchors with at least one label
    count = min(anchors, -(-int(rooms.max()) // 8) * 8)
    starts = np.empty((len(texts), count), np.int64)
    used = np.minimum(rooms, count)
    for row, (text, room) in enumerate(zip(texts, rooms, strict=True)):
        tokens[row, : len(text)] = text
        first = data.boundaries[numbers[row]]
        positions = np.sort(generator.permutation(room)[:count]) + first
        # Surplus blocks repeat the last position and have no valid labels.
        starts[row] = np.pad(positions, (0, count - len(positions)), mode="edge")
    at = starts[..., None] + np.arange(1, block)
    valid = (at < lengths[:, None, None]) & (np.arange(count) < used[:, None])[..., None]
    labels = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1).reshape(len(texts), -1), 1)
    return TextBatch(
        texts=np.array(numbers),
        tokens=torch.from_numpy(tokens),
        anchors=torch.from_numpy(starts),
        labels=torch.from_numpy(labels.reshape(at.shape)),
        valid=torch.from_numpy(valid),
        real=int(lengths.sum()),
    )


def epoch_batches(lengths: np.ndarray, numbers: np.ndarray, *, batch: int, seed: int) -> list[np.ndarray]:
    """Return one epoch of random batches of texts with similar length; an incomplete batch is dropped."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(numbers)
    if len(order) < batch:
        return [np.resize(order, batch)]
    order = order[: len(order) // batch * batch]
    window = 32 * batch
    batches = []
    for start in range(0, len(order), window):
        texts = order[start : start + window]
        texts = texts[np.argsort(lengths[texts], kind="stable")]
        batches += np.split(texts, len(texts) // batch)
    return [batches[index] for index in generator.permutation(len(batches))]
