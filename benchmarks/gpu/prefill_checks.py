"""What the prefill benchmark checks: the kernels of prompt text against their references, at real shapes."""

import itertools
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from layer_checks import Poison
from report import Report
from torch import Tensor

from treeflash.kernels.attention import prefill as attention
from treeflash.kernels.attention.reference import paged_attention
from treeflash.kernels.causal_conv import chunk as conv
from treeflash.kernels.causal_conv import reference as conv_reference
from treeflash.kernels.delta_rule import chunk as delta
from treeflash.kernels.delta_rule import reference as delta_reference
from treeflash.kernels.kv_cache.format import FORMATS, HeadPool
from treeflash.kernels.kv_cache.reference import encode
from treeflash.kernels.kv_cache.rotation import rotate
from treeflash.models.spec import ModelSpec

PAGE = 64
# Key heads, value heads, dims of the delta rule; query heads, KV heads, dims of attention.
LARGE = {"delta": (16, 48, 128), "attention": (24, 4, 256), "tokens": (1, 63, 65, 200, 2048)}
SMALL = {"delta": (1, 3, 32), "attention": (6, 2, 32), "tokens": (1, 65)}


def error(found: Tensor, wanted: Tensor) -> float:
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


class DeltaWork:
    """One delta layer's inputs for a chunk, and what its slot holds."""

    def __init__(self, shape: tuple[int, int, int], tokens: int, count: int, device: str):
        key_heads, value_heads, dim = shape
        channels, saved = (2 * key_heads + value_heads) * dim, 24

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device)

        wide = normal(1, tokens, channels + 2 * value_heads + 6)
        self.rows = wide.split([channels, value_heads, value_heads, 6], -1)[:3]
        self.weights = normal(channels, 4), -torch.rand(value_heads, device=device), normal(value_heads)
        self.state = normal(2, value_heads, dim, dim)
        self.window, self.stash = normal(2, 3, channels), normal(2, saved, channels)
        self.gates = torch.rand(2, saved, 2, value_heads, device=device)
        self.gates[:, :, 0] *= -1
        path = torch.randperm(saved, device=device).sort().values[None]
        self.places = {
            "slots": torch.tensor([1], device=device),
            "path": path,
            "count": torch.tensor([count], device=device),
            "key_heads": key_heads,
        }

    def heads(self, implementation: ModuleType = conv) -> tuple[Tensor, ...]:
        kept = {"window": self.window, "tree_inputs": self.stash}
        return implementation.chunk_heads(*self.rows, *self.weights, **kept, **self.places)

    def fold(self) -> None:
        kept = {"window": self.window, "tree_inputs": self.stash, "tree_gates": self.gates}
        delta.fold_path(self.state, self.weights[0], **kept, **self.places)

    def run(self, reference: bool) -> tuple[Tensor, Tensor, Tensor]:
        state, window = self.state.clone(), self.window.clone()
        kept = {"window": window, "tree_inputs": self.stash}
        folding, convolving = (delta_reference, conv_reference) if reference else (delta, conv)
        folding.fold_path(state, self.weights[0], tree_gates=self.gates, **kept, **self.places)
        heads = convolving.chunk_heads(*self.rows, *self.weights, **kept, **self.places)
        out = folding.slot_delta(*heads, state, slots=self.places["slots"])
        return out, state, window


def check_delta(report: Report, shapes: dict) -> None:
    for tokens in shapes["tokens"]:
        for count in (0, 5):
            work = DeltaWork(shapes["delta"], tokens, count, report.device)
            wanted = work.run(reference=True)
            with Poison():
                found = work.run(reference=False)
                again = work.run(reference=False)
            errors = [error(*pair) for pair in zip(found, wanted, strict=True)]
            same = all(torch.equal(*pair) for pair in zip(found, again, strict=True))
            report.check(
                f"delta rule, heads of {shapes['delta'][2]}, {tokens} tokens behind {count}",
                max(errors[:2]) < 3e-3 and errors[2] < 1e-6 and same,
                errors=[f"{each:.1e}" for each in errors],
                same_bits_again=same,
            )


