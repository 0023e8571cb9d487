"""A target's MTP block as a trainable module: drafts from many anchors, each a few steps deep, in one pass.

`models.mtp.MTPBlock` is the same computation at inference. Step 0 reads the anchor and the target's hidden
state before it; every later step reads the next token and the block's own output. While training the tokens
are those of the text: on a path that is accepted they are the ones drafted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from bough.errors import UnsupportedModel
from bough.kernels.norm_rope import rope_angles
from bough.models.decoder import EMBEDDING_TAP
from bough.models.spec import ModelSpec
from bough.spec.mtp import STEPS
from bough.train.draft_data import TextBatch
from bough.train.draft_model import Readout, rope
from bough.train.draft_target import Frozen

_DEVIATION = 0.02  # standard deviation of initial weights


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """The shape of a target's MTP block, in the words of a draft's."""

    source: str
    taps: tuple[int, ...]
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = STEPS + 1  # the anchor, and what the steps predict
    mask_id: int = 0  # of no use
    layers: tuple[str, ...] = ("full",)

    @classmethod
    def of(cls, target: ModelSpec, source: str) -> "MTPSpec":
        if not target.family.hybrid or target.experts is not None:
            raise UnsupportedModel(
                f"{target.architecture}{' with experts' if target.experts else ''}: no MTP block can be"
                " trained for it, needed a dense model of Qwen3.5's family",
                "train a draft: `kind` dflash or dflash2",
            )
        return cls(
            source,
            (EMBEDDING_TAP, len(target.layers) - 1),
            target.width,
            target.feed_forward,
            target.heads,
            target.kv_heads,
            target.head_dim,
        )


def block_shapes(target: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a target's MTP block, without the block's number."""
    width, dim, inner = target.width, target.head_dim, target.feed_forward
    queries, kv = target.heads * dim, target.kv_heads * dim
    return {
        "nextn.enorm": (width,),
        "nextn.hnorm": (width,),
        "nextn.eh_proj": (width, 2 * width),
        "nextn.shared_head_norm": (width,),
        "attn_norm": (width,),
        "attn_q": (2 * queries if target.family.gated_query else queries, width),
        "attn_k": (kv, width),
        "attn_v": (kv, width),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        "attn_output": (width, queries),
        target.family.feed_forward_norm: (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }


class TrainedMTP(nn.Module):
    recompute = False

    def __init__(self, target: ModelSpec, final_norm: Tensor, source: str, *, seed: int = 0):
        """`final_norm` [width]: the weights of the target's norm before its head."""
        super().__init__()
        self.spec, self._target = MTPSpec.of(target, source), target
        self._final_norm: Tensor
        self.register_buffer("_final_norm", final_norm, persistent=False)
        width, shapes = target.width, block_shapes(target)
        generator = torch.Generator().manual_seed(seed)
        self._names = list(shapes)
        for name, shape in shapes.items():
            value = torch.ones(shape)
            if len(shape) == 2:
                value = _DEVIATION * torch.randn(shape, generator=generator)
            if name == "nextn.eh_proj":
                # At first the target's hidden state goes through.
                value[:, width:] += torch.eye(width)
            self.register_parameter(_field(name), nn.Parameter(value))
        pairs = torch.arange(target.rope_dim // 2, dtype=torch.float32)
        frequencies = target.rope_theta ** (-2 * pairs / target.rope_dim) / target.rope_factor
        self._frequencies: Tensor
        self.register_buffer("_frequencies", frequencies, persistent=False)

    @property
    def tables(self) -> list[Tensor]:
        return []

    def tensors(self) -> dict[str, Tensor]:
        block = f"blk.{len(self._target.layers)}"
        return {f"{block}.{name}.weight": self._weight(name).detach() for name in self._names}

    def readout(self, frozen: Frozen) -> Readout:
        """Return how its rows are read: they are normed, for a row is the next one's input."""
        return Readout(nn.Identity())

    def inputs(self, frozen: Frozen, batch: TextBatch) -> Tensor:
        """Return the embeddings [B, M, T, width] of the anchors and the tokens after them."""
        anchors = batch.tokens.gather(1, batch.anchors)
        return frozen.embed(torch.cat([anchors[..., None], batch.labels], -1))

    def forward(self, features: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
        """Return hidden states [B, M, T, width] for the target's head; those of the first row are zero.

        features [B, n, 2 * width]: the target's embedding and last hidden state, of positions 0 to n - 1;
        embeddings [B, M, T, width] of the anchors and the tokens after them; anchors [B, M], positions.
        """
        eps, width = self._target.eps, self.spec.width
        tokens, hidden = features.float().split(width, -1)
        hidden = rms_norm(hidden, (width,), self._final_norm, eps)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        context = self._fuse(tokens, before)
        positions = torch.arange(features.shape[1], device=features.device)
        keys, values = self._key_value(self._norm("attn_norm", context), positions[None])
        # A row sees the positions up to its anchor; the first one has no hidden state before it.
        seen = (positions >= 1) & (positions <= anchors[..., None])  # [B, M, n]
        index = anchors[..., None].expand(-1, -1, width)
        x = context.gather(1, index)  # [B, M, width]
        rows, pairs = [torch.zeros_like(x)], []
        for depth in range(embeddings.shape[2] - 1):
            if depth:
                x = self._fuse(embeddings[:, :, depth], rows[-1])
            h = self._norm("attn_norm", x)
            if depth:
                pairs.append(self._key_value(h, anchors + depth))
            x = x + self._attend(h, anchors + depth, keys, values, seen, pairs)
            h = self._norm(self._target.family.feed_forward_norm, x)
            x = x + self._matmul("ffn_down", silu(self._matmul("ffn_gate", h)) * self._matmul("ffn_up", h))
            rows.append(rms_norm(x.float(), (width,), self._weight("nextn.shared_head_norm"), eps))
        return torch.stack(rows, 2)

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        pair = [self._norm("nextn.enorm", tokens), self._norm("nextn.hnorm", hidden)]
        return self._matmul("nextn.eh_proj", torch.cat(pair, -1)).float()

    def _attend(
        self,
        h: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        pairs: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attend from h [B, M, width] to the context [B, n, KV, D] and to the rows `own` of each path."""
        dim, kv_heads = self.spec.head_dim, self.spec.kv_heads
        q, gate = self._matmul("attn_q", h), None
        q = q.unflatten(-1, (self.spec.heads, -1))
        if self._target.family.gated_query:
            q, gate = q.split(dim, -1)
        q = rope(self._norm("attn_q_norm", q.float()), *rope_angles(positions, self._frequencies))
        q = (q * dim**-0.5).unflatten(2, (kv_heads, -1))  # [B, M, KV, group, D]
        scores = torch.einsum("bmkgd,bnkd->bmkgn", q, keys)
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        path = [torch.einsum("bmkgd,bmkd->bmkg", q, key)[..., None] for key, _ in pairs]
        weights = torch.cat([scores, *path], -1).float().softmax(-1)
        out = torch.einsum("bmkgn,bnkd->bmkgd", weights[..., : keys.shape[1]].to(values.dtype), values)
        for place, (_, value) in enumerate(pairs, keys.shape[1]):
            out = out + weights[..., place, None] * value[:, :, :, None]
        out = out.flatten(2, 3)
        if gate is not None:
            out = out * gate.sigmoid()
        return self._matmul("attn_output", out.flatten(-2))

    def _key_value(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [B, N, KV, D] of normed rows [B, N, width] at positions [B or 1, N]."""
        k, v = (
            self._matmul(name, h).unflatten(-1, (self.spec.kv_heads, -1)) for name in ("attn_k", "attn_v")
        )
        return rope(self._norm("attn_k_norm", k.float()), *rope_angles(positions, self._frequencies)), v

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weight(name)
        return rms_norm(x.float(), weight.shape, weight, self._target.eps)

    def _matmul(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._weight(name))

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(_field(name))


def _field(name: str) -> str:
    return name.replace(".", "_")
