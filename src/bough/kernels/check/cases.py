"""Every operation that a model runs on a GPU, with its variants: inputs, what computes it, its reference.

The list serves `bough doctor --gpu` and the self-check of a first start. A test holds it against the kernels
in this package: one that no case launches fails it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels import (
    attention,
    causal_conv,
    commit,
    delta_rule,
    experts,
    hadamard,
    norm_rope,
    quant_matmul,
    slot_mapping,
    tree,
)
from bough.kernels.attention import PagedContext
from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers
from bough.kernels.check.inputs import PAGE, Random, random_trees
from bough.kernels.check.shapes import QUICK, Shapes, Sizes
from bough.kernels.delta_rule import DeltaHeads, DeltaRows
from bough.kernels.embedding import embed, gather_rows
from bough.kernels.experts import reference as experts_reference
from bough.kernels.experts.cache import stage_bytes
from bough.kernels.kv_cache.format import FORMATS, HeadPool, KVRing
from bough.kernels.kv_cache.reference import decode
from bough.kernels.quant_matmul import BUCKETS, Layout, PackedRows, PackedWeight, int8, pack_rows, unpack
from bough.kernels.sampling import SampledRows, make_workspace, rank_rows, sample_rows
from bough.kernels.sampling import state as plain_sampling
from bough.kernels.sampling.state import RowOwners, SamplingState

Outputs = Sequence[Tensor]
_Formats = tuple[str, str]  # of K and of V
_Window = dict[str, int]
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
    fresh: Callable[[], Sequence[Any]] = tuple
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


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """What all cases of a model are made from."""

    shapes: Shapes
    random: Random
    sizes: Sizes

    def made(self, make: Callable[..., Work], *arguments: Any) -> Work:
        self.random.restart()
        return make(self, *arguments)


Found = Iterator[tuple[str, str, Callable[..., Work], *tuple[Any, ...]]]  # operation, variant, what makes it


def cases_of(shapes: Shapes, device: torch.device, sizes: Sizes = QUICK) -> list[Case]:
    """Return the cases of a model's shapes; nothing is computed until one is made."""
    at, cases = CaseInputs(shapes, Random(device), sizes), []
    for group in (_matmuls, _norms, _experts, _attention, _drafts, _delta, _steps, _sampling, _embeddings):
        for operation, variant, *making in group(at):
            cases.append(Case(operation, variant, partial(at.made, *making), shapes.name))
    return cases


def _reference(operation: Any, *, double: bool) -> Any:
    """Return the reference of an operation, or those of a package; computed in float64 with `double`."""
    if isinstance(operation, ModuleType):
        return _PlainOperations(operation, double)
    plain = getattr(operation, "__wrapped__", operation)

    def call(*inputs: Any, **options: Any) -> Any:
        return plain(*map(_doubled, inputs), **{name: _doubled(value) for name, value in options.items()})

    return call if double else plain


@dataclass(frozen=True, slots=True)
class _PlainOperations:
    package: ModuleType
    double: bool

    def __getattr__(self, name: str) -> Any:
        return _reference(getattr(self.package, name), double=self.double)


