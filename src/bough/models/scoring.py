"""The part of a model that scores a prompt: its first layers, and queries and keys of some in the middle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.gguf.quants import check_decodable
from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.native import Library
from bough.kernels.norm_rope import head_rope, rms_norm, rope_angles
from bough.kernels.quant_matmul import Layout
from bough.models.decoder import Block, Decoder, rope_frequencies
from bough.models.measure import MeasuringLoader
from bough.models.native import NativeDecoder, NativeLoader, native_gap
from bough.models.spec import ModelSpec
from bough.models.step import Buffers, Step
from bough.models.weights import Progress, WeightLoader

ROWS = 16  # queries whose probabilities are held at once
# Architecture, width, layers: the layer that keeps most facts. docs/compression.md has the measurement.
MEASURED = {("qwen2", 896, 24): (11,), ("qwen2", 1536, 28): (12,)}


def scoring_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers whose attention scores: the measured one, else those of the middle third.

    Single layers have holes, and the first third scores hardly better than words do.
    """
    count = len(spec.layers)
    if known := MEASURED.get((spec.architecture, spec.width, count)):
        return known
    layers = enumerate(zip(spec.layers, spec.attention, strict=True))
    attention = [index for index, (kind, layer) in layers if kind == "attention" and layer.window is None]
    if not attention:
        raise UnsupportedModel(
            f"{spec.name} has no layer that attends to its whole context, so that it cannot score a prompt"
        )
    middle = tuple(index for index in attention if count <= 3 * index < 2 * count)
    return middle or (min(attention, key=lambda index: abs(2 * index - count)),)


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """What one scoring layer computes of some rows."""

    queries: Tensor | None  # [T, H, D], after norm and rope; None: not asked for
    keys: Tensor  # [T, KV, D]


class _ScoringLayer:
    """Queries and keys of an attention layer; its values, output and feed-forward layer are not needed."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int):
        block, width, dim = f"blk.{index}", spec.width, spec.head_dim
        self._spec, self._theta = spec, spec.attention[index].rope_theta
        self._norm = loader.vector(f"{block}.attn_norm.weight", width)
        query = spec.heads * dim * (2 if spec.family.gated_query else 1)
        self._query = loader.projections([f"{block}.attn_q.weight"], [query], width)
        self._key = loader.projections([f"{block}.attn_k.weight"], [spec.kv_heads * dim], width)
        self._norms: list[Tensor | None] = [None, None]
        if spec.family.query_key_norm:
            self._norms = [loader.vector(f"{block}.attn_{part}_norm.weight", dim) for part in "qk"]

    def __call__(
        self, x: Tensor, ropes: Mapping[float, tuple[Tensor, Tensor]], *, queries: bool
    ) -> LayerHeads:
        """Return the heads of the residual stream x [1, T, width] before the layer."""
        spec, (cos, sin) = self._spec, ropes[self._theta]
        x = rms_norm(x, self._norm, spec.eps)
        k = self._key(x)[0].unflatten(-1, (spec.kv_heads, spec.head_dim))
        keys = self._turned(k, self._norms[1], cos, sin)
        if not queries:
            return LayerHeads(None, keys)
        q = self._query(x)[0].unflatten(-1, (spec.heads, -1))[..., : spec.head_dim]
        return LayerHeads(self._turned(q, self._norms[0], cos, sin), keys)

    def _turned(self, part: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Return heads [T, heads, D] after norm and rope."""
        spec, part = self._spec, part.contiguous()
        return head_rope(part, norm, spec.eps, cos, sin, interleaved=spec.family.rope_interleaved)[0]


