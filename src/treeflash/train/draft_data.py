"""Training text: prompts answered by the target itself, kept as token ids, handed out as batches of blocks.

A folder of tokens holds index.json and shards tokens-NNNNN.npz. A shard is written when all its answers are
there; a run that is killed loses the one it was at. Features are not kept: they are recomputed when needed.
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
# Prompts: about a minute's work. The more, the more of them are of one length and read together, and the
# less time passes with the last few answers of a shard alone.
_SHARD = {"cuda": 16384, "cpu": 64}
# Answers at a time: a GPU is idle with fewer, a CPU gains nothing from more. States of all of them may take
# a quarter of the free memory.
_SLOTS = {"cuda": 2048, "cpu": 64}
_STATES = 0.25
_LEAST_ANSWER = 2  # tokens: an anchor and a label
_PADDING = 64  # lengths of batches are multiples of it, so that few shapes occur
# A run of so many tokens that comes for the third time: from there on the answer goes in circles.
_LOOP, _LOOP_TIMES = 12, 3


@dataclass(frozen=True, slots=True)
class Regeneration:
    """How prompts are answered."""

    length: int = 512  # tokens of prompt and answer that are kept
    max_tokens: int = 384  # of an answer
    temperatures: tuple[float, ...] = (0.0, 0.8)  # every prompt is answered once at each
    top_p: float = 0.95
    top_k: int = 64  # 0: all; a full sort of the vocabulary costs as much as the target's pass
    seed: int = 0


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Lines of {"messages": [...]}, optionally with "thinking": true or false, or {"prompt": text}."""
    prompts = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts.append(_prompt(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not readable: {error}", "--prompts names a JSONL file") from error
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
    """Ids up to where the answer begins; an answer that the prompt brings along is left out."""
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
    """Answers the prompts of a file and keeps the tokens; shards that are there already are not made again.

    `progress` hears of answers; `cancelled` is asked at each of them: False where it said yes. Each rank
    makes its share of the shards.
    """
    lines = read_prompts(prompts)
    encoded = []
    for number, line in enumerate(lines, 1):
        try:
            encoded.append(encode_prompt(line, target))
        except TreeFlashError as error:
            raise type(error)(f"{prompts}: prompt {number}: {error.message}", error.hint) from error
    room = settings.length - _LEAST_ANSWER
    fitting = [(number, ids) for number, ids in enumerate(encoded) if 0 < len(ids) <= room]
    if not fitting:
        shortest = min(map(len, encoded))
        raise UsageError(
            f"{prompts}: no prompt leaves room for an answer: the shortest has {shortest} tokens, "
            f"needed at most {room}",
            "--seq N takes longer texts",
        )
    size = _open_folder(folder, _index(target, prompts, settings))
    shards = [
        (temperature, fitting[start : start + size])
        for start in range(0, len(fitting), size)
        for temperature in settings.temperatures
    ]
    total = len(settings.temperatures) * len(fitting)
    done = 0
    for number, (temperature, part) in enumerate(shards):
        path = folder / f"tokens-{number:05}.npz"
        if number % ranks == rank and not path.exists():
            sampling = SamplingParams(
                temperature=temperature,
                top_p=settings.top_p if temperature else 1.0,
                top_k=settings.top_k if temperature else 0,
                seed=settings.seed + number,
            )
            texts = []
            for text in _answered(target, part, settings, sampling):
                if cancelled():
                    return False
                texts.append(text)
                if progress is not None:
                    progress(done + len(texts), total)
            _write_shard(path, sorted(text for text in texts if text is not None))
        done += len(part)
        if progress is not None:
            progress(done, total)
    return True


def _answered(
    target: Target, prompts: list[tuple[int, list[int]]], settings: Regeneration, sampling: SamplingParams
) -> Iterator[tuple[int, list[int], int] | None]:
    """The prompt's number, its text with the answer, where that begins; None where it is too short."""
    answers = generate_batch(
        target.decoder,
        [ids for _, ids in prompts],
        max_tokens=settings.max_tokens,
        sampling=sampling,
        stop_ids=target.tokenizer.stop_ids,
        slots=min(_slots(target, settings), len(prompts)),
    )
    for index, answer in answers:
        number, prompt = prompts[index]
        text = (prompt + _finished(answer, settings.max_tokens, target.tokenizer.eos_id))[: settings.length]
        yield (number, text, len(prompt)) if len(text) - len(prompt) >= _LEAST_ANSWER else None


def _slots(target: Target, settings: Regeneration) -> int:
    most = _SLOTS[target.device.type]
    if target.device.type != "cuda":
        return most
    free, _ = torch.cuda.mem_get_info(target.device)
    row = 2 * target.spec.head_dim
    each = target.spec.recurrent_bytes() + settings.length * target.spec.kv_bytes_per_token(row, row)
    return max(1, min(most, int(_STATES * free) // each))


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


def _finished(answer: list[int], limit: int, end: int | None) -> list[int]:
    """The answer up to where it begins to repeat itself, or else with the end token that it ended with."""
    seen: dict[tuple[int, ...], int] = {}
    for start in range(len(answer) - _LOOP + 1):
        run = tuple(answer[start : start + _LOOP])
        seen[run] = seen.get(run, 0) + 1
        if seen[run] == _LOOP_TIMES:
            return answer[: start + _LOOP]
    return answer if end is None or len(answer) >= limit else [*answer, end]


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
    """Writes the index, or refuses a folder made in another way; says how many prompts a shard has."""
    path = folder / INDEX
    if not path.exists():
        write_json(path, index)
        return index["shard"]
    found = read_json(path)
    for key, value in index.items():
        if found.get(key) != value and key != "shard":
            raise UsageError(
                f"{folder} was made with {key} {found.get(key)!r}, now it is {value!r}",
                "name another folder with -o, remove this one, or use it as it is with --tokens",
            )
    size = found.get("shard")
    if type(size) is not int or size < 1:
        raise ModelFileError(f"{path}: shard is {size!r}, needed a number of prompts")
    return size


@dataclass(frozen=True, slots=True)
class TokenData:
    """Texts, one behind the other."""

    tokens: np.ndarray  # int32
    starts: np.ndarray  # [N + 1]
    boundaries: np.ndarray  # [N] where answers begin, from the text's start
    prompts: np.ndarray  # [N] number of the prompt: texts of one prompt belong together

    def __len__(self) -> int:
        return len(self.boundaries)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def text(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    @classmethod
    def load(cls, path: Path, *, vocabulary: int, length: int) -> "TokenData":
        """All shards of a folder, or one file; texts are cut to `length`, and need an answer within it."""
        files = sorted(path.glob("tokens-*.npz")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise UsageError(f"{path} holds no tokens-*.npz", "--prompts FILE makes them")
        parts = [_read_shard(file, vocabulary) for file in files]
        texts, boundaries, prompts = [], [], []
        for tokens, lengths, borders, numbers in parts:
            for text, border, number in zip(
                np.split(tokens, np.cumsum(lengths)[:-1]), borders.tolist(), numbers.tolist(), strict=True
            ):
                if min(len(text), length) - border >= _LEAST_ANSWER:
                    texts.append(text[:length])
                    boundaries.append(border)
                    prompts.append(number)
        if not texts:
            raise UsageError(f"{path} holds no text with an answer within {length} tokens", "raise --seq")
        starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
        return cls(np.concatenate(texts), starts, np.array(boundaries), np.array(prompts))

    def split(self, held_out: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the texts to train on, and of those of about `held_out` prompts spread over all."""
        prompts = np.unique(self.prompts)
        count = min(held_out, len(prompts) // 2)
        chosen = prompts[np.linspace(0, len(prompts) - 1, count).astype(int)] if count else prompts[:0]
        apart = np.isin(self.prompts, chosen)
        return np.flatnonzero(~apart), np.flatnonzero(apart)


def _read_shard(path: Path, vocabulary: int) -> tuple[np.ndarray, ...]:
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths, borders, numbers = (
                file[name].astype(np.int64) for name in ("tokens", "lengths", "boundaries", "prompts")
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ModelFileError(
            f"{path}: not a readable file of tokens: {error}", "remove it: the same command makes it again"
        ) from error
    sound = len(lengths) == len(borders) == len(numbers) and lengths.sum() == len(tokens)
    if not sound or (lengths < 1).any() or (borders < 1).any():
        raise ModelFileError(
            f"{path}: lengths, boundaries and tokens do not belong together",
            "remove it: the same command makes it again",
        )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise UsageError(
            f"{path}: holds token {tokens.max()}, the target's vocabulary has ids 0 to {vocabulary - 1}",
            "these are the tokens of another target",
        )
    return tokens.astype(np.int32), lengths, borders, numbers


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [B, n], padded at the end
    anchors: Tensor  # [B, M] where blocks begin, ascending
    labels: Tensor  # [B, M, K] tokens behind the anchor
    valid: Tensor  # [B, M, K] bool: the text has them
    real: int  # tokens without padding

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def split(self, size: int) -> Iterator["Batch"]:
        parts = (each.split(size) for each in (self.tokens, self.anchors, self.labels, self.valid))
        for tokens, anchors, labels, valid in zip(*parts, strict=True):
            yield Batch(tokens, anchors, labels, valid, 0)

    def to(self, device: torch.device) -> "Batch":
        moved = (each.to(device) for each in (self.tokens, self.anchors, self.labels, self.valid))
        return Batch(*moved, real=self.real)


def make_batch(data: TokenData, numbers: Sequence[int], *, anchors: int, block: int, seed: int) -> Batch:
    """Texts with up to `anchors` blocks each, spread at random over their answers."""
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
        places = np.sort(generator.permutation(room)[:count]) + first
        # Blocks too many stand at the last place and have no labels.
        chosen[row] = np.pad(places, (0, count - len(places)), mode="edge")
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
    """All texts once, in random batches of texts of similar length; what does not fill a batch waits."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(numbers)
    if len(order) < batch:
        return [np.resize(order, batch)]
    order = order[: len(order) // batch * batch]
    window = 32 * batch
    parts = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        parts += np.split(part, len(part) // batch)
    return [parts[place] for place in generator.permutation(len(parts))]