def _doubled(value: Any) -> Any:
    if isinstance(value, DeltaHeads):
        return DeltaHeads(*map(_doubled, value))
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _outputs(result: Any) -> Outputs:
    """Return what a function returned as tensors, packed rows as floats."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedRows):
        return [_floats(result)[None]]
    return [tensor for part in result for tensor in _outputs(part)]


def _floats(x: PackedRows) -> Tensor:
    return x.halves()[:, : x.columns].float() * x.scale[:, None]


def _copied(value: Any) -> Any:
    return value.map(torch.clone) if isinstance(value, HeadPool) else value.clone()


def _function(
    kernel: Callable[..., Any],
    tolerance: float,
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    counts: tuple[int, int] = (0, 0),
    **options: Any,
) -> Work:
    """A function of inputs that it does not change, against its reference in float64."""
    run, exact = (
        partial(function, *inputs, **options)
        for function in (kernel, _reference(reference or kernel, double=True))
    )
    return Work(lambda: _outputs(run()), lambda: _outputs(exact()), tolerance, tuple, *counts)


def _packed(kernel: Callable[..., Any], *inputs: Any, read: int) -> Work:
    """A norm or an activation whose output is packed."""
    return _function(partial(kernel, pack=True), 1e-3, *inputs, reference=kernel, counts=(read, 0))


def _both(
    compute: Callable[..., Any],
    operations: Any,
    tolerance: float,
    *changed: Tensor | HeadPool,
    double: bool = False,
    counts: tuple[int, int] = (0, 0),
) -> Work:
    """Work with some operations, and with their references, each on copies of what it changes."""
    exact = _reference(operations, double=double)
    return Work(
        lambda *buffers: _outputs(compute(operations, *buffers)),
        lambda *buffers: _outputs(compute(exact, *(map(_doubled, buffers) if double else buffers))),
        tolerance,
        lambda: [_copied(buffer) for buffer in changed],
        *counts,
    )


def _numbers(random: Random, *tables: Sequence[Any]) -> list[Tensor]:
    return [torch.tensor(table).to(random.device) for table in tables]


def _matmuls(at: CaseInputs) -> Found:
    buckets = dict.fromkeys(min(size for size in BUCKETS if size >= rows) for rows in at.shapes.rows)
    for type in at.shapes.types:
        for rows in (*buckets, _MANY):
            yield "matmul", f"{type.name}, {rows} rows", _matmul, type, rows
        if at.shapes.int8:
            yield "int8 matmul", f"{type.name}, {_MANY} rows", _int8, type


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.double() @ unpack(weight).double().T


def _matmul(at: CaseInputs, type: QuantType, rows: int) -> Work:
    (out, columns), tolerance = at.sizes.matrix, 2e-3 if type in (Q.Q4_K, Q.Q5_K, Q.Q4_1, Q.Q5_1) else 1e-3
    weight, x = at.random.weight(type, out, columns), at.random.normal(rows, columns)
    counts = (weight.nbytes, 2 * rows * out * columns)
    return _function(quant_matmul.packed_matmul, tolerance, x, weight, reference=_product, counts=counts)


def _partial_sums(at: CaseInputs, type: QuantType) -> Work:
    """A matmul whose split-K sums a norm adds, or where that is not done, a matmul and a norm."""
    (rows, columns), random = at.sizes.matrix, at.random
    weight, x, norm = random.weight(type, rows, columns), random.normal(8, columns), random.normal(rows)

    plain = _reference(norm_rope.add_rms_norm, double=False)

    def run(residual: Tensor, x: Tensor, norm: Tensor) -> Any:
        packed = pack_rows(x)
        fits = quant_matmul.supports_partial_sums(packed, weight)
        add = (
            quant_matmul.partial_matmul(packed, weight)
            if fits
            else quant_matmul.packed_matmul(packed, weight)[None]
        )
        return norm_rope.add_rms_norm(residual, add, norm, 1e-6, pack=True)

    def reference(residual: Tensor, x: Tensor, norm: Tensor) -> Any:
        return plain(residual, _product(x, weight)[None], norm, 1e-6)

    inputs, counts = (random.normal(1, 8, rows), x, norm), (weight.nbytes, 16 * rows * columns)
    return _function(run, 3e-3, *inputs, reference=reference, counts=counts)


def _int8(at: CaseInputs, type: QuantType) -> Work:
    (rows, columns), random = at.sizes.matrix, at.random
    weight, x = random.weight(type, rows, columns), random.normal(_MANY, columns)
    rounded = quant_matmul.with_int8(weight, rows)

    def reference() -> Outputs:
        out = torch.empty(_MANY, rows, device=x.device)
        int8.matmul(int8.quantise(_floats(pack_rows(x))), int8.quantise(unpack(weight)), out)
        return [torch.cat([out[:, : rounded.int8_rows], _product(x, weight)[:, rounded.int8_rows :]], 1)]

    counts = (weight.nbytes, 2 * _MANY * rows * columns)
    return Work(
        lambda: [quant_matmul.packed_matmuls(pack_rows(x), [rounded])], reference, 1e-2, tuple, *counts
    )


def _norms(at: CaseInputs) -> Found:
    for type in at.shapes.types:
        yield "norms", f"{type.name}, partial sums", _partial_sums, type
    for rows in (max(at.shapes.rows), 80):
        yield "norms", f"norm, {rows} rows", _norm, rows
        yield "norms", f"SiLU, {rows} rows", _silu, rows
        if at.shapes.delta is not None:
            yield "norms", f"gated norm, {rows} rows", _gated_norm, rows, at.shapes.delta
    yield "norms", "unpacked", _unpacked_norms


def _norm(at: CaseInputs, rows: int) -> Work:
    x, add = at.random.normal(2, 1, rows, at.shapes.width)
    inputs = (x, add, at.random.normal(at.shapes.width), at.shapes.eps)
    return _packed(norm_rope.add_rms_norm, *inputs, read=x.nbytes + add.nbytes)


def _silu(at: CaseInputs, rows: int) -> Work:
    gate, up = at.random.normal(2, 1, rows, at.shapes.feed_forward)
    return _function(
        lambda gate, up: (norm_rope.silu_mul(gate, up, pack=True), norm_rope.silu_rows(gate[0], up[0])),
        1e-3,
        *(gate, up),
        reference=lambda *parts: 2 * [_reference(norm_rope.silu_mul, double=False)(*parts)],
        counts=(gate.nbytes + up.nbytes, 0),
    )


def _gated_norm(at: CaseInputs, rows: int, delta: _Delta) -> Work:
    _, heads, dim, _ = delta
    x, gate = at.random.normal(1, rows, heads, dim), at.random.normal(1, rows, heads * dim)
    inputs = (x, gate, at.random.normal(dim), at.shapes.eps)
    return _packed(norm_rope.gated_rms_norm, *inputs, read=x.nbytes + gate.nbytes)


def _unpacked_norms(at: CaseInputs) -> Work:
    """Norms whose output no matmul with tiles reads, and rotated heads."""
    shapes, random = at.shapes, at.random
    heads, _, dim = shapes.heads
    x, y = random.normal(2, 1, 8, shapes.width)
    q, weight, head_weight = random.normal(1, 8, heads, dim), random.normal(shapes.width), random.normal(dim)
    rotation = (head_weight if shapes.head_norms else None, shapes.eps, *_angles(random, 8, shapes.rope_dim))
    gated, gate, small = random.normal(1, 8, 4, 128), random.normal(1, 8, 512), random.normal(128)

    def compute(norms: Any) -> Any:
        return [
            norms.rms_norm(x, weight, shapes.eps),
            norms.silu_mul(x, y),
            norms.head_rope(q, *rotation, interleaved=shapes.interleaved),
            norms.gated_rms_norm(gated, gate, small, shapes.eps),
        ]

    return _both(compute, norm_rope, 1e-5, double=True)


def _angles(random: Random, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    return norm_rope.rope_angles(random.integers(9000, 1, rows), random.uniform(dim // 2))


def _experts(at: CaseInputs) -> Found:
    if at.shapes.experts is None:
        return
    steps = dict.fromkeys(BUCKETS[0] if rows <= BUCKETS[0] else 24 for rows in at.shapes.rows)
    for rows in (1, *steps, _MANY):
        yield "expert routing", f"{rows} rows", _routing, rows
    for type in at.shapes.expert_types:
        for rows in (*steps, _MANY):
            yield "experts", f"{type.name}, {rows} rows", _expert_matmul, type, rows
    for type in at.shapes.expert_types[:1] if at.shapes.cached_experts else ():
        for rows in (*steps, _MANY):
            yield "experts", f"{type.name}, {rows} rows, cached", _expert_matmul, type, rows, True


@dataclass(frozen=True, slots=True)
class _Router:
    x: Tensor
    router: Tensor
    gate: Tensor
    used: int

    @classmethod
    def random(cls, at: CaseInputs, rows: int) -> "_Router":
        shapes, random = at.shapes, at.random
        assert shapes.experts is not None
        count, used, _ = shapes.experts
        x = random.normal(rows, shapes.width)
        return cls(x, random.normal(count, shapes.width), random.normal(shapes.width), used)

    def route(self, layouts: Sequence[Layout] = ()) -> tuple[PackedRows, Tensor, experts.Routing]:
        return experts.route_rows(self.x, self.router, self.gate, used=self.used, layouts=layouts)


def _expert_matmul(at: CaseInputs, type: QuantType, rows: int, cached: bool = False) -> Work:
    assert at.shapes.experts is not None
    (count, used, inner), width = at.shapes.experts, at.shapes.width
    inner = min(inner, at.sizes.matrix[0])
    layer = _Router.random(at, rows)
    tiles = at.random.weight(type, count * experts.padded(inner), width)
    stack, cache = experts.ExpertStack.of(tiles, count, inner), None
    if cached:
        stack = stack.cached(count // 8)
        cache = experts.ExpertCache.of([stack])
        stage = torch.empty(stage_bytes([stack]), dtype=torch.uint8, device=stack.data.device)
        cache.share(stage, cache.mirror, cache.uses)

    def run() -> Outputs:
        packed, _, routing = layer.route((stack.layout,))
        if cache is not None:
            routing = experts.placed(routing, cache, [stack])
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


def _routing(at: CaseInputs, rows: int) -> Work:
    layer = _Router.random(at, rows)
    outputs = at.random.normal(rows * layer.used, at.shapes.width)

    def run() -> Outputs:
        _, logits, routing = layer.route()
        weights = routing.weights
        return [logits, weights, routing.chosen, experts.combine(layer.x, logits, outputs, weights)]

    def reference() -> Outputs:
        logits = layer.x.double() @ torch.cat([layer.router, layer.gate[None]]).double().T
        weights, expert_ids = experts_reference.route(logits[:, :-1], layer.used)
        parts = outputs.double().view(rows, layer.used, -1)
        total = experts_reference.combine(layer.x.double(), logits[:, -1], parts, weights)
        return [logits, weights, expert_ids.int(), total]

    return Work(run, reference, 1e-4, read=layer.router.nbytes)


def _attention(at: CaseInputs) -> Found:
    shapes = at.shapes
    for kv in shapes.kv:
        name = "/".join(dict.fromkeys(kv))
        for rows in shapes.rows:
            yield "tree attention", f"{name}, {rows} rows", _tree_attention, kv, rows
        yield "prompt attention", name, _prompt_attention, kv
        if shapes.sliding is not None:
            # Shorter than the context of a check, so that it hides something.
            near = {"window": min(shapes.sliding, at.sizes.chunk // 2), "sinks": 0}
            yield "tree attention", f"{name}, sliding", _tree_attention, kv, shapes.rows[-1], near
            yield "prompt attention", f"{name}, sliding", _prompt_attention, kv, near
        yield "KV cache", name, _cache_write, kv


def _context(at: CaseInputs, kv: _Formats, rows: int, length: int) -> tuple[Tensor, Tensor, PagedContext]:
    """Return queries and gate after a context whose pages are in any order."""
    heads, kv_heads, dim = at.shapes.heads
    pages = -(-(length + max(rows, _SAVED)) // PAGE)
    keys, values = (at.random.pool(name, (pages, kv_heads, PAGE), dim) for name in kv)
    q, gate = at.random.normal(2, 1, rows, heads, dim)
    (lengths,) = _numbers(at.random, [length])
    return q, gate, PagedContext(keys, values, at.random.order(pages)[None], lengths)


def _tree_attention(at: CaseInputs, kv: _Formats, rows: int, near: _Window | None = None) -> Work:
    q, gate, context = _context(at, kv, rows, at.sizes.context)
    ancestors = random_trees(rows, device=at.random.device).ancestors
    context = replace(context, ancestors=ancestors, **(near or {"window": at.shapes.window}))
    read = sum(plane.nbytes for pool in (context.keys, context.values) for plane in pool.planes)
    counts = (read, 4 * q.numel() * at.sizes.context)
    tolerance = 2e-2 if "bf16" in kv else 3e-3
    return _function(attention.paged_attention, tolerance, q, context, gate=gate, counts=counts)


def _prompt_attention(at: CaseInputs, kv: _Formats, near: _Window | None = None) -> Work:
    q, gate, context = _context(at, kv, at.sizes.chunk, 70)
    context, span = replace(context, **(near or {})), at.sizes.chunk + 70
    tolerance, counts = 2e-2 if "bf16" in kv else 3e-3, (0, 2 * q.numel() * (span + 70))
    return _function(attention.chunk_attention, tolerance, q, context, span=span, gate=gate, counts=counts)


def _cache_write(at: CaseInputs, kv: _Formats) -> Work:
    shapes, random = at.shapes, at.random
    (heads, kv_heads, dim), rows = shapes.heads, 24
    q, k, v = random.normal(1, rows, heads, dim), *random.normal(2, 1, rows, kv_heads, dim)
    norms = (random.normal(dim), random.normal(dim)) if shapes.head_norms else (None, None)
    angles = _angles(random, rows, shapes.rope_dim)
    slots = random.order(2 * PAGE)[:rows]
    where = {"pages": slots // PAGE, "offsets": slots % PAGE, "interleaved": shapes.interleaved}

    def compute(operations: Any, keys: HeadPool, values: HeadPool) -> Outputs:
        queries = operations.cache_heads(
            q, k, v, norms, shapes.eps, *angles, keys=keys, values=values, **where
        )
        return [queries, _stored(keys), _stored(values)]

    # Where the last bits of a sum differ, a value may be rounded to the next code.
    tolerance = 2e-2 if {"bf16", "tq3_0"} & set(kv) else 5e-3
    pools = [HeadPool.empty(FORMATS[name], (2, kv_heads, PAGE), dim, random.device) for name in kv]
    return _both(compute, norm_rope, tolerance, *pools)


def _stored(pool: HeadPool) -> Tensor:
    return pool.codes if pool.scales is None else decode(pool.codes, pool.scales, pool.format, pool.dim)


def _drafts(at: CaseInputs) -> Found:
    if at.shapes.draft is not None:
        yield "draft attention", "16 rows", _draft_attention, *at.shapes.draft
        yield "draft ring", "16 rows", _draft_ring, *at.shapes.draft
    yield "tree building", "22 nodes", _best_tree


def _draft_attention(at: CaseInputs, heads: int, kv_heads: int, dim: int) -> Work:
    (rows, ring), random = (16, 512), at.random
    q, (k, v) = random.normal(1, rows, heads, dim), random.normal(2, 1, rows, kv_heads, dim)
    keys, values = random.normal(2, 2, ring, kv_heads, dim).half()
    slots, lengths, starts, columns = _numbers(random, [1], [3, 300], [0, 5], range(rows))
    tables = (lengths[slots][:, None] + columns, KVRing(keys, values, slots, lengths, starts))
    return _function(attention.block_attention, 3e-3, q, k, v, *tables, window=None, causal=False)


def _draft_ring(at: CaseInputs, _: int, heads: int, dim: int) -> Work:
    rows, random = 16, at.random
    (k, v), norm = random.normal(2, 1, rows, heads, dim), random.normal(dim)
    angles, ring = _angles(random, rows, dim), random.normal(2, 2, 40, heads, dim).half()
    slots, count, positions = _numbers(random, [1], [9], [range(30, 30 + rows)])
    where = {"count": count, "positions": positions}

    def compute(operations: Any, both: Tensor) -> Outputs:
        ring = KVRing(both[0], both[1], slots, slots, slots)  # lengths and starts are not read
        operations.ring_heads(k, v, norm, at.shapes.eps, *angles, ring=ring, **where)
        return [both]

    return _both(compute, norm_rope, 1e-3, ring)


def _best_tree(at: CaseInputs) -> Work:
    """The best tree of a draft's candidates, and the path of it that the target accepts: as on a CPU."""
    (depths, width), random = (15, 24), at.random
    ids = torch.stack([random.order(40)[:width] for _ in range(depths)])[None]
    scores = (2 * random.normal(1, depths, width)).log_softmax(-1)
    chains, chain_scores = random.integers(40, 1, 1, depths), -random.uniform(1, 1, depths)
    anchors, parts = random.integers(40, 1), (ids, scores, chains, chain_scores)

    def compute(device: torch.device) -> Outputs:
        candidates = tree.Candidates(*(part.to(device) for part in parts))
        packed, weights = tree.best_tree(anchors.to(device), candidates, tree.TreeForm(22, 24, -4.0))
        tokens, parents, ancestors, _ = (row.contiguous() for row in packed[0])
        sampled = torch.roll(tokens, -1)
        tables = {"slots": [0], "limits": [64]}
        options = {name: torch.tensor(table).to(device) for name, table in tables.items()}
        stops, counts = torch.full((1, 64), -1).to(device), torch.zeros(1, 64).to(device)
        path = tree.accept_path(tokens, parents, ancestors, sampled, stops=stops, counts=counts, **options)
        return [part.to(random.device) for part in (packed, weights, path.flat, counts)]

    return Work(lambda: compute(random.device), lambda: compute(torch.device("cpu")), 1e-6)


