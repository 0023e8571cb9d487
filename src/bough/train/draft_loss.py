"""Loss and estimated acceptance of a draft's blocks, a few blocks at a time.

The target's frozen head turns hidden states into logits; the selector of a DFlash2 draft adds to those of the
likeliest candidates what follows from the token before. The logits of all blocks of a batch would take
gigabytes, so each group of blocks is backpropagated to its hidden states and its logits are freed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bough.train.cross_entropy import label_costs, to_gradients
from bough.train.draft_model import TrainedSelector

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
    recalled: Tensor  # [K] labels among the candidates that a selector compares

    @classmethod
    def zero(cls, positions: int, device: torch.device) -> "Tally":
        one, many = torch.zeros((), device=device), torch.zeros(positions, device=device)
        return cls(one, one.clone(), many, many.clone(), many.clone(), one.clone(), many.clone())

    def add(self, cost: Tensor, right: Tensor, valid: Tensor, recalled: Tensor) -> None:
        """Count blocks; cost, right, valid, recalled [C, K]."""
        whole = valid.all(1)
        self.loss += (cost * valid).sum()
        self.labels += valid.sum()
        self.right += (right & valid).sum(0)
        self.seen += valid.sum(0)
        self.survived += (right.cumprod(1).bool() & whole[:, None]).sum(0)
        self.blocks += whole.sum()
        self.recalled += (recalled & valid).sum(0)

    def merge(self, other: "Tally", *, keep: float = 1.0) -> None:
        """Scale these sums by `keep` and add `other`."""
        for name in ("loss", "labels", "right", "seen", "survived", "blocks", "recalled"):
            getattr(self, name).mul_(keep).add_(getattr(other, name))

    @property
    def mean_loss(self) -> float:
        return float(self.loss / self.labels.clamp(min=1))

    @property
    def top1(self) -> list[float]:
        return (self.right / self.seen.clamp(min=1)).tolist()

    @property
    def recall(self) -> list[float]:
        return (self.recalled / self.seen.clamp(min=1)).tolist()

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


@dataclass(frozen=True, slots=True)
class Head:
    """The rows of the target's head that a loss compares: all, or those of some tokens.

    A large vocabulary takes most of a step's time, and of its tokens few occur. Those that do not occur are
    represented by some of them.
    """

    weights: Tensor  # [n, width]
    tokens: Tensor | None = None  # [n]: which; None: all
    places: Tensor | None = None  # [V]: the row of each token; 0 where it has none

    @classmethod
    def of(cls, weights: Tensor, tokens: Tensor) -> "Head":
        """Return the part of a head [V, width] for tokens [n], ascending."""
        tokens = tokens.to(weights.device)
        places = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        places[tokens] = torch.arange(len(tokens), device=weights.device)
        return cls(weights[tokens], tokens, places)

    def rows_of(self, tokens: Tensor) -> Tensor:
        return tokens if self.places is None else self.places[tokens]

    def tokens_of(self, rows: Tensor) -> Tensor:
        return rows if self.tokens is None else self.tokens[rows]


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """The selector's share of the loss: which of a position's candidates follows the token before."""

    best: Tensor  # [C, K, n] rows of the head: the candidates
    logits: Tensor  # [C, K, n] of them, a leaf
    cost: Tensor  # [C, K] cross entropy of the labels among the candidates
    right: Tensor  # [C, K] bool: the label has the best score
    recalled: Tensor  # [C, K] bool: it is among the candidates


def selection(
    selector: TrainedSelector, hidden: Tensor, logits: Tensor, labels: Tensor, anchors: Tensor, head: Head
) -> TokenSelection:
    """Score labels [C, K] among the likeliest tokens by logits [C, K, V], each after the true token before.

    A label that is missing takes the place of the last candidate. On the path that is accepted every token
    before is the true one, so that `right` is what the engine will find.
    """
    best = logits.topk(selector.candidates, -1).indices
    rows = head.rows_of(labels)
    matches = best == rows[..., None]
    recalled = matches.any(-1)
    best[..., -1] = torch.where(recalled, best[..., -1], rows)
    place = torch.where(recalled, matches.int().argmax(-1), best.shape[-1] - 1)
    before = torch.cat([anchors[:, None], labels[:, :-1]], 1)
    scored = logits.gather(-1, best).float().requires_grad_(torch.is_grad_enabled())
    scores = scored + selector(hidden, before[..., None], head.tokens_of(best))[..., 0, :]
    cost = cross_entropy(scores.flatten(0, 1), place.flatten(), reduction="none").view_as(place)
    return TokenSelection(best, scored, cost, (scores.argmax(-1) == place) & recalled, recalled)


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    valid: Tensor,
    head: Head,
    *,
    kind: LossKind,
    scale: float = 1.0,
    selector: TrainedSelector | None = None,
    anchors: Tensor | None = None,
) -> Tally:
    """Return the blocks' statistics; backpropagate through `hidden` [B, M, T, width] if it needs a gradient.

    labels and valid [B, M, T - 1] belong to the rows after the anchor, anchors [B, M] are its tokens, which
    only a selector needs. The loss is the mean weighted cross entropy of the valid labels,
    and of the selector's choice, times `scale`.
    """
    train = hidden.requires_grad
    rows = hidden.detach()[:, :, 1:].flatten(0, 1)  # [C, K, width]
    labels, valid = labels.flatten(0, 1), valid.flatten(0, 1)
    tally = Tally.zero(labels.shape[1], hidden.device)
    factor = scale / valid.sum().clamp(min=1)
    size = max(1, _LOGITS // (labels.shape[1] * len(head.weights)))
    gradients = []
    roots = labels[:, 0] if anchors is None else anchors.flatten()
    parts = (part.split(size) for part in (rows, labels, valid, roots))
    for group, labels_of, counted, root in zip(*parts, strict=True):
        with torch.no_grad():
            logits = linear(group.to(head.weights.dtype), head.weights)
            targets = head.rows_of(labels_of).flatten()
            costs = label_costs(logits.flatten(0, 1), targets)
        cost, right = costs.cost.view_as(labels_of), costs.right.view_as(labels_of)
        weights = block_weights(cost, counted, kind)
        recalled, selected = torch.zeros_like(counted), None
        if selector is not None:
            assert anchors is not None
            group = group.detach().requires_grad_(train)
            selected = selection(selector, group, logits, labels_of, root, head)
            right, recalled = selected.right, selected.recalled
            if train:
                (selected.cost * weights).sum().mul(factor).backward()
        tally.add(cost, right, counted, recalled)
        if train:
            to_gradients(logits.flatten(0, 1), targets, costs.total, weights.flatten())
            if selected is not None:
                assert selected.logits.grad is not None
                choice = selected.logits.grad / factor
                logits.scatter_add_(-1, selected.best, choice.to(logits.dtype))
            gradient = (logits @ head.weights).float() * factor
            gradients.append(gradient if group.grad is None else gradient + group.grad)
    if train:
        gradient = torch.zeros_like(hidden)
        gradient[:, :, 1:] = torch.cat(gradients).view_as(gradient[:, :, 1:])
        hidden.backward(gradient)
    return tally
