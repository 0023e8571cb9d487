"""The multi-token-prediction (MTP) block at the end of a target's file. Owns no state.

It is one transformer block that reads a token and the target's hidden state of the position before it, and
predicts the next token; its own output takes the place of the hidden state for the token after that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.kernels.attention import block_attention
from bough.kernels.norm_rope import head_rope, ring_heads, rms_norm, rope_angles
from bough.models.decoder import EMBEDDING_TAP
from bough.models.dflash import PIECE, DraftBuffers
from bough.models.layers import Experts, FeedForward
from bough.models.measure import measured, weight_loader
from bough.models.newest import NewestHidden
from bough.models.spec import ModelSpec, has_mtp
from bough.models.weights import WeightLoader


@dataclass(frozen=True, slots=True)
class MTPBuffers:
    """The block's KV ring, and the target's hidden states of the newest positions."""

    ring: DraftBuffers  # of one layer; the first position has no hidden state before it, and so no K and V
    newest: NewestHidden


KeyValue = tuple[Tensor, Tensor]  # [..., KV, D] each, after norm and rope


class MTPBlock:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, device: torch.device):
        self.spec, self.device = spec, device
        self.layouts = loader.layouts
        block, width, kv = f"blk.{len(spec.layers)}", spec.width, spec.kv_heads * spec.head_dim
        query = spec.heads * spec.head_dim * (2 if spec.family.gated_query else 1)
        self._final_norm = loader.vector("output_norm.weight", width)
        self._embedding_norm = loader.vector(f"{block}.nextn.enorm.weight", width)
        self._hidden_norm = loader.vector(f"{block}.nextn.hnorm.weight", width)
        self._fuse = loader.matrix(f"{block}.nextn.eh_proj.weight", width, 2 * width)
        self._norm = loader.vector(f"{block}.attn_norm.weight", width)
        self._query = loader.matrix(f"{block}.attn_q.weight", query, width)
        names = [f"{block}.attn_k.weight", f"{block}.attn_v.weight"]
        self._key_value = loader.projections(names, [kv, kv], width)
        self._query_norm = loader.vector(f"{block}.attn_q_norm.weight", spec.head_dim)
        self._key_norm = loader.vector(f"{block}.attn_k_norm.weight", spec.head_dim)
        self._out = loader.matrix(f"{block}.attn_output.weight", width, spec.heads * spec.head_dim)
        self._ffn_norm = loader.vector(f"{block}.{spec.family.feed_forward_norm}.weight", width)
        self._ffn: FeedForward | Experts
        if spec.experts is not None:
            self._ffn = Experts(spec, loader, block)
        else:
            self._ffn = FeedForward(loader, block, width=width, inner=spec.feed_forward)
        self._head_norm = loader.vector(f"{block}.nextn.shared_head_norm.weight", width)
        pairs = torch.arange(spec.rope_dim // 2, dtype=torch.float32, device=device)
        self._frequencies = spec.rope_theta ** (-2 * pairs / spec.rope_dim) / spec.rope_factor

    @classmethod
    def load(
        cls, file: GGUFFile, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, expand: bool = True
    ) -> "MTPBlock":
        """Read the block's weights, in the form that `Decoder.load` gives those of the target."""
        if not has_mtp(file, spec):
            raise UnsupportedModel(f"{file.path}: the file has no MTP block, or one of an unsupported kind")
        plan = measured(file, lambda loader: cls(spec, loader, torch.device("cpu")))
        with weight_loader(file, plan, device, dtype=dtype, expand=expand) as loader:
            return cls(spec, loader, device)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that `append` and `commit` need the outputs of."""
        return EMBEDDING_TAP, len(self.spec.layers) - 1

    def append(self, features: Tensor, slots: Tensor, buffers: MTPBuffers, *, skipped: int = 0) -> None:
        """Add the features [B, n, 2 * width] of committed positions, after `skipped` ones without."""
        ring = buffers.ring
        size = ring.keys[0].shape[1]
        # One more than the ring holds: the first kept position has no hidden state before it.
        beyond = max(0, features.shape[1] - size - 1)
        if skipped + beyond:
            ring.lengths[slots] += skipped + beyond
            ring.starts[slots] = ring.lengths[slots] + 1
        for piece in features[:, beyond:].split(min(PIECE, size), 1):
            if piece.shape[1]:
                self.commit(piece, slots, buffers, torch.full_like(slots, piece.shape[1]))

    def commit(self, features: Tensor, slots: Tensor, buffers: MTPBuffers, count: Tensor) -> None:
        """Add the first `count` [B] positions only, without host/device synchronisation."""
        embeddings, residual = features.split(self.spec.width, -1)
        rows, ring = features.shape[1], buffers.ring
        hidden = rms_norm(residual.contiguous(), self._final_norm, self.spec.eps)
        hidden = buffers.newest.commit(hidden, slots, count)
        x = self.fuse(embeddings, hidden[:, :-1])
        positions = ring.lengths[slots][:, None] + torch.arange(rows, device=self.device)
        k, v = self._heads(self._key_value(rms_norm(x, self._norm, self.spec.eps)))
        angles, tables = rope_angles(positions, self._frequencies), {"positions": positions, "count": count}
        ring_heads(k, v, self._key_norm, self.spec.eps, *angles, ring=ring.layer(0, slots), **tables)
        ring.lengths.index_add_(0, slots, count)

    def fuse(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return the block's input [..., width] of tokens and the hidden states before them, [..., width]."""
        eps = self.spec.eps
        token = rms_norm(embeddings.contiguous(), self._embedding_norm, eps)
        before = rms_norm(hidden.contiguous(), self._hidden_norm, eps)
        return self._fuse(torch.cat([token, before], -1))

    def nothing(self, sequences: int) -> KeyValue:
        """Return K and V of no tokens [sequences, 0, KV, D]."""
        empty = torch.zeros(sequences, 0, self.spec.kv_heads, self.spec.head_dim, device=self.device)
        return empty, empty

    def step(
        self, x: Tensor, depths: Tensor, above: KeyValue, slots: Tensor, buffers: MTPBuffers
    ) -> tuple[Tensor, KeyValue]:
        """Return hidden states [W, width] of drafted tokens x [W, width], and their K and V.

        depths [W]: the anchor's is 0; above [W, n, KV, D]: K and V of tokens from the anchor down to each, of
        which the first `depths` count. Logits, by the target's head, are of the tokens that follow.
        """
        spec, ring, rows = self.spec, buffers.ring, above[0].shape[1] + 1
        starts, index = ring.lengths[slots][:, None], depths[:, None, None, None]
        angles = rope_angles(starts + depths[:, None], self._frequencies)
        h = rms_norm(x[:, None], self._norm, spec.eps)
        q, gate = self._query(h).unflatten(-1, (spec.heads, 2 * spec.head_dim)).split(spec.head_dim, -1)
        q = head_rope(q.contiguous(), self._query_norm, spec.eps, *angles, interleaved=False)
        k, v = self._heads(self._key_value(h))
        k = head_rope(k, self._key_norm, spec.eps, *angles, interleaved=False)
        # Each token is the row of its depth; rows after it are not seen, and queries of others not used.
        keys, values = (
            torch.cat([path, row], 1).scatter(1, index.expand_as(row), row)
            for path, row in zip(above, (k, v), strict=True)
        )
        queries = q.new_zeros(len(q), rows, *q.shape[2:]).scatter(1, index.expand_as(q), q)
        positions = starts + torch.arange(rows, device=self.device)
        layer = ring.layer(0, slots)
        out = block_attention(queries, keys, values, positions, layer, window=None, causal=True)
        out = out.gather(1, index.expand(-1, 1, *out.shape[2:])) * gate.sigmoid()
        x = x + self._out(out.flatten(1))
        x = x + self._ffn(rms_norm(x, self._ffn_norm, spec.eps)).view_as(x)
        return rms_norm(x, self._head_norm, spec.eps), (k[:, 0], v[:, 0])

    def _heads(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        k, v = (part.unflatten(-1, (self.spec.kv_heads, -1)).contiguous() for part in rows)
        return k, v
