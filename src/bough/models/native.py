"""The target model as the native CPU library runs it: packed weights, one call for each step.

`NativeDecoder` has the interface of `Decoder`, reads and writes the same buffers, and computes the same
function with activations rounded to 16 bits.
"""

import ctypes
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile, TensorInfo
from bough.gguf.rotation import rotation_of
from bough.gguf.types import QuantType
from bough.kernels import native
from bough.kernels.kv_cache.format import BLOCK, HeadPool, KVFormat
from bough.kernels.native import INT8, INT16, Library, PackedMatrix
from bough.kernels.native.library import (
    CACHE_FORMATS,
    MAX_ROWS,
    Cache,
    Layer,
    LayerState,
    Model,
    NativeMatrix,
    NativeStep,
)
from bough.kernels.quant_matmul import Layout
from bough.models.decoder import (
    EMBEDDING_TAP,
    Output,
    VerifyBuffers,
    check_taps,
    check_tensors,
    rope_frequencies,
)
from bough.models.draft_spec import DraftSpec
from bough.models.pooling import CLASSIFIER
from bough.models.spec import ModelSpec
from bough.models.step import AttentionBuffers, Buffers, Step
from bough.models.weights import Progress, TensorSource, WeightLoader

_CPU = torch.device("cpu")
_WIDEST_CONV = 8
_FLOATS = (QuantType.F16, QuantType.BF16, QuantType.F32)


def native_gap(
    file: TensorSource, spec: ModelSpec, kv: Sequence[KVFormat], window: int | None = None
) -> str | None:
    """Return why the native library cannot run this model with this cache, in words; None: it can."""
    if (reason := native.unavailable()) is not None:
        return reason
    if spec.experts is not None:
        return f"{spec.architecture} has experts"
    if spec.family.sliding:
        return f"{spec.architecture} has sliding layers"
    if window is not None:
        return "`window` is set"
    for format in kv:
        if format.name not in CACHE_FORMATS:
            return f"the KV cache is in {format.name}"
        if format.quantised and spec.head_dim % BLOCK:
            return f"a head size of {spec.head_dim} with a KV cache in {format.name}"
    sizes = {"width": spec.width, "feed-forward": spec.feed_forward, "head": spec.head_dim}
    if spec.delta is not None:
        sizes |= {"state": spec.delta.head_dim}
        if not 2 <= spec.delta.conv_width <= _WIDEST_CONV:
            return f"a convolution of {spec.delta.conv_width} tokens"
    for name, size in sizes.items():
        if size % 8:
            return f"a {name} size of {size}, needed a multiple of 8"
    return weights_gap(file, without=(CLASSIFIER,)) or _basis_gap(file, len(spec.layers))


def _basis_gap(file: TensorSource, layers: int) -> str | None:
    """Return which matrix a native step would misread: the quantised ones are rotated there, or none is."""
    if (rotated := rotation_of(file)) is None:
        return None
    for name, info in file.tensors.items():
        read = not name.startswith("blk.") or int(name.split(".")[1]) < layers
        if not read or not _is_matrix(name, info) or name in (CLASSIFIER, "token_embd.weight"):
            continue
        if (name in rotated.names) == (info.type in _FLOATS):
            return f"{name} in {info.type.name} is {'' if name in rotated.names else 'not '}rotated"
    return None


def weights_gap(file: TensorSource, *, without: Collection[str] = ()) -> str | None:
    """Return which matrix of a file the native matmul cannot take; None: it takes all."""
    for name, info in file.tensors.items():
        if _is_matrix(name, info) and name not in without:
            rows, columns = info.shape
            if not native.has_kind(info.type):
                return f"weights in {info.type.name}"
            if not native.packed_bytes(info.type, rows, columns):
                return f"{name} has rows of {columns} values"
    return None


def packed_model_bytes(file: TensorSource, spec: ModelSpec) -> int:
    """Return the bytes of a model's weights in the native library."""
    prediction = tuple(f"blk.{len(spec.layers) + i}." for i in range(spec.mtp_layers))
    return packed_tensors_bytes(
        {name: info for name, info in file.tensors.items() if not name.startswith(prediction)}
    )


