"""The Muon optimiser: momentum, orthogonalised per matrix; AdamW for all other parameters.

Updates are scaled to the RMS of AdamW's, so that one learning rate serves both.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTUM = 0.95
_ITERATIONS = 5
# Coefficients of the quintic Newton-Schulz iteration, which drives singular values in (0, 1] to about 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ADAM_SIZE = 0.2  # RMS of an AdamW update


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices to [N, rows, columns]."""
    # The iteration tolerates rounding: bfloat16 is precise enough, and faster on a GPU.
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters; those of one shape are updated in one batch."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                updates = orthogonalised(torch.stack([self._momentum(each) for each in parameters]))
                size = group["lr"] * _ADAM_SIZE * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(state["momentum"], _MOMENTUM)


def optimisers(
    parameters: Iterable[Tensor],
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    tables: Iterable[Tensor] = (),
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of `kind`: muon (matrices; AdamW for the rest) or adamw (everything).

    `tables`: matrices whose rows are looked up, which are not orthogonalised.
    """
    parameters, looked_up = list(parameters), {id(each) for each in tables}
    matrices = [each for each in parameters if each.ndim == 2 and id(each) not in looked_up]
    others = [each for each in parameters if each.ndim != 2 or id(each) in looked_up]

    def adam(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)

    if kind == "muon":
        return [
            Muon(matrices, lr=lr, weight_decay=weight_decay),
            adam([{"params": others, "weight_decay": 0.0}]),
        ]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [adam(groups)]
