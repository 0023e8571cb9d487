"""The layers' kernels on a GPU at the 27B's shapes: checked, then timed.

PYTHONPATH=src python benchmarks/gpu/layers.py --out layers.jsonl
"""

import argparse
import json
import random
import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from treeflash.kernels.attention import kernel as attention_kernel
from treeflash.kernels.attention import reference as attention
from treeflash.kernels.causal_conv import kernel as conv_kernel
from treeflash.kernels.causal_conv import reference as conv
from treeflash.kernels.gated_delta import kernel as delta_kernel
from treeflash.kernels.gated_delta import reference as delta
from treeflash.kernels.norm_rope import kernel as norm_kernel
from treeflash.kernels.norm_rope import reference as norm
from treeflash.models.step import Step

WIDTH, INNER = 5120, 17408
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
HEADS, KV_HEADS, HEAD, ROTATED, PAGE = 24, 4, 256, 64, 64
EPS = 1e-6
BUCKETS = (1, 8, 16, 24, 32, 48, 64)
SAVED = 64
FAILED: list[str] = []
LINES: list[dict] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def check(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    good = bool(found.isfinite().all()) and error < tolerance
    if not good:
        FAILED.append(name)
    say("PASS" if good else "FAIL", name, f"error {error:.2e}, at most {tolerance:.0e}")
    LINES.append({"check": name, "error": error, "passed": good})


def same(name: str, found: Tensor, wanted: Tensor) -> None:
    """Bits; reported, not required, where the delta rule is in it."""
    equal = torch.equal(found, wanted)
    apart = float((found.double() - wanted.double()).abs().max())
    say("EQUAL" if equal else "DIFFERS", name, f"largest difference {apart:.2e}")
    LINES.append({"bits": name, "equal": equal, "difference": apart})


class Poison:
    """Fresh memory holds NaN while this is open."""

    def __enter__(self) -> None:
        self._plain = plain = torch.empty

        def empty(*shape, **options) -> Tensor:
            out = plain(*shape, **options)
            return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(1 << 20)

        torch.empty = empty

    def __exit__(self, *failure: object) -> None:
        torch.empty = self._plain


def tree_of(rows: int, batch: int = 1, *, depth: int = 16, seed: int = 0) -> Step:
    """Random trees, no path longer than `depth`."""
    choose = random.Random(seed + rows)
    trees = []
    for _ in range(batch):
        parents, depths = [-1], [1]
        for row in range(1, rows):
            parent = choose.choice([i for i in range(max(0, row - 6), row) if depths[i] < depth] or [0])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        trees.append(parents)
    parents = torch.tensor(trees, device="cuda")
    zeros = torch.zeros(batch, dtype=torch.int64, device="cuda")
    return Step.tree(torch.arange(batch, device="cuda"), torch.zeros_like(parents), parents, zeros)


def milliseconds(work: Callable[[], None], *, repeats: int = 30) -> float:
    """Median time of a captured graph of `work`."""
    side = torch.cuda.Stream()
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


class DeltaLayers:
    """States and inputs of several delta layers: together larger than the second-level cache."""

    def __init__(
        self, rows: int, count: int, layers: int, *, batch: int = 1, dtype: torch.dtype = torch.float16
    ):
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda")

        self.step, self.rows, self.layers = tree_of(rows, batch), rows, layers
        self.slots = torch.arange(batch, device="cuda").flip(0)
        self.state = normal(layers, batch, VALUE_HEADS, DIM, DIM)
        self.window = normal(layers, batch, TAPS - 1, CHANNELS).to(dtype)
        self.stash = normal(layers, batch, SAVED, CHANNELS).to(dtype)
        self.gates = torch.rand(layers, batch, SAVED, 2, VALUE_HEADS, device="cuda")
        self.gates[:, :, :, 0] *= -3
        self.inputs = normal(layers, batch, rows, CHANNELS + VALUE_HEADS * DIM + 2 * VALUE_HEADS)
        self.weights = normal(CHANNELS, TAPS), -torch.rand(VALUE_HEADS, device="cuda"), normal(VALUE_HEADS)
        self.norm = normal(DIM)
        chosen = [torch.randperm(SAVED, device="cuda").sort().values for _ in range(batch)]
        self.path = torch.stack(chosen)
        self.count = torch.full((batch,), count, device="cuda")
        self.index = conv_kernel.conv_index(self.step.parents, TAPS, self.count, SAVED)

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        return self.inputs[layer].split([CHANNELS, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS], -1)

    def conv(self, layer: int, implementation=conv_kernel) -> tuple[Tensor, ...]:
        inputs, _, beta, alpha = self.parts(layer)
        return implementation.tree_conv(
            inputs,
            alpha,
            beta,
            *self.weights,
            window=self.window[layer],
            tree_inputs=self.stash[layer],
            tree_gates=self.gates[layer],
            slots=self.slots,
            path=self.path,
            count=self.count,
            index=self.index,
            key_heads=KEY_HEADS,
        )

    def delta(self, layer: int, rows: tuple[Tensor, ...]) -> Tensor:
        places = {"slots": self.slots, "count": self.count, "ancestors": self.step.ancestors}
        return delta_kernel.tree_delta(*rows, self.state[layer], **places)


def check_delta() -> None:
    for rows, count, batch in [
        (1, 0, 1),
        (1, 1, 1),
        (3, 2, 2),
        (8, 5, 1),
        (16, 16, 1),
        (24, 3, 2),
        (32, 1, 1),
        (48, 7, 1),
        (64, 64, 1),
    ]:
        for dtype in (torch.float16, torch.float32):
            with Poison():
                layer = DeltaLayers(rows, count, 1, batch=batch, dtype=dtype)
            name = f"{rows} rows, path {count}, batch {batch}, {str(dtype)[6:]}"
            left = [part.clone() for part in (layer.window, layer.stash, layer.gates)]
            wanted = layer.conv(0, conv)
            after = [part.clone() for part in (layer.window, layer.stash, layer.gates)]
            for part, old in zip((layer.window, layer.stash, layer.gates), left, strict=True):
                part.copy_(old)
            expected = conv.conv_index(layer.step.parents, TAPS, layer.count, SAVED)
            check(f"conv index, {name}", layer.index, expected, 1e-9)
            with Poison():
                found = layer.conv(0)
            for label, one, other in zip(("q", "k", "v", "g", "beta"), found, wanted, strict=True):
                both = (
                    [one, other]
                    if label == "q"
                    else [x[:, [*range(count), *range(SAVED, SAVED + rows)]] for x in (one, other)]
                )
                check(f"conv {label}, {name}", *both, 3e-6)
            for label, one, other in zip(
                ("window", "stash", "gates"), (layer.window, layer.stash, layer.gates), after, strict=True
            ):
                check(f"conv leaves {label}, {name}", one, other, 3e-6)
        exact = [x.double() for x in found]
        state = layer.state[0].double()
        places = {"slots": layer.slots, "count": layer.count, "ancestors": layer.step.ancestors}
        wanted_out = delta.tree_delta(*exact, state, **places)
        with Poison():
            out = layer.delta(0, found)
        check(f"delta out, {name}", out, wanted_out, 5e-6)
        check(f"delta state, {name}", layer.state[0], state, 5e-6)


def check_rows_alone() -> None:
    """Row 0 of a larger step against a step of one row; a path in one piece against row by row."""
    torch.manual_seed(1)
    layer = DeltaLayers(1, 3, 1)
    state, window, stash, gates = (x.clone() for x in (layer.state, layer.window, layer.stash, layer.gates))
    rows = layer.conv(0)
    alone = layer.delta(0, rows)
    for count in BUCKETS[1:]:
        more = DeltaLayers(count, 3, 1)
        more.inputs[:, :, :1] = layer.inputs
        more.weights, more.path = layer.weights, layer.path
        for part, value in (
            (more.state, state),
            (more.window, window),
            (more.stash, stash),
            (more.gates, gates),
        ):
            part.copy_(value)
        found = more.conv(0)
        same(f"conv q of row 0, {count} rows", found[0][:, :1], rows[0])
        same(f"delta row 0, {count} rows", more.delta(0, found)[:, :1], alone)
        same(f"delta state, {count} rows", more.state, layer.state)
    cache = Cache(1, 1000, 1)
    one = cache.attention(0)
    for count in BUCKETS[1:]:
        more = Cache(count, 1000, 1)
        more.q[:, :, :1], more.gate[:, :, :1] = cache.q, cache.gate
        more.table = cache.table
        more.keys.copy_(cache.keys)
        more.values.copy_(cache.values)
        same(f"attention row 0, {count} rows", more.attention(0)[:, :1], one)


class Cache:
    """Queries and pages of several attention layers."""

    def __init__(
        self,
        rows: int,
        length: int,
        layers: int,
        *,
        batch: int = 1,
        heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD),
        dtype: torch.dtype = torch.float16,
    ):
        query, kv, dim = heads
        pages = -(-(length + 64) // PAGE)
        self.step = tree_of(rows, batch)
        self.q = torch.randn(layers, batch, rows, query, dim, device="cuda")
        self.gate = torch.randn(layers, batch, rows, query, 2 * dim, device="cuda")[..., dim:]
        self.keys, self.values = (
            torch.randn(layers, batch * pages, PAGE, kv, dim, device="cuda", dtype=dtype) for _ in range(2)
        )
        generator = torch.Generator("cuda").manual_seed(length)
        self.table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages)
        self.lengths = torch.full((batch,), length, device="cuda")

    def attention(self, layer: int) -> Tensor:
        return attention_kernel.paged_attention(
            self.q[layer],
            self.keys[layer],
            self.values[layer],
            self.table,
            self.lengths,
            self.step.ancestors,
            gate=self.gate[layer],
        )