def packed_tensors_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(
        native.packed_bytes(info.type, *info.shape) if _is_matrix(name, info) else 4 * info.elements
        for name, info in tensors.items()
    )


def _is_matrix(name: str, info: TensorInfo) -> bool:
    return len(info.shape) == 2 and name.endswith(".weight") and "conv1d" not in name


class NativeLoader(WeightLoader):
    """Loads tensors for the native library's structures, and holds what they point to."""

    def __init__(self, file: TensorSource, library: Library, *, progress: Progress | None = None):
        super().__init__(file, device=_CPU, expand=False, progress=progress)
        self.library = library
        self.held: list[Tensor | PackedMatrix] = []

    def packed_matrix(self, name: str, rows: int, columns: int) -> PackedMatrix:
        """Return a matrix, with the .bias of its .weight if the file has one."""
        type = self._file.require_tensor(name, (rows, columns)).type
        bias = name.removesuffix("weight") + "bias"
        values = self.vector(bias, rows) if self.has(bias) else None
        # Read once, from the mapped file: neither a copy of it nor its pages stay in memory.
        rotation = self._rotation(name)
        packed = self.library.pack(self._file.raw(name), type, (rows, columns), values, rotation)
        self._file.release(name)
        self._count(name)
        self.held.append(packed)
        return packed

    def address(self, tensor: Tensor) -> int:
        """Hold a tensor; return its address."""
        tensor = tensor.contiguous()
        self.held.append(tensor)
        return tensor.data_ptr()

    def layer(
        self, spec: ModelSpec | DraftSpec, block: str, inputs: Mapping[str, int], out: str, columns: int
    ) -> Layer:
        """Return a layer without its mixer's vectors; inputs: the rows of each matrix that reads x."""
        width, ffn = spec.width, spec.feed_forward

        def matrix(name: str, rows: int, columns: int) -> NativeMatrix:
            return self.packed_matrix(f"{block}.{name}.weight", rows, columns).struct

        ffn_norm = spec.family.feed_forward_norm if isinstance(spec, ModelSpec) else "ffn_norm"
        layer = Layer(inputs=len(inputs), norm=self.norm(block, "attn_norm", width))
        layer.ffn_norm = self.norm(block, ffn_norm, width)
        for place, (name, rows) in enumerate(inputs.items()):
            layer.in_[place] = matrix(name, rows, width)
        layer.out, layer.down = matrix(out, width, columns), matrix("ffn_down", width, ffn)
        layer.gate, layer.up = matrix("ffn_gate", ffn, width), matrix("ffn_up", ffn, width)
        return layer

    def attention(self, spec: ModelSpec | DraftSpec, block: str, *, queries: int = 1, norms: bool) -> Layer:
        """Return a layer with attention; `queries`: matrices for each head, with an output gate 2."""
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        inputs = {"attn_q": queries * query, "attn_k": kv, "attn_v": kv}
        layer = self.layer(spec, block, inputs, "attn_output", query)
        layer.attention = True
        if norms:
            layer.q_norm = self.norm(block, "attn_q_norm", spec.head_dim)
            layer.k_norm = self.norm(block, "attn_k_norm", spec.head_dim)
        return layer

    def model(
        self, spec: ModelSpec | DraftSpec, layers: "ctypes.Array[Layer]", frequencies: Tensor, **rest: Any
    ) -> Model:
        """Return what native code reads of a model; `rest`: where targets and drafts differ."""
        sizes = {"width": spec.width, "ffn": spec.feed_forward, "heads": spec.heads}
        sizes |= {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "layers": len(layers)}
        norm = self.address(self.vector("output_norm.weight", spec.width))
        pointers = {"frequencies": self.address(frequencies), "norm": norm, "layer": layers}
        return Model(**sizes, **pointers, eps=spec.eps, **rest)

    def norm(self, block: str, name: str, size: int) -> int:
        return self.address(self.vector(f"{block}.{name}.weight", size))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's rows of all slots, flat and contiguous, and where their results go."""

    tokens: Tensor
    parents: Tensor | None  # None: a chunk
    features: Tensor  # of each slot without its first `skipped` rows
    hidden: Tensor | None
    logits: Tensor | None
    skipped: int
    embedded: Tensor | None = None  # [rows, width] of a chunk with images,
    rope: Tensor | None = None  # and [rows, 3] its positions


