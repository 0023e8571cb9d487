"""The layers of a decoder block: attention, Gated DeltaNet, feed-forward, experts. They own no state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from bough.kernels.attention import SINKS, PagedContext, chunk_attention, paged_attention
from bough.kernels.causal_conv import ConvRows, ConvWeights, chunk_heads, tree_conv
from bough.kernels.delta_rule import DeltaRows, fold_path, slot_delta, tree_delta
from bough.kernels.experts import ExpertCache, ExpertStack, combine, expert_matmul, placed, route_rows
from bough.kernels.experts import reference as plain_experts
from bough.kernels.norm_rope import add_rms_norm, cache_heads, gated_rms_norm, silu_mul, silu_rows
from bough.kernels.quant_matmul import PackedRows, PackedWeight, Unfinished, pack_rows
from bough.models.spec import LogitSpec, ModelSpec
from bough.models.step import AttentionBuffers, DeltaBuffers, Pending
from bough.models.weights import Matrix, Projections, WeightLoader


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What all layers of one forward pass share, computed once from the step and the buffers."""

    batch: int  # B: of equally many rows each, or 1 for ragged rows
    slots: Tensor  # [S]
    ropes: Mapping[float, tuple[Tensor, Tensor]]  # of each theta: cos and sin [B, T, 1, rope/2]
    ancestors: Tensor | None  # [B, T] bits, for a tree; None for a chunk
    first: Tensor | None  # [S + 1] first row of each sequence, for ragged rows
    conv: ConvRows | None  # for delta layers, where a chunk has no tree rows
    delta: DeltaRows | None  # the same of a tree
    page_table: Tensor  # [S, P]
    lengths: Tensor  # [S]
    pages: Tensor  # [B * T] slot mapping of the rows in the KV cache: the page,
    offsets: Tensor  # [B * T] and the offset in it
    window: int | None  # tokens that a row attends to where the layer has no window; None for a chunk: all
    span: int  # tokens of the longest sequence including a chunk's rows; 0 for a tree
    pending: Pending  # of these slots only; P path rows, the first `count` to be committed


def takes_packed(*users: Matrix | Projections) -> bool:
    """Return whether the input rows of these matrices are packed, as matmuls with tiles read them.

    Of any number of rows: those that a card multiplies in parts must have the bits of others.
    """
    matrices = [m for user in users for m in (user.matrices if isinstance(user, Projections) else [user])]
    tiles = [m.data for m in matrices if isinstance(m.data, PackedWeight) and m.rotation is None]
    return len(tiles) == len(matrices) and tiles[0].data.is_cuda


def by_sequence(parts: Iterable[Tensor], batch: int) -> list[Tensor]:
    """Return outputs of packed rows, [B * T, N], as [B, T, N]; others have that shape already."""
    return [part if part.ndim > 2 else part.unflatten(0, (batch, -1)) for part in parts]


def in_stream(out: Tensor | Unfinished, batch: int) -> Tensor | Unfinished:
    """Return a layer's output as the norm takes it that adds it to the residual stream."""
    return out if isinstance(out, Unfinished) else by_sequence([out], batch)[0]


