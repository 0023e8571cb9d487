"""What the benchmark of a long text looks at: memory in use, a text with needles, their keys and values."""

import itertools
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import treeflash
from treeflash.engine.engine import Engine
from treeflash.kernels.kv_cache.format import HeadPool
from treeflash.kernels.kv_cache.reference import decode, encode
from treeflash.kernels.kv_cache.rotation import rotate, rotate_back
from treeflash.models.step import AttentionBuffers
from treeflash.session.session import Session

DEPTHS = tuple((2 * number + 1) / 20 for number in range(10))
NEEDLE = 8  # tokens of each whose keys and values are compared


class Peak:
    """The most that is in use of the whole device, looked at every few milliseconds while this is open."""

    def __init__(self, device: str):
        self._device, self.bytes, self.looks = device, 0, 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        free, total = torch.cuda.mem_get_info(self._device)
        self.bytes, self.looks = max(self.bytes, total - free), self.looks + 1

    def _go_on(self) -> None:
        while not self._over.wait(0.02):
            self.look()

    def __enter__(self) -> "Peak":
        if self._device != "cpu":
            self._over.clear()
            self._thread = threading.Thread(target=self._go_on, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self.look()


def text_of(session: Session, count: int) -> tuple[list[int], list[int]]:
    """Tokens of the package's own files, other at each pass, with a needle at each depth; where those are."""
    files = sorted(Path(treeflash.__file__).parent.rglob("*.py"))
    ids: list[int] = []
    for number in itertools.count():
        for file in files:
            if len(ids) < count:
                title = f"\n# Reading {number}: {file.stem} {(7919 * number + len(ids)) % 10007}\n"
                ids += session.tokenizer.encode(title + file.read_text().replace("return", f"return{number}"))
        if len(ids) >= count:
            break
    ids, places = ids[:count], [int(depth * count) for depth in DEPTHS]
    for number, at in enumerate(places):
        needle = session.tokenizer.encode(f"\nThe code of chest {number} is {(number + 3) ** 5 % 9973}.\n")
        ids[at : at + len(needle)] = needle
    return ids[:count], places


def rows_at(pool: HeadPool, table: Tensor, tokens: Tensor) -> Tensor:
    """[tokens, KV, D] float32 as they were before they were stored."""
    chosen = [plane[table[tokens // pool.page], :, tokens % pool.page] for plane in pool.planes]
    if pool.scales is None:
        return chosen[0].float()
    return rotate_back(decode(chosen[0], chosen[1], pool.format, pool.dim))


@torch.inference_mode()
def needles(engine: Engine, places: list[int]) -> Tensor:
    """[layers, 2, depths, tokens, KV, D] of slot 0."""
    buffers, device = engine.states.buffers, engine.target.device
    tokens = (torch.tensor(places)[:, None] + torch.arange(NEEDLE)).flatten().to(device)
    layers = [layer for layer in buffers.layers if isinstance(layer, AttentionBuffers)]
    found = [
        rows_at(pool, buffers.page_table[0], tokens).unflatten(0, (len(places), NEEDLE)).cpu()
        for layer in layers
        for pool in (layer.keys, layer.values)
    ]
    return torch.stack(found).unflatten(0, (len(layers), 2))


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def stored(rows: Tensor, format: Any) -> Tensor:
    """What is left of rows behind a format."""
    if not format.quantised:
        return rows.to(format.dtype).float()
    return rotate_back(decode(*encode(rotate(rows), format), format, rows.shape[-1]))


def arithmetic() -> float:
    """Operations a second of float16 products."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192**3 / min(times) * 1e3


@torch.inference_mode()
def noise(engine: Engine) -> None:
    """Pages that hold numbers such as those of a text."""
    for plane in engine.states.planes:
        if plane.dtype == torch.uint8:
            plane.random_(0, 256)
        elif plane.shape[-1] < engine.target.spec.head_dim:
            plane.uniform_(0.01, 0.02)  # scales
        else:
            plane.normal_()
