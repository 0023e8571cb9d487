"""Training data: the target's own outputs for a set of prompts, stored as token ids, batched into blocks.

A token folder holds index.json and shards tokens-NNNNN.npz. A shard is written once all its outputs are
complete; a killed run loses only the shard in progress. Features are not stored: they are recomputed when
needed.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from treeflash.engine.sampler import SamplingParams
from treeflash.errors import ModelFileError, TreeFlashError, UsageError
from treeflash.train.draft_target import Target
from treeflash.train.files import read_json, write_json, write_whole
from treeflash.train.generation import generate_batch

INDEX = "index.json"
_FORMAT = 1
# Prompts per shard, about a minute's work. In a larger shard more prompts share a length and are prefilled
# together, and less time passes with only the last few outputs running.
_SHARD = {"cuda": 16384, "cpu": 64}
# Concurrent sequences: a GPU idles with fewer, a CPU gains nothing from more. Their states may take a quarter
# of the free memory.
_SLOTS = {"cuda": 2048, "cpu": 64}
_STATE_SHARE = 0.25
_MIN_OUTPUT = 2  # tokens: an anchor and a label
_PADDING = 64  # batch lengths are rounded up to multiples of it, so that few shapes occur
# An output is cut where an n-gram of this many tokens occurs for the third time: it is looping.
_LOOP, _LOOP_TIMES = 12, 3


@dataclass(frozen=True, slots=True)
class Regeneration:
    """How the target generates outputs for the prompts."""

    length: int = 512  # tokens of prompt and output that are stored
    max_tokens: int = 384  # per output
    temperatures: tuple[float, ...] = (0.0, 0.8)  # one output per prompt at each temperature
    top_p: float = 0.95
    top_k: int = 64  # 0: all; a full sort of the vocabulary costs as much as the target's forward pass
    seed: int = 0


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


def encode_prompt(prompt: dict[str, Any], target: Target) -> list[int]:
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
    target: Target,
    prompts: Path,
    folder: Path,
    settings: Regeneration,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    rank: int = 0,
    ranks: int = 1,
) -> bool:
    """Generate an output for every prompt of a file and store the tokens; existing shards are kept.

    `progress` and `cancelled` are called after each output. Returns False if cancelled. Each rank generates
    its share of the shards.
    """
    lines = read_prompts(prompts)
    encoded = []
    for number, line in enumerate(lines, 1):
        try:
            encoded.append(encode_prompt(line, target))
        except TreeFlashError as error:
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
    size = _open_folder(folder, _index(target, prompts, settings))
    shards = [
        (temperature, fitting[start : start + size])
        for start in range(0, len(fitting), size)
        for temperature in settings.temperatures
    ]
    total = len(settings.temperatures) * len(fitting)
    done = 0
    for number, (temperature, shard) in enumerate(shards):
        path = folder / f"tokens-{number:05}.npz"
        if number % ranks == rank and not path.exists():
            sampling = SamplingParams(
                temperature=temperature,
                top_p=settings.top_p if temperature else 1.0,
                top_k=settings.top_k if temperature else 0,
                seed=settings.seed + number,
            )
            texts = []
            for text in _generated(target, shard, settings, sampling):
                if cancelled():
                    return False
                texts.append(text)
                if progress is not None:
                    progress(done + len(texts), total)
            _write_shard(path, sorted(text for text in texts if text is not None))
        done += len(shard)
        if progress is not None:
            progress(done, total)
    return True


def _generated(
    target: Target, prompts: list[tuple[int, list[int]]], settings: Regeneration, sampling: SamplingParams
) -> Iterator[tuple[int, list[int], int] | None]:
    """Yield (prompt number, prompt and output tokens, prompt length); None if the output is too short."""
    outputs = generate_batch(
        target.decoder,
        [ids for _, ids in prompts],
        max_tokens=settings.max_tokens,
        sampling=sampling,
        stop_ids=target.tokenizer.stop_ids,
        slots=min(_slots(target, settings), len(prompts)),
    )
    for index, output in outputs:
        number, prompt = prompts[index]
        text = (prompt + _finished(output, settings.max_tokens, target.tokenizer.eos_id))[: settings.length]
        yield (number, text, len(prompt)) if len(text) - len(prompt) >= _MIN_OUTPUT else None


def _slots(target: Target, settings: Regeneration) -> int:
    most = _SLOTS[target.device.type]
    if target.device.type != "cuda":
        return most
    free, _ = torch.cuda.mem_get_info(target.device)
    row = 2 * target.spec.head_dim
    each = target.spec.recurrent_bytes() + settings.length * target.spec.kv_bytes_per_token(row, row)
    return max(1, min(most, int(_STATE_SHARE * free) // each))


def _write_shard(path: Path, texts: list[tuple[int, list[int], int]]) -> None:
    write_whole(
        path,
        lambda file: np.savez_compressed(
            file,
            tokens=np.array([token for _, text, _ in texts for token in text], np.int32),
            lengths=np.array([len(text) for _, text, _ in texts], np.int32),
            boundaries=np.array([boundary for _, _, boundary in texts], np.int32),
            prompts=np.array([number for number, _, _ in texts], np.int32),
        ),
    )


def _finished(output: list[int], limit: int, end: int | None) -> list[int]:
    """Return the output cut where it starts to loop, otherwise with its end token."""
    seen: dict[tuple[int, ...], int] = {}
    for start in range(len(output) - _LOOP + 1):
        ngram = tuple(output[start : start + _LOOP])
        seen[ngram] = seen.get(ngram, 0) + 1
        if seen[ngram] == _LOOP_TIMES:
            return output[: start + _LOOP]
    return output if end is None or len(output) >= limit else [*output, end]


def _index(target: Target, prompts: Path, settings: Regeneration) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "target": target.path.name,
        "target_bytes": target.size,
        "vocabulary": target.spec.vocab_size,
        "prompts": prompts.name,
        "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        **asdict(settings),
        "temperatures": list(settings.temperatures),
        "shard": _SHARD[target.device.type],
    }


def _open_folder(folder: Path, index: dict[str, Any]) -> int:
    """Write the index, or check it against an existing one; return the number of prompts per shard."""
    path = folder / INDEX
    if not path.exists():
        write_json(path, index)
        return index["shard"]
    found = read_json(path)
    for key, value in index.items():
        if found.get(key) != value and key != "shard":
            raise UsageError(
                f"{folder} was made with {key} {found.get(key)!r}, now it is {value!r}",
                "choose another `output`, remove this folder, or reuse it with `tokens`",
            )
    size = found.get("shard")
    if type(size) is not int or size < 1:
        raise ModelFileError(f"{path}: shard is {size!r}, needed a number of prompts")
    return size


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
        """Load a folder's shards, or one file; texts are cut to `length` and need an output within it."""
        files = sorted(path.glob("tokens-*.npz")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise UsageError(f"{path} holds no tokens-*.npz", "set `prompts` to generate them")
        shards = [_read_shard(file, vocabulary) for file in files]
        texts, boundaries, prompts = [], [], []
        for tokens, lengths, borders, numbers in shards:
            for text, border, number in zip(
                np.split(tokens, np.cumsum(lengths)[:-1]), borders.tolist(), numbers.tolist(), strict=True
            ):
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
        chosen = prompts[np.linspace(0, len(prompts) - 1, count).astype(int)] if count else prompts[:0]
        held = np.isin(self.prompts, chosen)
        return np.flatnonzero(~held), np.flatnonzero(held)


def _read_shard(path: Path, vocabulary: int) -> tuple[np.ndarray, ...]:
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths, borders, numbers = (
                file[name].astype(np.int64) for name in ("tokens", "lengths", "boundaries", "prompts")
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ModelFileError(
            f"{path}: not a readable token file: {error}", "remove it: the same command creates it again"
        ) from error
    sound = len(lengths) == len(borders) == len(numbers) and lengths.sum() == len(tokens)
    if not sound or (lengths < 1).any() or (borders < 1).any():
        raise ModelFileError(
            f"{path}: lengths, boundaries and tokens are inconsistent",
            "remove it: the same command creates it again",
        )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise UsageError(
            f"{path}: holds token {tokens.max()}, the target's vocabulary has ids 0 to {vocabulary - 1}",
            "these tokens were generated by another target",
        )
    return tokens.astype(np.int32), lengths, borders, numbers


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [B, n], padded at the end
    anchors: Tensor  # [B, M] positions where blocks begin, ascending
    labels: Tensor  # [B, M, K] tokens after the anchor
    valid: Tensor  # [B, M, K] bool: false past the end of the text
    real: int  # tokens without padding

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def split(self, size: int) -> Iterator["Batch"]:
        """Yield micro-batches of at most `size` texts."""
        fields = (each.split(size) for each in (self.tokens, self.anchors, self.labels, self.valid))
        for tokens, anchors, labels, valid in zip(*fields, strict=True):
            yield Batch(tokens, anchors, labels, valid, 0)

    def to(self, device: torch.device) -> "Batch":
        moved = (each.to(device) for each in (self.tokens, self.anchors, self.labels, self.valid))
        return Batch(*moved, real=self.real)


def make_batch(data: TokenData, numbers: Sequence[int], *, anchors: int, block: int, seed: int) -> Batch:
    """Return texts with up to `anchors` blocks each, at random positions of their outputs."""
    generator = np.random.default_rng(seed)
    texts = [data.text(number) for number in numbers]
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), -(-lengths.max() // _PADDING) * _PADDING), np.int64)
    rooms = lengths - 1 - data.boundaries[list(numbers)]  # anchors with at least one label
    count = min(anchors, -(-int(rooms.max()) // 8) * 8)
    chosen = np.empty((len(texts), count), np.int64)
    used = np.minimum(rooms, count)
    for row, (text, room) in enumerate(zip(texts, rooms, strict=True)):
        tokens[row, : len(text)] = text
        first = data.boundaries[numbers[row]]
        positions = np.sort(generator.permutation(room)[:count]) + first
        # Surplus blocks repeat the last position and have no valid labels.
        chosen[row] = np.pad(positions, (0, count - len(positions)), mode="edge")
    at = chosen[..., None] + np.arange(1, block)
    valid = (at < lengths[:, None, None]) & (np.arange(count) < used[:, None])[..., None]
    labels = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1).reshape(len(texts), -1), 1)
    return Batch(
        tokens=torch.from_numpy(tokens),
        anchors=torch.from_numpy(chosen),
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
