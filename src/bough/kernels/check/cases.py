"""Every operation that a model runs on a GPU, with its variants: inputs, what computes it, its reference.

The list serves `bough doctor --gpu` and the self-check of a first start. A test holds it against the kernels
in this package: one that no case launches fails it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels import attention, causal_conv, commit, delta_rule, experts, norm_rope, slot_mapping, tree
from bough.kernels.attention import cpu as attention_cpu
from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers
from bough.kernels.causal_conv import reference as conv_reference
from bough.kernels.check.inputs import PAGE, Random, random_trees
from bough.kernels.check.shapes import QUICK, Shapes, Sizes
from bough.kernels.commit import reference as commit_reference
from bough.kernels.delta_rule import DeltaHeads, DeltaRows
from bough.kernels.delta_rule import cpu as delta_cpu
from bough.kernels.embedding import embed
from bough.kernels.experts import reference as experts_reference
from bough.kernels.gather_rows import gather_rows
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import decode
from bough.kernels.norm_rope import reference as norm_reference
from bough.kernels.quant_matmul import (
    BUCKETS,
    Layout,
    PackedRows,
    int8,
    pack_rows,
    packed_matmul,
    packed_matmuls,
    partial_matmul,
    supports_partial_sums,
    unpack,
    with_int8,
)
from bough.kernels.sampling import RowOwners, SamplingState, make_workspace, rank_rows, sample_rows
from bough.kernels.sampling import state as plain_sampling
from bough.kernels.slot_mapping import reference as mapping_reference

Outputs = Sequence[Tensor]
_Formats = tuple[str, str]  # of K and of V
_Delta = tuple[int, int, int, int]  # key heads, value heads, dims, taps of the convolution
Q = QuantType
_PENDING = 5  # rows of the last tree that were accepted and wait for their commit
_SAVED = 64
_MANY = 200  # rows that no tile holds
_EXACT = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """One variant with its inputs on a device."""

    run: Callable[..., Outputs]  # takes what `fresh` returns, and may change it
    reference: Callable[..., Outputs]
    tolerance: float  # of the relative RMS error; 0: the same bits
    fresh: Callable[[], Sequence[Tensor]] = tuple
    read: int = 0  # bytes that must be read from the GPU's memory
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    operation: str  # one of `OPERATIONS`
    variant: str
    make: Callable[[], Work]
    model: str = ""  # whose shapes it has

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.operation, self.variant, self.model) if part)


Cases = Iterator[tuple[str, str, Callable[[], Work]]]


def cases_of(shapes: Shapes, device: torch.device, sizes: Sizes = QUICK) -> list[Case]:
    """Return the cases of a model's shapes; nothing is computed until one is made."""
    random = Random(device)
    cases: list[Case] = []
    for group in (_matmuls, _norms, _experts, _attention, _drafts, _delta, _steps, _sampling, _embeddings):
        for operation, variant, make in group(shapes, random, sizes):
            cases.append(Case(operation, variant, partial(_made, random, make), shapes.name))
    return cases


def _made(random: Random, make: Callable[[], Work]) -> Work:
    random.restart()
    return make()


def _floats(x: PackedRows) -> Tensor:
    """Return packed rows as floats."""
    return x.halves()[:, : x.columns].float() * x.scale[:, None]


def _matmul(random: Random, type: QuantType, rows: int, shape: tuple[int, int], tolerance: float) -> Work:
    weight, x = random.weight(type, *shape), random.normal(rows, shape[1])
    return Work(
        lambda: [packed_matmul(x, weight)],
        lambda: [x.double() @ unpack(weight).double().T],
        tolerance,
        read=weight.nbytes,
        flops=2 * rows * shape[0] * shape[1],
    )


