"""The parts of a decoder block: attention, Gated DeltaNet, feed-forward, experts. They own no state."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from treeflash.kernels.attention import paged_attention
from treeflash.kernels.causal_conv import chunk_conv, tree_conv
from treeflash.kernels.gated_delta import chunk_delta, fold, tree_delta
from treeflash.kernels.norm_rope import l2_norm, rms_norm, rope
from treeflash.models.spec import ModelSpec
from treeflash.models.step import AttentionBuffers, DeltaBuffers, Pending
from treeflash.models.weights import Matrix, WeightLoader

# The l2 norm of queries and keys has its own constant in the trained models, whatever the file's rms
# epsilon is.
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Frame:
    """What every layer of one forward pass shares, computed once from the step and the buffers."""

    slots: Tensor  # [B]
    is_chunk: bool
    cos: Tensor  # [B, T, 1, rope/2]
    sin: Tensor
    visible: Tensor | None  # [B, T, T] for a tree
    conv_index: Tensor | None  # [B, T, conv width] for a tree
    page_table: Tensor  # [B, P]
    lengths: Tensor  # [B]
    cache_rows: Tensor  # [B * T] where the rows' keys and values go in the flattened pages
    pending: Pending | None  # of these slots only; None: nothing to fold in
    accepted: Tensor | None  # [B, tree rows] bool


class Attention:
    """Grouped-query attention; with query/key norms, biases and an output gate where the family has them."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, block: str):
        self._spec = spec
        width, kv = spec.width, spec.kv_heads * spec.head_dim
        query = spec.heads * spec.head_dim * (2 if spec.family.gated_query else 1)
        names = [f"{block}.attn_{part}.weight" for part in "qkv"]
        self._qkv = loader.projections(names, [query, kv, kv], width)
        self._out = loader.projections([f"{block}.attn_output.weight"], [width], spec.heads * spec.head_dim)
        self._norms = None
        if spec.family.query_key_norm:
            self._norms = [loader.vector(f"{block}.attn_{part}_norm.weight", spec.head_dim) for part in "qk"]

    def __call__(self, x: Tensor, frame: Frame, buffers: AttentionBuffers) -> Tensor:
        """x [B, T, width], normalised, to [B, T, width]."""
        spec = self._spec
        q, k, v = self._qkv(x)
        gate = None
        if spec.family.gated_query:
            q, gate = q.unflatten(-1, (spec.heads, 2 * spec.head_dim)).split(spec.head_dim, -1)
        else:
            q = q.unflatten(-1, (spec.heads, spec.head_dim))
        k, v = (part.unflatten(-1, (spec.kv_heads, spec.head_dim)) for part in (k, v))
        if self._norms is not None:
            q, k = (rms_norm(part, norm, spec.eps) for part, norm in zip((q, k), self._norms, strict=True))
        q, k = (rope(part, frame.cos, frame.sin, interleaved=spec.family.rope_interleaved) for part in (q, k))
        # Rows are read back through the cache, so that a node and a committed token look alike.
        for pool, rows in ((buffers.keys, k), (buffers.values, v)):
            pool.flatten(0, 1).index_copy_(0, frame.cache_rows, rows.flatten(0, 1).to(pool.dtype))
        out = paged_attention(q, buffers.keys, buffers.values, frame.page_table, frame.lengths, frame.visible)
        if gate is not None:
            out = out * gate.sigmoid()
        return self._out(out.flatten(-2))[0]