class NativeDecoder:
    """A model of a supported family in the native library."""

    def __init__(self, spec: ModelSpec, loader: NativeLoader, *, mode: int = INT16):
        self.spec, self.device, self.dtype = spec, _CPU, torch.float32
        self.layouts: set[Layout] = set()
        self.library, self._mode = loader.library, mode
        self._held = loader.held
        head = "token_embd.weight" if spec.tied_head else "output.weight"
        self._head = loader.packed_matrix(head, spec.vocab_size, spec.width)
        self._embedding = self._head
        if not spec.tied_head:
            self._embedding = loader.packed_matrix("token_embd.weight", spec.vocab_size, spec.width)
        self._layers = (Layer * len(spec.layers))(*(self._layer(loader, i) for i in range(len(spec.layers))))
        self._frequencies = rope_frequencies(spec, loader, theta=spec.rope_theta)
        self._axes = torch.tensor(spec.rope_axes)
        self._model = self._described(loader)
        self._scratch = torch.empty(
            self.library.c.tf_step_scratch(self._model, self.library.threads), dtype=torch.uint8
        )
        self._scores, self._span = torch.empty(0), 0  # and the tokens that they are enough for
        self._bound: Buffers | None = None
        # Of the bound buffers, by slot.
        self._calls: dict[int, tuple[ctypes.Array[LayerState], NativeStep]] = {}
        self._taps: dict[tuple[int, ...], ctypes.Array[ctypes.c_int32]] = {}

    @classmethod
    def load(
        cls, file: GGUFFile, library: Library, *, mode: int = INT16, progress: Progress | None = None
    ) -> "NativeDecoder":
        """Read and pack all weights; `native_gap` has found nothing missing.

        mode: what activations are rounded to; with INT8 the text may differ from the reference's.
        """
        spec = ModelSpec.from_gguf(file)
        plan = check_tensors(file, spec)
        loader = NativeLoader(file, library, progress=progress)
        decoder = cls(spec, loader, mode=mode)
        if ignored := set(plan.names) - set(loader.names):
            raise UnsupportedModel(
                f"{file.path}: the native CPU backend does not read tensor {min(ignored)}",
                "the torch backend does",
            )
        return decoder

    @property
    def threads(self) -> int:
        return self.library.threads

    @property
    def approximate(self) -> tuple[str, ...]:
        return ("activations in int8",) if self._mode == INT8 else ()

    @property
    def packed_bytes(self) -> int:
        return sum(part.nbytes for part in self._held) - self._frequencies.nbytes

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., width] of tokens [...]."""
        return self.library.embed(self._embedding, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of hidden [..., width]."""
        return self.library.matmul(self._head, hidden, mode=self._mode)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the same for a draft, whose numbers never reach the text: activations have 8 bits."""
        return self.library.matmul(self._head, hidden, mode=INT8)

    def head_rows(self, tokens: Tensor) -> Tensor:
        return self.library.embed(self._head, tokens)

    def forward(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), tapped: int | None = None
    ) -> Output:
        hidden = torch.empty(*step.tokens.shape, self.spec.width)
        return Output(hidden, self._run(step, buffers, taps, tapped, hidden=hidden))

    def forward_by_layers(
        self, step: Step, buffers: Callable[[], Buffers], taps: Sequence[int], tapped: int | None
    ) -> Generator[None, None, Output]:
        """See Decoder.forward_by_layers; without pauses: the native library runs all layers."""
        yield from ()
        return self.forward(step, buffers(), taps=taps, tapped=tapped)

    def verify(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), into: VerifyBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Decoder.verify; never into static buffers: there are no graphs on a CPU."""
        logits = torch.empty(*step.tokens.shape, self.spec.vocab_size)
        return self._run(step, buffers, taps, None, logits=logits), logits

    def _run(
        self,
        step: Step,
        buffers: Buffers,
        taps: Sequence[int],
        tapped: int | None,
        *,
        hidden: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Run a step, slot by slot; return features [B, n, taps * width] of each slot's last rows."""
        count = step.rows
        assert buffers.window is None and (step.is_chunk or count <= MAX_ROWS)
        skipped = 0 if tapped is None else max(0, count - tapped)
        slots = step.slots.tolist()
        features = torch.empty(step.tokens.shape[0], count - skipped, len(taps) * self.spec.width)
        parents = None if step.parents is None else step.parents.contiguous()
        rows = _Rows(
            step.tokens.contiguous(), parents, features, hidden, logits, skipped, *self._images(step)
        )
        assert step.first is None or not skipped
        bounds = range(0, (len(slots) + 1) * count, count) if step.first is None else step.first.tolist()
        for slot, (begin, end) in zip(slots, pairwise(bounds), strict=True):
            if end > begin:
                saved = begin - begin // count * skipped
                self._run_slot(slot, rows, range(begin, end), saved, buffers, self._wanted(tuple(taps)))
        if EMBEDDING_TAP in taps:
            place = taps.index(EMBEDDING_TAP) * self.spec.width
            embedded = self.embed(step.tokens) if rows.embedded is None else rows.embedded[None]
            features[..., place : place + self.spec.width] = embedded[:, skipped:]
        return features

    def _images(self, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """Return what enters the first layer [T, width] and positions [T, 3] of a chunk with images."""
        if (images := step.images) is None:
            return None, None
        rows = self.embed(step.tokens[0]).index_copy(0, images.rows, images.embeddings.float())
        return rows.contiguous(), images.positions.T.contiguous()

    def _run_slot(
        self,
        slot: int,
        rows: _Rows,
        span: range,
        saved: int,
        buffers: Buffers,
        taps: "ctypes.Array[ctypes.c_int32]",
    ) -> None:
        """Run the rows `own` of one slot, whose features begin at row `kept`."""
        total, counts = len(span), buffers.pending.count.numpy()
        length, pending = int(buffers.lengths.numpy()[slot]), int(counts[slot])
        states, call = self._slot(buffers, slot)
        self._reserve_scores(length + total)
        call.chunk, call.offset = rows.parents is None, int(buffers.offsets.numpy()[slot])
        call.parents = None if rows.parents is None else rows.parents.data_ptr() + 8 * span.start
        call.tap = ctypes.addressof(taps)
        # A chunk is cut into pieces, which makes no difference to a row.
        for start in range(0, total, MAX_ROWS):
            call.rows = min(MAX_ROWS, total - start)
            call.length = length + start
            call.pending = pending if start == 0 else 0
            call.tokens = rows.tokens.data_ptr() + 8 * (span.start + start)
            call.rope = None if rows.rope is None else rows.rope[start:].data_ptr()
            call.embedded = None if rows.embedded is None else rows.embedded[start:].data_ptr()
            call.skipped = min(max(0, rows.skipped - start), call.rows)
            call.taps = len(taps) if call.skipped < call.rows else 0
            call.features = _address(rows.features, saved + max(0, start - rows.skipped))
            call.hidden = None if rows.hidden is None else _address(rows.hidden, span.start + start)
            call.logits = None if rows.logits is None else _address(rows.logits, span.start + start)
            wrong = self.library.c.tf_step(
                self.library.pool,
                self._model,
                states,
                call,
                self._scratch.data_ptr(),
                self._scores.data_ptr(),
            )
            assert not wrong, f"native step refused with code {wrong}: {call.rows} rows at {call.length}"
        counts[slot] = 0  # every delta layer has advanced over its path

    def _wanted(self, taps: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int32]":
        if taps not in self._taps:
            check_taps(self.spec, taps)
            self._taps[taps] = (ctypes.c_int32 * len(taps))(*taps)
        return self._taps[taps]

    def _reserve_scores(self, span: int) -> None:
        if self._span < span:
            self._span = 2 * span
            self._scores = torch.empty(self.library.c.tf_step_scores(self.library.threads, self._span))

    def _slot(self, buffers: Buffers, slot: int) -> "tuple[ctypes.Array[LayerState], NativeStep]":
        """Return pointers to a slot's buffers, and a call with those that stay: made once for `buffers`."""
        if buffers is not self._bound:
            self._bound, self._calls = buffers, {}
        if slot not in self._calls:
            pools = [layer.keys for layer in buffers.layers if isinstance(layer, AttentionBuffers)]
            table, path = buffers.page_table, buffers.pending.path
            call = NativeStep(
                page=pools[0].page if pools else 64,
                pages=pools[0].codes.shape[0] if pools else table.numel(),
                table=table.shape[1],
                saved=path.shape[1],
                page_table=table.data_ptr() + 8 * slot * table.stride(0),
                path=path.data_ptr() + 8 * slot * path.stride(0),
            )
            states = [_layer_state(layer, slot) for layer in buffers.layers]
            self._calls[slot] = (LayerState * len(states))(*states), call
        return self._calls[slot]

    def _layer(self, loader: NativeLoader, index: int) -> Layer:
        spec, block = self.spec, f"blk.{index}"
        if spec.layers[index] != "attention":
            return self._delta(loader, block)
        family = spec.family
        return loader.attention(spec, block, queries=1 + family.gated_query, norms=family.query_key_norm)

    def _delta(self, loader: NativeLoader, block: str) -> Layer:
        delta = self.spec.delta
        assert delta is not None
        heads = delta.value_heads
        inputs = {"attn_qkv": delta.channels, "attn_gate": delta.inner, "ssm_beta": heads, "ssm_alpha": heads}
        layer = loader.layer(self.spec, block, inputs, "ssm_out", delta.inner)
        conv = loader.vector(f"{block}.ssm_conv1d.weight", delta.channels, delta.conv_width)
        layer.conv = loader.address(conv.T)
        layer.decay = loader.address(loader.vector(f"{block}.ssm_a", heads))
        layer.time_bias = loader.address(loader.vector(f"{block}.ssm_dt.bias", heads))
        layer.state_norm = loader.norm(block, "ssm_norm", delta.head_dim)
        return layer

    def _described(self, loader: NativeLoader) -> Model:
        spec, sizes = self.spec, dict[str, int]()
        if (delta := spec.delta) is not None:
            sizes = {"key_heads": delta.key_heads, "value_heads": delta.value_heads}
            sizes |= {"state_dim": delta.head_dim, "conv_width": delta.conv_width}
        return loader.model(
            *(spec, self._layers, self._frequencies),
            rope_dim=spec.rope_dim,
            interleaved=spec.family.rope_interleaved,
            gated=spec.family.gated_query,
            mode=self._mode,
            axes=self._axes.data_ptr(),
            embedding=self._embedding.struct,
            head=self._head.struct,
            **sizes,
        )


def _address(x: Tensor, row: int) -> int:
    """Return the address of a row of x [B, T, n], contiguous float32; rows are counted over all T."""
    return x.data_ptr() + 4 * row * x.shape[2]


def _layer_state(layer, slot: int) -> LayerState:
    if isinstance(layer, AttentionBuffers):
        return LayerState(k=_cache(layer.keys), v=_cache(layer.values))
    for tensor in (layer.state, layer.window, layer.tree_inputs, layer.tree_gates):
        assert tensor.dtype == torch.float32 and tensor[slot].is_contiguous(), f"{tensor.dtype}"
    return LayerState(
        state=layer.state[slot].data_ptr(),
        window=layer.window[slot].data_ptr(),
        inputs=layer.tree_inputs[slot].data_ptr(),
        gates=layer.tree_gates[slot].data_ptr(),
    )


def _cache(pool: HeadPool) -> Cache:
    cache = Cache(*_plane(pool.codes), format=CACHE_FORMATS[pool.format.name])
    assert pool.codes.shape[-1] == pool.dim and pool.page % 16 == 0, f"{pool.codes.shape}"
    if pool.scales is not None:
        cache.scales, cache.scales_page, cache.scales_head = _plane(pool.scales)
    return cache


def _plane(plane: Tensor) -> tuple[int, int, int]:
    """Return the address of [pages, heads, tokens, row], and the bytes from page to page and head to head."""
    assert plane.stride(3) == 1 and plane.stride(2) == plane.shape[3], f"{plane.stride()}"
    return plane.data_ptr(), plane.stride(0) * plane.itemsize, plane.stride(1) * plane.itemsize
