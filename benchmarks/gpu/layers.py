"""The layers' kernels on a GPU at the 27B's shapes: checked, then timed.

PYTHONPATH=src python benchmarks/gpu/layers.py --out layers.jsonl
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from layer_checks import (
    BUCKETS,
    DIM,
    EPS,
    FAILED,
    HEAD,
    HEADS,
    INNER,
    KV_HEADS,
    LINES,
    ROTATED,
    VALUE_HEADS,
    WIDTH,
    Cache,
    DeltaLayers,
    check,
    check_attention,
    check_delta,
    check_norms,
    check_rows_alone,
    check_triton_delta,
    say,
    summary,
    tree_of,
)

from treeflash.convert.tiny import make_tiny
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels import norm_rope
from treeflash.kernels.attention import triton_kernels as attention_kernel
from treeflash.kernels.causal_conv import cuda as conv_cuda
from treeflash.kernels.causal_conv import triton_kernels as conv_kernel
from treeflash.kernels.delta_rule import cuda as delta_cuda
from treeflash.kernels.delta_rule import triton_kernels as delta_kernel
from treeflash.kernels.kv_cache import triton_kernels as cache_kernel
from treeflash.kernels.norm_rope import reference as norm
from treeflash.kernels.norm_rope import triton_kernels as norm_kernel
from treeflash.kernels.quant_matmul import pack_rows
from treeflash.models.decoder import Decoder
from treeflash.models.step import Step
from treeflash.state.sequences import SequenceStates

SECONDS = 50  # behind which no further part begins


def milliseconds(work: Callable[[], None], *, repeats: int = 30) -> float:
    """Median time of a captured graph of `work`."""
    side = torch.cuda.Stream()
    # It would read page tables and lengths that are not written yet.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def report(name: str, rows: int, us: float, **more: object) -> None:
    say(f"{name:34s} {rows:3d} rows {us:8.2f} us a layer", *(f"{key} {value}" for key, value in more.items()))
    LINES.append({"time": name, "rows": rows, "us": us, **more})


def time_delta() -> None:
    """Several layers, one behind the other, as they lie in memory of a model."""
    layers = 48
    for rows in BUCKETS:
        for count in (1, 6):
            work = DeltaLayers(rows, count, layers)
            outputs = [work.conv(i) for i in range(layers)]
            kinds = [("cuda", conv_cuda, delta_cuda)]
            if rows in (1, 24) and count == 1:
                kinds.append(("triton", conv_kernel, delta_kernel))
            for label, convs, deltas in kinds:
                ms = milliseconds(partial(_convolutions, work, convs))
                report(f"{label} conv and gates", rows, ms * 1e3 / layers, path=count)
                ms = milliseconds(partial(_deltas, work, outputs, deltas))
                moved = 2 * VALUE_HEADS * DIM * DIM * 4
                rate = round(moved * layers / ms / 1e9, 2)
                report(f"{label} delta rule", rows, ms * 1e3 / layers, path=count, TBs=rate)
            ms = milliseconds(lambda work=work: [work.delta(i, work.conv(i)) for i in range(layers)])
            report("cuda conv, then delta rule", rows, ms * 1e3 / layers, path=count)


def _convolutions(work: DeltaLayers, implementation) -> None:
    for layer in range(work.layers):
        work.conv(layer, implementation)


def _deltas(work: DeltaLayers, outputs: list, implementation) -> None:
    for layer, rows in enumerate(outputs):
        work.delta(layer, rows, implementation)


def time_norms() -> None:
    """Norms and activations as floats and then packed, against packed at once."""
    for rows in (1, 8, 24, 64):
        x, add = torch.randn(2, 1, rows, WIDTH, device="cuda")
        weight, wide = torch.randn(WIDTH, device="cuda"), torch.randn(1, rows, 2 * INNER, device="cuda")
        heads = torch.randn(1, rows, VALUE_HEADS, DIM, device="cuda")
        gate, head_weight = torch.randn(1, rows, VALUE_HEADS * DIM, device="cuda"), weight[:DIM].clone()
        works = {
            "norm": lambda pack, a=(x, add, weight, EPS): norm_kernel.add_rms_norm(*a, pack=pack)[1],
            "silu": lambda pack, a=wide: norm_kernel.silu_mul(*a.chunk(2, -1), pack=pack),
            "gated norm": lambda pack, a=(heads, gate, head_weight, EPS): norm_kernel.gated_rms_norm(
                *a, pack=pack
            ),
        }
        for name, work in works.items():
            plain = milliseconds(lambda f=work: [f(False) for _ in range(50)])
            packed = milliseconds(lambda f=work: [f(True) for _ in range(50)])
            twice = milliseconds(lambda f=work: [pack_rows(f(False).flatten(0, 1)) for _ in range(50)])
            chosen = norm_kernel.launch_options
            try:
                norm_kernel.launch_options = lambda device: {"OVERLAP": False}
                apart = milliseconds(lambda f=work: [f(True) for _ in range(50)])
            finally:
                norm_kernel.launch_options = chosen
            others = {"floats": plain, "then_packed": twice, "without_overlap": apart}
            report(name, rows, packed * 20, **{key: round(ms * 20, 2) for key, ms in others.items()})


def time_attention() -> None:
    layers = 16
    for length in (256, 8192):
        for rows in (1, 24, 64):
            work = Cache(rows, length, layers)
            ms = milliseconds(lambda work=work: [work.attention(i) for i in range(layers)])
            rate = round(2 * length * KV_HEADS * HEAD * 2 * layers / ms / 1e9, 2)
            report("attention", rows, ms * 1e3 / layers, context=length, TBs=rate)
    plain = attention_kernel.tiles
    work = Cache(24, 8192, layers)
    for block, stages, warps in ((32, 2, 4), (32, 3, 8), (64, 2, 8)):
        label = f"attention {block} keys {stages} stages {warps} warps"
        chosen = {"BLOCK_N": block, "num_stages": stages, "num_warps": warps}
        try:
            attention_kernel.tiles = lambda *shape, chosen=chosen: {**plain(*shape), **chosen}
            ms = milliseconds(lambda: [work.attention(i) for i in range(layers)], repeats=10)
            report(label, 24, ms * 1e3 / layers, context=8192)
        except Exception:
            say("could not", label, traceback.format_exc(limit=1).splitlines()[-1])
        finally:
            attention_kernel.tiles = plain


class Layers:
    """All of a delta and of an attention layer but the products."""

    def __init__(self, rows: int, length: int, layers: int):
        self.deltas, self.cache = DeltaLayers(rows, 3, layers), Cache(rows, length, layers)
        self.x, self.add = torch.randn(2, 1, rows, WIDTH, device="cuda")
        self.weight, self.head_weight = torch.randn(WIDTH, device="cuda"), torch.randn(HEAD, device="cuda")
        self.wide = torch.randn(1, rows, 2 * INNER, device="cuda")
        query, kv = 2 * HEADS * HEAD, KV_HEADS * HEAD
        q, k, v = torch.randn(1, rows, query + 2 * kv, device="cuda").split([query, kv, kv], -1)
        self.q = q.unflatten(-1, (HEADS, 2 * HEAD))
        self.k, self.v = (part.unflatten(-1, (KV_HEADS, HEAD)) for part in (k, v))
        behind = torch.arange(rows, device="cuda")
        self.places = {"pages": torch.zeros_like(behind), "offsets": behind}
        positions = self.cache.lengths[:, None] + behind
        self.angles = norm.rope_angles(positions, torch.rand(ROTATED // 2, device="cuda"))

    def delta(self, i: int) -> None:
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        out = self.deltas.delta(i, self.deltas.conv(i))
        norm_rope.gated_rms_norm(out, self.deltas.parts(i)[1], self.deltas.norm, EPS, pack=True)
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        norm_rope.silu_mul(*self.wide.chunk(2, -1), pack=True)

    def attention(self, i: int) -> None:
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        options = {"interleaved": False}
        cache = self.cache
        pools = {"keys": cache.keys[i], "values": cache.values[i]}
        heads, norms = (self.q[..., :HEAD], self.k, self.v), (self.head_weight, self.head_weight)
        q = cache_kernel.cache_heads(*heads, norms, EPS, *self.angles, **pools, **self.places, **options)
        places = (cache.keys[i], cache.values[i], cache.table, cache.lengths, cache.step.ancestors)
        attention_kernel.paged_attention(q, *places, gate=self.q[..., HEAD:])
        norm_rope.add_rms_norm(self.x, self.add, self.weight, EPS, pack=True)
        norm_rope.silu_mul(*self.wide.chunk(2, -1), pack=True)


def time_layers() -> None:
    layers = 16
    for rows in (1, 8, 24, 64):
        for length in (256, 8192):
            work = Layers(rows, length, layers)
            parts = []
            for name, layer in (("delta", work.delta), ("attention", work.attention)):
                ms = milliseconds(lambda f=layer: [f(i) for i in range(layers)], repeats=15)
                parts.append(ms * 1e3 / layers)
                report(f"{name} layer without products", rows, parts[-1], context=length)
            report("the 27B's 48 + 16 layers, in all", rows, 48 * parts[0] + 16 * parts[1], context=length)


def check_model() -> None:
    """A tiny random model's prompt and trees on the GPU against the CPU, with commits between."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        make_tiny(path, family="qwen35", layers=4)
        results = []
        for device in ("cpu", "cuda"):
            with GGUFFile.open(path) as file:
                model = Decoder.load(file, device=device)
            states = SequenceStates(model.spec, max_ctx=256, max_rows=16, device=device)
            slots = torch.tensor([states.open()], device=device)
            generator, found = torch.Generator().manual_seed(3), []
            for turn in range(7):
                tokens = torch.randint(0, 200, (1, 16), generator=generator).to(device)
                last = torch.randint(0, 16, (1,), generator=generator).to(device)
                states.reserve(0, 16)
                lengths = states.buffers.lengths[slots]
                if turn in (0, 4):
                    step = Step.chunk(slots, tokens, lengths)
                else:
                    step = Step.tree(slots, tokens, tree_of(16, seed=turn).parents.to(device), lengths)
                with torch.inference_mode():
                    if step.is_chunk:
                        found.append(model.logits(model.forward(step, states.buffers).hidden).cpu())
                        states.advance(step)
                    else:
                        found.append(model.verify(step, states.buffers)[1].cpu())
                        states.commit(step, last)
            results.append(torch.cat(found))
        check("tiny model, GPU against CPU", results[1], results[0], 2e-3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    parts: list[Callable[[], None]] = [check_delta, check_norms]
    parts += [] if options.no_times else [time_delta, time_norms, time_layers]
    parts += [check_model, check_rows_alone, check_attention, check_triton_delta]
    parts += [] if options.no_times else [time_attention]
    begin = time.monotonic()
    for part in parts:
        if time.monotonic() - begin > SECONDS:
            say("no time left for", part.__name__)
            continue
        started = time.monotonic()
        try:
            with torch.inference_mode():
                part()
        except Exception:
            FAILED.append(part.__name__)
            say("FAIL", part.__name__)
            traceback.print_exc()
            sys.stderr.flush()
        summary(part.__name__, LINES)
        say(f"part {part.__name__} took {time.monotonic() - started:.1f} s")
        if options.out is not None:
            with options.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in LINES)
        LINES.clear()
    say("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
