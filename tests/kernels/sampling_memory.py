"""Scratch memory of the sampling kernels filled with what must not be read, and what they left in it."""

import torch
from torch import Tensor

from bough.kernels.sampling import RowOwners
from bough.kernels.sampling.triton_kernels import THRESHOLD
from bough.kernels.sampling.workspace import Workspace


def poisoned(work: Workspace) -> Workspace:
    for name, part in vars(work).items():
        if isinstance(part, Tensor) and name not in ("arrived", "roots"):
            part.fill_(torch.nan if part.is_floating_point() else 0x7B7B7B7B)
    return work


def owners(logits: Tensor) -> RowOwners:
    """All rows are one tree, in slot 0."""
    return RowOwners.one(0, len(logits), logits.device)


def above_threshold(work: Workspace, logits: Tensor) -> Tensor:
    """Return [R, V] bool: the tokens whose keys are no smaller than that of the last token kept."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 20
    keys = ordered | (0xFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return keys >= work.record[: len(logits), THRESHOLD.value, None]
