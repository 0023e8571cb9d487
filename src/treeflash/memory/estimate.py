"""MemoryEstimate: the bytes a model needs on a device, part by part, before anything is allocated.

Weights, states, draft KV rings and sampling buffers are exact: the code that allocates them later runs here
on the meta device. Workspaces are upper bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from treeflash.config import DraftConfig, EngineConfig
from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.kernels.attention.reference import SPLITS
from treeflash.kernels.quant_matmul import BUCKETS
from treeflash.kernels.sampling import make_workspace
from treeflash.kernels.sampling.state import SamplingState
from treeflash.kernels.tree import MAX_ROWS
from treeflash.memory.device import KVFormats
from treeflash.models.decoder import Decoder
from treeflash.models.dflash import PIECE, DFlashDraft, open_draft
from treeflash.models.draft_spec import DraftSpec
from treeflash.models.measure import META, MeasuringLoader, held_bytes
from treeflash.models.native import packed_model_bytes, packed_tensors_bytes
from treeflash.models.native_draft import draft_gap, packed_draft_bytes
from treeflash.models.spec import ModelSpec
from treeflash.models.step import SIZES, DeltaBuffers, padded_rows
from treeflash.state.draft_ring import draft_buffers
from treeflash.state.sequences import PAGE, SequenceStates

DeviceType = Literal["cpu", "cuda"]

# Names of parts are keys in the JSON output of `treeflash show`.
EMBEDDING = "token embedding"  # may be in host memory instead
KV_CACHE = "keys and values"
PARTIAL_SUMS = "products"

_SPLIT_K_BLOCKS = 2 * 148  # thread blocks of a split-K matmul: two on each SM of the largest card
_SPLIT_K_BYTES = 4 * _SPLIT_K_BLOCKS * 128 * 64 * 4  # partial sums of four launches
_MIN_CHUNK = 512  # tokens; prefill chunks are halved down to this where memory is short
_DRAFT_QUANTS = {"q8_0": QuantType.Q8_0, "q4_k": QuantType.Q4_K, "none": None}
_CPU = torch.device("cpu")
CPU_CHUNK = 512  # a larger chunk is no faster on a CPU, and reports progress less often
# Bytes of a GPU and tokens of a chunk: the more rows share a dequantised weight, the less it costs (18% of
# the arithmetic at 2048 on an H200, 4.5% at 8192).
CHUNKS = ((60 << 30, 8192), (30 << 30, 4096), (0, 2048))
EXPANDED_WEIGHTS = 1 << 26  # float16 values dequantised at a time for matmuls of many rows
EXPANDED_PAGES = 64 << 20  # bytes of KV pages gathered at a time


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of everything but the KV cache, by part."""

    spec: ModelSpec
    parts: Mapping[str, int]
    prefill: Mapping[int, int]  # workspace by chunk size, the preferred size first
    rows: int  # of a step; they need KV slots after the context
    expanded: bool  # weights are used as stored in memory; else each use dequantises them
    widened: Mapping[str, int]  # extra bytes of the quant types that a GPU stores as float16
    native: bool = False  # the native CPU library runs the model
    native_gap: str = ""  # why it does not, although it is asked for

    def without_kv(self, *, host_embedding: bool = False) -> int:
        return sum(self.parts.values()) - (self.parts[EMBEDDING] if host_embedding else 0)

    def page_bytes(self, formats: KVFormats) -> int:
        """Return the bytes of a KV page and its page table entry."""
        return PAGE * kv_bytes_per_token(self.spec, formats) + 8

    def kv_bytes(self, formats: KVFormats, context: int) -> int:
        return -(-(context + self.rows) // PAGE) * self.page_bytes(formats)

    def max_context(self, formats: KVFormats, free: int) -> int:
        """Return the most tokens whose KV cache fits in `free` bytes, up to the model's context length."""
        pages = free // self.page_bytes(formats)
        return min(self.spec.context_length, max(0, pages * PAGE - self.rows))


def kv_bytes_per_token(spec: ModelSpec, formats: KVFormats) -> int:
    return spec.kv_bytes_per_token(*(format.row_bytes(spec.head_dim) for format in formats))


def compute_dtype(device_type: str) -> torch.dtype:
    """Return bfloat16 for GPUs, which have it since Ampere; its matmuls are slow or missing on many CPUs."""
    return torch.bfloat16 if device_type == "cuda" else torch.float32


def ring_dtype(device_type: str) -> torch.dtype:
    """Return the dtype of the draft's KV ring."""
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
    memory: int,
    expand: bool = True,
    native: bool = False,
) -> MemoryEstimate:
    """Estimate a model and its draft on a device with `memory` bytes, which decide the chunk size.

    `expand`: a CPU dequantises the weights at load; a GPU always stores them in tiles. `native`: the native
    library has them packed.
    """
    on_gpu = device_type == "cuda"
    loader = MeasuringLoader(file, tiles=on_gpu, dtype=compute_dtype(device_type), expand=expand)
    target = Decoder(spec, loader, _CPU)
    parts = _packed_bytes(file, spec) if native else _weight_bytes(target)
    draft_spec: DraftSpec | None = None
    if config.speculation is not None and config.draft is not None:
        quant = draft_quant(config.draft, device_type, native=native)
        with open_draft(config.draft.path, spec, quant=quant, causal=config.draft.causal) as (
            draft_spec,
            source,
        ):
            draft_loader = MeasuringLoader(
                source, tiles=on_gpu, dtype=compute_dtype(device_type), expand=expand
            )
            draft = held_bytes(DFlashDraft(draft_spec, draft_loader, _CPU))
            if native and draft_gap(source, draft_spec) is None:
                draft = packed_draft_bytes(source)
        rings = draft_buffers(
            draft_spec,
            max_ctx=context,
            context=config.draft.context,
            device=META,
            dtype=ring_dtype(device_type),
        )
        parts |= {"draft": draft, "draft context": held_bytes(rings)}
    rows = config.max_rows if not on_gpu else padded_rows(config.max_rows)
    parts |= _state_bytes(spec, rows, target.dtype)
    if on_gpu:
        parts |= {
            "sampling": held_bytes(
                SamplingState.empty(MAX_ROWS, spec.vocab_size, META),
                make_workspace(MAX_ROWS, spec.vocab_size, META),
            ),
            "steps": _step_bytes(spec, rows, draft_spec),
            PARTIAL_SUMS: _SPLIT_K_BYTES,
        }
    widened = {type.name: size for type, size in loader.widened.items()}
    taps = len(draft_spec.taps) if draft_spec else 0
    prefill = {
        chunk: prefill_bytes(spec, chunk, taps) if on_gpu else 0
        for chunk in _chunk_sizes(config, device_type, memory)
    }
    return MemoryEstimate(spec, parts, prefill, rows, on_gpu or native or expand, widened, native)