def _delta(at: CaseInputs) -> Found:
    if at.shapes.delta is None:
        return
    for rows in at.shapes.rows:
        yield "tree delta rule", f"{rows} rows", _tree_delta, at.shapes.delta, rows
        yield "tree convolution", f"{rows} rows", _tree_conv, at.shapes.delta, rows
    tokens = at.sizes.chunk
    yield "prompt delta rule", f"{tokens} tokens", _prompt_delta, at.shapes.delta, tokens
    yield "prompt convolution", f"{tokens} tokens", _prompt_conv, at.shapes.delta, tokens


def _delta_heads(delta: _Delta, random: Random, rows: int, path: int) -> DeltaHeads:
    key_heads, value_heads, dim, _ = delta
    q, k = random.normal(1, rows, key_heads, dim), random.normal(1, path + rows, key_heads, dim)
    q, k = q / q.norm(dim=-1, keepdim=True) * dim**-0.5, k / k.norm(dim=-1, keepdim=True)
    g = -random.uniform(1, path + rows, value_heads)
    v = random.normal(1, path + rows, value_heads, dim)
    return DeltaHeads(q, k, v, g, random.uniform(1, path + rows, value_heads))


def _tree_delta(at: CaseInputs, delta: _Delta, rows: int) -> Work:
    (_, value_heads, dim, _), random = delta, at.random
    heads, state = _delta_heads(delta, random, rows, 24), random.normal(2, value_heads, dim, dim)
    slots, count = _numbers(random, [1], [_PENDING])
    ancestors = random_trees(rows, device=random.device).ancestors

    def compute(rule: Any, state: Tensor) -> Outputs:
        return [rule.tree_delta(heads, state, DeltaRows(slots, count, rule.tree_order(ancestors))), state]

    counts = (2 * 4 * value_heads * dim * dim, 0)
    return _both(compute, delta_rule, 1e-5, state, double=True, counts=counts)