def finished(logits: Tensor, spec: LogitSpec) -> Tensor:
    """Return the head's output, which it overwrites, as it is sampled."""
    if spec.scale != 1:
        logits.mul_(spec.scale)
    return logits.div_(spec.cap).tanh_().mul_(spec.cap) if spec.cap else logits


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of the residual stream, fused with the addition before it."""

    weight: Tensor
    eps: float
    pack: bool  # matmuls with tiles read its rows; it can complete what the layer before left unfinished

    def __call__(self, x: Tensor, add: Tensor | Unfinished | None) -> tuple[Tensor, Tensor | PackedRows]:
        """Return the stream x [B, T, width] plus `add`, and its norm."""
        return add_rms_norm(x, add, self.weight, self.eps, pack=self.pack)


class Mixer(Protocol):
    """A layer that mixes tokens; `buffers` are those of its kind."""

    takes_packed: bool
    fused: bool  # the next norm completes its output

    def __call__(
        self, x: Tensor | PackedRows, context: ForwardContext, buffers: Any
    ) -> Tensor | Unfinished: ...


class Attention:
    """Grouped-query attention; with query/key norms, biases, a window, no rope and an output gate where the
    layer has them."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int):
        self._spec, self._layer, block = spec, spec.attention[index], f"blk.{index}"
        width, query, kv = spec.width, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = {"q": 2 * query if spec.family.gated_query else query, "k": kv, "v": kv}
        if spec.family.output_gate:
            parts["gate"] = query
        names = [f"{block}.attn_{part}.weight" for part in parts]
        self._qkv = loader.projections(names, list(parts.values()), width)
        self._out = loader.projections([f"{block}.attn_output.weight"], [width], query)
        self.fused = False
        self.takes_packed, self._out_takes_packed = takes_packed(self._qkv), takes_packed(self._out)
        self._norms: list[Tensor | None] = [None, None]
        if spec.family.query_key_norm:
            self._norms = [loader.vector(f"{block}.attn_{part}_norm.weight", spec.head_dim) for part in "qk"]

    def __call__(
        self, x: Tensor | PackedRows, context: ForwardContext, buffers: AttentionBuffers
    ) -> Tensor | Unfinished:
        """Return [B, T, width] of normed x [B, T, width]."""
        spec = self._spec
        q, k, v, *gates = by_sequence(self._qkv(x), context.batch)
        if spec.family.gated_query:
            q, gate = q.unflatten(-1, (spec.heads, 2 * spec.head_dim)).split(spec.head_dim, -1)
        else:
            q, *gates = (part.unflatten(-1, (spec.heads, spec.head_dim)) for part in (q, *gates))
            gate = gates[0] if gates else None
        k, v = (part.unflatten(-1, (spec.kv_heads, spec.head_dim)) for part in (k, v))
        # Rows are read back from the KV cache, so that a tree's row and a committed token give equal results.
        keys, values = buffers.keys, buffers.values
        cache: dict[str, Any] = {"keys": keys, "values": values, "pages": context.pages}
        cache |= {"offsets": context.offsets, "interleaved": spec.family.rope_interleaved}
        q = cache_heads(q, k, v, self._norms, spec.eps, *context.ropes[self._layer.rope_theta], **cache)
        tables = (context.page_table, context.lengths, context.ancestors, context.first)
        # A window that the model was trained with has no sinks; the user's is for the other layers.
        sliding = self._layer.window is not None
        paged = PagedContext(
            *(keys, values, *tables),
            window=self._layer.window if sliding else context.window,
            sinks=0 if sliding else SINKS,
        )
        if context.ancestors is None:
            out = chunk_attention(q, paged, span=context.span, gate=gate).flatten(-2)
        else:
            out = paged_attention(q, paged, gate=gate).flatten(-2)
        if not (self.fused and self._out_takes_packed):
            return self._out(out)[0]
        return in_stream(self._out.partial_sums(pack_rows(out.flatten(0, 1)))[0], context.batch)


