"""Makes and writes the pieces of planned tensors on several threads. Knows no models.

Most of the time of writing a large file goes into the kernel's copying, which one thread cannot hurry.
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

from treeflash.convert.families import Entry
from treeflash.convert.grow_bytes import Noise, build
from treeflash.convert.grow_plan import Plan
from treeflash.gguf.writer import GGUFWriter
from treeflash.models.weights import TensorSource

Progress = Callable[[int, int], None]  # bytes written, bytes in all
# What a thread makes at a time; small enough to stay in a cache until it is written.
_PIECE_BYTES = 1 << 22
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class PlannedFile:
    path: Path
    architecture: str
    metadata: list[Entry]
    plans: list[Plan]
    source: TensorSource

    @property
    def data_bytes(self) -> int:
        return sum(plan.info.nbytes for plan in self.plans)

    @property
    def header_bytes(self) -> int:
        """About; the writer knows better, but only of its own file."""
        listed = [value for _, value, _ in self.metadata if isinstance(value, list)]
        text = sum(len(item) + 8 if isinstance(item, str) else 8 for value in listed for item in value)
        return text + 200 * len(self.plans) + (1 << 16)


class _PiecewiseWriter(GGUFWriter):
    """Takes a tensor's bytes in pieces, from any thread and in any order."""

    def write_header(self) -> None:
        super().write_header()
        assert self._file is not None
        self._file.flush()
        try:
            # what no piece covers is padding
            os.ftruncate(self._file.fileno(), self._data_start + self._data_bytes)
        except OSError as error:
            self._translate(error)

    def write_piece(self, name: str, offset: int, data: np.ndarray) -> None:
        """Bytes [n] from `offset` of the tensor on."""
        assert self._file is not None
        view, place = data.data, self._data_start + self._offsets[name] + offset
        while view:
            written = os.pwrite(self._file.fileno(), view, place)
            view, place = view[written:], place + written

    def written(self, name: str) -> None:
        """Says that all pieces of a tensor are there."""
        self._unwritten.remove(name)

    def failed(self, error: OSError) -> NoReturn:
        self._translate(error)


def write_files(files: list[PlannedFile], progress: Progress | None = None) -> None:
    """Writes the files one after the other; each appears when it is complete."""
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
            # closed before the writer is: a thread must not write to a file that is gone
            with closing(_write_tensors(writer, file, noise)) as sizes:
                for size in sizes:
                    done += size
                    if progress is not None:
                        progress(done, total)


def _write_tensors(writer: _PiecewiseWriter, file: PlannedFile, noise: Noise) -> Generator[int]:
    """Yields the bytes of each piece that was written."""
    largest_row = max(plan.info.row_bytes for plan in file.plans)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    buffers: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(threads):
        buffers.put(np.empty(max(_PIECE_BYTES, largest_row), np.uint8))

    def write(plan: Plan, rows: range) -> int:
        buffer = buffers.get()
        try:
            data = build(plan, rows, file.source, noise, buffer).reshape(-1)
            writer.write_piece(plan.name, rows.start * plan.info.row_bytes, data)
            return data.nbytes
        finally:
            buffers.put(buffer)

    pool = ThreadPoolExecutor(threads)
    try:
        pieces: list[tuple[Plan, list[Future[int]]]] = [
            (plan, [pool.submit(write, plan, rows) for rows in _pieces(plan)]) for plan in file.plans
        ]
        for plan, futures in pieces:
            for future in futures:
                yield future.result()
            writer.written(plan.name)
    except OSError as error:
        # the other threads first: this closes the file
        pool.shutdown(cancel_futures=True)
        writer.failed(error)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(plan: Plan) -> Iterator[range]:
    """The rows of a tensor, some at a time."""
    info = plan.info
    rows, step = info.nbytes // info.row_bytes, max(1, _PIECE_BYTES // info.row_bytes)
    for start in count(0, step):
        if start >= rows:
            return
        yield range(start, min(rows, start + step))
