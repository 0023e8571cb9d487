"""What a draft's blocks cost and how far they would be accepted, a few blocks at a time. Knows no model.

Rows are compared with the labels through the target's frozen head. The logits of all blocks of a batch would
take gigabytes, so each group of blocks leaves its gradient at the hidden rows and is forgotten.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

LossKind = Literal["dpace", "decay"]
_ALPHA = 0.5  # D-PACE: what even a hopeless token leaves of the credit of those behind it
_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # of the decay, by block size
_LOGITS = 1 << 28  # float32 numbers at a time: 1 GiB


@dataclass(slots=True)
class Tally:
    """Sums over blocks, which add up; positions are those behind the anchor."""

    loss: Tensor  # plain cross entropy of the labels
    labels: Tensor
    right: Tensor  # [K] top-1 at each position
    seen: Tensor  # [K]
    survived: Tensor  # [K] whole blocks whose first k tokens are all right
    blocks: Tensor  # whole blocks

    @classmethod
    def zero(cls, positions: int, device: torch.device) -> "Tally":
        one, many = torch.zeros((), device=device), torch.zeros(positions, device=device)
        return cls(one, one.clone(), many, many.clone(), many.clone(), one.clone())

    def add(self, cost: Tensor, right: Tensor, valid: Tensor) -> None:
        """cost, right, valid [C, K]."""
        whole = valid.all(1)
        self.loss += (cost * valid).sum()
        self.labels += valid.sum()
        self.right += (right & valid).sum(0)
        self.seen += valid.sum(0)
        self.survived += (right.cumprod(1).bool() & whole[:, None]).sum(0)
        self.blocks += whole.sum()

    def merge(self, other: "Tally", *, keep: float = 1.0) -> None:
        """Adds `other` to what is here, of which only `keep` still counts."""
        for name in ("loss", "labels", "right", "seen", "survived", "blocks"):
            getattr(self, name).mul_(keep).add_(getattr(other, name))

    @property
    def mean_loss(self) -> float:
        return float(self.loss / self.labels.clamp(min=1))

    @property
    def top1(self) -> list[float]:
        return (self.right / self.seen.clamp(min=1)).tolist()

    @property
    def acceptance(self) -> float:
        """Tokens that a step with the likeliest chain would commit, the target's own among them."""
        return 1 + float(self.survived.sum() / self.blocks.clamp(min=1))


def block_weights(cost: Tensor, valid: Tensor, kind: LossKind) -> Tensor:
    """How much each label [C, K] counts; cost is its cross entropy, valid labels come first in a block."""
    positions = cost.shape[1]
    if kind == "decay":
        gamma = _GAMMAS.get(positions + 1, (positions + 1) / 2.3)
        return torch.exp(-torch.arange(positions, device=cost.device) / gamma) * valid
    # The gradient of the expected accepted length, softened: a token is worth the text that hangs on it.
    chances = (1 - _ALPHA) * (-cost.detach()).exp() + _ALPHA
    reached = chances.cumprod(1) * valid
    return reached.flip(1).cumsum(1).flip(1) * valid


def block_loss(
    hidden: Tensor, labels: Tensor, valid: Tensor, head: Tensor, *, kind: LossKind, scale: float = 1.0
) -> Tally:
    """Runs the backward pass through `hidden` [B, M, T, width], if it has a gradient, and counts.

    labels and valid [B, M, T - 1] speak of the rows behind the anchor; head [V, width]. The loss is the mean
    weighted cross entropy of the valid labels, times `scale`.
    """
    train = hidden.requires_grad
    rows = hidden.detach()[:, :, 1:].flatten(0, 1)  # [C, K, width]
    labels, valid = labels.flatten(0, 1), valid.flatten(0, 1)
    tally = Tally.zero(labels.shape[1], hidden.device)
    count = valid.sum().clamp(min=1)
    size = max(1, _LOGITS // (labels.shape[1] * head.shape[0]))
    gradients = []
    for part, wanted, counted in zip(rows.split(size), labels.split(size), valid.split(size), strict=True):
        part = part.detach().requires_grad_(train)
        logits = linear(part.to(head.dtype), head).float()
        cost = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        with torch.no_grad():
            tally.add(cost, logits.argmax(-1) == wanted, counted)
            weights = block_weights(cost, counted, kind)
        if train:
            (cost * weights).sum().mul(scale / count).backward()
            gradients.append(part.grad)
    if train:
        gradient = torch.zeros_like(hidden)
        gradient[:, :, 1:] = torch.cat(gradients).view_as(gradient[:, :, 1:])
        hidden.backward(gradient)
    return tally
