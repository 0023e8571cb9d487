"""Bytes in use on a whole GPU, now and at most."""

import threading

import torch

from tests.gpu.inputs import DEVICE


def in_use() -> int:
    """Return the bytes in use by all processes."""
    torch.cuda.synchronize(DEVICE)
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


class PeakMemory:
    """The most bytes in use while this is open, sampled every 20 milliseconds."""

    def __init__(self) -> None:
        self.bytes, self.samples = 0, 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> None:
        free, total = torch.cuda.mem_get_info(DEVICE)
        self.bytes, self.samples = max(self.bytes, total - free), self.samples + 1

    def _run(self) -> None:
        while not self._closed.wait(0.02):
            self.sample()

    def __enter__(self) -> "PeakMemory":
        self._closed.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._closed.set()
        assert self._thread is not None
        self._thread.join()
        self.sample()
