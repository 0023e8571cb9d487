"""Cross entropy of many rows of logits, which are read once for the costs and once for their gradients.

The gradients take the logits' place: with 98,000 rows and 49,000 tokens a copy in float32 would be 18 GB.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Costs:
    """The cross entropy of rows of logits [N, V]."""

    cost: Tensor  # [N]
    right: Tensor  # [N] bool: the label has the largest logit
    total: Tensor  # [N] log of the sum of exponentials


def label_costs(logits: Tensor, labels: Tensor) -> Costs:
    """Return the costs of labels [N] by logits [N, V], in float32."""
    if logits.is_cuda:
        from bough.train import cross_entropy_kernels as kernels

        return Costs(*kernels.label_costs(logits, labels))
    wide = logits.float()
    total = wide.logsumexp(-1)
    return Costs(total - wide.gather(1, labels[:, None])[:, 0], wide.argmax(-1) == labels, total)


def to_gradients(logits: Tensor, labels: Tensor, total: Tensor, weights: Tensor) -> None:
    """Replace logits [N, V] by the gradients of the sum of their costs times weights [N]."""
    if logits.is_cuda:
        from bough.train import cross_entropy_kernels as kernels

        kernels.to_gradients(logits, labels, total, weights)
        return
    gradients = (logits.float() - total[:, None]).exp_()
    gradients[torch.arange(len(labels)), labels] -= 1
    logits.copy_(gradients.mul_(weights[:, None]))
