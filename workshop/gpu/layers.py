"""Times the layers' kernels on a GPU at the shapes of a 27B model.

    python -m workshop gpu.layers --out layers.jsonl

tests/gpu/test_delta_rule.py, test_norm_rope.py and test_attention.py check them.
"""

import traceback
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from bough.kernels import norm_rope
from bough.kernels.attention import triton_kernels as attention_triton
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.causal_conv import triton_kernels as conv_triton
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.delta_rule import triton_kernels as delta_triton
from bough.kernels.kv_cache import triton_kernels as cache_kernel
from bough.kernels.norm_rope import reference as norm_reference
from bough.kernels.norm_rope import triton_kernels as norm_triton
from bough.kernels.quant_matmul import pack_rows
from tests.gpu.inputs import (
    DELTA_DIM,
    DEVICE,
    EPS,
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    ROTARY_DIM,
    ROW_COUNTS,
    VALUE_HEADS,
    WIDTH,
    DeltaLayers,
    PagedStep,
    random_trees,
)
from workshop.case import case
from workshop.report import Report, graph_ms


class PagedLayers(PagedStep):
    """Queries and KV pages of several attention layers, read by Triton's kernel."""

    def __init__(self, rows: int, length: int, layers: int):
        super().__init__(("f16", "f16"), rows, (length,), layers=layers, trees=random_trees)
        self.layers = [[pool[layer] for pool in self.pools] for layer in range(layers)]

    def layer(self, layer: int) -> Tensor:
        return self.attention(attention_triton.paged_attention, self.layers[layer])


def time_delta(report: Report) -> None:
    """Time several layers, one after the other, as in a model: together larger than the L2 cache."""
    layers = 48
    for rows in ROW_COUNTS:
        for count in (1, 6):
            work = DeltaLayers(rows, count, layers)
            outputs = [work.conv(i) for i in range(layers)]
            kinds = [("cuda", conv_cuda, delta_cuda)]
            if rows in (1, 24) and count == 1:
                kinds.append(("triton", conv_triton, delta_triton))
            for label, convs, deltas in kinds:
                ms = graph_ms(partial(_convolutions, work, convs))
                report.kernel_time(f"{label} conv and gates", rows, ms * 1e3 / layers, path=count)
                ms = graph_ms(partial(_deltas, work, outputs, deltas))
                moved = 2 * VALUE_HEADS * DELTA_DIM * DELTA_DIM * 4
                rate = round(moved * layers / ms / 1e9, 2)
                report.kernel_time(f"{label} delta rule", rows, ms * 1e3 / layers, path=count, TBs=rate)
            ms = graph_ms(lambda work=work: [work.delta(i, work.conv(i)) for i in range(layers)])
            report.kernel_time("cuda conv, then delta rule", rows, ms * 1e3 / layers, path=count)


def _convolutions(work: DeltaLayers, implementation: ModuleType) -> None:
    for layer in range(work.layers):
        work.conv(layer, implementation)


def _deltas(work: DeltaLayers, outputs: list, implementation: ModuleType) -> None:
    for layer, rows in enumerate(outputs):
        work.delta(layer, rows, implementation)


def time_norms(report: Report) -> None:
    """Time norms and activations whose output is packed at once, against packing it afterwards."""
    for rows in (1, 8, 24, 64):
        x, add = torch.randn(2, 1, rows, WIDTH, device=DEVICE)
        weight, wide = (
            torch.randn(WIDTH, device=DEVICE),
            torch.randn(1, rows, 2 * FEED_FORWARD, device=DEVICE),
        )
        heads = torch.randn(1, rows, VALUE_HEADS, DELTA_DIM, device=DEVICE)
        gate, head_weight = (
            torch.randn(1, rows, VALUE_HEADS * DELTA_DIM, device=DEVICE),
            weight[:DELTA_DIM].clone(),
        )
        works = {
            "norm": lambda pack, a=(x, add, weight, EPS): norm_triton.add_rms_norm(*a, pack=pack)[1],
            "silu": lambda pack, a=wide: norm_triton.silu_mul(*a.chunk(2, -1), pack=pack),
            "gated norm": lambda pack, a=(heads, gate, head_weight, EPS): norm_triton.gated_rms_norm(
                *a, pack=pack
            ),
        }
        for name, work in works.items():
            plain = graph_ms(lambda f=work: [f(False) for _ in range(50)])
            packed = graph_ms(lambda f=work: [f(True) for _ in range(50)])
            twice = graph_ms(lambda f=work: [pack_rows(f(False).flatten(0, 1)) for _ in range(50)])
            chosen = norm_triton.launch_options
            try:
                norm_triton.launch_options = lambda device: {"OVERLAP": False}
                apart = graph_ms(lambda f=work: [f(True) for _ in range(50)])
            finally:
                norm_triton.launch_options = chosen
            others = {"floats": plain, "then_packed": twice, "without_overlap": apart}
            report.kernel_time(
                name, rows, packed * 20, **{key: round(ms * 20, 2) for key, ms in others.items()}
            )