class GatedDelta:
    """Gated DeltaNet: a short convolution, the gated delta rule, a gated norm."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int):
        assert spec.delta is not None
        block = f"blk.{index}"
        self._delta = delta = spec.delta
        self._eps = spec.eps
        heads = delta.value_heads
        names = [f"{block}.{part}.weight" for part in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")]
        self._in = loader.projections(names, [delta.channels, delta.inner, heads, heads], spec.width)
        self._out = loader.matrix(f"{block}.ssm_out.weight", spec.width, delta.inner)
        self._conv = ConvWeights(
            loader.vector(f"{block}.ssm_conv1d.weight", delta.channels, delta.conv_width),
            loader.vector(f"{block}.ssm_a", heads),
            loader.vector(f"{block}.ssm_dt.bias", heads),
            delta.key_heads,
        )
        self._norm = loader.vector(f"{block}.ssm_norm.weight", delta.head_dim)
        self.fused = False
        self.takes_packed, self._out_takes_packed = takes_packed(self._in), takes_packed(self._out)

    def __call__(
        self, x: Tensor | PackedRows, context: ForwardContext, buffers: DeltaBuffers
    ) -> Tensor | Unfinished:
        """Return [B, T, width] of normed x [B, T, width]."""
        batch = context.batch
        inputs, gate, beta, alpha = by_sequence(self._in(x), batch)
        rows = (inputs, alpha, beta) if context.first is None else (inputs[0], alpha[0], beta[0])
        assert context.conv is not None
        if context.delta is not None:
            out = tree_delta(
                tree_conv(*rows, self._conv, buffers, context.conv), buffers.state, context.delta
            )
            out = out.view(batch, -1, *out.shape[-2:])
        else:
            fold_path(self._conv, buffers, context.conv)
            heads = chunk_heads(*rows, self._conv, buffers, context.conv)
            out = slot_delta(heads, buffers.state, context.slots)
        h = gated_rms_norm(out, gate, self._norm, self._eps, pack=self._out_takes_packed)
        return in_stream(self._out.partial_sums(h) if self.fused else self._out(h), batch)


class FeedForward:
    """SwiGLU."""

    def __init__(self, loader: WeightLoader, block: str, *, width: int, inner: int, suffix: str = ""):
        names = [f"{block}.ffn_{part}{suffix}.weight" for part in ("gate", "up")]
        self._in = loader.projections(names, [inner, inner], width)
        self._out = loader.matrix(f"{block}.ffn_down{suffix}.weight", width, inner)
        self.takes_packed, self._out_takes_packed = takes_packed(self._in), takes_packed(self._out)

    def __call__(self, x: Tensor | PackedRows) -> Tensor:
        """Return [..., width] of x [..., width], or [M, width] of packed rows [M, width]."""
        shape = (x.rows,) if isinstance(x, PackedRows) else x.shape[:-1]
        return self._out(self._activated(x)).view(*shape, -1)

    def unfinished(self, x: Tensor | PackedRows) -> Tensor | Unfinished:
        """Return the same for a norm that completes it, where the kernels can leave it unfinished."""
        return self._out.partial_sums(self._activated(x)) if isinstance(x, PackedRows) else self(x)

    def _activated(self, x: Tensor | PackedRows) -> Tensor | PackedRows:
        pack = self._out_takes_packed
        gate, up = self._in.partial_sums(x) if pack else self._in(x)
        return silu_mul(gate, up, pack=pack)


class Experts:
    """A softmax router over SwiGLU experts, with renormalised weights, plus a gated shared expert if any."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, block: str):
        assert spec.experts is not None
        experts, width = spec.experts, spec.width
        self._used = experts.used
        self._router = loader.vector(f"{block}.ffn_gate_inp.weight", experts.count, width)
        fused, rows = [f"{block}.ffn_gate_up_exps.weight"], 2 * experts.width
        if not loader.has(fused[0]):
            fused, rows = [f"{block}.ffn_{part}_exps.weight" for part in ("gate", "up")], experts.width
        self._gate_up = loader.experts(fused, experts.count, rows, width)
        down = f"{block}.ffn_down_exps.weight"
        (self._down,) = loader.experts([down], experts.count, width, experts.width)
        self._shared, self._shared_gate = None, torch.zeros_like(self._router[0])
        if inner := experts.shared_width:
            self._shared = FeedForward(loader, block, width=width, inner=inner, suffix="_shexp")
            self._shared_gate = loader.vector(f"{block}.ffn_gate_inp_shexp.weight", width)
        self.stacks = [stack for stack in self.routed if isinstance(stack, ExpertStack)]
        on_host = any(stack.host is not None for stack in self.stacks)
        self.cache = ExpertCache.of(self.stacks) if on_host else None

    @property
    def routed(self) -> Sequence[ExpertStack | tuple[Matrix, ...]]:
        """Return the matrices of which a row uses some."""
        return (*self._gate_up, self._down)

    takes_packed = False  # the router reads floats

    def __call__(self, x: Tensor | PackedRows) -> Tensor:
        assert isinstance(x, Tensor), "packed rows for a router"
        flat = x.flatten(0, -2)
        return (self._grouped if isinstance(self._down, ExpertStack) else self._by_expert)(flat).view_as(x)

    unfinished = __call__  # its sum needs no norm

    def _grouped(self, x: Tensor) -> Tensor:
        """Multiply with all chosen experts at once; no host/device synchronisation."""
        layouts = {stack.layout for stack in self.stacks}
        packed, logits, routing = route_rows(
            x, self._router, self._shared_gate, used=self._used, layouts=layouts
        )
        if self.cache is not None:
            routing = placed(routing, self.cache, self.stacks)
        shared = torch.zeros_like(x)
        if self._shared is not None:
            shared = self._shared(packed if self._shared.takes_packed else x)
        *inner, down = self.stacks
        parts = [expert_matmul(packed, stack, routing) for stack in inner]
        gate, up = parts if len(parts) > 1 else parts[0].chunk(2, -1)
        outputs = expert_matmul(silu_rows(gate, up), down, routing)
        return combine(shared, logits, outputs, routing.weights)

    def _by_expert(self, x: Tensor) -> Tensor:
        """Multiply with one expert after the other: the specification, and what a CPU runs."""
        weights, expert_ids = plain_experts.route(x @ self._router.T, self._used)
        outputs = x.new_empty(*expert_ids.shape, x.shape[-1])
        for expert in expert_ids.unique().tolist():
            row, rank = (expert_ids == expert).nonzero(as_tuple=True)
            outputs[row, rank] = self._expert(expert, x[row])
        shared = torch.zeros_like(x) if self._shared is None else self._shared(x)
        return plain_experts.combine(shared, x @ self._shared_gate, outputs, weights)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        assert isinstance(self._down, tuple), "experts in a stack"
        parts = [matrices[expert](x) for matrices in self._gate_up if isinstance(matrices, tuple)]
        gate, up = parts if len(parts) > 1 else parts[0].chunk(2, -1)
        return self._down[expert](silu(gate) * up)