def _prompt_delta(at: CaseInputs, delta: _Delta, tokens: int) -> Work:
    (_, value_heads, dim, _), random = delta, at.random
    heads, state = _delta_heads(delta, random, tokens, 0), random.normal(1, value_heads, dim, dim)
    # As the convolution of a prompt writes them.
    heads, (slots,) = heads._replace(q=heads.q.half(), k=heads.k.half()), _numbers(random, [0])

    def compute(rule: Any, state: Tensor, v: Tensor) -> Outputs:
        return [rule.slot_delta(heads._replace(v=v), state, slots), state]

    counts = (0, 8 * tokens * value_heads * dim * dim)
    return _both(compute, delta_rule, 3e-3, state, heads.v, double=True, counts=counts)


def _conv(delta: _Delta, random: Random, rows: int) -> tuple[tuple[Tensor, ...], ConvWeights]:
    """Return inputs, alpha and beta of a convolution, and its weights."""
    key_heads, value_heads, dim, taps = delta
    channels = (2 * key_heads + value_heads) * dim
    inputs = tuple(random.normal(1, rows, n) for n in (channels, value_heads, value_heads))
    decay, bias = -random.uniform(value_heads), random.normal(value_heads)
    return inputs, ConvWeights(random.normal(channels, taps), decay, bias, key_heads)


