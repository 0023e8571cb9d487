"""Loss and estimated acceptance of a draft's blocks, a few blocks at a time.

The target's frozen head turns hidden states into logits. The logits of all blocks of a batch would take
gigabytes, so each group of blocks is backpropagated to its hidden states and its logits are freed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

LossKind = Literal["dpace", "decay"]
_ALPHA = 0.5  # D-PACE: the smallest factor by which a token reduces the weight of the tokens after it
_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # of the decay, by block size
_LOGITS = 1 << 28  # float32 logits per group: 1 GiB


@dataclass(slots=True)
class Tally:
    """Additive statistics over blocks; positions count from the token after the anchor."""

    loss: Tensor  # unweighted cross entropy of the labels
    labels: Tensor
    right: Tensor  # [K] top-1 hits at each position
    seen: Tensor  # [K]
    survived: Tensor  # [K] complete blocks whose first k tokens are all right
    blocks: Tensor  # complete blocks

    @classmethod
    def zero(cls, positions: int, device: torch.device) -> "Tally":
        one, many = torch.zeros((), device=device), torch.zeros(positions, device=device)
        return cls(one, one.clone(), many, many.clone(), many.clone(), one.clone())

    def add(self, cost: Tensor, right: Tensor, valid: Tensor) -> None:
        """Count blocks; cost, right, valid [C, K]."""
        whole = valid.all(1)
        self.loss += (cost * valid).sum()
        self.labels += valid.sum()
        self.right += (right & valid).sum(0)
        self.seen += valid.sum(0)
        self.survived += (right.cumprod(1).bool() & whole[:, None]).sum(0)
        self.blocks += whole.sum()

    def merge(self, other: "Tally", *, keep: float = 1.0) -> None:
        """Scale these sums by `keep` and add `other`."""
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
        """Return the acceptance length with the likeliest chain, the target's own token included."""
        return 1 + float(self.survived.sum() / self.blocks.clamp(min=1))


def block_weights(cost: Tensor, valid: Tensor, kind: LossKind) -> Tensor:
    """Return the weights of the labels [C, K]; cost is their cross entropy, valid labels come first."""
    positions = cost.shape[1]
    if kind == "decay":
        gamma = _GAMMAS.get(positions + 1, (positions + 1) / 2.3)
        return torch.exp(-torch.arange(positions, device=cost.device) / gamma) * valid
    # The gradient of the expected acceptance length, smoothed: a token's weight sums the later tokens that
    # can be accepted only after it.
    chances = (1 - _ALPHA) * (-cost.detach()).exp() + _ALPHA
    reached = chances.cumprod(1) * valid
    return reached.flip(1).cumsum(1).flip(1) * valid


def block_loss(
    hidden: Tensor, labels: Tensor, valid: Tensor, head: Tensor, *, kind: LossKind, scale: float = 1.0
) -> Tally:
    """Return the blocks' statistics; backpropagate through `hidden` [B, M, T, width] if it needs a gradient.

    labels and valid [B, M, T - 1] belong to the rows after the anchor; head [V, width]. The loss is the mean
    weighted cross entropy of the valid labels, times `scale`.
    """
    train = hidden.requires_grad
    rows = hidden.detach()[:, :, 1:].flatten(0, 1)  # [C, K, width]
    labels, valid = labels.flatten(0, 1), valid.flatten(0, 1)
    tally = Tally.zero(labels.shape[1], hidden.device)
    count = valid.sum().clamp(min=1)
    size = max(1, _LOGITS // (labels.shape[1] * head.shape[0]))
    gradients = []
    for group, wanted, counted in zip(rows.split(size), labels.split(size), valid.split(size), strict=True):
        group = group.detach().requires_grad_(train)
        logits = linear(group.to(head.dtype), head).float()
        cost = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        with torch.no_grad():
            tally.add(cost, logits.argmax(-1) == wanted, counted)
            weights = block_weights(cost, counted, kind)
        if train:
            (cost * weights).sum().mul(scale / count).backward()
            gradients.append(group.grad)
    if train:
        gradient = torch.zeros_like(hidden)
        gradient[:, :, 1:] = torch.cat(gradients).view_as(gradient[:, :, 1:])
        hidden.backward(gradient)
    return tally
