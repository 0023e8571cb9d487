"""A DFlash draft with any head that is trained, as a module: the blocks of many anchors in one forward pass.

Parameters have z-lab's names, so that a state dict is a checkpoint. The forward pass and the final norm
return what `models.dflash.DFlashDraft` does for each anchor alone; blocks do not attend to each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint

from bough.errors import UsageError
from bough.kernels.norm_rope import rope_angles
from bough.models.draft_spec import (
    MAX_BLOCK,
    MIN_BLOCK,
    DraftSpec,
    LayerKind,
    RefineSpec,
    SecondSpec,
    default_taps,
)
from bough.models.refine import MLP_EPS
from bough.models.spec import ModelSpec
from bough.train.draft_data import TextBatch
from bough.train.draft_target import Frozen

DraftKind = Literal["dflash", "dflash2", "mlp", "mtp"]
_TAPS = 5
_KERNEL, _CONV_GROUP, _CANDIDATES = 2, 16, 16  # of DFlash2, as published
_HEAD_DIM = 128
_GROUP = 4  # query heads per KV head
_MOST_KV_HEADS = 8
_DEVIATION = 0.02  # standard deviation of initial weights


def new_spec(
    target: ModelSpec,
    *,
    mask_id: int,
    layers: int = 3,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    block_size: int = 16,
    window: int = 0,
    rank: int = 0,
    inner: int = 0,
    source: str = "the new draft",
) -> DraftSpec:
    """Return a spec for `target` in z-lab's proportions; `window`: all layers but the last use a window.

    `rank`: of a DFlash2 draft's selector; `inner`: of an MLP over candidates; both 0: a DFlash draft.
    """
    for name, value, least, most in (
        ("layers", layers, 1, 64),
        ("kv_heads", kv_heads or 1, 1, 64),
        ("block", block_size, MIN_BLOCK, MAX_BLOCK),
        ("window", window, 0, 1 << 20),
        ("rank", rank or inner, 0, 1 << 12),
        ("feed_forward", feed_forward or 1, 1, 1 << 20),
    ):
        if not least <= value <= most:
            raise UsageError(f"`{name}` is {value}, needed {least} to {most}")
    depth = len(target.layers)
    taps = default_taps(depth, _TAPS)
    if len(set(taps)) < _TAPS:  # the formula needs eight layers
        taps = list(range(max(0, depth - 1 - _TAPS), max(1, depth - 1)))
    head_dim = min(_HEAD_DIM, max(16, target.width // 4 * 2))
    kv_heads = kv_heads or min(_MOST_KV_HEADS, max(1, target.width // (2 * _HEAD_DIM)))
    kinds: tuple[LayerKind, ...] = ("full",) * layers
    if window:
        kinds = ("sliding",) * (layers - 1) + ("full",)
    return DraftSpec(
        source=source,
        layers=kinds,
        causal=tuple(kind == "sliding" for kind in kinds),
        window=window if "sliding" in kinds else 0,
        width=target.width,
        feed_forward=feed_forward or -(-3 * target.width // 256) * 256,
        heads=_GROUP * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=target.rope_theta,
        eps=target.eps,
        block_size=block_size,
        taps=tuple(taps),
        mask_id=mask_id,
        vocab_size=target.vocab_size,
        second=SecondSpec(_KERNEL, _CONV_GROUP, rank, _CANDIDATES) if rank else None,
        refine=RefineSpec(inner) if inner else None,
        from_anchor=False,
    )


# Logits [..., n, k] of ids [..., k] after the tokens before [..., n], of rows before and after the final norm
# [..., width] and the marginal logits [..., k] of the ids.
CandidateLogits = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Readout:
    norm: Callable[[Tensor], Tensor]  # rows of the target's head follow
    candidates: int = 0  # of a position that are scored after the token before them
    logits: CandidateLogits | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Rope angles and attention masks of a forward pass, shared by its layers."""

    context: tuple[Tensor, Tensor]  # cos and sin of the context's positions
    blocks: tuple[Tensor, Tensor]  # cos and sin of the blocks' rows
    masks: dict[tuple[LayerKind, bool], Tensor]  # by kind and causality: [B, 1, M, 1, T or 1, n + T] bool


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + R/2) of the first R dims of x [B, T, H, D]; cos and sin [..., T, 1, R/2].

    The gradient of one split is one concatenation; the kernels' reference slices, whose gradients are three
    zero-filled tensors.
    """
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class DraftAttention(nn.Module):
    def __init__(self, spec: DraftSpec, kind: LayerKind, causal: bool):
        super().__init__()
        self._spec, self._kind, self._causal = spec, kind, causal
        queries, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.width, queries, bias=False)
        self.k_proj = nn.Linear(spec.width, kv, bias=False)
        self.v_proj = nn.Linear(spec.width, kv, bias=False)
        self.o_proj = nn.Linear(queries, spec.width, bias=False)
        self.q_norm = nn.RMSNorm(spec.head_dim, spec.eps)
        self.k_norm = nn.RMSNorm(spec.head_dim, spec.eps)

    def forward(self, rows: Tensor, context: Tensor, at: Geometry) -> Tensor:
        """Attend from rows [B, M, T, width], normed, to themselves and to context [B, n, width]."""
        dim, kv_heads = self._spec.head_dim, self._spec.kv_heads
        blocks, size = rows.shape[1:3]
        flat = rows.flatten(1, 2)
        q = rope(self.q_norm(self.q_proj(flat).unflatten(-1, (-1, dim)).float()), *at.blocks)
        keys, values = self._key_value(context, at.context)
        own_keys, own_values = (
            each.unflatten(1, (blocks, size)).permute(0, 3, 1, 2, 4)  # [B, KV, M, T, D]
            for each in self._key_value(flat, at.blocks)
        )
        # [B, KV, M, group, T, D]: a KV head's queries are rows of one matmul.
        q = (
            (q * dim**-0.5)
            .unflatten(2, (kv_heads, -1))
            .unflatten(1, (blocks, size))
            .permute(0, 3, 1, 4, 2, 5)
        )
        group = q.shape[3]
        scores = torch.cat(
            [
                (q.flatten(2, 4) @ keys.permute(0, 2, 3, 1)).unflatten(2, (blocks, group * size)),
                q.flatten(3, 4) @ own_keys.mT,
            ],
            -1,
        ).unflatten(3, (group, size))
        scores = scores.masked_fill_(at.masks[self._kind, self._causal], -torch.inf)
        # In the matmuls' dtype: autocast would keep a second copy of the weights in float32.
        with torch.autocast(scores.device.type, enabled=False):
            weights = scores.softmax(-1)
        length = context.shape[1]
        out = (weights[..., :length].flatten(2, 4) @ values.transpose(1, 2)).unflatten(2, (blocks, -1))
        out = out + weights[..., length:].flatten(3, 4) @ own_values
        out = out.unflatten(3, (group, size)).permute(0, 2, 4, 1, 3, 5)  # [B, M, T, KV, group, D]
        return self.o_proj(out.flatten(3))

    def _key_value(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Project x [B, N, width] to k and v [B, N, KV, D]."""
        k, v = (linear(x).unflatten(-1, (-1, self._spec.head_dim)) for linear in (self.k_proj, self.v_proj))
        return rope(self.k_norm(k.float()), *angles), v