def _tree_conv(at: CaseInputs, delta: _Delta, rows: int) -> Work:
    random = at.random
    inputs, weights = _conv(delta, random, rows)
    channels, taps = weights.taps.shape
    window, saved = random.normal(1, taps - 1, channels).half(), random.normal(1, _SAVED, channels).half()
    gates, path = random.uniform(1, _SAVED, 2, len(weights.decay)), random.order(_SAVED).sort().values[None]
    slots, count = _numbers(random, [0], [_PENDING])
    parents = random_trees(rows, device=random.device).parents

    def compute(conv: Any, *saves: Tensor) -> Outputs:
        step = ConvRows(slots, path, count, conv.conv_index(parents, taps, count, _SAVED))
        buffers = DeltaBuffers(random.normal(0), *saves)
        q, *heads = conv.tree_conv(*inputs, weights, buffers, step)
        # What follows a path, up to its room, is not written.
        parts = [torch.cat([part[:, :_PENDING], part[:, _SAVED:]], 1) for part in heads]
        return [q, *parts, buffers.window]

    counts = (weights.taps.nbytes + inputs[0].nbytes, 0)
    return _both(compute, causal_conv, 1e-4, window, saved, gates, counts=counts)


def _prompt_conv(at: CaseInputs, delta: _Delta, tokens: int) -> Work:
    random = at.random
    inputs, weights = _conv(delta, random, tokens)
    channels, taps = weights.taps.shape
    window, saved = random.normal(1, taps - 1, channels), random.normal(1, 24, channels)
    slots, count = _numbers(random, [0], [_PENDING])
    path = random.order(24).sort().values[None]
    rows, unused = ConvRows(slots, path, count, path), random.normal(0)

    def compute(conv: Any, window: Tensor) -> Outputs:
        buffers = DeltaBuffers(unused, window, saved, unused)
        return [*conv.chunk_heads(*inputs, weights, buffers, rows), window]

    return _both(compute, causal_conv, 1e-3, window, counts=(2 * inputs[0].nbytes, 0))


