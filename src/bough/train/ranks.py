"""Data parallelism over the processes that torchrun started, or none."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch import Tensor

_PATIENCE = timedelta(hours=6)


class Ranks:
    """This process's rank and the collectives of a run; with one process they do nothing."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, device: str) -> tuple["Ranks", str]:
        """Join the process group; return the ranks and this process's device, one GPU each."""
        if not (distributed.is_available() and distributed.is_torchelastic_launched()):
            return cls(), device
        cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if not distributed.is_initialized():
            # Ranks wait for the slowest one to finish generating its training text.
            distributed.init_process_group("nccl" if cuda else "gloo", timeout=_PATIENCE)
        if cuda:
            device = f"cuda:{distributed.get_node_local_rank()}"
            torch.cuda.set_device(device)
        return cls(distributed.get_rank(), distributed.get_world_size()), device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.count > 1:
            distributed.barrier()

    def broadcast(self, values: list[float], device: torch.device) -> list[float]:
        """Return rank 0's values on every rank: clocks differ, and all must stop at the same step."""
        if self.count == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.broadcast(shared, 0)
        return shared.tolist()

    def all(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set on every rank."""
        if self.count == 1:
            return flag
        shared = torch.tensor(float(flag), device=device)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN)
        return bool(shared)

    def average(self, tensors: Iterable[Tensor]) -> None:
        if self.count == 1:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        flat /= self.count
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def leave(self) -> None:
        if self.count > 1:
            distributed.destroy_process_group()