def check_attention() -> None:
    sizes = [
        (rows, length)
        for rows, length in zip(
            (1, 3, 8, 16, 24, 33, 48, 64), (0, 1, 63, 64, 257, 1000, 8191, 4100), strict=True
        )
    ]
    for heads in ((HEADS, KV_HEADS, HEAD), (32, 8, 128), (6, 2, 64)):
        for dtype in (torch.float16, torch.bfloat16) if heads[2] == HEAD else (torch.float16,):
            for rows, length in sizes:
                cache = Cache(rows, length, 1, batch=2, heads=heads, dtype=dtype)
                cache.lengths[1] //= 3
                with Poison():
                    found = cache.attention(0)
                wanted = attention.paged_attention(
                    cache.q[0].double(), cache.keys[0].double(), cache.values[0].double(), cache.table,
                    cache.lengths, cache.step.ancestors, gate=cache.gate[0].double(),
                )  # fmt: skip
                check(
                    f"attention {heads}, {str(dtype)[6:]}, {rows} rows, {length}",
                    found,
                    wanted,
                    2e-3 if dtype == torch.float16 else 1.2e-2,
                )
    for length, start, window, causal in (
        (0, 0, None, False),
        (700, 5, None, False),
        (5000, 40, 2048, True),
        (300, 0, 2048, False),
    ):
        rows, heads, kv, dim, ring = 16, 32, 8, 128, 2048
        q, k, v = (
            torch.randn(2, rows, heads, dim, device="cuda"),
            *torch.randn(2, 2, rows, kv, dim, device="cuda"),
        )
        keys, values = torch.randn(2, 3, ring, kv, dim, device="cuda", dtype=torch.float16)
        slots = torch.tensor([2, 0], device="cuda")
        lengths, starts = (
            torch.tensor([77, 9, length], device="cuda"),
            torch.tensor([3, 0, start], device="cuda"),
        )
        positions = lengths[slots][:, None] + torch.arange(rows, device="cuda")
        places = (positions, keys, values, slots, lengths, starts)
        with Poison():
            found = attention_kernel.block_attention(q, k, v, *places, window=window, causal=causal)
        wanted = attention.block_attention(q, k, v, *places, window=window, causal=causal)
        check(f"block attention, {length}, window {window}, causal {causal}", found, wanted, 2e-3)


