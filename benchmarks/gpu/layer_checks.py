"""What the layers' benchmark checks: the kernels on a GPU against their references, at the 27B's shapes."""

import random
from types import ModuleType

import torch
from torch import Tensor

from treeflash.kernels.attention import reference as attention
from treeflash.kernels.attention import triton_kernels as attention_kernel
from treeflash.kernels.causal_conv import cuda as conv_cuda
from treeflash.kernels.causal_conv import reference as conv
from treeflash.kernels.causal_conv import triton_kernels as conv_kernel
from treeflash.kernels.delta_rule import cuda as delta_cuda
from treeflash.kernels.delta_rule import reference as delta
from treeflash.kernels.delta_rule import triton_kernels as delta_kernel
from treeflash.kernels.kv_cache import triton_kernels as cache_kernel
from treeflash.kernels.kv_cache.format import FORMATS, HeadPool
from treeflash.kernels.norm_rope import reference as norm
from treeflash.kernels.norm_rope import triton_kernels as norm_kernel
from treeflash.kernels.quant_matmul import PackedRows, pack_rows
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
    """Relative error; a check that fails is said at once, the others by `summary`."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    good = bool(found.isfinite().all()) and error < tolerance
    if not good:
        FAILED.append(name)
        say("FAIL", name, f"error {error:.2e}, at most {tolerance:.0e}")
    LINES.append({"check": name, "error": error, "passed": good})


def summary(part: str, lines: list[dict]) -> None:
    errors = [line["error"] for line in lines if "check" in line]
    if errors and all(line.get("passed", True) for line in lines):
        say("PASS", part, f"{len(errors)} checks, worst error {max(errors):.2e}")


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


def tree_of(
    rows: int, batch: int = 1, *, depth: int = 16, seed: int = 0, device: str | torch.device = "cuda"
) -> Step:
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
    parents = torch.tensor(trees, device=device)
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    return Step.tree(torch.arange(batch, device=device), torch.zeros_like(parents), parents, zeros)


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

    def conv(self, layer: int, implementation: ModuleType = conv_cuda) -> tuple[Tensor, ...]:
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

    def delta(self, layer: int, rows: tuple[Tensor, ...], implementation: ModuleType = delta_cuda) -> Tensor:
        places = {"slots": self.slots, "count": self.count, "ancestors": self.step.ancestors}
        return implementation.tree_delta(*rows, self.state[layer], **places)

    def left(self) -> list[Tensor]:
        return [part.clone() for part in (self.window, self.stash, self.gates, self.state)]

    def restore(self, left: list[Tensor]) -> None:
        for part, old in zip((self.window, self.stash, self.gates, self.state), left, strict=True):
            part.copy_(old)


SIZES = [
    (1, 0, 1),
    (1, 1, 1),
    (3, 2, 2),
    (8, 5, 1),
    (16, 16, 1),
    (23, 3, 2),
    (32, 1, 1),
    (48, 9, 1),
    (64, 64, 1),
]


def check_delta() -> None:
    _check_delta("cuda", conv_cuda, delta_cuda, SIZES)


def check_triton_delta() -> None:
    """What other cards use."""
    _check_delta("triton", conv_kernel, delta_kernel, SIZES[2:6:3])


def _check_delta(label: str, convs: ModuleType, deltas: ModuleType, sizes: list) -> None:
    for rows, count, batch in sizes:
        for dtype in (torch.float16, torch.float32):
            with Poison():
                layer = DeltaLayers(rows, count, 1, batch=batch, dtype=dtype)
            name = f"{rows} rows, path {count}, batch {batch}, {str(dtype)[6:]}"
            before = layer.left()
            wanted = layer.conv(0, conv)
            after = layer.left()
            exact, state = [x.double() for x in wanted], layer.state[0].double()
            places = {"slots": layer.slots, "count": layer.count, "ancestors": layer.step.ancestors}
            wanted_out = delta.tree_delta(*exact, state, **places)
            expected = conv.conv_index(layer.step.parents, TAPS, layer.count, SAVED)
            check(f"conv index, {name}", layer.index, expected, 1e-9)
            used = [*range(count), *range(SAVED, SAVED + rows)]
            layer.restore(before)
            with Poison():
                found = layer.conv(0, convs)
            for part, one, other in zip(("q", "k", "v", "g", "beta"), found, wanted, strict=True):
                both = [one, other] if part == "q" else [x[:, used] for x in (one, other)]
                check(f"{label} conv {part}, {name}", *both, 3e-6)
            for part, one, other in zip(("window", "stash", "gates"), layer.left(), after, strict=False):
                check(f"{label} conv leaves {part}, {name}", one, other, 3e-6)
            with Poison():
                out = layer.delta(0, found, deltas)
            check(f"{label} delta out, {name}", out, wanted_out, 5e-6)
            check(f"{label} delta state, {name}", layer.state[0], state, 5e-6)


def check_rows_alone() -> None:
    """Row 0 of a larger step against a step of one row; a path in one piece against row by row."""
    torch.manual_seed(1)
    layer = DeltaLayers(1, 3, 1)
    before = layer.left()
    rows = layer.conv(0)
    alone = layer.delta(0, rows)
    for count in BUCKETS[1:]:
        more = DeltaLayers(count, 3, 1)
        more.inputs[:, :, :1] = layer.inputs
        more.weights, more.path = layer.weights, layer.path
        more.restore(before)
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
        more.keys, more.values = cache.keys, cache.values
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
        format: str = "f16",
    ):
        query, kv, dim = heads
        pages = -(-(length + 64) // PAGE)
        self.step = tree_of(rows, batch)
        self.q = torch.randn(layers, batch, rows, query, dim, device="cuda")
        self.gate = torch.randn(layers, batch, rows, query, 2 * dim, device="cuda")[..., dim:]
        self.keys, self.values = (
            HeadPool.empty(FORMATS[format], (layers, batch * pages, kv, PAGE), dim, self.q.device)
            for _ in range(2)
        )
        for pool in (self.keys, self.values):
            pool.codes.normal_()
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
    for heads in ((HEADS, KV_HEADS, HEAD), (32, 8, 128)):
        for format in ("f16", "bf16") if heads[2] == HEAD else ("f16",):
            for rows, length in sizes:
                cache = Cache(rows, length, 1, batch=2, heads=heads, format=format)
                cache.lengths[1] //= 3
                with Poison():
                    found = cache.attention(0)
                wanted = attention.paged_attention(
                    cache.q[0].double(), cache.keys[0], cache.values[0], cache.table,
                    cache.lengths, cache.step.ancestors, gate=cache.gate[0].double(),
                )  # fmt: skip
                check(
                    f"attention {heads}, {format}, {rows} rows, {length}",
                    found,
                    wanted,
                    2e-3 if format == "f16" else 1.2e-2,
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


def check_packed(name: str, found: PackedRows, floats: Tensor) -> None:
    """Rows that a kernel packed against those that packing its floats gives."""
    wanted = pack_rows(floats.flatten(0, 1))
    data = [
        (x.data if x.bucket is None else x.data.transpose(0, 1).flatten(1)[: x.rows]) for x in (found, wanted)
    ]
    check(name, data[0], data[1], 1e-3)
    check(f"{name}, scales", found.scale, wanted.scale, 1e-9)


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
        with Poison():
            packed_norm = norm_kernel.add_rms_norm(x, add, weight, EPS, pack=True)[1]
            packed_product = norm_kernel.silu_mul(x, add, pack=True)
        check_packed(f"packed norm {rows} x {width}", packed_norm, wanted[1])
        check_packed(f"packed silu {rows} x {width}", packed_product, norm.silu_mul(x, add))
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
        places = torch.randperm(40, device="cuda")[:10]
        split, pools, queries = {"pages": places // 8, "offsets": places % 8}, [], []
        q = torch.randn(2, 5, HEADS, 2 * HEAD, device="cuda")[..., :HEAD]
        for implementation in (cache_kernel, norm):
            both = HeadPool.empty(FORMATS["f16"], (2, 5, KV_HEADS, 8), HEAD, x.device)
            with Poison():
                queries += [implementation.cache_heads(
                    q, x, other, (1 - weight, weight), EPS, cos, sin, keys=both[0], values=both[1], **split,
                    interleaved=interleaved,
                )]  # fmt: skip
            pools.append(both.codes)
        check(f"cache, interleaved {interleaved}", *pools, 1e-4)
        check(f"queries beside it, interleaved {interleaved}", *queries, 1e-6)
    heads, gate = (
        torch.randn(2, 7, VALUE_HEADS, DIM, device="cuda"),
        torch.randn(2, 7, VALUE_HEADS * DIM + 4, device="cuda")[..., 4:],
    )
    weight = torch.randn(DIM, device="cuda")
    with Poison():
        found = norm_kernel.gated_rms_norm(heads, gate, weight, EPS)
        packed = norm_kernel.gated_rms_norm(heads, gate, weight, EPS, pack=True)
    wanted = norm.gated_rms_norm(heads, gate, weight, EPS)
    check("gated norm", found, wanted, 1e-6)
    check_packed("packed gated norm", packed, wanted)