def time_attention(report: Report) -> None:
    layers = 16
    for length in (256, 8192):
        for rows in (1, 24, 64):
            work = PagedLayers(rows, length, layers)
            ms = graph_ms(lambda work=work: [work.layer(i) for i in range(layers)])
            rate = round(2 * length * KV_HEADS * HEAD_DIM * 2 * layers / ms / 1e9, 2)
            report.kernel_time("attention", rows, ms * 1e3 / layers, context=length, TBs=rate)
    plain = attention_triton.tiles
    work = PagedLayers(24, 8192, layers)
    for block, stages, warps in ((32, 2, 4), (32, 3, 8), (64, 2, 8)):
        label = f"attention {block} keys {stages} stages {warps} warps"
        chosen = {"BLOCK_N": block, "num_stages": stages, "num_warps": warps}
        try:
            attention_triton.tiles = lambda *shape, chosen=chosen: {**plain(*shape), **chosen}
            ms = graph_ms(lambda: [work.layer(i) for i in range(layers)], repeats=10)
            report.kernel_time(label, 24, ms * 1e3 / layers, context=8192)
        except Exception:
            print("could not", label, traceback.format_exc(limit=1).splitlines()[-1], flush=True)
        finally:
            attention_triton.tiles = plain


class Layers:
    """All kernels of a delta layer and of an attention layer except the matmuls."""

    def __init__(self, rows: int, length: int, layers: int):
        self.deltas, self.cache = DeltaLayers(rows, 3, layers), PagedLayers(rows, length, layers)
        self.x, self.add = torch.randn(2, 1, rows, WIDTH, device=DEVICE)
        self.weight, self.head_weight = (
            torch.randn(WIDTH, device=DEVICE),
            torch.randn(HEAD_DIM, device=DEVICE),
        )
        self.wide = torch.randn(1, rows, 2 * FEED_FORWARD, device=DEVICE)
        query, kv = 2 * HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        q, k, v = torch.randn(1, rows, query + 2 * kv, device=DEVICE).split([query, kv, kv], -1)
        self.q = q.unflatten(-1, (HEADS, 2 * HEAD_DIM))
        self.k, self.v = (part.unflatten(-1, (KV_HEADS, HEAD_DIM)) for part in (k, v))
        offsets = torch.arange(rows, device=DEVICE)
        self.mapping = {"pages": torch.zeros_like(offsets), "offsets": offsets}
        positions = self.cache.lengths[:, None] + offsets
        self.angles = norm_reference.rope_angles(positions, torch.rand(ROTARY_DIM // 2, device=DEVICE))

    def delta(self, i: int) -> None:
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        out = self.deltas.delta(i, self.deltas.conv(i))
        norm_rope.gated_rms_norm(out, self.deltas.projections(i)[1], self.deltas.norm, EPS, pack=True)
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        norm_rope.silu_mul(*self.wide.chunk(2, -1), pack=True)

    def attention(self, i: int) -> None:
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        options = {"interleaved": False}
        cache = self.cache
        keys, values = cache.layers[i]
        heads, norms = (self.q[..., :HEAD_DIM], self.k, self.v), (self.head_weight, self.head_weight)
        q = cache_kernel.cache_heads(
            *heads, norms, EPS, *self.angles, keys=keys, values=values, **self.mapping, **options
        )
        attention_triton.paged_attention(q, keys, values, *cache.mapping, gate=self.q[..., HEAD_DIM:])
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        norm_rope.silu_mul(*self.wide.chunk(2, -1), pack=True)


def time_layers(report: Report) -> None:
    layers = 16
    for rows in (1, 8, 24, 64):
        for length in (256, 8192):
            work = Layers(rows, length, layers)
            times = []
            for name, layer in (("delta", work.delta), ("attention", work.attention)):
                ms = graph_ms(lambda f=layer: [f(i) for i in range(layers)], repeats=15)
                times.append(ms * 1e3 / layers)
                report.kernel_time(f"{name} layer without matmuls", rows, times[-1], context=length)
            report.kernel_time(
                "the 27B's 48 + 16 layers, in all", rows, 48 * times[0] + 16 * times[1], context=length
            )


def compare_bits(report: Report) -> None:
    """Report whether row 0 of a larger step has the bits of a one-row step; the tests ask for closeness."""
    torch.manual_seed(1)
    alone = DeltaLayers(1, 3)
    before = alone.saved_buffers()
    heads = alone.conv()
    out = alone.delta(0, heads)
    for rows in ROW_COUNTS[1:]:
        wider = DeltaLayers(rows, 3)
        wider.inputs[:, :, :1] = alone.inputs
        wider.weights = alone.weights
        wider.conv_rows = replace(wider.conv_rows, path=alone.conv_rows.path)
        wider.restore(before)
        found = wider.conv()
        bits(report, f"conv q of row 0, {rows} rows", found[0][:, :1], heads[0])
        bits(report, f"delta row 0, {rows} rows", wider.delta(0, found)[:, :1], out)
        bits(report, f"delta state, {rows} rows", wider.state, alone.state)
    for rows in ROW_COUNTS[1:]:
        step = PagedStep(("f16", "f16"), rows, (1000,), trees=random_trees)
        found = step.attention(attention_triton.paged_attention)[:, :1]
        step.q, step.gate, step.tree = step.q[:, :1], step.gate[:, :1], random_trees(1)
        bits(report, f"attention row 0, {rows} rows", found, step.attention(attention_triton.paged_attention))


def bits(report: Report, name: str, found: Tensor, expected: Tensor) -> None:
    equal, difference = torch.equal(found, expected), float((found.double() - expected.double()).abs().max())
    print("EQUAL" if equal else "DIFFERS", name, f"largest difference {difference:.2e}", flush=True)
    report.write(bits=name, equal=equal, difference=difference)


@case(seconds=50)
def main(report: Report) -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with torch.inference_mode():
        for part in (time_delta, time_norms, time_layers, compare_bits, time_attention):
            report.part(part)
