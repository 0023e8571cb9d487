"""The DFlash draft: predicts a block of masked tokens from the target's hidden states. Owns no state."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.kernels.attention import block_attention
from treeflash.kernels.norm_rope import add_rms_norm, head_rope, ring_heads, rms_norm, rope_angles
from treeflash.kernels.quant_matmul import PackedRows
from treeflash.kernels.tree import MAX_ROWS
from treeflash.models.draft_spec import DraftSpec
from treeflash.models.layers import FeedForward, PackedInput, by_sequence
from treeflash.models.measure import tile_space
from treeflash.models.safetensors_source import SafetensorsSource, find_checkpoint, read_config
from treeflash.models.spec import ModelSpec
from treeflash.models.weights import Progress, TensorSource, WeightLoader, project_all

PIECE = 2048  # rows of `append` at a time: fused features are wide


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """The draft's KV rings, computed from context features: position p is at p modulo the layer's ring."""

    keys: tuple[Tensor, ...]  # a layer: [slots, ring, KV, D], after norm and rope
    values: tuple[Tensor, ...]
    lengths: Tensor  # [slots] int64: number of committed positions
    starts: Tensor  # [slots] int64: positions below it were skipped


class DraftLayer:
    def __init__(self, spec: DraftSpec, loader: WeightLoader, index: int):
        self._spec, self._index = spec, index
        block, width, kv = f"blk.{index}", spec.width, spec.kv_heads * spec.head_dim
        self._query = loader.matrix(f"{block}.attn_q.weight", spec.heads * spec.head_dim, width)
        names = [f"{block}.attn_k.weight", f"{block}.attn_v.weight"]
        self.to_key_value = loader.projections(names, [kv, kv], width)
        self._out = loader.matrix(f"{block}.attn_output.weight", width, spec.heads * spec.head_dim)
        self._query_norm = loader.vector(f"{block}.attn_q_norm.weight", spec.head_dim)
        self._key_norm = loader.vector(f"{block}.attn_k_norm.weight", spec.head_dim)
        self._norm = loader.vector(f"{block}.attn_norm.weight", width)
        self._ffn_norm = loader.vector(f"{block}.ffn_norm.weight", width)
        self._ffn = FeedForward(loader, block, width=width, inner=spec.feed_forward)
        self._takes_packed = PackedInput(self._query, self.to_key_value)
        self.key_value_takes_packed = PackedInput(self.to_key_value)

    def key_value(self, x: Tensor | PackedRows, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v [B, T, KV, D] of x [B, T, width]: context features or normed block rows."""
        k, v = self._heads(self.to_key_value(x), len(angles[0]))
        return head_rope(k, self._key_norm, self._spec.eps, *angles, interleaved=False), v

    def _heads(self, rows: tuple[Tensor, ...], batch: int) -> tuple[Tensor, Tensor]:
        k, v = by_sequence(rows, batch)
        return k.unflatten(-1, (self._spec.kv_heads, -1)), v.unflatten(-1, (self._spec.kv_heads, -1))

    def commit(
        self,
        rows: tuple[Tensor, ...],
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        buffers: DraftBuffers,
        count: Tensor,
    ) -> None:
        """Write the first `count` [B] rows of `to_key_value`'s output to the layer's ring."""
        k, v = self._heads(rows, len(slots))
        pools = {"keys": buffers.keys[self._index], "values": buffers.values[self._index]}
        tables = {"slots": slots, "lengths": buffers.lengths, "count": count}
        ring_heads(k, v, self._key_norm, self._spec.eps, *angles, **pools, **tables)

    def __call__(
        self,
        x: Tensor,
        add: Tensor | None,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        buffers: DraftBuffers,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream of the block's rows and the layer's output, to be added to it.

        x [B, T, width] and `add`, the previous layer's output, are the residual stream before this layer.
        """
        spec, index = self._spec, self._index
        rows = x.shape[0] * x.shape[1]
        x, h = add_rms_norm(x, add, self._norm, spec.eps, pack=self._takes_packed(rows))
        q = self._query(h).view(*x.shape[:2], spec.heads, -1)
        q = head_rope(q, self._query_norm, spec.eps, *angles, interleaved=False)
        k, v = self.key_value(h, angles)
        out = block_attention(
            q,
            k,
            v,
            positions,
            buffers.keys[index],
            buffers.values[index],
            slots,
            buffers.lengths,
            buffers.starts,
            window=spec.window if spec.layers[index] == "sliding" else None,
            causal=spec.causal[index],
        )
        out = self._out(out.flatten(-2))
        x, h = add_rms_norm(x, out, self._ffn_norm, spec.eps, pack=self._ffn.takes_packed(rows))
        return x, self._ffn(h).view_as(x)


@contextmanager
def open_draft(
    path: Path, target: ModelSpec, *, quant: QuantType | None = None, causal: bool | None = None
) -> Generator[tuple[DraftSpec, TensorSource]]:
    """Open a draft and yield its spec, checked against the target, and its tensors."""
    if path.suffix == ".gguf":
        with GGUFFile.open(path) as file:
            spec = DraftSpec.from_gguf(file, causal=causal)
            spec.check_target(target)
            spec.check_tensors(file.tensors, target, str(path))
            yield spec, file
        return
    weights, config = find_checkpoint(path)
    spec = DraftSpec.from_config(
        read_config(config), source=str(config), target_depth=len(target.layers), causal=causal
    )
    spec.check_target(target)
    source = SafetensorsSource(weights, quant=quant)
    spec.check_tensors(source.tensors, target, str(weights))
    yield spec, source


class DFlashDraft:
    def __init__(self, spec: DraftSpec, loader: WeightLoader, device: torch.device):
        self.spec = spec
        self.device = device
        self.layouts = loader.layouts
        self._fuse = loader.matrix("fc.weight", spec.width, len(spec.taps) * spec.width)
        self._fuse_norm = loader.vector("enc.output_norm.weight", spec.width)
        self._layers = [DraftLayer(spec, loader, index) for index in range(len(spec.layers))]
        self._norm = loader.vector("output_norm.weight", spec.width)
        self._columns = torch.arange(MAX_ROWS, device=device)
        pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32, device=device)
        self._frequencies = spec.rope_theta ** (-2 * pairs / spec.head_dim)

    @classmethod
    def load(
        cls,
        path: Path,
        target: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        quant: QuantType | None = None,
        causal: bool | None = None,
        progress: Progress | None = None,
    ) -> "DFlashDraft":
        """Load a safetensors checkpoint (a folder or its file) or a `dflash` GGUF.

        Raise for a draft of another target. `quant` quantises a safetensors checkpoint's matrices; `causal`
        overrides the file for every layer.
        """
        device = torch.device(device)
        with open_draft(path, target, quant=quant, causal=causal) as (spec, source):
            space = None
            if device.type == "cuda":
                space = tile_space(source, lambda measuring: cls(spec, measuring, torch.device("cpu")))
            loader = WeightLoader(
                source, device=device, dtype=dtype, expand=expand, space=space, progress=progress
            )
            return cls(spec, loader, device)

    def append(self, features: Tensor, slots: Tensor, buffers: DraftBuffers, *, skipped: int = 0) -> None:
        """Append the features [B, n, taps * width] of newly committed positions to the slots' rings.

        `skipped` positions before them have no features: no ring has to hold them.
        """
        longest = max(keys.shape[1] for keys in buffers.keys)
        beyond = max(0, features.shape[1] - longest)
        features, skipped = features[:, beyond:], skipped + beyond
        first = buffers.lengths[slots] + skipped
        if skipped:
            buffers.lengths[slots] = buffers.starts[slots] = first
        if features.shape[1] > PIECE:
            for piece in features.split(PIECE, 1):
                self.append(piece, slots, buffers)
            return
        if features.shape[1]:
            self._append(features, first, slots, buffers)
            buffers.lengths[slots] = first + features.shape[1]

    def _append(self, features: Tensor, first: Tensor, slots: Tensor, buffers: DraftBuffers) -> None:
        """Write the K and V of features [B, n, taps * width] at positions from `first` [B] on."""
        positions = first[:, None] + torch.arange(features.shape[1], device=self.device)
        x = rms_norm(self._fuse(features), self._fuse_norm, self.spec.eps)
        angles = rope_angles(positions, self._frequencies)
        # A ring holds only the newest rows; most layers have rings of one size.
        sizes = {keys.shape[1] for keys in buffers.keys}
        indices = {ring: (slots[:, None], positions[:, -ring:] % ring) for ring in sizes}
        for layer, keys, values in zip(self._layers, buffers.keys, buffers.values, strict=True):
            ring = keys.shape[1]
            for pool, rows in zip((keys, values), layer.key_value(x, angles), strict=True):
                pool[indices[ring]] = rows[:, -ring:].to(pool.dtype)

    def commit(self, features: Tensor, slots: Tensor, buffers: DraftBuffers, count: Tensor) -> None:
        """Append the first `count` [B] positions only, without host/device synchronisation."""
        batch, rows = features.shape[:2]
        positions = buffers.lengths[slots][:, None] + self._columns[:rows]
        pack = all(layer.key_value_takes_packed(batch * rows) for layer in self._layers)
        fused = self._fuse(features)
        _, x = add_rms_norm(fused, None, self._fuse_norm, self.spec.eps, pack=pack)
        angles = rope_angles(positions, self._frequencies)
        projected = project_all(x, [layer.to_key_value for layer in self._layers])
        for layer, key_value in zip(self._layers, projected, strict=True):
            layer.commit(key_value, angles, slots, buffers, count)
        buffers.lengths.index_add_(0, slots, count)

    def block(self, embeddings: Tensor, slots: Tensor, buffers: DraftBuffers) -> Tensor:
        """Return hidden rows [B, block, width] of the embeddings [B, block, width] of anchor and masks.

        Row i predicts the token at its own position, lengths + i; row 0, the anchor, predicts nothing.
        """
        positions = buffers.lengths[slots][:, None] + torch.arange(embeddings.shape[1], device=self.device)
        angles = rope_angles(positions, self._frequencies)
        x, add = embeddings * self.spec.embedding_scale, None
        for layer in self._layers:
            x, add = layer(x, add, positions, angles, slots, buffers)
        return add_rms_norm(x, add, self._norm, self.spec.eps)[1]

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Return the target head's logits with the scale and softcap this draft was trained with."""
        spec = self.spec
        if spec.output_multiplier != 1.0:
            logits = logits * spec.output_multiplier
        return spec.softcap * torch.tanh(logits / spec.softcap) if spec.softcap else logits
