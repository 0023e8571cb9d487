"""Random inputs of the kernels at the shapes of a 27B hybrid, for tests and timing scripts."""

import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.attention import SINKS, PagedContext, paged_attention
from bough.kernels.attention import cpu as attention_cpu
from bough.kernels.attention import prefill as chunk_attention
from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads
from bough.kernels.causal_conv import chunk as chunk_conv
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.causal_conv import reference as conv_reference
from bough.kernels.causal_conv import triton_kernels as conv_triton
from bough.kernels.check import inputs
from bough.kernels.check.inputs import TreeRows
from bough.kernels.delta_rule import DeltaRows, fold_path
from bough.kernels.delta_rule import chunk as chunk_delta
from bough.kernels.delta_rule import cpu as delta_cpu
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.delta_rule import triton_kernels as delta_triton
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.runtime.device import usable
from tests.kernels.delta_layer import copied
from tests.kernels.pools import filled

# On a CPU only tests that are marked so run, in Triton's interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not INTERPRETED else torch.device("cpu")
# Whether the card, or the one that it acts as, runs the CUDA C++ kernels.
CUDA_KERNELS = DEVICE.type == "cuda" and usable(DEVICE)
CONV_KERNELS, DELTA_KERNELS = (conv_cuda, delta_cuda) if CUDA_KERNELS else (conv_triton, delta_triton)
EPS = 1e-6
WIDTH, FEED_FORWARD = 5120, 17408
KEY_HEADS, VALUE_HEADS, DELTA_DIM = (1, 3, 16) if INTERPRETED else (16, 48, 128)
TAPS = 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM
HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, PAGE = 24, 4, 256, 64, 64
ATTENTION_HEADS = (HEADS, KV_HEADS, HEAD_DIM)
MAX_TREE_ROWS = 64
ROW_COUNTS = (1, 8, 16, 24, 32, 48, 64)
KV_FORMATS = ("f16", "bf16", "q8_0", "q5_0", "q4_0", "tq3_0")
# The types of a Q4_K_M mix, whose tilings are tuned.
TUNED_TYPES = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)


def tree_rows(parents: list[list[int]], device: torch.device = DEVICE) -> TreeRows:
    return inputs.tree_rows(parents, device)


def random_trees(
    rows: int, batch: int = 1, *, depth: int = 16, seed: int = 0, device: torch.device = DEVICE
) -> TreeRows:
    """Return random trees, no path longer than `depth`."""
    return inputs.random_trees(rows, batch, depth=depth, seed=seed, device=device)


def deep_trees(rows: int, batch: int = 1, device: torch.device = DEVICE) -> TreeRows:
    """Return trees of one long path with a leaf at every third of its rows."""
    return tree_rows([[-1, *(row - 1 if row % 3 else row - 2 for row in range(1, rows))]] * batch, device)