class GatedDelta:
    """Gated DeltaNet: a short convolution, the gated delta rule, a gated norm."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, block: str):
        assert spec.delta is not None
        self._delta = delta = spec.delta
        self._eps = spec.eps
        heads = delta.value_heads
        names = [f"{block}.{part}.weight" for part in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")]
        self._in = loader.projections(names, [delta.channels, delta.inner, heads, heads], spec.width)
        self._out = loader.matrix(f"{block}.ssm_out.weight", spec.width, delta.inner)
        self._conv = loader.vector(f"{block}.ssm_conv1d.weight", delta.channels, delta.conv_width)
        self._decay = loader.vector(f"{block}.ssm_a", heads)
        self._time_bias = loader.vector(f"{block}.ssm_dt.bias", heads)
        self._norm = loader.vector(f"{block}.ssm_norm.weight", delta.head_dim)

    def __call__(self, x: Tensor, frame: Frame, buffers: DeltaBuffers) -> Tensor:
        """x [B, T, width], normalised, to [B, T, width]."""
        delta, dim = self._delta, self._delta.head_dim
        inputs, gate, beta, alpha = self._in(x)
        beta = beta.sigmoid()
        g = self._decay * softplus(alpha + self._time_bias)
        state, window = self._committed(frame, buffers)
        if frame.is_chunk:
            mixed, window = chunk_conv(inputs, window, self._conv)
        else:
            assert frame.conv_index is not None
            mixed = tree_conv(inputs, window, self._conv, frame.conv_index)
        keys = delta.key_heads * dim
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in mixed.split([keys, keys, delta.inner], -1))
        q, k = l2_norm(q, L2_EPS) * dim**-0.5, l2_norm(k, L2_EPS)
        if frame.is_chunk:
            out, state = chunk_delta(q, k, v, g, beta, state)
            buffers.state[frame.slots] = state
            buffers.window[frame.slots] = window.to(buffers.window.dtype)
        else:
            assert frame.visible is not None
            out, writes, decay = tree_delta(q, k, v, g, beta, state, frame.visible)
            rows = x.shape[1]
            buffers.tree_inputs[frame.slots, :rows] = inputs.to(buffers.tree_inputs.dtype)
            buffers.tree_keys[frame.slots, :rows] = k
            buffers.tree_writes[frame.slots, :rows] = writes
            buffers.tree_decay[frame.slots, :rows] = decay
        out = rms_norm(out, self._norm, self._eps) * silu(gate.unflatten(-1, (-1, dim)))
        return self._out(out.flatten(-2))

    def _committed(self, frame: Frame, buffers: DeltaBuffers) -> tuple[Tensor, Tensor]:
        """State and window of the frame's slots, after folding in what the last tree had accepted."""
        slots = frame.slots
        if len(slots) == 1:  # a view: the state is large and mostly there is one sequence
            first = int(slots[0])
            state, window = buffers.state[first : first + 1], buffers.window[first : first + 1]
        else:
            state, window = buffers.state[slots], buffers.window[slots]
        pending = frame.pending
        if pending is None:
            return state, window
        assert frame.accepted is not None
        rows = frame.accepted.shape[1]
        stash = (part[slots, :rows] for part in (buffers.tree_keys, buffers.tree_writes, buffers.tree_decay))
        fold(state, *stash, row=pending.row, accepted=frame.accepted)
        series = torch.cat([window, buffers.tree_inputs[slots, :rows]], 1)
        window = series.gather(1, pending.inputs[..., None].expand(-1, -1, series.shape[2]))
        if len(slots) > 1:
            buffers.state[slots] = state
        buffers.window[slots] = window.to(buffers.window.dtype)
        return state, window


class FeedForward:
    """SwiGLU."""

    def __init__(self, loader: WeightLoader, block: str, *, width: int, inner: int, suffix: str = ""):
        names = [f"{block}.ffn_{part}{suffix}.weight" for part in ("gate", "up")]
        self._in = loader.projections(names, [inner, inner], width)
        self._out = loader.matrix(f"{block}.ffn_down{suffix}.weight", width, inner)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._in(x)
        return self._out(silu(gate) * up)


class Experts:
    """A softmax router over SwiGLU experts, the used weights renormalised, plus one gated shared expert."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, block: str):
        assert spec.experts is not None
        experts, width = spec.experts, spec.width
        self._used = experts.used
        self._router = loader.vector(f"{block}.ffn_gate_inp.weight", experts.count, width)
        self._gate_up: tuple[tuple[Matrix, Matrix], ...] | tuple[Matrix, ...]
        fused = f"{block}.ffn_gate_up_exps.weight"
        if loader.has(fused):
            self._gate_up = loader.experts(fused, experts.count, 2 * experts.width, width)
        else:
            stacks = (
                loader.experts(f"{block}.ffn_{part}_exps.weight", experts.count, experts.width, width)
                for part in ("gate", "up")
            )
            self._gate_up = tuple(zip(*stacks, strict=True))
        self._down = loader.experts(f"{block}.ffn_down_exps.weight", experts.count, width, experts.width)
        self._shared = FeedForward(loader, block, width=width, inner=experts.shared_width, suffix="_shexp")
        self._shared_gate = loader.vector(f"{block}.ffn_gate_inp_shexp.weight", width)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = (flat @ self._router.T).softmax(-1).topk(self._used, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self._shared(flat) * (flat @ self._shared_gate).sigmoid()[:, None]
        for expert in chosen.unique().tolist():
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self._expert(expert, flat[row]) * weights[row, rank, None])
        return out.view_as(x)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        stack = self._gate_up[expert]
        gate, up = stack(x).chunk(2, -1) if isinstance(stack, Matrix) else (part(x) for part in stack)
        return self._down[expert](silu(gate) * up)