def _steps(at: CaseInputs) -> Found:
    yield "slot mapping", "a tree", _mapping
    if at.shapes.sequences > 1:
        yield "slot mapping", "several trees", _ragged_mapping
    yield "commit", "24 rows", _commit


def _mapping(at: CaseInputs) -> Work:
    random = at.random
    rows, lengths = random.integers(1 << 40, 4, 64), random.integers(200, 3)
    table, path, counts = random.order(99).view(3, 33), random.integers(64, 3, 64), random.integers(9, 3)
    count, slot = _numbers(random, [5], [2])

    def compute(module: Any) -> Outputs:
        padded = module.padded_tree(rows, count, slot, lengths, size=16)
        mapping = module.slot_mapping(slot, lengths, table, path, counts, rows=16, page=PAGE)
        return [padded, *(getattr(mapping, field.name) for field in fields(mapping))]

    return _both(compute, slot_mapping, _EXACT)


def _ragged_mapping(at: CaseInputs) -> Work:
    rows, lengths = at.random.integers(64, 4, 64), at.random.integers(200, 3)
    first, slots = _numbers(at.random, [0, 5, 12], [2, 0])
    return _function(slot_mapping.ragged_rows, _EXACT, rows, first, slots, lengths, size=16)


def _commit(at: CaseInputs) -> Work:
    """An accepted path, and its rows of the KV cache moved to their places."""
    (_, kv_heads, dim), random = at.shapes.heads, at.random
    ancestors = random_trees(24, device=random.device).ancestors
    last, slots = _numbers(random, [23], [1])
    table, planes = random.order(8).view(2, 4), random.normal(2, 8, kv_heads, PAGE, dim).half()
    tables = random.integers(64, 2, 64), random.integers(9, 2), random.integers(90, 2)

    def compute(module: Any, plane: Tensor, path: Tensor, count: Tensor, lengths: Tensor) -> Outputs:
        taken = module.commit_path(ancestors, last, slots, path=path, count=count, lengths=lengths)
        module.move_rows([plane], taken, slots, table)
        return [taken.counts, taken.starts, taken.source, plane, path, count, lengths]

    return _both(compute, commit, _EXACT, planes, *tables)


