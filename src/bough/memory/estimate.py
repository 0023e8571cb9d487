"""MemoryEstimate: the bytes a model needs on a device, part by part, before anything is allocated.

Weights, states, draft KV rings and sampling buffers are exact: the code that allocates them later runs here
on the meta device. Workspaces are upper bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bough.config import DraftConfig, EngineConfig
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.attention.records import SPLITS
from bough.kernels.quant_matmul import BUCKETS
from bough.kernels.sampling import make_workspace
from bough.kernels.sampling.state import SamplingState
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import KVFormats
from bough.models.decoder import Decoder
from bough.models.dflash import PIECE, DFlashDraft, open_draft
from bough.models.measure import META, MeasuringLoader, held_bytes
from bough.models.mtp import MTPBlock
from bough.models.native import native_gap, packed_model_bytes, packed_tensors_bytes
from bough.models.native_draft import draft_gap, packed_draft_bytes
from bough.models.newest import NewestHidden
from bough.models.small import is_small_model, open_small_model
from bough.models.spec import ModelSpec, has_mtp
from bough.models.step import SIZES, largest_padded
from bough.models.vision_spec import REMEMBERED, VisionSpec, tower_bytes, workspace_bytes
from bough.models.weaver import WeaverHead
from bough.models.weaver_spec import WeaverFile
from bough.models.weights import TensorSource
from bough.spec.mtp import BEAMS, STEPS
from bough.spec.small_model import SMALL_BEAMS, SMALL_KV, SMALL_PIECE, SMALL_ROWS, small_states
from bough.spec.weaver import CANDIDATES, WIDTH
from bough.state.draft_ring import draft_buffers, mtp_buffers
from bough.state.sequences import PAGE, SequenceStates

DeviceType = Literal["cpu", "cuda"]

# Names of parts are keys in the JSON output of `bough show`.
EMBEDDING = "token embedding"  # may be in host memory instead
KV_CACHE = "keys and values"
PARTIAL_SUMS = "products"
ENCODER = "image encoder"

_ENTRY = 8  # bytes of a page table's entry
_SPLIT_K_BLOCKS = 2 * 148  # thread blocks of a split-K matmul: two on each SM of the largest card
_SPLIT_K_BYTES = 4 * _SPLIT_K_BLOCKS * 128 * 64 * 4  # partial sums of four launches
_MIN_CHUNK = 512  # tokens; prefill chunks are halved down to this where memory is short
_DRAFT_QUANTS = {"q8_0": QuantType.Q8_0, "q4_k": QuantType.Q4_K, "none": None}
_CPU = torch.device("cpu")
CPU_CHUNK = 512  # a larger chunk is no faster on a CPU, and reports progress less often
# Tokens of a chunk on a GPU. Weights are dequantised once a chunk: 19 ms for a 27B on an H200, of 420.
GPU_CHUNK = 4096
EXPANDED_WEIGHTS = 1 << 26  # float16 values dequantised at a time for matmuls of many rows
EXPANDED_PAGES = 64 << 20  # bytes of KV pages gathered at a time


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of everything but the KV cache, by part."""

    spec: ModelSpec
    parts: Mapping[str, int]
    prefill: Mapping[int, int]  # workspace by chunk size, the preferred size first
    rows: int  # of a sequence's tree; they need KV slots after the context
    expanded: bool  # weights are used as stored in memory; else each use dequantises them
    widened: Mapping[str, int]  # extra bytes of the quant types that a GPU stores as float16
    native: bool = False  # the native CPU library runs the model
    native_gap: str = ""  # why it does not, although it is asked for
    sequences: int = 1  # that run at once
    routed: int = 0  # bytes of all routed experts
    # Of those in host memory: bytes, and how many of a layer's have a place among the weights. None: all are.
    host_experts: int = 0
    expert_slots: int | None = None

    @property
    def dense(self) -> int:
        """Return the bytes of the weights that every step reads: all but those of routed experts."""
        experts = self.spec.experts
        elsewhere = 0
        if experts is not None and self.expert_slots is not None:
            elsewhere = self.host_experts * (experts.count - self.expert_slots) // experts.count
        return self.parts["weights"] + elsewhere - self.routed

    def unread(self, rows: int) -> float:
        """Return the share of experts that a step of `rows` rows does not use, if they choose at random."""
        experts = self.spec.experts
        return 0.0 if experts is None else (1 - experts.used / experts.count) ** rows

    def read_bytes(self, rows: int) -> int:
        """Return the bytes of weights that a step of `rows` rows reads, if rows choose experts at random."""
        return self.dense + round(self.routed * (1 - self.unread(rows)))

    def missed_bytes(self, rows: int) -> int:
        """Return the bytes of experts that such a step copies, if those that have a place are like others."""
        experts = self.spec.experts
        if experts is None or self.expert_slots is None:
            return 0
        return round(self.host_experts * (1 - self.unread(rows)) * (1 - self.expert_slots / experts.count))

    def without_kv(self, *, host_embedding: bool = False) -> int:
        return sum(self.parts.values()) - (self.parts[EMBEDDING] if host_embedding else 0)

    def page_bytes(self, formats: KVFormats) -> int:
        return PAGE * kv_bytes_per_token(self.spec, formats)

    def pool_pages(self, tokens: int) -> int:
        """Return the pages of `tokens` tokens and a tree's rows after them, a page more for each sequence."""
        return -(-(tokens + self.rows) // PAGE) + self.sequences - 1

    def kv_bytes(self, formats: KVFormats, context: int, tokens: int = 0) -> int:
        """Return the bytes of a pool for `tokens` tokens, at least one context, and of the page tables."""
        pages = self.pool_pages(max(context, tokens)) + 1  # for the rows that pad a step
        return pages * self.page_bytes(formats) + self._table_bytes(context)

    def max_context(self, formats: KVFormats, free: int) -> int:
        """Return the longest context whose KV cache fits in `free` bytes, up to the model's."""
        page = self.page_bytes(formats)
        pages = (free - self.sequences * page) // (page + _ENTRY * self.sequences)
        return min(self.spec.context_length, max(0, pages * PAGE - self.rows))

    def max_tokens(self, formats: KVFormats, context: int, free: int) -> int:
        """Return how many tokens of all sequences fit in `free` bytes, each of at most `context`."""
        pages = (free - self._table_bytes(context)) // self.page_bytes(formats) - self.sequences
        return max(0, min(pages * PAGE - self.rows, self.sequences * context))

    def _table_bytes(self, context: int) -> int:
        return _ENTRY * self.sequences * -(-(context + self.rows) // PAGE)


def kv_bytes_per_token(spec: ModelSpec, formats: KVFormats) -> int:
    return spec.kv_bytes_per_token(*(format.row_bytes(spec.head_dim) for format in formats))


def compute_dtype(device_type: str) -> torch.dtype:
    """Return bfloat16 for GPUs, which have it since Ampere; its matmuls are slow or missing on many CPUs."""
    return torch.bfloat16 if device_type == "cuda" else torch.float32


def ring_dtype(device_type: str) -> torch.dtype:
    return torch.float16 if device_type == "cuda" else torch.float32


def draft_quant(draft: DraftConfig, device_type: str, *, native: bool = False) -> QuantType | None:
    """Return the type a draft is quantised to while loading."""
    if draft.quant == "auto":
        return QuantType.Q8_0 if device_type == "cuda" or native else None
    return _DRAFT_QUANTS[draft.quant]


def estimate_memory(
    file: GGUFFile,
    spec: ModelSpec,
    config: EngineConfig,
    device_type: DeviceType,
    *,
    context: int,
    expand: bool = True,
    native: bool = False,
) -> MemoryEstimate:
    """Estimate a model and its draft on a device.

    `expand`: a CPU dequantises the weights at load; a GPU always stores them in tiles. `native`: the native
    library has them packed.
    """
    place = _Place(device_type, context, config.parallel or 1, expand, native)
    on_gpu, sequences = place.tiles, place.slots
    slots = spec.experts.count - config.experts_host if spec.experts and config.experts_host else None
    loader = place.loader(file, expert_slots=slots)
    target = Decoder(spec, loader, _CPU)
    if config.draft is not None and config.draft.shortlist is not None:
        target.limit_drafts(config.draft.shortlist)
    parts = _packed_bytes(file, spec) if native else _weight_bytes(target, loader.host_bytes)
    draft = _draft_need(file, spec, config, place)
    parts |= draft.parts
    item, encoding = place.dtype.itemsize, 0
    if config.mmproj is not None:
        with GGUFFile.open(config.mmproj) as encoder:
            shape = VisionSpec.from_gguf(encoder)
            parts |= {ENCODER: tower_bytes(encoder, item), "image rows": REMEMBERED * shape.out * item}
            encoding = workspace_bytes(shape, config.image_tokens, item)
    rows = config.max_rows if not on_gpu else largest_padded(config.max_rows)
    parts |= _state_bytes(spec, rows, sequences, target.dtype)
    if on_gpu:
        parts |= {
            "sampling": held_bytes(
                SamplingState.empty(MAX_ROWS, spec.vocab_size, META, slots=sequences),
                make_workspace(MAX_ROWS, spec.vocab_size, META),
            ),
            "steps": _step_bytes(spec, rows if sequences == 1 else MAX_ROWS, draft, sequences),
            PARTIAL_SUMS: _SPLIT_K_BYTES,
        }
    widened = {type.name: size for type, size in loader.widened.items()}
    prefill = {
        # An image is encoded before the first layer of its chunk.
        chunk: max(
            encoding, draft.prefill, prefill_bytes(spec, chunk, draft.taps, int8=config.prefill == "int8")
        )
        if on_gpu
        else encoding
        for chunk in _chunk_sizes(config, device_type)
    }
    expanded, routed = on_gpu or native or expand, held_bytes(target.routed)
    if spec.experts is not None and slots is not None:
        routed -= loader.host_bytes * slots // spec.experts.count  # in host memory all of them are
    more: dict[str, Any] = {"sequences": sequences, "routed": routed}
    more |= {"host_experts": loader.host_bytes, "expert_slots": slots}
    return MemoryEstimate(spec, parts, prefill, rows, expanded, widened, native, **more)


def _weight_bytes(target: Decoder, on_host: int) -> dict[str, int]:
    embedding = held_bytes(target.embed)
    return {"weights": held_bytes(target) - embedding - on_host, EMBEDDING: embedding}


def _packed_bytes(file: GGUFFile, spec: ModelSpec) -> dict[str, int]:
    """Return the same in the native library, which has a tied embedding once, as the head."""
    name = "token_embd.weight"
    embedding = 0 if spec.tied_head else packed_tensors_bytes({name: file.tensors[name]})
    return {"weights": packed_model_bytes(file, spec) - embedding, EMBEDDING: embedding}


def uses_mtp(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> bool:
    """Return whether the MTP block of the target's file proposes tokens."""
    speculation = config.speculation
    if speculation is None or speculation.mtp == "off" or not has_mtp(file, spec):
        return False
    return speculation.mtp == "on" or config.draft is None


@dataclass(frozen=True, slots=True)
class _DraftNeed:
    """What a draft adds to a target's memory."""

    parts: Mapping[str, int]
    taps: int = 0
    values: int = 0  # of a captured draft call, each of 4 bytes
    prefill: int = 0  # bytes of the workspace in which it reads a text by itself

    def __add__(self, other: "_DraftNeed") -> "_DraftNeed":
        names = {**self.parts, **other.parts}
        parts = {name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in names}
        prefill = max(self.prefill, other.prefill)
        return _DraftNeed(parts, self.taps + other.taps, self.values + other.values, prefill)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a draft is: its device, and the texts that it holds beside the target."""

    device_type: DeviceType
    max_ctx: int
    slots: int
    expand: bool
    native: bool

    @property
    def tiles(self) -> bool:
        return self.device_type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.device_type)

    @property
    def rings(self) -> dict[str, Any]:
        dtype = ring_dtype(self.device_type)
        return {"max_ctx": self.max_ctx, "slots": self.slots, "device": META, "dtype": dtype}

    def loader(self, source: TensorSource, **options: Any) -> MeasuringLoader:
        return MeasuringLoader(source, tiles=self.tiles, dtype=self.dtype, expand=self.expand, **options)


def _draft_need(file: GGUFFile, spec: ModelSpec, config: EngineConfig, place: _Place) -> _DraftNeed:
    need = _DraftNeed({})
    if uses_mtp(config, file, spec):
        need += _mtp_need(file, spec, place)
    if config.speculation is not None and config.draft is not None:
        if is_small_model(config.draft.path):
            return need + _small_need(file, config.draft, place)
        need += _block_draft_need(spec, config.draft, place)
    return need


def _mtp_need(file: GGUFFile, spec: ModelSpec, place: _Place) -> _DraftNeed:
    block, buffers = MTPBlock(spec, place.loader(file), _CPU), mtp_buffers(spec, **place.rings)
    values = 2 * BEAMS * spec.vocab_size
    if place.tiles:
        values += BEAMS * _attention_values(STEPS, spec.heads, spec.kv_heads, spec.head_dim)
    held = {"draft": held_bytes(block), "draft context": held_bytes(buffers)}
    return _DraftNeed(held, len(block.taps), values)


def _small_need(target: GGUFFile, draft: DraftConfig, place: _Place) -> _DraftNeed:
    """Return the need of a small model: its weights, the KV cache of one text, and its states."""
    with open_small_model(draft.path, target) as (file, spec):
        if place.native and native_gap(file, spec, SMALL_KV) is None:
            weights = packed_model_bytes(file, spec)
        else:
            weights = held_bytes(Decoder(spec, place.loader(file), _CPU))
    options = {"max_ctx": place.max_ctx, "texts": place.slots, "dtype": place.dtype}
    states = small_states(spec, draft, **options, device=META if place.tiles else _CPU)
    kv = 0 if place.tiles else states.max_ctx * kv_bytes_per_token(spec, SMALL_KV)  # of one text, as it grows
    state = kv + held_bytes(states.buffers) + 4 * len(states.lengths) * spec.width
    values = 2 * SMALL_BEAMS * spec.vocab_size + _forward_values(spec, SMALL_ROWS) if place.tiles else 0
    prefill = prefill_bytes(spec, SMALL_PIECE) if place.tiles else 0
    return _DraftNeed({"draft": weights, "draft context": state}, values=values, prefill=prefill)


def _block_draft_need(spec: ModelSpec, draft: DraftConfig, place: _Place) -> _DraftNeed:
    quant = draft_quant(draft, place.device_type, native=place.native)
    with open_draft(draft.path, spec, quant=quant, causal=draft.causal) as (shape, source):
        weights = held_bytes(DFlashDraft(shape, place.loader(source), _CPU, spec.vocab_size))
        if place.native and draft_gap(source, shape) is None:
            weights = packed_draft_bytes(source)
    state = held_bytes(draft_buffers(shape, context=draft.context, **place.rings))
    values = 2 * shape.block_size * spec.vocab_size
    taps = len(shape.taps)
    if draft.head is not None:
        head = WeaverFile(draft.head, quant=draft_quant(draft, place.device_type))
        head.spec.check(spec, shape)
        weights += held_bytes(WeaverHead(head.spec, place.loader(head), _CPU))
        state += held_bytes(NewestHidden.empty(place.slots, spec.width, META))
        # Rows of the target's head for the candidates of one call's nodes, and what the head itself computes.
        values += WIDTH * (2 * CANDIDATES * spec.width + 8 * shape.depth * head.spec.width)
        taps += 1
    held = {"draft": weights, "draft context": state}
    if (refine := shape.refine) is not None:
        rows = shape.depth * (refine.candidates + 1)
        values += rows * (2 * refine.inner + 6 * shape.width) + (EXPANDED_WEIGHTS // 2 if place.tiles else 0)
    if place.tiles:
        values += _attention_values(shape.block_size, shape.heads, shape.kv_heads, shape.head_dim)
    return _DraftNeed(held, taps, values)


def _chunk_sizes(config: EngineConfig, device_type: DeviceType) -> list[int]:
    """Return the prefill chunk sizes to consider, the preferred one first."""
    if config.prefill_chunk:
        return [config.prefill_chunk]
    preferred = chunk_size(device_type)
    if device_type == "cpu":
        return [preferred]
    return [size for size in (preferred >> n for n in range(4)) if size >= _MIN_CHUNK]


def _state_bytes(spec: ModelSpec, rows: int, sequences: int, input_dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of the sequences' states without their KV cache: an empty pool has no pages."""
    states = SequenceStates(
        spec, max_ctx=1, slots=sequences, max_rows=rows, device=META, input_dtype=input_dtype
    )
    buffers, whole = states.buffers, states.recurrent
    return {
        "recurrent states": held_bytes(whole.state, whole.window) if whole else 0,
        "tree rows": held_bytes(
            (whole.tree_inputs, whole.tree_gates) if whole else (),
            buffers.pending,
            buffers.lengths,
            buffers.offsets,
        ),
    }


def _step_bytes(spec: ModelSpec, rows: int, draft: _DraftNeed, sequences: int) -> int:
    """Return the bytes of captured steps: each size has its own logits and features and shares the rest."""
    outputs = sum(size for size in SIZES if size <= rows) * (spec.vocab_size + draft.taps * spec.width)
    return 4 * (outputs + max(_forward_values(spec, rows), sequences * draft.values))


def _forward_values(spec: ModelSpec, rows: int) -> int:
    """Return how many values a forward pass over trees has at a time, without what it returns."""
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    channels = spec.delta.channels + spec.delta.inner if spec.delta else 0
    heads = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
    padded = max(rows, BUCKETS[0])  # as the matmul kernels pad them
    activations = padded * (8 * spec.width + 4 * inner + 3 * max(channels, heads) + 2 * _SPLIT_K_BLOCKS * 128)
    activations += rows * _expert_bytes(spec) // 4
    return activations + _attention_values(rows, spec.heads, spec.kv_heads, spec.head_dim)


def _expert_bytes(spec: ModelSpec) -> int:
    """Return the bytes that a row's routed experts add: logits, pairs and chunks, gate, up, outputs."""
    if spec.experts is None:
        return 0
    experts, padded = spec.experts, -(-spec.experts.width // 256) * 256
    pair = 4 * 2 * experts.width + 2 * padded + 4 * spec.width
    return 4 * (experts.count + 1) + experts.used * (pair + 4 * 7)


def _attention_values(rows: int, heads: int, kv_heads: int, dim: int) -> int:
    """Return how many values the splits of tree attention write for the merge, rows padded to 64."""
    padded = -(-rows * heads // kv_heads // 64) * 64
    return (SPLITS + 2) * kv_heads * padded * (dim + 2)


def chunk_size(device_type: str) -> int:
    return GPU_CHUNK if device_type == "cuda" else CPU_CHUNK


def prefill_bytes(spec: ModelSpec, chunk: int, taps: int = 0, *, int8: bool = False) -> int:
    """Return the peak workspace of a chunk on a GPU; `taps`: layers whose outputs the draft reads."""
    width = spec.width

    # The residual stream, the outputs of this layer's halves and of the layer before, a packed matmul input.
    stream = 6 * 4 * width + 2 * width
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    stages = [4 * 2 * inner + 2 * inner + 4 * width]
    stages[0] += _expert_bytes(spec)  # the shared expert's output waits for theirs
    query = spec.heads * spec.head_dim * (2 if spec.gated else 1)
    qkv = query + 2 * spec.kv_heads * spec.head_dim
    heads = 4 * spec.heads * spec.head_dim
    # Queries, those scaled in 16 bits, and the output.
    stages += [4 * qkv + 2 * heads + heads // 2, 4 * qkv + heads + heads // 2 + 4 * width]
    if spec.delta is not None:
        delta = spec.delta
        joined = delta.channels + delta.inner + 2 * delta.value_heads
        # q, k, the erase factor of the WY form and the attention within 64 tokens in 16 bits; v, which the
        # outputs overwrite.
        run = 2 * (delta.channels - delta.inner) + 6 * delta.inner + 2 * 64 * delta.value_heads
        stages += [4 * joined + run, 4 * joined + 6 * delta.inner + 4 * width]
    features = 4 * taps * width
    constant = 2 * EXPANDED_WEIGHTS + EXPANDED_PAGES + min(chunk, PIECE) * (2 * taps + 12) * width
    if int8:
        # The rows of a matmul in int8; the slice of its matrix takes what one in float16 does, and scales.
        deltas = spec.delta.inner if spec.delta else 0
        columns = max(width, inner, spec.heads * spec.head_dim, deltas) + 255
        stream += columns * 33 // 32
        constant += EXPANDED_WEIGHTS // 16 + 2 * 256 * columns * 33 // 32
    return chunk * (stream + max(stages) + features) + constant
