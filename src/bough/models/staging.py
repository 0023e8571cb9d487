"""StagedReader: reads a file's tensors ahead of use, in threads, into a few pinned buffers that are reused.

The tensors, in the order in which they are needed, are one stream of bytes, cut into blocks of a buffer's
size. Reading, upload and repacking on the GPU overlap. The file is read, not mapped: a page fault for every
4 KiB would take longer than the reading.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from bough.gguf.header import TensorInfo

BLOCK = 32 << 20  # bytes of a buffer
_BUFFERS = 6
_THREADS = 4  # one reads some 8 GB/s from the page cache, and a fast disk wants several requests at a time


@runtime_checkable
class RangeSource(Protocol):
    """A source whose tensors are ranges of a file, and can be read in any thread."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with a tensor's bytes from `start` on."""
        ...


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a tensor in a block."""

    name: str
    start: int  # in the tensor
    size: int


class StagedReader:
    """A context; leaving it, also by an exception, ends the threads after what they are reading."""

    def __init__(
        self,
        source: RangeSource,
        names: Sequence[str],
        device: torch.device,
        *,
        block: int = BLOCK,
        buffers: int = _BUFFERS,
        threads: int = _THREADS,
    ):
        """names: of the tensors, in the order in which they will be taken."""
        self._source, self._names = source, deque(names)
        sizes = [(name, source.tensors[name].nbytes) for name in names]
        self._blocks = _blocks(sizes, block)
        self._on_gpu = device.type == "cuda"
        size = min(block, sum(size for _, size in sizes))
        count = min(buffers, len(self._blocks))
        self._changed = threading.Condition()
        # Buffers that may be written, some of them once the GPU has passed an event.
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(
            (_host_buffer(size, pinned=self._on_gpu), None) for _ in range(count)
        )
        self._read: dict[int, Tensor] = {}  # by number of the block
        self._next, self._stopped = 0, False
        self._error: BaseException | None = None
        self._block, self._at = 0, 0  # where the next tensor begins
        self._threads = [
            threading.Thread(target=self._work, name=f"read-{number}", daemon=True)
            for number in range(min(threads, count))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def take(self, name: str, out: Tensor) -> None:
        """Copy the next tensor, which must be `name`, to out, uint8; on a GPU in the current stream."""
        expected = self._names.popleft()
        assert name == expected, f"{name} is loaded where {expected} was planned"
        flat, at = out.view(-1), 0
        while at < len(flat):
            buffer, length = self._current(), sum(part.size for part in self._blocks[self._block])
            count = min(len(flat) - at, length - self._at)
            flat[at : at + count].copy_(buffer[self._at : self._at + count], non_blocking=True)
            at, self._at = at + count, self._at + count
            if self._at == length:
                self._release()

    def _current(self) -> Tensor:
        """Return the current block once it has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._block in self._read)
            if self._error is not None:
                raise self._error
            return self._read[self._block]

    def _release(self) -> None:
        """Give the current block's buffer back, and go on to the next block."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        with self._changed:
            self._free.append((self._read.pop(self._block), event))
            self._changed.notify_all()
        self._block, self._at = self._block + 1, 0

    def _work(self) -> None:
        while (taken := self._next_block()) is not None:
            number, buffer, event = taken
            try:
                if event is not None:
                    event.synchronize()
                self._fill(self._blocks[number], memoryview(buffer.numpy()))
            except BaseException as error:
                with self._changed:
                    self._error, self._stopped = error, True
                    self._changed.notify_all()
                return
            with self._changed:
                self._read[number] = buffer
                self._changed.notify_all()

    def _next_block(self) -> tuple[int, Tensor, torch.cuda.Event | None] | None:
        """Return a block to read and its buffer; blocks get buffers in order, as they are taken."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._next == len(self._blocks) or bool(self._free)
            )
            if self._stopped or self._next == len(self._blocks):
                return None
            self._next += 1
            return self._next - 1, *self._free.popleft()

    def _fill(self, block: Sequence[_Segment], view: memoryview) -> None:
        at = 0
        for part in block:
            self._source.read_into(part.name, part.start, view[at : at + part.size])
            at += part.size


def _host_buffer(size: int, *, pinned: bool) -> Tensor:
    """Return host memory, pinned where that is possible: WSL2 limits how much is, and copies are slower."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)


def _blocks(sizes: Sequence[tuple[str, int]], most: int) -> list[list[_Segment]]:
    """Cut the stream of all tensors into blocks of `most` bytes."""
    blocks: list[list[_Segment]] = []
    room = 0
    for name, size in sizes:
        start = 0
        while start < size:
            if not room:
                blocks.append([])
                room = most
            taken = min(room, size - start)
            blocks[-1].append(_Segment(name, start, taken))
            start, room = start + taken, room - taken
    return blocks
