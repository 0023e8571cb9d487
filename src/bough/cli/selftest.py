"""Small computations with reference results, which check that this machine's kernels are correct."""

from collections.abc import Callable

import torch
from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.hub.catalog import EMBEDDED
from bough.hub.resolve import meaning, resolve
from bough.kernels.attention import paged_attention
from bough.kernels.check.cases import Case, cases_of
from bough.kernels.check.shapes import COMMON
from bough.kernels.delta_rule import DeltaHeads, DeltaRows, chunk_delta, tree_delta, tree_order
from bough.kernels.delta_rule.reference import recurrence
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.native import Library
from bough.kernels.quant_matmul import quant_matmul
from bough.models.decoder import Decoder
from bough.models.native import NativeDecoder
from bough.models.step import Step
from bough.state.sequences import SequenceStates

# In which a step of a 27B spends its time.
HOT = {
    "matmul": ("Q4_K, 8 rows", "Q4_K, 24 rows", "Q5_K, 24 rows", "Q6_K, 24 rows", "Q4_K, 200 rows"),
    "norms": ("Q4_K, partial sums", "norm, 48 rows", "SiLU, 48 rows", "gated norm, 48 rows"),
    "tree attention": ("f16, 1 rows", "f16, 24 rows", "q8_0, 24 rows"),
    "prompt attention": ("f16",),
    "KV cache": ("q8_0",),
    "tree delta rule": ("24 rows",),
    "tree convolution": ("24 rows",),
    "prompt delta rule": ("130 tokens",),
    "draft attention": ("16 rows",),
    "tree building": ("22 nodes",),
    "sampling": ("greedy", "top-p"),
    "embedding": ("Q4_K",),
}
# Relative RMS error.
TOLERANCE = 1e-4


def tests(device: torch.device) -> dict[str, Callable[[], float]]:
    """Return tests by name; each returns a relative error."""
    return {
        "delta rule": lambda: delta_rule(device),
        "paged attention": lambda: attention(device),
        "quantised matmul": lambda: quantised_matmul(device),
    }


def delta_rule(device: torch.device) -> float:
    """Compare a chunk and a chain of tree rows with the recurrence, token by token."""
    generator = torch.Generator().manual_seed(1)
    tokens, key_heads, value_heads, dim = 70, 2, 4, 16
    q, k = (_unit(torch.randn(1, tokens, key_heads, dim, generator=generator)) for _ in range(2))
    v = torch.randn(1, tokens, value_heads, dim, generator=generator)
    g = -torch.rand(1, tokens, value_heads, generator=generator)
    heads = DeltaHeads(q, k, v, g, torch.rand(1, tokens, value_heads, generator=generator))
    state, expected = torch.zeros(value_heads, dim, dim), []
    for token in range(tokens):
        out, state = recurrence(heads, state, 0, [token])
        expected.append(out)
    split, inputs = tokens - 6, [x.to(device) for x in heads]
    empty = torch.zeros(1, value_heads, dim, dim, device=device)
    head, middle = chunk_delta(DeltaHeads(*(x[:, :split] for x in inputs)), empty)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    chain = (2 << torch.arange(tokens - split, device=device)[None]) - 1
    rows = DeltaHeads(*(x[:, split:].contiguous() for x in inputs))
    tail = tree_delta(rows, middle, DeltaRows(none, none, tree_order(chain)))
    return _error(torch.cat([head, tail], 1)[0], torch.stack(expected))


def attention(device: torch.device) -> float:
    """Compare attention over shuffled pages with plain softmax."""
    generator = torch.Generator().manual_seed(2)
    length, rows, heads, kv_heads, dim, page = 37, 3, 4, 2, 16, 8
    keys, values = (torch.randn(length + rows, kv_heads, dim, generator=generator) for _ in range(2))
    q = torch.randn(rows, heads, dim, generator=generator)
    scores = torch.einsum("thd,shd->hts", q, keys.repeat_interleave(2, 1)) / dim**0.5
    hidden = torch.arange(length + rows)[None] > torch.arange(length, length + rows)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    wanted = torch.einsum("hts,shd->thd", weights, values.repeat_interleave(2, 1))
    pages = torch.tensor([3, 0, 4, 1, 2])
    format = FORMATS["f32" if device.type == "cpu" else "f16"]
    cache = [HeadPool.empty(format, (5, kv_heads, page), dim, device) for _ in range(2)]
    for pool, source in zip(cache, (keys, values), strict=True):
        pool.codes[pages] = source.view(5, page, kv_heads, dim).transpose(1, 2).to(pool.codes)
    lengths = torch.tensor([length], device=device)
    found = paged_attention(q[None].to(device), cache[0], cache[1], pages[None].to(device), lengths, None)
    return _error(found[0], wanted)


def quantised_matmul(device: torch.device) -> float:
    """Compare a matmul with packed Q8_0 weights with the same weights in float64."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = 48, 64
    packed = torch.randint(0, 256, (rows, columns // 32, 34), dtype=torch.uint8, generator=generator)
    packed[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    packed = packed.flatten(1)
    x = torch.randn(5, columns, generator=generator)
    wanted = x.double() @ dequantise(packed, QuantType.Q8_0).double().T
    return _error(quant_matmul(x.to(device), packed.to(device), QuantType.Q8_0), wanted)


def native_answer() -> float:
    """Compare the logits of the small model that comes with Bough in native code with PyTorch's."""
    target = resolve(meaning(EMBEDDED), offline=True)
    tokens, logits = torch.tensor([[5, 300, 17, 42, 9, 1000, 77, 3]]), []
    with GGUFFile.open(target) as file:
        for model in (NativeDecoder.load(file, Library(1)), Decoder.load(file)):
            states = SequenceStates(model.spec, max_ctx=64, max_rows=1)
            slots = torch.tensor([states.open()])
            states.reserve(0, tokens.shape[1])
            step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
            logits.append(model.logits(model.forward(step, states.buffers).hidden[0]))
    return _error(logits[0], logits[1])


def hot_cases(device: torch.device) -> list[Case]:
    """Return the operations in which a step of a 27B spends its time, each in one or two variants."""
    return [case for case in cases_of(COMMON[0], device) if case.variant in HOT.get(case.operation, ())]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double().cpu(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())