def _sampling(at: CaseInputs) -> Found:
    settings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top-p": {"temperature": 0.8, "top_p": 0.95},
        "penalties": {"temperature": 0.9, "repetition": 1.1},
    }
    for name, options in settings.items():
        yield "sampling", name, _sample, options
    yield "sampling", "a draft's ranking", _ranking


def _requests(random: Random, rows: int, vocabulary: int, options: dict[str, Any]) -> SamplingState:
    state = SamplingState.empty(rows, vocabulary, random.device)
    prompt = random.integers(vocabulary, 50) if "repetition" in options else None
    state.begin(**options, seed=12345, prompt=prompt)
    return state


def _sample(at: CaseInputs, options: dict[str, Any]) -> Work:
    rows, vocabulary, random = 24, at.sizes.vocabulary, at.random
    # A few tokens above a bulk: as a model's logits.
    logits = 2 * random.normal(rows, vocabulary) + 12 * (random.uniform(rows, vocabulary) < 30 / vocabulary)
    tokens, positions = random.integers(vocabulary, rows), random.integers(1 << 40, rows)
    ancestors = random_trees(rows, device=random.device).ancestors[0]
    owners, state = RowOwners.one(0, rows, random.device), _requests(random, rows, vocabulary, options)
    sampled = SampledRows(logits, positions, tokens, owners, ancestors)
    workspace = make_workspace(rows, vocabulary, random.device)
    return Work(
        lambda: [sample_rows(sampled, state, workspace).clone()],
        lambda: [plain_sampling.sample_rows(sampled, state)],
        _EXACT,
        read=logits.nbytes,
    )


