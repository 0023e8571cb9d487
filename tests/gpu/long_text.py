"""A long text with needles at ten depths, the K and V of their tokens, and what is generated after it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import bough
from bough.engine.engine import Done, Engine, Progress, Request, Tokens
from bough.engine.stats import RequestStats
from bough.kernels.attention import prefill
from bough.kernels.kv_cache.format import HeadPool, KVFormat
from bough.kernels.kv_cache.reference import decode, encode
from bough.kernels.kv_cache.rotation import rotate, rotate_back
from bough.models.step import AttentionBuffers
from bough.session.session import Session
from tests.gpu.texts import GREEDY_WITH_LOGPROBS

DEPTHS = tuple((2 * number + 1) / 20 for number in range(10))
NEEDLE_TOKENS = 8  # of each needle, whose K and V are compared


@dataclass
class Needles:
    """Tokens, gaps, K and V found by processing a long text."""

    tokens: list[int] = field(default_factory=list)  # generated after it
    gaps: list[float] = field(default_factory=list)  # between the log probabilities of the two likeliest
    rows: Tensor = field(default_factory=lambda: torch.empty(0))  # [layers, K and V, depths, tokens, KV, D]
    stats: RequestStats | None = None


def long_text(session: Session, count: int) -> tuple[list[int], list[int]]:
    """Return `count` tokens of the package's own files with a needle at each depth, and their positions."""
    files = sorted(Path(bough.__file__).parent.rglob("*.py"))
    ids: list[int] = []
    for number in itertools.count():
        for file in files:
            if len(ids) < count:
                title = f"\n# Reading {number}: {file.stem} {(7919 * number + len(ids)) % 10007}\n"
                ids += session.tokenizer.encode(title + file.read_text().replace("return", f"return{number}"))
        if len(ids) >= count:
            break
    ids, positions = ids[:count], [int(depth * count) for depth in DEPTHS]
    for number, at in enumerate(positions):
        needle = session.tokenizer.encode(f"\nThe code of chest {number} is {(number + 3) ** 5 % 9973}.\n")
        ids[at : at + len(needle)] = needle
    return ids[:count], positions


def read(
    engine: Engine,
    prompt: list[int],
    needles: list[int],
    count: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Needles:
    """Prefill the prompt, copy the needles' K and V, and generate `count` tokens."""
    found = Needles()
    for event in engine.generate(Request(prompt=prompt, max_tokens=count, sampling=GREEDY_WITH_LOGPROBS)):
        match event:
            case Progress(done, total):
                progress(done, total)
            case Tokens(ids, logprobs):
                if not found.tokens:
                    found.rows = needle_rows(engine, needles)
                found.tokens += ids
                found.gaps += [each.top[0][1] - each.top[1][1] for each in logprobs or ()]
            case Done(_, stats):
                found.stats = stats
    return found


@torch.inference_mode()
def needle_rows(engine: Engine, needles: list[int]) -> Tensor:
    """Return [layers, 2, depths, tokens, KV, D] of slot 0."""
    buffers, device = engine.states.buffers, engine.target.device
    tokens = (torch.tensor(needles)[:, None] + torch.arange(NEEDLE_TOKENS)).flatten().to(device)
    layers = [layer for layer in buffers.layers if isinstance(layer, AttentionBuffers)]
    found = [
        rows_at(pool, buffers.page_table[0], tokens).unflatten(0, (len(needles), NEEDLE_TOKENS)).cpu()
        for layer in layers
        for pool in (layer.keys, layer.values)
    ]
    return torch.stack(found).unflatten(0, (len(layers), 2))


def rows_at(pool: HeadPool, page_table: Tensor, tokens: Tensor) -> Tensor:
    """Return [tokens, KV, D] float32, decoded and rotated back."""
    chosen = [plane[page_table[tokens // pool.page], :, tokens % pool.page] for plane in pool.planes]
    if pool.scales is None:
        return chosen[0].float()
    return rotate_back(decode(chosen[0], chosen[1], pool.format, pool.dim))


def stored(rows: Tensor, format: KVFormat) -> Tensor:
    """Return rows as a format stores them."""
    if not format.quantised:
        return rows.to(format.dtype).float()
    return rotate_back(decode(*encode(rotate(rows), format), format, rows.shape[-1]))


def compile_slices(engine: Engine) -> None:
    """Prefill a short prompt in slices as small as pages, so that no long prompt waits for compilation."""
    plain, prefill.SLICE_BYTES = prefill.SLICE_BYTES, 1
    try:
        for _ in engine.generate(
            Request(prompt=list(range(300)), max_tokens=2, sampling=GREEDY_WITH_LOGPROBS)
        ):
            pass
    finally:
        prefill.SLICE_BYTES = plain