class DraftFeedForward(nn.Module):
    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.width, spec.feed_forward, bias=False)
        self.up_proj = nn.Linear(spec.width, spec.feed_forward, bias=False)
        self.down_proj = nn.Linear(spec.feed_forward, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class TrainedConvolution(nn.Module):
    """DFlash2's convolutions over a block's rows, before and after half a layer; at first the identity."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        assert spec.second is not None
        self._taps, self._group = spec.second.kernel, spec.second.group
        base = torch.zeros(2, self._taps, spec.width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(spec.width, 2 * self._taps * spec.width // self._group, bias=False)

    def forward(self, x: Tensor, half: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output of half a layer of x [B, M, T, width], convolved before and after."""
        kernels = self.kernel_projection(x).unflatten(-1, (2, self._taps, -1))
        return self._convolve(half(self._convolve(x, kernels, 0)), kernels, 1)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(x)
        for back in range(min(self._taps, x.shape[2])):
            dynamic = kernels[..., side, back, :].repeat_interleave(self._group, -1)
            earlier = pad(x, (0, 0, back, 0))[:, :, : x.shape[2]]
            out = out + (self.base_kernel[side, back] + dynamic) * earlier
        return out


class TrainedSelector(nn.Module):
    """DFlash2's scores of a candidate after the token before it; at first all are zero."""

    def __init__(self, spec: SecondSpec, width: int, vocabulary: int):
        super().__init__()
        self.candidates = spec.candidates
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocabulary, spec.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, spec.rank))
        self.hidden_projection = nn.Linear(width, spec.rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """Return scores [..., n, k] of ids [..., k] after the tokens before [..., n]; hidden [..., width]."""
        gated = self.predecessor_codebook[before] * self.hidden_projection(hidden)[..., None, :]
        return gated @ self.successor_codebook[ids].mT


class TrainedMLP(nn.Module):
    """A gated unit that refines a row by the embedding of the token before it; at first it adds nothing."""

    def __init__(self, spec: RefineSpec, width: int):
        super().__init__()
        self.candidates = spec.candidates
        self.norm = nn.RMSNorm(width, MLP_EPS)
        self.ug = nn.Linear(2 * width, 2 * spec.inner)
        self.d = nn.Linear(spec.inner, width, bias=False)

    def forward(self, rows: Tensor, normed: Tensor, embedded: Tensor) -> Tensor:
        """Return rows [..., n, width] of rows [..., width] after the tokens embedded [..., n, width]."""
        both = torch.cat([self.norm(embedded), normed[..., None, :].expand_as(embedded)], -1)
        up, gate = self.ug(both).chunk(2, -1)
        return rows[..., None, :] + self.d(silu(gate) * up)


class TrainedLayer(nn.Module):
    def __init__(self, spec: DraftSpec, kind: LayerKind, causal: bool):
        super().__init__()
        self._convolves = spec.second is not None
        if self._convolves:
            self.attention_conv, self.mlp_conv = TrainedConvolution(spec), TrainedConvolution(spec)
        self.input_layernorm = nn.RMSNorm(spec.width, spec.eps)
        self.self_attn = DraftAttention(spec, kind, causal)
        self.post_attention_layernorm = nn.RMSNorm(spec.width, spec.eps)
        self.mlp = DraftFeedForward(spec)

    def forward(self, x: Tensor, context: Tensor, at: Geometry) -> Tensor:
        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(rows, context, at)

        if not self._convolves:
            x = x + attend(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv(self.input_layernorm(x), attend)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class TrainedDraft(nn.Module):
    def __init__(self, spec: DraftSpec, *, seed: int = 0):
        super().__init__()
        self.spec = spec
        self.recompute = False  # activation checkpointing: layers are recomputed in the backward pass
        self.fc = nn.Linear(len(spec.taps) * spec.width, spec.width, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.width, spec.eps)
        self.layers = nn.ModuleList(
            TrainedLayer(spec, kind, causal) for kind, causal in zip(spec.layers, spec.causal, strict=True)
        )
        self.norm = nn.RMSNorm(spec.width, spec.eps)
        self.candidate_selector: TrainedSelector | None = None
        if spec.second is not None:
            assert spec.vocab_size is not None
            self.candidate_selector = TrainedSelector(spec.second, spec.width, spec.vocab_size)
        self.ar_approximation: TrainedMLP | None = None
        if spec.refine is not None:
            self.ar_approximation = TrainedMLP(spec.refine, spec.width)
        pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32)
        self._frequencies: Tensor
        frequencies = spec.rope_theta ** (-2 * pairs / spec.head_dim)
        self.register_buffer("_frequencies", frequencies, persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Output projections are scaled by depth, so that the residual stream's variance stays constant.
        scaled = _DEVIATION * (2 * len(self.layers)) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("predecessor_codebook"):
                nn.init.normal_(parameter, generator=generator)
            elif name.endswith(("kernel_projection.weight", "successor_codebook", "ug.bias", "d.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=scaled if output else _DEVIATION, generator=generator)

    @property
    def tables(self) -> list[Tensor]:
        """Parameters with a row for each token: of most, a step has no gradient."""
        selector = self.candidate_selector
        return [] if selector is None else [selector.predecessor_codebook, selector.successor_codebook]

    def readout(self, frozen: Frozen) -> Readout:
        """Return how its rows are read: by the final norm, and the head that knows the token before."""
        selector, mlp = self.candidate_selector, self.ar_approximation

        def selected(rows: Tensor, normed: Tensor, before: Tensor, ids: Tensor, marginals: Tensor) -> Tensor:
            assert selector is not None
            return marginals[..., None, :] + selector(normed, before, ids)

        def refined(rows: Tensor, normed: Tensor, before: Tensor, ids: Tensor, marginals: Tensor) -> Tensor:
            assert mlp is not None
            with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
                after = mlp(rows, normed, frozen.embed(before))
            return self.norm(after.float()) @ frozen.head[ids].float().mT

        if selector is not None:
            return Readout(self.norm, selector.candidates, selected)
        return Readout(self.norm) if mlp is None else Readout(self.norm, mlp.candidates, refined)

    def freeze_backbone(self) -> None:
        """Leave nothing to train but the head that knows the token before; there has to be one."""
        head = self.candidate_selector or self.ar_approximation
        assert head is not None
        self.requires_grad_(False)
        head.requires_grad_(True)

    def inputs(self, frozen: Frozen, batch: TextBatch) -> Tensor:
        """Return the blocks' input rows [B, M, T, width]: the anchors, then masks."""
        return frozen.embeddings(batch.tokens.gather(1, batch.anchors))

    def forward(self, features: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
        """Return the rows of all blocks before the final norm: [B, M, T, width].

        features [B, n, taps * width] of positions 0 to n - 1; embeddings [B, M, T, width] of anchors and
        masks; anchors [B, M], the blocks' first positions. A block attends to the features before its anchor
        and to itself.
        """
        context = self.hidden_norm(self.fc(features).float())
        at = self._geometry(anchors, features.shape[1], embeddings.shape[2])
        x = embeddings
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, context, at, use_reentrant=False)
            else:
                x = layer(x, context, at)
        return x

    def _geometry(self, anchors: Tensor, length: int, size: int) -> Geometry:
        rows = torch.arange(size, device=anchors.device)
        context = torch.arange(length, device=anchors.device)
        at = (anchors[..., None] + rows).flatten(1)
        kinds = set(zip(self.spec.layers, self.spec.causal, strict=True))
        return Geometry(
            context=rope_angles(context[None], self._frequencies),
            blocks=rope_angles(at, self._frequencies),
            masks={
                (kind, causal): self._mask(anchors, context, rows, kind, causal) for kind, causal in kinds
            },
        )

    def _mask(self, anchors: Tensor, context: Tensor, rows: Tensor, kind: LayerKind, causal: bool) -> Tensor:
        """Return a mask [B, 1, M, 1, T or 1, n + T] that is true where a row must not attend."""
        # [B, M, n]: the anchor's own feature does not exist yet when a block is drafted.
        before = context[None, None] >= anchors[..., None]
        before, ahead = before[:, :, None], rows - rows[:, None]  # ahead [T, T] = key - query
        in_block = torch.zeros_like(ahead, dtype=torch.bool)
        if kind == "sliding":
            queries = (anchors[..., None] + rows)[..., None]
            before = before | (queries - context >= self.spec.window)
            in_block = in_block | (ahead.abs() >= self.spec.window)
        if causal:
            in_block = in_block | (ahead > 0)
        if kind == "full" and not causal:
            in_block = in_block[:1]
        mask = torch.cat(
            [before.expand(-1, -1, in_block.shape[0], -1), in_block.expand(*anchors.shape, -1, -1)], -1
        )
        return mask[:, None, :, None]