def load_scoring(
    file: GGUFFile,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[int] | None = None,
    native: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "Scoring":
    """Read the weights that are needed; `layers`: those that score, else as `scoring_layers` says.

    native: whether native code runs it on a CPU, where it can; threads: of that.
    """
    spec = ModelSpec.from_gguf(file)
    check_decodable(info.type for info in file.tensors.values())
    indices = layers or scoring_layers(spec)
    native = native and device.type == "cpu" and min(indices) > 0
    if native and native_gap(file, spec, (FORMATS["f32"],) * 2) is None:
        library = Library(threads or torch.get_num_threads())
        return NativeScoringDecoder(file, spec, library, indices, progress=progress)
    return ScoringDecoder(
        spec, WeightLoader(file, device=device, dtype=dtype, progress=progress), device, indices
    )


def unloaded_scoring(
    file: GGUFFile, device: torch.device, layers: Sequence[int] | None = None
) -> "ScoringDecoder":
    """Return the same on a GPU without weights, for a dry run that finds its kernels."""
    spec = ModelSpec.from_gguf(file)
    return ScoringDecoder(spec, MeasuringLoader(file, tiles=True), device, layers or scoring_layers(spec))


def _held(spec: ModelSpec, last: int) -> ModelSpec:
    """Return the layers of the buffers, which need at least one with attention for their pages."""
    return _cut(spec, last if "attention" in spec.layers[:last] else last + 1)


def _cut(spec: ModelSpec, count: int) -> ModelSpec:
    return replace(spec, layers=spec.layers[:count], attention=spec.attention[:count])


class NativeScoringDecoder:
    """The blocks below the last scoring layer in the native library, which layers of torch tap.

    `spec` is that of the sequence states: of the layers below the last scoring one.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        library: Library,
        layers: Sequence[int],
        *,
        progress: Progress | None = None,
    ):
        last = max(layers)
        self.spec, self.context_length = _held(spec, last), spec.context_length
        self.device, self.layouts = torch.device("cpu"), set[Layout]()
        self.layers = tuple(sorted(layers))
        # The head is not used: the embedding is there anyway.
        below = replace(_cut(spec, last), tied_head=True)
        self._below = NativeDecoder(below, NativeLoader(file, library, progress=progress))
        loader = WeightLoader(file, device=self.device)
        self._scoring = [_ScoringLayer(spec, loader, index) for index in self.layers]
        theta = spec.rope_theta  # of all layers: native code runs no others
        self._frequencies = {theta: rope_frequencies(spec, loader, theta=theta)}

    def heads(self, step: Step, buffers: Buffers, *, queries: bool = True) -> list[LayerHeads]:
        """Run a chunk through the blocks; return keys, and queries, of each scoring layer."""
        taps = [index - 1 for index in self.layers]
        features = self._below.forward(step, buffers, taps=taps).features
        ropes = {theta: rope_angles(step.positions, each) for theta, each in self._frequencies.items()}
        streams = features.split(self.spec.width, -1)
        layers = zip(self._scoring, streams, strict=True)
        return [layer(x, ropes, queries=queries) for layer, x in layers]


class ScoringDecoder(Decoder):
    """The blocks below the last scoring layer, without a head."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, device: torch.device, layers: Sequence[int]):
        last = max(layers)
        self.spec = _held(spec, last)
        self.context_length = spec.context_length
        self.device = device
        self.dtype = loader.dtype
        self.layouts = loader.layouts
        self.layers = tuple(sorted(layers))
        self.embed = loader.embedding("token_embd.weight", spec.vocab_size, spec.width)
        self._blocks = [Block(spec, loader, index) for index in range(last)]
        self._scoring = {index: _ScoringLayer(spec, loader, index) for index in self.layers}
        self._prepare(spec, loader)

    def heads(self, step: Step, buffers: Buffers, *, queries: bool = True) -> list[LayerHeads]:
        context = self._context(step, buffers)
        x, add = self._embedded(step), None
        masses = []
        for index, (block, layer) in enumerate(zip(self._blocks, buffers.layers, strict=False)):
            before, x, add = block(x, add, context, layer, fused=False)
            if index in self._scoring:
                masses.append(self._scoring[index](before, context.ropes, queries=queries))
        assert isinstance(add, Tensor), "no partial sums were asked for"
        buffers.pending.count.index_fill_(0, step.slots, 0)
        return [*masses, self._scoring[self.layers[-1]](x + add, context.ropes, queries=queries)]


Scoring = NativeScoringDecoder | ScoringDecoder


def attention_mass(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the attention [N] that N keys get from the rows of a text that follow them, mean of all rows.

    queries [T, H, D], keys [N + T, KV, D]: a row attends to all keys up to its own. Mean over heads, too.
    """
    rows, heads, dim = queries.shape
    kv = keys.shape[1]
    before = len(keys) - rows
    keys = keys.permute(1, 2, 0).float()  # [KV, D, N + T]
    grouped = queries.float().unflatten(1, (kv, heads // kv)) * dim**-0.5
    positions = torch.arange(len(keys[0, 0]), device=keys.device)
    total = torch.zeros(before, device=keys.device)
    for start in range(0, rows, ROWS):
        q = grouped[start : start + ROWS].permute(1, 2, 0, 3)  # [KV, G, R, D]
        logits = (q.flatten(1, 2) @ keys).unflatten(1, q.shape[1:3])  # [KV, G, R, N + T]
        rows_at = before + start + torch.arange(q.shape[2], device=keys.device)
        logits.masked_fill_(positions > rows_at[:, None], float("-inf"))
        # float32: over 128K keys a mass is some 1e-6.
        total += logits.softmax(-1)[..., :before].sum((0, 1, 2))
    return total / (rows * heads)