def _weight_bytes(target: Decoder) -> dict[str, int]:
    embedding = held_bytes(target.embed)
    return {"weights": held_bytes(target) - embedding, EMBEDDING: embedding}


def _packed_bytes(file: GGUFFile, spec: ModelSpec) -> dict[str, int]:
    """Return the same in the native library, which has a tied embedding once, as the head."""
    name = "token_embd.weight"
    embedding = 0 if spec.tied_head else packed_tensors_bytes({name: file.tensors[name]})
    return {"weights": packed_model_bytes(file, spec) - embedding, EMBEDDING: embedding}


def _chunk_sizes(config: EngineConfig, device_type: DeviceType, memory: int) -> list[int]:
    """Return the prefill chunk sizes to consider, the preferred one first."""
    if config.prefill_chunk:
        return [config.prefill_chunk]
    preferred = chunk_size(device_type, memory)
    if device_type == "cpu":
        return [preferred]
    return [size for size in (preferred, preferred // 2, preferred // 4) if size >= _MIN_CHUNK]


def _state_bytes(spec: ModelSpec, rows: int, input_dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of one sequence's state without its KV cache: an empty pool has no pages."""
    states = SequenceStates(spec, max_ctx=1, max_rows=rows, device=META, input_dtype=input_dtype)
    buffers = states.buffers
    deltas = [layer for layer in buffers.layers if isinstance(layer, DeltaBuffers)]
    tree_rows = [(layer.tree_inputs, layer.tree_gates) for layer in deltas]
    return {
        "recurrent states": held_bytes([(layer.state, layer.window) for layer in deltas]),
        "tree rows": held_bytes(tree_rows, buffers.pending, buffers.lengths),
    }


def _step_bytes(spec: ModelSpec, rows: int, draft: DraftSpec | None) -> int:
    """Return the bytes of captured steps: each size has its own logits and features and shares the rest."""
    taps = len(draft.taps) if draft else 0
    outputs = sum(size for size in SIZES if size <= rows) * (spec.vocab_size + taps * spec.width)
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    channels = spec.delta.channels + spec.delta.inner if spec.delta else 0
    heads = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
    padded = max(rows, BUCKETS[0])  # as the matmul kernels pad them
    activations = padded * (8 * spec.width + 4 * inner + 3 * max(channels, heads) + 2 * _SPLIT_K_BLOCKS * 128)
    activations += _attention_values(rows, spec.heads, spec.kv_heads, spec.head_dim)
    draft_values = 0
    if draft is not None:
        draft_values = 2 * draft.block_size * spec.vocab_size
        draft_values += _attention_values(draft.block_size, draft.heads, draft.kv_heads, draft.head_dim)
    return 4 * (outputs + max(activations, draft_values))


def _attention_values(rows: int, heads: int, kv_heads: int, dim: int) -> int:
    """Return how many values the splits of tree attention write for the merge, rows padded to 64."""
    padded = -(-rows * heads // kv_heads // 64) * 64
    return (SPLITS + 2) * kv_heads * padded * (dim + 2)


def chunk_size(device_type: str, memory: int) -> int:
    """Return the preferred prefill chunk, in tokens, of a device with `memory` usable bytes."""
    if device_type == "cpu":
        return CPU_CHUNK
    return next(tokens for least, tokens in CHUNKS if memory >= least)


def prefill_bytes(spec: ModelSpec, chunk: int, taps: int = 0) -> int:
    """Return the peak workspace of a chunk on a GPU; `taps`: layers whose outputs the draft reads."""
    width = spec.width

    # The residual stream, the outputs of this layer's halves and of the layer before, a packed matmul input.
    stream = 6 * 4 * width + 2 * width
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    stages = [4 * 2 * inner + 2 * inner + 4 * width]
    query = spec.heads * spec.head_dim * (2 if spec.family.gated_query else 1)
    qkv = query + 2 * spec.kv_heads * spec.head_dim
    heads = 4 * spec.heads * spec.head_dim
    stages += [4 * qkv + 2 * heads, 4 * qkv + heads + heads // 2 + 4 * width]
    if spec.delta is not None:
        delta = spec.delta
        joined = delta.channels + delta.inner + 2 * delta.value_heads
        # q, k, the erase factor of the WY form and the attention within 64 tokens in 16 bits; v, which the
        # outputs overwrite.
        run = 2 * (delta.channels - delta.inner) + 6 * delta.inner + 2 * 64 * delta.value_heads
        stages += [4 * joined + run, 4 * joined + 6 * delta.inner + 4 * width]
    features = 4 * taps * width
    constant = 2 * EXPANDED_WEIGHTS + EXPANDED_PAGES + min(chunk, PIECE) * (2 * taps + 12) * width
    return chunk * (stream + max(stages) + features) + constant
