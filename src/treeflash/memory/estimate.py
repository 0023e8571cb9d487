"""What a model takes on a device, part by part, before any of it is allocated; decides nothing.

Weights, states, rings and sampling buffers are counted to the byte: the code that later makes them makes them
from tensors without memory. Workspaces are estimated from above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from treeflash.config import DraftConfig, EngineConfig
from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.kernels.kv_cache.format import KVFormat
from treeflash.kernels.quant_matmul import BUCKETS
from treeflash.kernels.sampling import make_workspace
from treeflash.kernels.sampling.state import SamplingState
from treeflash.kernels.tree import MAX_ROWS
from treeflash.models.decoder import Decoder
from treeflash.models.dflash import PIECE, DFlashDraft, open_draft
from treeflash.models.draft_spec import DraftSpec
from treeflash.models.measure import META, MeasuringLoader, held_bytes
from treeflash.models.spec import ModelSpec
from treeflash.models.step import SIZES, DeltaBuffers, padded_rows
from treeflash.state.draft_ring import draft_buffers
from treeflash.state.sequences import PAGE, SequenceStates

Kind = Literal["cpu", "cuda"]
Pair = tuple[KVFormat, KVFormat]  # of keys and of values

EMBEDDING = "token embedding"  # the part that may stay in the host's memory
_BLOCKS = 2 * 148  # that a product is cut into: two on each SM of the largest card
_PRODUCTS = 4 * _BLOCKS * 128 * 64 * 4  # partial sums of four launches
_LEAST_CHUNK = 512  # tokens that a prompt is read in at a time, where memory is short
_DRAFT_QUANTS = {"q8_0": QuantType.Q8_0, "q4_k": QuantType.Q4_K, "none": None}
_CPU = torch.device("cpu")
CPU_CHUNK = 512  # a larger one is no faster there, and tells less often how far it is
# Bytes of a GPU, and tokens: the more rows share an expanded weight, the less it costs (18% of the arithmetic
# at 2048 on an H200, 4.5% at 8192).
CHUNKS = ((60 << 30, 8192), (30 << 30, 4096), (0, 2048))
EXPANDED_WEIGHTS = 1 << 26  # float16, at a time, for products of many rows
EXPANDED_PAGES = 64 << 20  # bytes of keys and values brought together at a time


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of everything but keys and values, by what they are for."""

    spec: ModelSpec
    parts: Mapping[str, int]
    prefill: Mapping[int, int]  # beside them, by the tokens of a chunk, the usual first
    rows: int  # of a step; they go behind the tokens
    expanded: bool  # weights are used as they are held; else every use unpacks them
    widened: Mapping[str, int]  # bytes added to types that a GPU holds as float16

    def fixed(self, *, host_embedding: bool = False) -> int:
        return sum(self.parts.values()) - (self.parts[EMBEDDING] if host_embedding else 0)

    def page(self, pair: Pair) -> int:
        """Bytes of a page of keys and values, and of its number in the table of pages."""
        return PAGE * token_bytes(self.spec, pair) + 8

    def kv(self, pair: Pair, context: int) -> int:
        return -(-(context + self.rows) // PAGE) * self.page(pair)

    def context(self, pair: Pair, free: int) -> int:
        """The most tokens that fit in `free` bytes; no more than the model was made for."""
        pages = free // self.page(pair)
        return min(self.spec.context_length, max(0, pages * PAGE - self.rows))


def token_bytes(spec: ModelSpec, pair: Pair) -> int:
    return spec.kv_bytes_per_token(*(format.row_bytes(spec.head_dim) for format in pair))


def compute_dtype(kind: str) -> torch.dtype:
    """Matrix products of bfloat16 are slow or missing on many CPUs; GPUs have them since Ampere."""
    return torch.bfloat16 if kind == "cuda" else torch.float32


def ring_dtype(kind: str) -> torch.dtype:
    """Of the draft's own keys and values."""
    return torch.float16 if kind == "cuda" else torch.float32


def draft_quant(draft: DraftConfig, kind: str) -> QuantType | None:
    """What a draft is quantised to while it is loaded."""
    if draft.quant == "auto":
        return QuantType.Q8_0 if kind == "cuda" else None
    return _DRAFT_QUANTS[draft.quant]


def measure(
    file: GGUFFile,
    spec: ModelSpec,
    config: EngineConfig,
    kind: Kind,
    *,
    context: int,
    memory: int,
    expand: bool = True,
) -> Needs:
    """`memory`: bytes of the device, by which chunks are cut.

    `expand`: weights become floats; a GPU holds them in tiles, whatever it says.
    """
    on_gpu = kind == "cuda"
    loader = MeasuringLoader(file, tiles=on_gpu, dtype=compute_dtype(kind), expand=expand)
    target = Decoder(spec, loader, _CPU)
    embedding = held_bytes(target.embed)
    parts = {"weights": held_bytes(target) - embedding, EMBEDDING: embedding}
    draft_spec: DraftSpec | None = None
    if config.speculation is not None and config.draft is not None:
        with open_draft(
            config.draft.path, spec, quant=draft_quant(config.draft, kind), causal=config.draft.causal
        ) as (draft_spec, source):
            loaded = MeasuringLoader(source, tiles=on_gpu, dtype=compute_dtype(kind), expand=expand)
            draft = held_bytes(DFlashDraft(draft_spec, loaded, _CPU))
        rings = draft_buffers(
            draft_spec, max_ctx=context, context=config.draft.context, device=META, dtype=ring_dtype(kind)
        )
        parts |= {"draft": draft, "draft context": held_bytes(rings)}
    rows = config.max_rows if not on_gpu else padded_rows(config.max_rows)
    parts |= _states(spec, rows, target.dtype)
    if on_gpu:
        parts |= {
            "sampling": held_bytes(
                SamplingState.empty(MAX_ROWS, spec.vocab_size, META),
                make_workspace(MAX_ROWS, spec.vocab_size, META),
            ),
            "steps": _steps(spec, rows, draft_spec),
            "products": _PRODUCTS,
        }
    widened = {type.name: size for type, size in loader.widened.items()}
    chunks = [config.prefill_chunk] if config.prefill_chunk else [chunk_size(kind, memory)]
    if on_gpu and config.prefill_chunk is None:
        chunks = [size for size in (chunks[0], chunks[0] // 2, chunks[0] // 4) if size >= _LEAST_CHUNK]
    taps = len(draft_spec.taps) if draft_spec else 0
    prefill = {chunk: prefill_bytes(spec, chunk, taps) if on_gpu else 0 for chunk in chunks}
    return Needs(spec, parts, prefill, rows, on_gpu or expand, widened)


def _states(spec: ModelSpec, rows: int, input_dtype: torch.dtype) -> dict[str, int]:
    """Of one sequence; keys and values aside, of which an empty pool has none."""
    states = SequenceStates(spec, max_ctx=1, max_rows=rows, device=META, input_dtype=input_dtype)
    buffers = states.buffers
    deltas = [layer for layer in buffers.layers if isinstance(layer, DeltaBuffers)]
    left = [(layer.tree_inputs, layer.tree_gates) for layer in deltas]
    return {
        "recurrent states": held_bytes([(layer.state, layer.window) for layer in deltas]),
        "tree rows": held_bytes(left, buffers.pending, buffers.lengths),
    }


def _steps(spec: ModelSpec, rows: int, draft: DraftSpec | None) -> int:
    """Captured steps keep their logits and features, each size its own; the rest they share."""
    taps = len(draft.taps) if draft else 0
    kept = sum(size for size in SIZES if size <= rows) * (spec.vocab_size + taps * spec.width)
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    channels = spec.delta.channels + spec.delta.inner if spec.delta else 0
    heads = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
    filled = max(rows, BUCKETS[0])  # as products take them
    flowing = filled * (8 * spec.width + 4 * inner + 3 * max(channels, heads) + 2 * _BLOCKS * 128)
    flowing += _attention(rows, spec.heads, spec.kv_heads, spec.head_dim)
    drafting = 0
    if draft is not None:
        drafting = 2 * draft.block_size * spec.vocab_size
        drafting += _attention(draft.block_size, draft.heads, draft.kv_heads, draft.head_dim)
    return 4 * (kept + max(flowing, drafting))


def _attention(rows: int, heads: int, kv_heads: int, dim: int) -> int:
    """Numbers that the splits of a tree's attention leave to be merged, rows filled up to 64."""
    from treeflash.kernels.attention.triton_kernels import SPLITS

    padded = -(-rows * heads // kv_heads // 64) * 64
    return (SPLITS + 1) * kv_heads * padded * (dim + 2)


def chunk_size(kind: str, memory: int) -> int:
    """Tokens of a chunk on a device of this kind (cpu, cuda) with so many bytes that may be used."""
    if kind == "cpu":
        return CPU_CHUNK
    return next(tokens for least, tokens in CHUNKS if memory >= least)


def prefill_bytes(spec: ModelSpec, chunk: int, taps: int = 0) -> int:
    """Most that a chunk takes on a GPU beside weights and states; `taps`: layers that a draft reads."""
    width = spec.width

    # The residual stream and what is added to it, of this layer's halves and the one before; packed for a
    # product.
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
        # Queries, keys, what is erased and what is seen in 16 bits; values, whose place the outputs take.
        run = 2 * (delta.channels - delta.inner) + 6 * delta.inner + 2 * 64 * delta.value_heads
        stages += [4 * joined + run, 4 * joined + 6 * delta.inner + 4 * width]
    tapped = 4 * taps * width
    fixed = 2 * EXPANDED_WEIGHTS + EXPANDED_PAGES + min(chunk, PIECE) * (2 * taps + 12) * width
    return chunk * (stream + max(stages) + tapped) + fixed