def _matmuls(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    for type in shapes.types:
        tolerance = 2e-3 if type in (Q.Q4_K, Q.Q5_K, Q.Q4_1, Q.Q5_1) else 1e-3
        buckets = dict.fromkeys(min(bucket for bucket in BUCKETS if bucket >= rows) for rows in shapes.rows)
        for rows in (*buckets, _MANY):
            variant = f"{type.name}, {rows} rows"
            yield "matmul", variant, partial(_matmul, random, type, rows, sizes.matrix, tolerance)
        if shapes.int8:
            yield "int8 matmul", f"{type.name}, {_MANY} rows", partial(_int8, random, type, sizes)


def _partial_sums(random: Random, type: QuantType, sizes: Sizes) -> Work:
    """A matmul whose split-K sums a norm adds, or where that is not done, a matmul and a norm."""
    rows, columns = sizes.matrix
    weight, x, norm = random.weight(type, rows, columns), random.normal(8, columns), random.normal(rows)
    residual = random.normal(1, 8, rows)

    def run() -> Outputs:
        packed = pack_rows(x)
        fits = supports_partial_sums(packed, weight)
        add = partial_matmul(packed, weight) if fits else packed_matmul(packed, weight)[None]
        total, normed = norm_rope.add_rms_norm(residual, add, norm, 1e-6, pack=True)
        assert isinstance(normed, PackedRows)
        return [total, _floats(normed)]

    def reference() -> Outputs:
        product = (x.double() @ unpack(weight).double().T)[None]
        total, normed = norm_reference.add_rms_norm(residual.double(), product, norm.double(), 1e-6)
        return [total, normed[0]]

    return Work(run, reference, 3e-3, read=weight.nbytes, flops=16 * rows * columns)


def _int8(random: Random, type: QuantType, sizes: Sizes) -> Work:
    rows, columns = sizes.matrix
    weight, x = random.weight(type, rows, columns), random.normal(_MANY, columns)
    rounded = with_int8(weight, rows)

    def reference() -> Outputs:
        floats = _floats(pack_rows(x))
        values, out = unpack(weight), torch.empty(_MANY, rows, device=x.device)
        int8.matmul(int8.quantise(floats), int8.quantise(values), out)
        exact = x.double() @ values.double().T
        return [torch.cat([out[:, : rounded.int8_rows], exact[:, rounded.int8_rows :]], 1)]

    flops = 2 * _MANY * rows * columns
    return Work(
        lambda: [packed_matmuls(pack_rows(x), [rounded])], reference, 1e-2, read=weight.nbytes, flops=flops
    )


def _norms(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    rows_of_step = max(shapes.rows)
    for type in shapes.types:
        yield "norms", f"{type.name}, partial sums", partial(_partial_sums, random, type, sizes)
    for rows in (rows_of_step, 80):
        yield "norms", f"norm, {rows} rows", partial(_norm, shapes, random, rows)
        width = shapes.feed_forward
        yield "norms", f"SiLU, {rows} rows", partial(_silu, random, rows, width)
        if shapes.delta is not None:
            yield "norms", f"gated norm, {rows} rows", partial(_gated_norm, shapes, random, rows)
    yield "norms", "unpacked", partial(_unpacked_norms, shapes, random)


def _norm(shapes: Shapes, random: Random, rows: int) -> Work:
    x, add = random.normal(2, 1, rows, shapes.width)
    weight = random.normal(shapes.width)

    def run() -> Outputs:
        total, packed = norm_rope.add_rms_norm(x, add, weight, shapes.eps, pack=True)
        assert isinstance(packed, PackedRows)
        return [total, _floats(packed)]

    def reference() -> Outputs:
        total, normed = norm_reference.add_rms_norm(x.double(), add.double(), weight.double(), shapes.eps)
        return [total, normed[0]]

    return Work(run, reference, 1e-3, read=x.nbytes + add.nbytes)


def _silu(random: Random, rows: int, width: int) -> Work:
    gate, up = random.normal(2, 1, rows, width)

    def run() -> Outputs:
        packed = norm_rope.silu_mul(gate, up, pack=True)
        assert isinstance(packed, PackedRows)
        return [_floats(packed), _floats(norm_rope.silu_rows(gate[0], up[0]))]

    def reference() -> Outputs:
        product = norm_reference.silu_mul(gate.double(), up.double())[0]
        return [product, product]

    return Work(run, reference, 1e-3, read=gate.nbytes + up.nbytes)


def _gated_norm(shapes: Shapes, random: Random, rows: int) -> Work:
    assert shapes.delta is not None
    _, heads, dim, _ = shapes.delta
    x, gate, weight = (
        random.normal(1, rows, heads, dim),
        random.normal(1, rows, heads * dim),
        random.normal(dim),
    )

    def run() -> Outputs:
        packed = norm_rope.gated_rms_norm(x, gate, weight, shapes.eps, pack=True)
        assert isinstance(packed, PackedRows)
        return [_floats(packed)]

    def reference() -> Outputs:
        return [norm_reference.gated_rms_norm(x.double(), gate.double(), weight.double(), shapes.eps)[0]]

    return Work(run, reference, 1e-3, read=x.nbytes + gate.nbytes)


def _unpacked_norms(shapes: Shapes, random: Random) -> Work:
    """Norms whose output no matmul with tiles reads, and rotated heads."""
    heads, _, dim = shapes.heads
    x, y = random.normal(2, 1, 8, shapes.width)
    q, weight, head_weight = random.normal(1, 8, heads, dim), random.normal(shapes.width), random.normal(dim)
    cos, sin = _angles(random, 8, shapes.rope_dim)
    gated, gate = random.normal(1, 8, 4, 128), random.normal(1, 8, 512)
    small = random.normal(128)

    def compute(module: ModuleType, cast: Callable[[Tensor], Tensor]) -> Outputs:
        wide, other, norm, rows, head = (cast(part) for part in (x, y, weight, q, head_weight))
        turned = module.head_rope(
            rows,
            head if shapes.head_norms else None,
            shapes.eps,
            cast(cos),
            cast(sin),
            interleaved=shapes.interleaved,
        )
        gates = module.gated_rms_norm(cast(gated), cast(gate), cast(small), shapes.eps)
        return [module.rms_norm(wide, norm, shapes.eps), module.silu_mul(wide, other), turned, gates]

    return Work(
        lambda: compute(norm_rope, lambda part: part),
        lambda: compute(norm_reference, lambda part: part.double()),
        1e-5,
    )


def _angles(random: Random, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    return norm_reference.rope_angles(random.integers(9000, 1, rows), random.uniform(dim // 2))


def _experts(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    if shapes.experts is None:
        return
    steps = dict.fromkeys(BUCKETS[0] if rows <= BUCKETS[0] else 24 for rows in shapes.rows)
    for rows in (1, *steps, _MANY):
        yield "expert routing", f"{rows} rows", partial(_routing, shapes, random, rows)
    for type in shapes.expert_types:
        for rows in (*steps, _MANY):
            variant = f"{type.name}, {rows} rows"
            yield "experts", variant, partial(_expert_matmul, shapes, random, type, rows, sizes)


@dataclass(frozen=True, slots=True)
class _Router:
    x: Tensor
    router: Tensor
    gate: Tensor
    used: int

    @classmethod
    def random(cls, shapes: Shapes, random: Random, rows: int) -> "_Router":
        assert shapes.experts is not None
        count, used, _ = shapes.experts
        x = random.normal(rows, shapes.width)
        return cls(x, random.normal(count, shapes.width), random.normal(shapes.width), used)

    def route(self, layouts: Sequence[Layout] = ()) -> tuple[PackedRows, Tensor, experts.Routing]:
        return experts.route_rows(self.x, self.router, self.gate, used=self.used, layouts=layouts)


def _expert_matmul(shapes: Shapes, random: Random, type: QuantType, rows: int, sizes: Sizes) -> Work:
    assert shapes.experts is not None
    (count, used, inner), width = shapes.experts, shapes.width
    inner = min(inner, sizes.matrix[0])
    layer = _Router.random(shapes, random, rows)
    tiles = random.weight(type, count * experts.padded(inner), width)
    stack = experts.ExpertStack.of(tiles, count, inner)

    def run() -> Outputs:
        packed, _, routing = layer.route((stack.layout,))
        return [experts.expert_matmul(packed, stack, routing)]

    def reference() -> Outputs:
        flat, weights = layer.route((stack.layout,))[2].chosen.flatten(), stack.unpacked()
        out = torch.empty(rows * used, inner, dtype=torch.float64, device=layer.x.device)
        for expert in flat.unique().tolist():  # all of them in float64 take gigabytes
            pairs = (flat == expert).nonzero()[:, 0]
            out[pairs] = layer.x[pairs // used].double() @ weights[expert].double().T
        return [out]

    read = stack.data.nbytes * min(rows * used, count) // count
    return Work(run, reference, 3e-3, read=read, flops=2 * rows * used * inner * width)


def _routing(shapes: Shapes, random: Random, rows: int) -> Work:
    layer = _Router.random(shapes, random, rows)
    outputs = random.normal(rows * layer.used, shapes.width)

    def run() -> Outputs:
        _, logits, routing = layer.route()
        return [
            logits,
            routing.weights,
            routing.chosen,
            experts.combine(layer.x, logits, outputs, routing.weights),
        ]

    def reference() -> Outputs:
        both = torch.cat([layer.router, layer.gate[None]]).double()
        logits = layer.x.double() @ both.T
        weights, expert_ids = experts_reference.route(logits[:, :-1], layer.used)
        parts = outputs.double().view(rows, layer.used, -1)
        total = experts_reference.combine(layer.x.double(), logits[:, -1], parts, weights)
        return [logits, weights, expert_ids.int(), total]

    return Work(run, reference, 1e-4, read=layer.router.nbytes)


def _attention(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    for keys, values in shapes.kv:
        name = keys if keys == values else f"{keys}/{values}"
        for rows in shapes.rows:
            variant = f"{name}, {rows} rows"
            yield (
                "tree attention",
                variant,
                partial(_tree_attention, shapes, random, (keys, values), rows, sizes),
            )
        yield "prompt attention", name, partial(_prompt_attention, shapes, random, (keys, values), sizes)
        yield "KV cache", name, partial(_cache_write, shapes, random, (keys, values))


@dataclass(frozen=True, slots=True)
class _Context:
    """Queries after a context whose pages are in any order."""

    q: Tensor
    gate: Tensor
    pools: tuple[HeadPool, HeadPool]
    table: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, shapes: Shapes, random: Random, kv: _Formats, rows: int, length: int) -> "_Context":
        heads, kv_heads, dim = shapes.heads
        pages = -(-(length + max(rows, _SAVED)) // PAGE)
        keys, values = (random.pool(name, (pages, kv_heads, PAGE), dim) for name in kv)
        q, gate = random.normal(2, 1, rows, heads, dim)
        lengths = torch.tensor([length]).to(random.device)
        return cls(q, gate, (keys, values), random.order(pages)[None], lengths)

    @property
    def read(self) -> int:
        return sum(plane.nbytes for pool in self.pools for plane in pool.planes)


def _tree_attention(shapes: Shapes, random: Random, kv: _Formats, rows: int, sizes: Sizes) -> Work:
    context = _Context.random(shapes, random, kv, rows, sizes.context)
    ancestors = random_trees(rows, device=random.device).ancestors
    tables = (*context.pools, context.table, context.lengths, ancestors)
    heads, _, dim = shapes.heads
    return Work(
        lambda: [attention.paged_attention(context.q, *tables, window=shapes.window, gate=context.gate)],
        lambda: [
            attention_cpu.paged_attention(
                context.q.double(), *tables, window=shapes.window, gate=context.gate.double()
            )
        ],
        2e-2 if "bf16" in kv else 3e-3,
        read=context.read,
        flops=4 * rows * heads * dim * sizes.context,
    )


def _prompt_attention(shapes: Shapes, random: Random, kv: _Formats, sizes: Sizes) -> Work:
    context = _Context.random(shapes, random, kv, sizes.chunk, 70)
    tables = (*context.pools, context.table, context.lengths)
    heads, _, dim = shapes.heads
    span = sizes.chunk + 70
    return Work(
        lambda: [attention.chunk_attention(context.q, *tables, span=span, gate=context.gate)],
        lambda: [
            attention_cpu.paged_attention(context.q.double(), *tables, None, gate=context.gate.double())
        ],
        2e-2 if "bf16" in kv else 3e-3,
        flops=2 * sizes.chunk * heads * dim * (span + 70),
    )


def _cache_write(shapes: Shapes, random: Random, kv: _Formats) -> Work:
    (heads, kv_heads, dim), rows = shapes.heads, 24
    q, k, v = random.normal(1, rows, heads, dim), *random.normal(2, 1, rows, kv_heads, dim)
    norms = (random.normal(dim), random.normal(dim)) if shapes.head_norms else (None, None)
    angles = _angles(random, rows, shapes.rope_dim)
    slots = random.order(2 * PAGE)[:rows]
    where = {"pages": slots // PAGE, "offsets": slots % PAGE, "interleaved": shapes.interleaved}

    def pools() -> list[Tensor]:
        both = [HeadPool.empty(FORMATS[name], (2, kv_heads, PAGE), dim, random.device) for name in kv]
        return [plane for pool in both for plane in pool.planes]

    def compute(function: Callable[..., Tensor], *planes: Tensor) -> Outputs:
        parts, both = list(planes), []
        for name in kv:
            codes, scales = parts.pop(0), parts.pop(0) if FORMATS[name].quantised else None
            both.append(HeadPool(FORMATS[name], dim, codes, scales))
        queries = function(q, k, v, norms, shapes.eps, *angles, keys=both[0], values=both[1], **where)
        stored = [
            pool.codes if pool.scales is None else decode(pool.codes, pool.scales, pool.format, dim)
            for pool in both
        ]
        return [queries, *stored]

    # Where the last bits of a sum differ, a value may be rounded to the next code.
    return Work(
        lambda *planes: compute(norm_rope.cache_heads, *planes),
        lambda *planes: compute(norm_reference.cache_heads, *planes),
        2e-2 if {"bf16", "tq3_0"} & set(kv) else 5e-3,
        pools,
    )


def _drafts(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    if shapes.draft is not None:
        yield "draft attention", "16 rows", partial(_draft_attention, shapes, random)
        yield "draft ring", "16 rows", partial(_draft_ring, shapes, random)
    yield "tree building", "22 nodes", partial(_best_tree, random)


def _draft_attention(shapes: Shapes, random: Random) -> Work:
    assert shapes.draft is not None
    (heads, kv_heads, dim), rows, ring = shapes.draft, 16, 512
    q, (k, v) = random.normal(1, rows, heads, dim), random.normal(2, 1, rows, kv_heads, dim)
    keys, values = random.normal(2, 2, ring, kv_heads, dim).half()
    slots, lengths, starts = (torch.tensor(part).to(random.device) for part in ([1], [3, 300], [0, 5]))
    positions = lengths[slots][:, None] + torch.arange(rows).to(random.device)
    rest = (positions, keys, values, slots, lengths, starts)
    options: dict[str, Any] = {"window": None, "causal": False}
    return Work(
        lambda: [attention.block_attention(q, k, v, *rest, **options)],
        lambda: [attention_cpu.block_attention(q.double(), k.double(), v.double(), *rest, **options)],
        3e-3,
    )


def _draft_ring(shapes: Shapes, random: Random) -> Work:
    assert shapes.draft is not None
    (_, heads, dim), rows = shapes.draft, 16
    (k, v), norm = random.normal(2, 1, rows, heads, dim), random.normal(dim)
    angles, ring = _angles(random, rows, dim), random.normal(2, 2, 40, heads, dim).half()
    slots, count, begin = (torch.tensor(part).to(random.device) for part in ([1], [9], [[30]]))
    where = {"slots": slots, "count": count, "positions": begin + torch.arange(rows).to(random.device)}

    def compute(function: Callable[..., None], both: Tensor) -> Outputs:
        function(k, v, norm, shapes.eps, *angles, keys=both[0], values=both[1], **where)
        return [both]

    return Work(
        lambda both: compute(norm_rope.ring_heads, both),
        lambda both: compute(norm_reference.ring_heads, both),
        1e-3,
        lambda: [ring.clone()],
    )


def _best_tree(random: Random) -> Work:
    """The best tree of a draft's candidates, and the path of it that the target accepts: as on a CPU."""
    depths, width = 15, 24
    ids = torch.stack([random.order(40)[:width] for _ in range(depths)])[None]
    scores = (2 * random.normal(1, depths, width)).log_softmax(-1)
    parts = (
        random.integers(40, 1),
        ids,
        scores,
        random.integers(40, 1, 1, depths),
        -random.uniform(1, 1, depths),
    )

    def compute(device: torch.device) -> Outputs:
        packed, weights = tree.best_tree(*(part.to(device) for part in parts), nodes=22, rows=24, spine=-4.0)
        tokens, parents, ancestors, _ = (row.contiguous() for row in packed[0])
        sampled = torch.roll(tokens, -1)
        tables = {"slots": [0], "limits": [64]}
        options = {name: torch.tensor(table).to(device) for name, table in tables.items()}
        stops = torch.full((1, 64), -1).to(device)
        counts = torch.zeros(1, 64).to(device)
        path = tree.accept_path(tokens, parents, ancestors, sampled, stops=stops, counts=counts, **options)
        return [packed, weights, path.flat, counts]

    def reference() -> Outputs:
        return [part.to(random.device) for part in compute(torch.device("cpu"))]

    return Work(lambda: compute(random.device), reference, 1e-6)


def _delta(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    if shapes.delta is None:
        return
    for rows in shapes.rows:
        yield "tree delta rule", f"{rows} rows", partial(_tree_delta, shapes.delta, random, rows)
        yield "tree convolution", f"{rows} rows", partial(_tree_conv, shapes.delta, random, rows)
    tokens = sizes.chunk
    yield "prompt delta rule", f"{tokens} tokens", partial(_prompt_delta, shapes.delta, random, tokens)
    yield "prompt convolution", f"{tokens} tokens", partial(_prompt_conv, shapes.delta, random, tokens)


def _delta_heads(delta: _Delta, random: Random, rows: int, path: int) -> DeltaHeads:
    key_heads, value_heads, dim, _ = delta
    q, k = random.normal(1, rows, key_heads, dim), random.normal(1, path + rows, key_heads, dim)
    q, k = q / q.norm(dim=-1, keepdim=True) * dim**-0.5, k / k.norm(dim=-1, keepdim=True)
    g = -random.uniform(1, path + rows, value_heads)
    v = random.normal(1, path + rows, value_heads, dim)
    return DeltaHeads(q, k, v, g, random.uniform(1, path + rows, value_heads))


def _tree_delta(delta: _Delta | None, random: Random, rows: int) -> Work:
    assert delta is not None
    _, value_heads, dim, _ = delta
    heads, state = _delta_heads(delta, random, rows, 24), random.normal(2, value_heads, dim, dim)
    slots, count = (torch.tensor(part).to(random.device) for part in ([1], [_PENDING]))
    ancestors = random_trees(rows, device=random.device).ancestors

    def run(state: Tensor) -> Outputs:
        rows = DeltaRows(slots, count, delta_rule.tree_order(ancestors))
        return [delta_rule.tree_delta(heads, state, rows), state]

    def reference(state: Tensor) -> Outputs:
        exact, rows = state.double(), DeltaRows(slots, count, delta_cpu.tree_order(ancestors))
        return [delta_cpu.tree_delta(DeltaHeads(*(part.double() for part in heads)), exact, rows), exact]

    read = 2 * 4 * value_heads * dim * dim
    return Work(run, reference, 1e-5, lambda: [state.clone()], read=read)


def _tree_conv(delta: _Delta | None, random: Random, rows: int) -> Work:
    assert delta is not None
    key_heads, value_heads, dim, taps = delta
    channels = (2 * key_heads + value_heads) * dim
    inputs, alpha, beta = (random.normal(1, rows, n) for n in (channels, value_heads, value_heads))
    decay, bias = -random.uniform(value_heads), random.normal(value_heads)
    weights = ConvWeights(random.normal(channels, taps), decay, bias, key_heads)
    window, saved = random.normal(1, taps - 1, channels).half(), random.normal(1, _SAVED, channels).half()
    gates = random.uniform(1, _SAVED, 2, value_heads)
    slots, count = (torch.tensor(part).to(random.device) for part in ([0], [_PENDING]))
    path = random.order(_SAVED).sort().values[None]
    parents = random_trees(rows, device=random.device).parents

    def compute(index: Callable[..., Tensor], conv: Callable[..., Outputs], *saves: Tensor) -> Outputs:
        step = ConvRows(slots, path, count, index(parents, taps, count, _SAVED))
        buffers = DeltaBuffers(random.normal(0), *saves)
        q, *heads = conv(inputs, alpha, beta, weights, buffers, step)
        # What follows a path, up to its room, is not written.
        parts = [torch.cat([part[:, :_PENDING], part[:, _SAVED:]], 1) for part in heads]
        return [q, *parts, buffers.window]

    return Work(
        lambda *buffers: compute(causal_conv.conv_index, causal_conv.tree_conv, *buffers),
        lambda *buffers: compute(conv_reference.conv_index, conv_reference.tree_conv, *buffers),
        1e-4,
        lambda: [part.clone() for part in (window, saved, gates)],
        read=weights.taps.nbytes + inputs.nbytes,
    )


def _prompt_delta(delta: _Delta | None, random: Random, tokens: int) -> Work:
    assert delta is not None
    _, value_heads, dim, _ = delta
    heads, state = _delta_heads(delta, random, tokens, 0), random.normal(1, value_heads, dim, dim)
    # As the convolution of a prompt writes them.
    heads = heads._replace(q=heads.q.half(), k=heads.k.half())
    slots = torch.tensor([0]).to(random.device)

    def run(state: Tensor, v: Tensor) -> Outputs:
        return [delta_rule.slot_delta(heads._replace(v=v), state, slots), state]

    def reference(state: Tensor, v: Tensor) -> Outputs:
        exact = state.double()
        return [delta_cpu.slot_delta(DeltaHeads(*(part.double() for part in heads)), exact, slots), exact]

    flops = 8 * tokens * value_heads * dim * dim
    return Work(run, reference, 3e-3, lambda: [state.clone(), heads.v.clone()], flops=flops)


def _prompt_conv(delta: _Delta | None, random: Random, tokens: int) -> Work:
    assert delta is not None
    key_heads, value_heads, dim, taps = delta
    channels = (2 * key_heads + value_heads) * dim
    inputs, alpha, beta = (random.normal(1, tokens, n) for n in (channels, value_heads, value_heads))
    decay, bias = -random.uniform(value_heads), random.normal(value_heads)
    weights = ConvWeights(random.normal(channels, taps), decay, bias, key_heads)
    window, saved = random.normal(1, taps - 1, channels), random.normal(1, 24, channels)
    slots, count = (torch.tensor(part).to(random.device) for part in ([0], [_PENDING]))
    path = random.order(24).sort().values[None]
    rows, unused = ConvRows(slots, path, count, path), random.normal(0)

    def compute(function: Callable[..., Outputs], window: Tensor) -> Outputs:
        buffers = DeltaBuffers(unused, window, saved, unused)
        return [*function(inputs, alpha, beta, weights, buffers, rows), window]

    return Work(
        lambda window: compute(causal_conv.chunk_heads, window),
        lambda window: compute(conv_reference.chunk_heads, window),
        1e-3,
        lambda: [window.clone()],
        read=2 * inputs.nbytes,
    )


def _steps(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    yield "slot mapping", "a tree", partial(_mapping, random)
    if shapes.sequences > 1:
        yield "slot mapping", "several trees", partial(_ragged_mapping, random)
    yield "commit", "24 rows", partial(_commit, shapes, random)


def _mapping(random: Random) -> Work:
    rows, lengths = random.integers(1 << 40, 4, 64), random.integers(200, 3)
    table, path, counts = random.order(99).view(3, 33), random.integers(64, 3, 64), random.integers(9, 3)
    count, slot = (torch.tensor(part).to(random.device) for part in ([5], [2]))

    def compute(module: ModuleType) -> Outputs:
        padded = module.padded_tree(rows, count, slot, lengths, size=16)
        mapping = module.slot_mapping(slot, lengths, table, path, counts, rows=16, page=PAGE)
        return [padded, *(getattr(mapping, field.name) for field in fields(mapping))]

    return Work(lambda: compute(slot_mapping), lambda: compute(mapping_reference), _EXACT)


def _ragged_mapping(random: Random) -> Work:
    rows, lengths = random.integers(64, 4, 64), random.integers(200, 3)
    first, slots = (torch.tensor(part).to(random.device) for part in ([0, 5, 12], [2, 0]))

    def compute(module: ModuleType) -> Outputs:
        return [module.ragged_rows(rows, first, slots, lengths, size=16)]

    return Work(lambda: compute(slot_mapping), lambda: compute(mapping_reference), _EXACT)


def _commit(shapes: Shapes, random: Random) -> Work:
    """An accepted path, and its rows of the KV cache moved to their places."""
    kv_heads, dim = shapes.heads[1:]
    ancestors = random_trees(24, device=random.device).ancestors
    last, slots = (torch.tensor(part).to(random.device) for part in ([23], [1]))
    table, planes = random.order(8).view(2, 4), random.normal(2, 8, kv_heads, PAGE, dim).half()
    path, count, lengths = random.integers(64, 2, 64), random.integers(9, 2), random.integers(90, 2)

    def compute(module: ModuleType, plane: Tensor, path: Tensor, count: Tensor, lengths: Tensor) -> Outputs:
        taken = module.commit_path(ancestors, last, slots, path=path, count=count, lengths=lengths)
        module.move_rows([plane], taken, slots, table)
        return [taken.counts, taken.starts, taken.source, plane, path, count, lengths]

    return Work(
        lambda *buffers: compute(commit, *buffers),
        lambda *buffers: compute(commit_reference, *buffers),
        _EXACT,
        lambda: [part.clone() for part in (planes, path, count, lengths)],
    )


def _sampling(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    settings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top-p": {"temperature": 0.8, "top_p": 0.95},
        "penalties": {"temperature": 0.9, "repetition": 1.1},
    }
    for name, options in settings.items():
        yield "sampling", name, partial(_sample, random, sizes.vocabulary, options)
    yield "sampling", "a draft's ranking", partial(_ranking, random, sizes.vocabulary)


def _requests(random: Random, rows: int, vocabulary: int, options: dict[str, Any]) -> SamplingState:
    state = SamplingState.empty(rows, vocabulary, random.device)
    prompt = random.integers(vocabulary, 50) if "repetition" in options else None
    state.begin(**options, seed=12345, prompt=prompt)
    return state


def _sample(random: Random, vocabulary: int, options: dict[str, Any]) -> Work:
    rows = 24
    # A few tokens above a bulk: as a model's logits.
    logits = 2 * random.normal(rows, vocabulary) + 12 * (random.uniform(rows, vocabulary) < 30 / vocabulary)
    tokens, positions = random.integers(vocabulary, rows), random.integers(1 << 40, rows)
    ancestors = random_trees(rows, device=random.device).ancestors[0]
    owners, state = RowOwners.one(0, rows, random.device), _requests(random, rows, vocabulary, options)
    inputs = (logits, positions, tokens, ancestors, owners, state)
    workspace = make_workspace(rows, vocabulary, random.device)
    return Work(
        lambda: [sample_rows(*inputs, workspace).clone()],
        lambda: [plain_sampling.sample_rows(*inputs)],
        _EXACT,
        read=logits.nbytes,
    )


def _ranking(random: Random, vocabulary: int) -> Work:
    rows, count = 15, 24
    logits, positions = 3 * random.normal(rows, vocabulary), random.integers(1 << 40, rows)
    anchors, owners = random.integers(vocabulary, rows), RowOwners.one(0, rows, random.device)
    state = _requests(random, rows, vocabulary, {})
    workspace = make_workspace(rows, vocabulary, random.device)
    return Work(
        lambda: rank_rows(logits, positions, anchors, owners, count, state, workspace),
        lambda: plain_sampling.rank_rows(logits, positions, anchors, owners, count, state),
        1e-4,
        read=logits.nbytes,
    )


def _embeddings(shapes: Shapes, random: Random, sizes: Sizes) -> Cases:
    if shapes.embedding is None:
        return
    type = shapes.embedding
    yield "embedding", type.name, partial(_embedding, shapes, random, type, sizes)
    if shapes.host_embedding:
        yield "row gathering", "from host memory", partial(_gathering, random)


def _embedding(shapes: Shapes, random: Random, type: QuantType, sizes: Sizes) -> Work:
    table, tokens = (
        random.bytes_of(type, sizes.vocabulary // 8, shapes.width),
        random.integers(sizes.vocabulary // 8, 1, 24),
    )
    return Work(lambda: [embed(table, type, tokens)], lambda: [dequantise(table[tokens], type)], _EXACT)


def _gathering(random: Random) -> Work:
    table = torch.randint(256, (300, 1152), dtype=torch.uint8, pin_memory=random.device.type == "cuda")
    rows = random.integers(300, 24)

    def reference() -> Outputs:
        return [table[rows.cpu()].to(rows.device)]

    return Work(lambda: [gather_rows(table, rows)], reference, _EXACT)