def check_causal(report: Report, shapes: dict) -> None:
    """Nothing that follows is seen: it shows in rounding only, as does a cut.

    (The power of two that states and writes are kept in follows from the whole chunk.)
    """
    work = DeltaWork(shapes["delta"], 150, 0, report.device)
    heads = work.heads()
    slots, states = work.places["slots"], [work.state.clone(), work.state.clone()]
    whole = delta.slot_delta(*(part.clone() for part in heads), states[0], slots=slots)
    parts = []
    for rows in (slice(0, 77), slice(77, None)):
        cut = [part[:, rows].clone(memory_format=torch.contiguous_format) for part in heads]
        parts.append(delta.slot_delta(*cut, states[1], slots=slots))
    follows = error(parts[0], whole[:, :77])
    report.check("delta rule: what follows is not seen", follows < 1e-4, error=f"{follows:.1e}")
    apart = error(parts[1], whole[:, 77:]), error(states[1], states[0])
    report.check("delta rule: cut in two", max(apart) < 3e-3, errors=[f"{each:.1e}" for each in apart])


def pool_of(format: str, pages: int, kv_heads: int, dim: int, device: str, used: Tensor) -> HeadPool:
    pool = HeadPool.empty(FORMATS[format], (pages, kv_heads, PAGE), dim, torch.device(device))
    rows = torch.randn(len(used), kv_heads, PAGE, dim, device=device)
    if pool.scales is None:
        pool.codes.fill_(torch.nan)
        pool.codes[used] = rows.to(pool.codes.dtype)
        return pool
    pool.scales.fill_(torch.nan)
    pool.codes[used], pool.scales[used] = encode(rotate(rows), pool.format)
    return pool


class AttentionWork:
    def __init__(self, shape: tuple[int, int, int], rows: int, length: int, formats: list[str], device: str):
        heads, kv_heads, dim = shape
        pages = -(-(rows + length) // PAGE)
        self.table = torch.randperm(pages + 3, device=device)[None, : pages + 1].contiguous()
        used = self.table[0, :pages]
        pools = [pool_of(format, pages + 3, kv_heads, dim, device, used) for format in formats]
        self.q = torch.randn(1, rows, heads, dim, device=device)
        self.gate = torch.randn(1, rows, heads, 2 * dim, device=device)[..., dim:]
        self.places = (*pools, self.table, torch.tensor([length], device=device))
        self.span = rows + length

    def run(self) -> Tensor:
        return attention.chunk_attention(self.q, *self.places, span=self.span, gate=self.gate)


def check_attention(report: Report, shape: tuple[int, int, int], formats: list[str]) -> None:
    large = report.device == "cuda"
    plain = attention.SLICE_BYTES
    for rows, length in [(1, 0), (127, 63), (513, 4000), (2048, 1)] if large else [(1, 0), (65, 70)]:
        work = AttentionWork(shape, rows, length, formats, report.device)
        attention.SLICE_BYTES = 4 * shape[1] * shape[2] * 1024  # several slices
        with Poison():
            found = work.run()
        attention.SLICE_BYTES = plain
        wanted = paged_attention(work.q, *work.places, None, gate=work.gate)
        limit = 1e-2 if "bf16" in formats else 2e-3
        name = f"attention, {rows} rows behind {length}, {'/'.join(formats)}, heads {shape}"
        report.check(name, error(found, wanted) < limit, error=f"{error(found, wanted):.1e}")


def checks(device: str) -> dict[str, Callable[[Report], None]]:
    """By name; each can have a process of its own, since most of its time goes into compiling."""
    large = device == "cuda"
    shapes = LARGE if large else SMALL
    kinds = [["f16", "f16"], ["q8_0", "q8_0"], ["tq3_0", "f16"], ["q8_0", "q4_0"], ["bf16", "bf16"]]
    dims = [shapes["attention"], (8, 2, 128), (8, 8, 64)] if large else [shapes["attention"]]
    found = {"delta": partial(check_delta, shapes=shapes), "causal": partial(check_causal, shapes=shapes)}
    for dim in (16, 32, 64) if large else (16,):
        small = {"delta": (2, 6, dim), "tokens": (16, 65)}
        found[f"delta-{dim}"] = partial(check_delta, shapes=small)
    for shape, formats in itertools.product(dims, kinds if large else kinds[:2]):
        name = f"attention-{shape[2]}-{'-'.join(formats)}"
        found[name] = partial(check_attention, shape=shape, formats=formats)
    return found


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Of products and attention; the delta rule's own 0.9 percent left out."""
    weights = 3 * spec.width * spec.feed_forward * len(spec.layers)
    inner = spec.heads * spec.head_dim
    weights += spec.attention_layers * spec.width * (3 * inner + 2 * spec.kv_heads * spec.head_dim)
    if spec.delta is not None:
        wide = spec.delta.channels + 2 * spec.delta.inner + 2 * spec.delta.value_heads
        weights += spec.delta_layers * spec.width * wide
    return 2.0 * weights * tokens + 2.0 * spec.attention_layers * inner * tokens**2