def check_norms() -> None:
    for rows, width in ((1, WIDTH), (64, WIDTH), (3, 1000)):
        wide = torch.randn(2, rows, 3 * width + 8, device="cuda")
        x, add, weight = wide[..., :width], wide[..., width : 2 * width], torch.randn(width, device="cuda")
        with Poison():
            total, normed = norm_kernel.add_rms_norm(x, add, weight, EPS)
            product = norm_kernel.silu_mul(x, add)
        wanted = norm.add_rms_norm(x, add, weight, EPS)
        check(f"residual {rows} x {width}", total, wanted[0], 1e-6)
        check(f"norm {rows} x {width}", normed, wanted[1], 1e-6)
        check(f"silu {rows} x {width}", product, norm.silu_mul(x, add), 1e-6)
    for interleaved in (False, True):
        x, other = torch.randn(2, 2, 5, KV_HEADS, 2 * HEAD, device="cuda")[..., :HEAD]
        cos, sin = norm.rope_angles(
            torch.randint(0, 9000, (2, 5), device="cuda"), torch.rand(ROTATED // 2, device="cuda")
        )
        weight = torch.randn(HEAD, device="cuda")
        with Poison():
            found = norm_kernel.head_rope(x, weight, EPS, cos, sin, interleaved=interleaved)
        check(
            f"head rope, interleaved {interleaved}",
            found,
            norm.head_rope(x, weight, EPS, cos, sin, interleaved=interleaved),
            1e-6,
        )
        pools = torch.zeros(2, 2, 40, KV_HEADS, HEAD, device="cuda", dtype=torch.float16)
        places = torch.randperm(40, device="cuda")[:10]
        for implementation, (keys, values) in zip((norm_kernel, norm), pools, strict=True):
            implementation.cache_heads(
                x,
                other,
                weight,
                EPS,
                cos,
                sin,
                keys=keys,
                values=values,
                rows=places,
                interleaved=interleaved,
            )
        check(f"cache, interleaved {interleaved}", pools[0], pools[1], 1e-4)
    heads, gate = (
        torch.randn(2, 7, VALUE_HEADS, DIM, device="cuda"),
        torch.randn(2, 7, VALUE_HEADS * DIM + 4, device="cuda")[..., 4:],
    )
    weight = torch.randn(DIM, device="cuda")
    with Poison():
        found = norm_kernel.gated_rms_norm(heads, gate, weight, EPS)
    check("gated norm", found, norm.gated_rms_norm(heads, gate, weight, EPS), 1e-6)


def report(name: str, rows: int, us: float, **more: object) -> None:
    say(f"{name:34s} {rows:3d} rows {us:8.2f} us a layer", *(f"{key} {value}" for key, value in more.items()))
    LINES.append({"time": name, "rows": rows, "us": us, **more})


def _all_deltas(work: DeltaLayers, outputs: list[tuple[Tensor, ...]]) -> None:
    for layer, rows in enumerate(outputs):
        work.delta(layer, rows)


def time_delta() -> None:
    layers = 48
    for rows in BUCKETS:
        for count in (1, 6):
            work = DeltaLayers(rows, count, layers)
            outputs = [work.conv(i) for i in range(layers)]
            ms = milliseconds(lambda work=work: [work.conv(i) for i in range(layers)])
            report("conv and gates", rows, ms * 1e3 / layers, path=count)
            ms = milliseconds(
                lambda work=work, outputs=outputs: [work.delta(i, outputs[i]) for i in range(layers)]
            )
            moved = 2 * VALUE_HEADS * DIM * DIM * 4
            report("delta rule", rows, ms * 1e3 / layers, path=count, TBs=round(moved * layers / ms / 1e9, 2))
    plain = delta_kernel.tiles
    for rows, precision, columns, dims, warps, stages in (
        (8, "ieee", 32, 32, 4, 1),
        (8, "tf32x3", 32, 32, 4, 3),
        (24, "ieee", 32, 32, 4, 1),
        (24, "tf32x3", 16, 32, 4, 1),
        (24, "tf32x3", 32, 32, 4, 3),
        (24, "tf32x3", 64, 32, 8, 3),
        (64, "ieee", 32, 32, 8, 1),
        (64, "tf32x3", 32, 32, 8, 3),
        (64, "tf32x3", 32, 32, 4, 3),
    ):
        work = DeltaLayers(rows, 4, layers)
        outputs = [work.conv(i) for i in range(layers)]
        label = f"delta {precision} {columns} columns {dims} dims {warps} warps {stages} stages"
        chosen = {"PRECISION": precision, "COLUMNS": columns, "SLICE": dims}
        chosen |= {"num_warps": warps, "num_stages": stages}
        try:
            delta_kernel.tiles = lambda *shape, chosen=chosen: {**plain(*shape), **chosen}
            run = partial(_all_deltas, work, outputs)
            ms = milliseconds(run, repeats=10)
            report(label, rows, ms * 1e3 / layers, path=4)
        except Exception:
            say("could not", label, traceback.format_exc(limit=1).splitlines()[-1])
        finally:
            delta_kernel.tiles = plain


def time_attention() -> None:
    layers = 16
    for length in (256, 8192):
        for rows in BUCKETS:
            work = Cache(rows, length, layers)
            ms = milliseconds(lambda work=work: [work.attention(i) for i in range(layers)])
            moved = 2 * length * KV_HEADS * HEAD * 2
            report(
                "attention", rows, ms * 1e3 / layers, context=length, TBs=round(moved * layers / ms / 1e9, 2)
            )
    plain = attention_kernel.tiles
    work = Cache(24, 8192, layers)
    for block, stages, warps in ((32, 2, 4), (32, 3, 8), (64, 2, 8), (16, 4, 4)):
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


def time_layers() -> None:
    """One delta and one attention layer with all but their products, captured; residual stream carried on."""
    layers = 16
    for length in (256, 8192):
        for rows in BUCKETS:
            deltas, cache = DeltaLayers(rows, 3, layers), Cache(rows, length, layers)
            x, add = torch.randn(2, 1, rows, WIDTH, device="cuda")
            weight, head_weight = torch.randn(WIDTH, device="cuda"), torch.randn(HEAD, device="cuda")
            wide = torch.randn(1, rows, 2 * INNER, device="cuda")
            qkv = torch.randn(1, rows, 2 * HEADS * HEAD + 2 * KV_HEADS * HEAD, device="cuda")
            q, k, v = qkv.split([2 * HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
            q, k, v = (
                q.unflatten(-1, (HEADS, 2 * HEAD)),
                k.unflatten(-1, (KV_HEADS, HEAD)),
                v.unflatten(-1, (KV_HEADS, HEAD)),
            )
            places = torch.arange(rows, device="cuda")
            positions = cache.lengths[:, None] + places
            cos, sin = norm.rope_angles(positions, torch.rand(ROTATED // 2, device="cuda"))

            def delta_layer(i: int, deltas=deltas, x=x, add=add, weight=weight, wide=wide) -> None:
                norm_kernel.add_rms_norm(x, add, weight, EPS)
                out = deltas.delta(i, deltas.conv(i))
                norm_kernel.gated_rms_norm(out, deltas.parts(i)[1], deltas.norm, EPS)
                norm_kernel.add_rms_norm(x, add, weight, EPS)
                norm_kernel.silu_mul(*wide.chunk(2, -1))

            def attention_layer(
                i: int,
                cache=cache,
                x=x,
                add=add,
                weight=weight,
                head_weight=head_weight,
                wide=wide,
                q=q,
                k=k,
                v=v,
                cos=cos,
                sin=sin,
                places=places,
            ) -> None:
                norm_kernel.add_rms_norm(x, add, weight, EPS)
                queries = norm_kernel.head_rope(q[..., :HEAD], head_weight, EPS, cos, sin, interleaved=False)
                norm_kernel.cache_heads(
                    k, v, head_weight, EPS, cos, sin, keys=cache.keys[i].flatten(0, 1),
                    values=cache.values[i].flatten(0, 1), rows=places, interleaved=False,
                )  # fmt: skip
                attention_kernel.paged_attention(
                    queries,
                    cache.keys[i],
                    cache.values[i],
                    cache.table,
                    cache.lengths,
                    cache.step.ancestors,
                    gate=q[..., HEAD:],
                )
                norm_kernel.add_rms_norm(x, add, weight, EPS)
                norm_kernel.silu_mul(*wide.chunk(2, -1))

            first = milliseconds(lambda f=delta_layer: [f(i) for i in range(layers)]) * 1e3 / layers
            report("delta layer without products", rows, first, context=length)
            second = milliseconds(lambda f=attention_layer: [f(i) for i in range(layers)]) * 1e3 / layers
            report("attention layer without products", rows, second, context=length)
            report("the 27B's 48 + 16 layers, in all", rows, 48 * first + 16 * second, context=length)
    for rows in (1, 24, 64):
        x, add = torch.randn(2, 1, rows, WIDTH, device="cuda")
        weight, wide = torch.randn(WIDTH, device="cuda"), torch.randn(1, rows, 2 * INNER, device="cuda")
        report(
            "residual and norm",
            rows,
            milliseconds(
                lambda x=x, add=add, weight=weight: [
                    norm_kernel.add_rms_norm(x, add, weight, EPS) for _ in range(50)
                ]
            )
            * 20,
        )
        report(
            "silu product",
            rows,
            milliseconds(lambda wide=wide: [norm_kernel.silu_mul(*wide.chunk(2, -1)) for _ in range(50)])
            * 20,
        )


def check_model() -> None:
    """A tiny random model's prompt and trees on the GPU against the CPU, with commits between."""
    import tempfile

    from treeflash.gguf.reader import GGUFFile
    from treeflash.models.decoder import Decoder
    from treeflash.state.sequences import SequenceStates
    from treeflash.tools.tiny import make_tiny

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
                    found.append(model.forward(step, states.buffers).hidden.cpu())
                    if step.is_chunk:
                        states.advance(step)
                    else:
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
    parts = [check_norms, check_delta, check_attention, check_rows_alone, check_model]
    if not options.no_times:
        parts += [time_delta, time_attention, time_layers]
    for part in parts:
        try:
            with torch.inference_mode():
                part()
        except Exception:
            FAILED.append(part.__name__)
            say("FAIL", part.__name__)
            traceback.print_exc()
            sys.stderr.flush()
        if options.out is not None:
            with options.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in LINES)
            LINES.clear()
    say("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
