"""One process, or several that torchrun started: who they are and what they tell each other. No models."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch import Tensor

_PATIENCE = timedelta(hours=6)


class Ranks:
    """Does nothing where there is only one process."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, device: str) -> tuple["Ranks", str]:
        """This process's place, and its device: of several GPUs each process takes its own."""
        if not (distributed.is_available() and distributed.is_torchelastic_launched()):
            return cls(), device
        cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if not distributed.is_initialized():
            # Processes wait for the slowest to answer its prompts.
            distributed.init_process_group("nccl" if cuda else "gloo", timeout=_PATIENCE)
        if cuda:
            device = f"cuda:{distributed.get_node_local_rank()}"
            torch.cuda.set_device(device)
        return cls(distributed.get_rank(), distributed.get_world_size()), device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    def agreed(self, values: list[float], device: torch.device) -> list[float]:
        """The first process's values, for all: clocks differ, and all must stop at the same step."""
        if self.count == 1:
            return values
        told = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.broadcast(told, 0)
        return told.tolist()

    def all(self, flag: bool, device: torch.device) -> bool:
        """Whether it holds for every process."""
        if self.count == 1:
            return flag
        told = torch.tensor(float(flag), device=device)
        distributed.all_reduce(told, distributed.ReduceOp.MIN)
        return bool(told)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """In place, over all processes."""
        if self.count == 1:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        flat /= self.count
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def leave(self) -> None:
        if self.count > 1:
            distributed.destroy_process_group()
