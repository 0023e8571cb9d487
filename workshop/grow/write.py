"""Parallel writing of planned tensors: encodes and writes them in pieces on several threads.

Writing a large file spends most of its time copying in the kernel, which is slow on one thread.
"""

import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import numpy as np

from bough.convert.families import Entry
from bough.gguf.writer import GGUFWriter
from bough.models.weights import TensorSource
from workshop.grow.bytes import Noise, build
from workshop.grow.plan import TensorPlan

Progress = Callable[[int, int], None]  # bytes written, total bytes
# Bytes per piece; small enough to stay in a CPU cache until it is written.
_PIECE_BYTES = 1 << 22
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class PlannedFile:
    path: Path
    architecture: str
    metadata: list[Entry]
    plans: list[TensorPlan]
    source: TensorSource

    @property
    def data_bytes(self) -> int:
        return sum(plan.info.nbytes for plan in self.plans)

    @property
    def header_bytes(self) -> int:
        """Return the header's approximate size."""
        listed = [value for _, value, _ in self.metadata if isinstance(value, list)]
        text = sum(len(item) + 8 if isinstance(item, str) else 8 for value in listed for item in value)
        return text + 200 * len(self.plans) + (1 << 16)


class _PiecewiseWriter(GGUFWriter):
    """A GGUF writer that takes tensors in pieces, from any thread and in any order."""

    def write_header(self, *, holes: bool = False) -> None:
        super().write_header(holes=holes)
        assert self._file is not None
        self._file.flush()
        try:
            # bytes that no piece covers are padding
            os.ftruncate(self._file.fileno(), self._data_start + self._data_bytes)
        except OSError as error:
            self._translate(error)

    def write_piece(self, name: str, offset: int, data: np.ndarray) -> None:
        """Write bytes [n] at `offset` of the tensor."""
        assert self._file is not None
        view, position = data.data, self._data_start + self._offsets[name] + offset
        while view:
            written = os.pwrite(self._file.fileno(), view, position)
            view, position = view[written:], position + written

    def written(self, name: str) -> None:
        """Mark a tensor as complete."""
        self._unwritten.remove(name)

    def failed(self, error: OSError) -> NoReturn:
        self._translate(error)


def write_files(files: list[PlannedFile], progress: Progress | None = None) -> None:
    """Write the files one after another; each is created atomically."""
    total, done = sum(file.data_bytes for file in files), 0
    noise = Noise()
    for file in files:
        for kind in {plan.type for plan in file.plans if plan.fill is None}:
            noise.prepare(kind)
        writer = _PiecewiseWriter(file.path, file.architecture)
        with writer:
            for key, value, kind in file.metadata:
                writer.add(key, value, kind)
            for plan in file.plans:
                writer.add_tensor(plan.name, plan.shape, plan.type)
            writer.write_header()
            # closed before the writer: no thread may write to a closed file
            with closing(_write_tensors(writer, file, noise)) as sizes:
                for size in sizes:
                    done += size
                    if progress is not None:
                        progress(done, total)


def _write_tensors(writer: _PiecewiseWriter, file: PlannedFile, noise: Noise) -> Generator[int]:
    """Yield the size of each piece after it is written."""
    largest_row = max(plan.info.row_bytes for plan in file.plans)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    buffers: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(threads):
        buffers.put(np.empty(max(_PIECE_BYTES, largest_row), np.uint8))

    def write(plan: TensorPlan, rows: range) -> int:
        buffer = buffers.get()
        try:
            data = build(plan, rows, file.source, noise, buffer).reshape(-1)
            writer.write_piece(plan.name, rows.start * plan.info.row_bytes, data)
            return data.nbytes
        finally:
            buffers.put(buffer)

    pool = ThreadPoolExecutor(threads)
    try:
        pieces: list[tuple[TensorPlan, list[Future[int]]]] = [
            (plan, [pool.submit(write, plan, rows) for rows in _pieces(plan)]) for plan in file.plans
        ]
        for plan, futures in pieces:
            for future in futures:
                yield future.result()
            writer.written(plan.name)
    except OSError as error:
        # stop the other threads first: `failed` closes the file
        pool.shutdown(cancel_futures=True)
        writer.failed(error)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(plan: TensorPlan) -> Iterator[range]:
    """Yield the row ranges of a tensor's pieces."""
    info = plan.info
    rows, step = info.nbytes // info.row_bytes, max(1, _PIECE_BYTES // info.row_bytes)
    for start in count(0, step):
        if start >= rows:
            return
        yield range(start, min(rows, start + step))