def binary_trees(rows: int, batch: int = 1, device: torch.device = DEVICE) -> TreeRows:
    """Return trees in which row i is a child of row (i - 1) // 2."""
    return tree_rows([[(row - 1) // 2 for row in range(rows)]] * batch, device)


def spread_rows(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return rows of very different magnitude with outliers: float16 alone would overflow."""
    x = torch.randn(rows, columns, device=generator.device, generator=generator)
    x[:, :: max(1, columns // 7)] *= 50
    return x * torch.logspace(-4, 6, rows, device=x.device)[:, None] if rows > 1 else x * 1e5


class DeltaLayers:
    """States and inputs of several delta layers for a tree step, `count` accepted rows pending in each."""

    def __init__(
        self, rows: int, count: int, layers: int = 1, *, batch: int = 1, dtype: torch.dtype = torch.float16
    ):
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE)

        saved = MAX_TREE_ROWS
        self.tree, self.rows, self.layers = random_trees(rows, batch), rows, layers
        self.slots = torch.arange(batch, device=DEVICE).flip(0)
        self.state = normal(layers, batch, VALUE_HEADS, DELTA_DIM, DELTA_DIM)
        self.window = normal(layers, batch, TAPS - 1, CHANNELS).to(dtype)
        self.tree_inputs = normal(layers, batch, saved, CHANNELS).to(dtype)
        self.tree_gates = torch.rand(layers, batch, saved, 2, VALUE_HEADS, device=DEVICE)
        self.tree_gates[:, :, :, 0] *= -3
        self.inputs = normal(layers, batch, rows, CHANNELS + VALUE_HEADS * DELTA_DIM + 2 * VALUE_HEADS)
        decay, bias = -torch.rand(VALUE_HEADS, device=DEVICE), normal(VALUE_HEADS)
        self.weights = ConvWeights(normal(CHANNELS, TAPS), decay, bias, KEY_HEADS)
        self.norm = normal(DELTA_DIM)
        paths = [torch.randperm(saved, device=DEVICE).sort().values for _ in range(batch)]
        self.count = torch.full((batch,), count, device=DEVICE)
        self.index = conv_triton.conv_index(self.tree.parents, TAPS, self.count, saved)
        self.conv_rows = ConvRows(self.slots, torch.stack(paths), self.count, self.index)
        self.delta_rows = DeltaRows(self.slots, self.count, delta_triton.tree_order(self.tree.ancestors))

    def projections(self, layer: int) -> tuple[Tensor, ...]:
        """Return the convolution's inputs, the output gate, beta and alpha."""
        sizes = [CHANNELS, VALUE_HEADS * DELTA_DIM, VALUE_HEADS, VALUE_HEADS]
        return self.inputs[layer].split(sizes, -1)

    def conv(self, layer: int = 0, implementation: ModuleType = CONV_KERNELS) -> DeltaHeads:
        inputs, _, beta, alpha = self.projections(layer)
        parts = (self.state, self.window, self.tree_inputs, self.tree_gates)
        buffers = DeltaBuffers(*(part[layer] for part in parts))
        return implementation.tree_conv(inputs, alpha, beta, self.weights, buffers, self.conv_rows)

    def delta(self, layer: int, heads: DeltaHeads, implementation: ModuleType = DELTA_KERNELS) -> Tensor:
        return implementation.tree_delta(heads, self.state[layer], self.delta_rows)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return self.window, self.tree_inputs, self.tree_gates, self.state

    def saved_buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.buffers]

    def restore(self, saved: list[Tensor]) -> None:
        for buffer, old in zip(self.buffers, saved, strict=True):
            buffer.copy_(old)


class DeltaChunk:
    """Inputs and buffers of one delta layer for a prompt chunk, `count` accepted rows pending."""

    def __init__(self, shape: tuple[int, int, int], tokens: int, count: int):
        key_heads, value_heads, dim = shape
        channels, saved = (2 * key_heads + value_heads) * dim, 24

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE)

        wide = normal(1, tokens, channels + 2 * value_heads + 6)
        self.rows = wide.split([channels, value_heads, value_heads, 6], -1)[:3]
        decay, bias = -torch.rand(value_heads, device=DEVICE), normal(value_heads)
        self.weights = ConvWeights(normal(channels, TAPS), decay, bias, key_heads)
        state, window, tree_inputs = (
            normal(2, value_heads, dim, dim),
            normal(2, TAPS - 1, channels),
            normal(2, saved, channels),
        )
        tree_gates = torch.rand(2, saved, 2, value_heads, device=DEVICE)
        tree_gates[:, :, 0] *= -1
        self.buffers = DeltaBuffers(state, window, tree_inputs, tree_gates)
        self.slots, path = torch.tensor([1], device=DEVICE), torch.randperm(saved, device=DEVICE)
        no_rows = torch.empty(1, 0, dtype=torch.int64, device=DEVICE)
        taken = torch.tensor([count], device=DEVICE)
        index = conv_reference.conv_index(no_rows, TAPS, taken, saved)
        self.pending = ConvRows(self.slots, path.sort().values[None], taken, index)

    def heads(self) -> DeltaHeads:
        return chunk_conv.chunk_heads(*self.rows, self.weights, self.buffers, self.pending)

    def fold(self) -> None:
        fold_path(self.weights, self.buffers, self.pending)

    def run(self, *, reference: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, the state and the convolution's window after the chunk; change no buffer."""
        buffers = copied(self.buffers)
        delta, conv = (delta_cpu, conv_reference) if reference else (chunk_delta, chunk_conv)
        if reference:
            self._fold_reference(buffers.state)
        else:
            fold_path(self.weights, buffers, self.pending)
        heads = conv.chunk_heads(*self.rows, self.weights, buffers, self.pending)
        return delta.slot_delta(heads, buffers.state, self.slots), buffers.state, buffers.window

    def _fold_reference(self, state: Tensor) -> None:
        none = torch.empty(1, 0, self.buffers.window.shape[-1], device=DEVICE)
        gates = torch.empty(1, 0, state.shape[1], device=DEVICE)
        heads = conv_reference.tree_conv(none, gates, gates, self.weights, copied(self.buffers), self.pending)
        order = torch.empty(1, 0, dtype=torch.int32)
        delta_cpu.tree_delta(heads, state, DeltaRows(self.slots, self.pending.count, order))


def noise_pool(format: str, shape: tuple[int, ...], dim: int) -> HeadPool:
    """Return a pool of random codes, for timing: quick to fill."""
    pool = HeadPool.empty(FORMATS[format], shape, dim, DEVICE)
    if pool.scales is None:
        pool.codes.normal_()
    else:
        pool.codes.random_(0, 256)
        pool.scales.uniform_(0.01, 0.02)
    return pool


class PagedStep:
    """Queries of a tree step over contexts whose pages are in any order; several layers only for timing."""

    def __init__(
        self,
        formats: tuple[str, str],
        rows: int,
        lengths: tuple[int, ...],
        *,
        heads: tuple[int, int, int] = ATTENTION_HEADS,
        window: int | None = None,
        sinks: int = SINKS,
        layers: int | None = None,
        trees: Callable[[int, int], TreeRows] = binary_trees,
    ):
        query_heads, kv_heads, dim = heads
        batch, pages = len(lengths), -(-(max(lengths) + MAX_TREE_ROWS) // PAGE)
        shape = (batch * pages, kv_heads, PAGE)
        self.reach, self.tree = {"window": window, "sinks": sinks}, trees(rows, batch)
        self.q = torch.randn(batch, rows, query_heads, dim, device=DEVICE)
        self.gate = torch.randn(batch, rows, query_heads, 2 * dim, device=DEVICE)[..., dim:]
        self.pools = [
            filled(name, shape, dim, device=DEVICE)
            if layers is None
            else noise_pool(name, (layers, *shape), dim)
            for name in formats
        ]
        self.page_table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages)
        self.lengths = torch.tensor(lengths, device=DEVICE)
        self.positions = self.lengths[:, None] + self.tree.depths

    def context(self, pools: list[HeadPool] | None = None) -> PagedContext:
        tables = (self.page_table, self.lengths, self.tree.ancestors)
        return PagedContext(*(pools or self.pools), *tables, **self.reach)

    def attention(
        self, implementation: Callable[..., Tensor] = paged_attention, pools: list[HeadPool] | None = None
    ) -> Tensor:
        return implementation(self.q, self.context(pools), gate=self.gate)

    def reference(self) -> Tensor:
        """Return the attention in float64."""
        return attention_cpu.paged_attention(self.q.double(), self.context(), gate=self.gate.double())


class AttentionChunk:
    """Queries of a prompt chunk over a context in pages; pages that nobody may read hold NaN."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        rows: int,
        length: int,
        formats: tuple[str, str],
        *,
        window: int | None = None,
    ):
        """`window`: of a sliding layer."""
        query_heads, kv_heads, dim = heads
        pages = -(-(rows + length) // PAGE)
        table = torch.randperm(pages + 3, device=DEVICE)[None, : pages + 1].contiguous()
        used = torch.isin(torch.arange(pages + 3, device=DEVICE), table[0, :pages])
        shape = (pages + 3, kv_heads, PAGE)
        pools = [filled(format, shape, dim, used, device=DEVICE) for format in formats]
        self.q = torch.randn(1, rows, query_heads, dim, device=DEVICE)
        self.gate = torch.randn(1, rows, query_heads, 2 * dim, device=DEVICE)[..., dim:]
        reach = {} if window is None else {"window": window, "sinks": 0}
        self.context = PagedContext(*pools, table, torch.tensor([length], device=DEVICE), **reach)
        self.span = rows + length

    def attention(self) -> Tensor:
        return chunk_attention.chunk_attention(self.q, self.context, span=self.span, gate=self.gate)

    def reference(self) -> Tensor:
        return attention_cpu.paged_attention(self.q, self.context, gate=self.gate)