def _ranking(at: CaseInputs) -> Work:
    rows, count, vocabulary, random = 15, 24, at.sizes.vocabulary, at.random
    logits, positions = 3 * random.normal(rows, vocabulary), random.integers(1 << 40, rows)
    anchors, owners = random.integers(vocabulary, rows), RowOwners.one(0, rows, random.device)
    inputs = (SampledRows(logits, positions, anchors, owners), count, _requests(random, rows, vocabulary, {}))
    workspace = make_workspace(rows, vocabulary, random.device)
    return Work(
        lambda: rank_rows(*inputs, workspace),
        lambda: plain_sampling.rank_rows(*inputs),
        1e-4,
        read=logits.nbytes,
    )


def _embeddings(at: CaseInputs) -> Found:
    if at.shapes.embedding is not None:
        yield "embedding", at.shapes.embedding.name, _embedding, at.shapes.embedding
        if at.shapes.host_embedding:
            yield "row gathering", "from host memory", _gathering
    if (block := at.shapes.rotation) is not None:
        for width in (at.shapes.width, at.shapes.feed_forward):
            yield "rotation", f"{width} columns", _rotation, width // block * block, block


def _embedding(at: CaseInputs, type: QuantType) -> Work:
    vocabulary = at.sizes.vocabulary // 8
    table, tokens = (
        at.random.bytes_of(type, vocabulary, at.shapes.width),
        at.random.integers(vocabulary, 1, 24),
    )
    return Work(lambda: [embed(table, type, tokens)], lambda: [dequantise(table[tokens], type)], _EXACT)


def _rotation(at: CaseInputs, width: int, block: int) -> Work:
    """Into the basis, in another order and in the same, and out of it."""
    x, signs = at.random.normal(24, width), at.random.normal(width).sign()
    order = torch.arange(width, device=x.device).flip(0)

    def compute(rotation: Any) -> Outputs:
        rotated = [rotation.rotate(x, signs, places, block) for places in (order, None)]
        return [*rotated, rotation.restore(x, signs, block)]

    return _both(compute, hadamard, _EXACT)


def _gathering(at: CaseInputs) -> Work:
    random = at.random
    table = torch.randint(256, (300, 1152), dtype=torch.uint8, pin_memory=random.device.type == "cuda")
    rows = random.integers(300, 24)
    return Work(lambda: [gather_rows(table, rows)], lambda: [table[rows.cpu()].to(rows.device)], _EXACT)
