"""Loss and estimated acceptance of a draft's blocks, a few blocks at a time.

The target's frozen head turns normed rows into logits; the selector of a DFlash2 draft or an MLP scores the
likeliest candidates anew, after the token before. The logits of all blocks of a batch would take
gigabytes, so each group of blocks is backpropagated to its rows and its logits are freed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bough.train.cross_entropy import label_costs, to_gradients
from bough.train.draft_model import Readout

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
    recalled: Tensor  # [K] labels among the candidates that are scored after the token before

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
    """The share of the loss of a head that knows the token before: which candidate follows it."""

    best: Tensor  # [C, K, n] rows of the head: the candidates
    logits: Tensor  # [C, K, n] of them as marginals, a leaf
    cost: Tensor  # [C, K] cross entropy of the labels among the candidates
    right: Tensor  # [C, K] bool: the label has the best score
    recalled: Tensor  # [C, K] bool: it is among the candidates


def selection(
    readout: Readout,
    rows: tuple[Tensor, Tensor],
    logits: Tensor,
    labels: Tensor,
    anchors: Tensor,
    head: Head,
) -> TokenSelection:
    """Score labels [C, K] among the likeliest tokens by logits [C, K, V], each after the true token before.

    rows: before and after the final norm, [C, K, width].
    A label that is missing takes the place of the last candidate. On the path that is accepted every token
    before is the true one, so that `right` is what the engine will find.
    """
    assert readout.logits is not None
    best = logits.topk(readout.candidates, -1).indices
    labelled = head.rows_of(labels)
    matches = best == labelled[..., None]
    recalled = matches.any(-1)
    best[..., -1] = torch.where(recalled, best[..., -1], labelled)
    place = torch.where(recalled, matches.int().argmax(-1), best.shape[-1] - 1)
    before = torch.cat([anchors[:, None], labels[:, :-1]], 1)
    scored = logits.gather(-1, best).float().requires_grad_(torch.is_grad_enabled())
    scores = readout.logits(*rows, before[..., None], head.tokens_of(best), scored)[..., 0, :]
    cost = cross_entropy(scores.flatten(0, 1), place.flatten(), reduction="none").view_as(place)
    return TokenSelection(best, scored, cost, (scores.argmax(-1) == place) & recalled, recalled)


def block_loss(
    rows: Tensor,
    labels: Tensor,
    valid: Tensor,
    head: Head,
    *,
    kind: LossKind,
    scale: float = 1.0,
    readout: Readout,
    anchors: Tensor | None = None,
) -> Tally:
    """Return the blocks' statistics; backpropagate, through `rows` [B, M, T, width] if they need a gradient.

    labels and valid [B, M, T - 1] belong to the rows after the anchor, anchors [B, M] are its tokens, which
    only a choice of candidates needs. The loss is the mean weighted cross entropy of the valid labels,
    and of that choice, times `scale`.
    """
    train, whole = torch.is_grad_enabled(), rows
    rows = whole.detach()[:, :, 1:].flatten(0, 1)  # [C, K, width]
    labels, valid = labels.flatten(0, 1), valid.flatten(0, 1)
    tally = Tally.zero(labels.shape[1], rows.device)
    factor = scale / valid.sum().clamp(min=1)
    size = max(1, _LOGITS // (labels.shape[1] * len(head.weights)))
    gradients = []
    roots = labels[:, 0] if anchors is None else anchors.flatten()
    parts = (part.split(size) for part in (rows, labels, valid, roots))
    for group, labels_of, counted, root in zip(*parts, strict=True):
        group = group.detach().requires_grad_(whole.requires_grad)
        normed = readout.norm(group)
        with torch.no_grad():
            logits = linear(normed.to(head.weights.dtype), head.weights)
            targets = head.rows_of(labels_of).flatten()
            costs = label_costs(logits.flatten(0, 1), targets)
        cost, right = costs.cost.view_as(labels_of), costs.right.view_as(labels_of)
        weights = block_weights(cost, counted, kind)
        recalled, choice = torch.zeros_like(counted), None
        if readout.logits is not None:
            assert anchors is not None
            choice = selection(readout, (group, normed), logits, labels_of, root, head)
            right, recalled = choice.right, choice.recalled
            if train:
                (choice.cost * weights).sum().mul(factor).backward(retain_graph=normed.requires_grad)
        tally.add(cost, right, counted, recalled)
        if whole.requires_grad:
            to_gradients(logits.flatten(0, 1), targets, costs.total, weights.flatten())
            if choice is not None and choice.logits.grad is not None:
                share = choice.logits.grad / factor
                logits.scatter_add_(-1, choice.best, share.to(logits.dtype))
            normed.backward((logits @ head.weights).float() * factor)
            gradients.append(group.grad)
    if whole.requires_grad:
        gradient = torch.zeros_like(whole)
        gradient[:, :, 1:] = torch.cat(gradients).view_as(gradient[:, :, 1:])
        whole.backward(gradient)
    return tally
