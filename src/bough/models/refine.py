"""Heads that refine a row by the token before it and score candidates anew; the marginal is replaced.

The MLP over candidates (arXiv 2606.03819) reads the token's embedding. DSpine reads a fixed code of it, and
uses the same step inside the block: after each layer a row gets a message of the row before.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from bough.kernels.norm_rope import rms_norm
from bough.models.decoder import Target
from bough.models.draft_spec import DraftSpec
from bough.models.weights import WeightLoader

MLP_EPS = 1e-6  # of the norm of embeddings: no setting


# Of rows [N, width] of the residual stream, the same after the final norm, the tokens before [N, n] and the
# target: rows [N, n, width] after each of those tokens.
Refinement = Callable[[Tensor, Tensor, Tensor, Target], Tensor]


class CandidateMLP:
    """A gated unit of the embedding of the token before and the row; at the start of training it adds 0."""

    def __init__(self, spec: DraftSpec, loader: WeightLoader):
        assert spec.refine is not None
        inner, width = spec.refine.inner, spec.width
        self._inner = inner
        self._norm = loader.vector("refine_norm.weight", width)
        self._in = loader.projections(["refine_ug.weight"], [2 * inner], 2 * width)
        self._out = loader.matrix("refine_d.weight", width, inner)

    def __call__(self, rows: Tensor, normed: Tensor, before: Tensor, target: Target) -> Tensor:
        embedded = rms_norm(target.embed(before), self._norm, MLP_EPS)
        both = torch.cat([embedded, normed[:, None].expand_as(embedded)], -1)
        up, gate = self._in(both)[0].split(self._inner, -1)
        return rows[:, None] + self._out(silu(gate) * up)


class AdjacentInjection:
    """DSpine's messages: gated by the receiver and the predecessor, written with the receiver's length."""

    def __init__(self, spec: DraftSpec, loader: WeightLoader, vocabulary: int):
        assert spec.refine is not None and spec.refine.rank is not None
        inner, rank, width = spec.refine.inner, spec.refine.rank, spec.width
        layers = range(len(spec.layers))
        self._scale = math.sqrt(rank)
        self._readouts = [loader.matrix(f"blk.{i}.refine_readout.weight", rank, width) for i in layers]
        self._writes = [loader.matrix(f"blk.{i}.refine_write.weight", width, inner) for i in layers]
        self._message = loader.matrix("refine_message.weight", inner, rank)
        self._receiver = loader.matrix("refine_receiver.weight", inner, rank)
        self._predecessor = loader.matrix("refine_predecessor.weight", inner, rank)
        self._bias = loader.vector("refine_gate.bias", inner)
        self._codes = loader.embedding("refine_codes.weight", vocabulary, rank)

    def __call__(self, rows: Tensor, normed: Tensor, before: Tensor, target: Target) -> Tensor:
        last = len(self._writes) - 1
        feature, code = self._feature(rows, last), self._code(before)
        return self._written(rows[:, None].expand(*before.shape, -1), feature[:, None], code, last)

    def between_rows(self, rows: Tensor, layer: int, anchors: Tensor) -> Tensor:
        """Return a block's rows [B, T, width] after a layer, with the messages; anchors [B]: their tokens."""
        features = self._feature(rows, layer)
        predecessors = torch.cat([self._code(anchors)[:, None], features[:, 1:-1]], 1)
        later = self._written(rows[:, 1:], features[:, 1:], predecessors, layer)
        return torch.cat([rows[:, :1], later], 1)

    def _feature(self, rows: Tensor, layer: int) -> Tensor:
        return self._scale * normalize(self._readouts[layer](rows), dim=-1)

    def _code(self, tokens: Tensor) -> Tensor:
        return self._scale * self._codes(tokens)

    def _written(self, rows: Tensor, receiver: Tensor, predecessor: Tensor, layer: int) -> Tensor:
        gate = (self._receiver(receiver) + self._predecessor(predecessor) + self._bias).sigmoid()
        length = rows.norm(dim=-1, keepdim=True) / math.sqrt(rows.shape[-1])
        return rows + length * self._writes[layer](gate * self._message(predecessor))


class Refiner:
    """Scores candidates after each of some tokens before them: refined rows, dotted with the head's rows."""

    def __init__(self, spec: DraftSpec, refinement: Refinement, norm: Tensor):
        """`norm`: the draft's final one."""
        assert spec.refine is not None
        self.candidates = spec.refine.candidates
        self.refinement = refinement
        self._norm, self._eps = norm, spec.eps

    def __call__(self, rows: Tensor, normed: Tensor, before: Tensor, ids: Tensor, target: Target) -> Tensor:
        """Return logits [N, n, k] of ids [N, k] after each of the tokens before [N, n]; rows [N, width]."""
        refined = rms_norm(self.refinement(rows, normed, before, target), self._norm, self._eps)
        return refined @ target.head_rows(ids).transpose(1, 2)
