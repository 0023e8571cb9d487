"""The layout of a small pair's tensors within the larger ones. Does no I/O.

The small residual stream occupies the first columns of the large one, times `Stream.scale`; then comes one
constant, then zeros. Rows that read the stream are zero on the constant, and new rows on the small stream
too: new heads and neurons output zero, so their output weights may be anything.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bough.convert.mixes import fitting_type, wanted_type
from bough.gguf.header import TensorInfo
from bough.gguf.types import QuantType
from bough.models.draft_spec import DraftSpec
from bough.models.spec import ExpertSpec, ModelSpec
from bough.models.weights import TensorSource
from workshop.grow.shape import DraftShape, PairShape, interval

# A padding token's logit is their product divided by the RMS of the last residual stream: below any real
# logit, and the scales fit in float16.
_FILLER_HIDDEN, _FILLER_WEIGHT = 100.0, -10000.0
# Heads whose state is zero may have any decay; this one decays within some tokens.
_DECAY = -0.5


@dataclass(frozen=True, slots=True)
class Span:
    """`count` rows or columns from index `small`, copied to index `large` of the grown tensor."""

    small: int
    large: int
    count: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A value in one column of some rows; the rest of its block is zero."""

    rows: range
    column: int
    value: float


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of the grown file: `fill`, then zero columns, the small tensor's spans, the constant.

    A vector is one row.
    """

    name: str
    shape: tuple[int, ...]
    type: QuantType
    fill: float | None = None  # None: random
    zero: tuple[tuple[int, int], ...] = ()  # columns: start, stop
    source: str | None = None
    rows: tuple[Span, ...] = (Span(0, 0, 1),)
    columns: tuple[Span, ...] = ()
    factor: float = 1.0
    constant: Constant | None = None

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.shape, self.type)


@dataclass(frozen=True, slots=True)
class Stream:
    """The small residual stream within the large one, such that norms with the same eps give the same result.

    The mean square of the large stream is `gain` times the small one's plus constant^2 / large, and the
    constant is such that this equals gain * (small mean square + eps) - eps.
    """

    small: int
    large: int
    eps: float

    @property
    def scale(self) -> float:
        """Return a power of two, which only changes exponents, large enough for a constant above 0."""
        return 2.0 ** (math.floor(math.log2(self.large / self.small) / 2) + 1)

    @property
    def gain(self) -> float:
        return self.scale**2 * self.small / self.large

    @property
    def constant(self) -> float:
        return math.sqrt(self.large * self.eps * (self.gain - 1))

    @property
    def norm_factor(self) -> float:
        return math.sqrt(self.small / self.large)

    @property
    def filler_norm(self) -> float:
        return _FILLER_HIDDEN * math.sqrt(self.gain) / self.constant

    def read(self, type: QuantType, offset: int = 0) -> tuple[int, int]:
        """Return the columns on which new rows must be zero: the small stream and the constant's block."""
        block = type.block_elements
        return offset, offset + -(-(self.small + 1) // block) * block


class PlanBuilder:
    """Collects the tensor plans of one file; a tensor that contains a small one has the small one's type."""

    def __init__(
        self,
        source: TensorSource,
        stream: Stream,
        type_of: Callable[[str, int, int], QuantType],
        random: bool,
    ):
        self.stream = stream
        self.plans: list[TensorPlan] = []
        self._source, self._type_of, self._random = source, type_of, random

    def _type(self, name: str, shape: tuple[int, ...], source: str | None) -> QuantType:
        if len(shape) == 1 or name.endswith("ssm_conv1d.weight"):
            return QuantType.F32
        if source is not None and not self._random:
            return self._source.require_tensor(source).type
        return self._type_of(name, len(shape), shape[-1])

    def _add(self, plan: TensorPlan) -> None:
        if self._random:
            fill = plan.fill if len(plan.shape) == 1 else None
            plan = TensorPlan(plan.name, plan.shape, plan.type, fill)
        elif plan.source is None:
            plan = replace(plan, rows=(), columns=())
        self.plans.append(plan)

    def reads(self, name: str, rows: int, source: str | None, spans: tuple[Span, ...]) -> None:
        """Add a matrix [rows, width] whose input is the normed stream."""
        shape, stream = (rows, self.stream.large), self.stream
        kind = self._type(name, shape, source)
        self._add(
            TensorPlan(
                name,
                shape,
                kind,
                zero=(stream.read(kind),),
                source=source,
                rows=spans,
                columns=(Span(0, 0, stream.small),),
            )
        )

    def writes(self, name: str, columns: int, source: str | None, spans: tuple[Span, ...]) -> None:
        """Add a matrix [width, columns] whose output is added to the stream."""
        stream, shape = self.stream, (self.stream.large, columns)
        zero = tuple((span.large, span.large + span.count) for span in spans) if source else ()
        self._add(
            TensorPlan(
                name,
                shape,
                self._type(name, shape, source),
                zero=zero,
                source=source,
                rows=(Span(0, 0, stream.small),),
                columns=spans,
                factor=stream.scale,
            )
        )

    def norm(self, name: str, source: str | None, *, before_head: bool = False) -> None:
        """Add a norm over the stream; the one before the head scales the constant for the padding tokens."""
        stream = self.stream
        constant = Constant(range(1), stream.small, stream.filler_norm) if before_head else None
        columns = (Span(0, 0, stream.small),)
        plan = TensorPlan(name, (stream.large,), QuantType.F32, fill=1.0, source=source, columns=columns)
        self._add(replace(plan, factor=stream.norm_factor, constant=constant))

    def vector(
        self, name: str, size: int, source: str | None, spans: tuple[Span, ...], *, fill: float = 1.0
    ) -> None:
        self._add(TensorPlan(name, (size,), QuantType.F32, fill=fill, source=source, columns=spans))

    def conv(self, name: str, shape: tuple[int, int], source: str | None, spans: tuple[Span, ...]) -> None:
        columns = (Span(0, 0, shape[1]),)
        self._add(TensorPlan(name, shape, QuantType.F32, source=source, rows=spans, columns=columns))

    def noise(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a tensor of random weights."""
        self._add(TensorPlan(name, shape, self._type(name, shape, None)))

    def embedding(self, name: str, vocabulary: int, rows: int) -> None:
        stream, shape = self.stream, (vocabulary, self.stream.large)
        self._add(
            TensorPlan(
                name,
                shape,
                self._type(name, shape, name),
                fill=0.0,
                source=name,
                rows=(Span(0, 0, rows),),
                columns=(Span(0, 0, stream.small),),
                factor=stream.scale,
                constant=Constant(range(vocabulary), stream.small, stream.constant),
            )
        )

    def head(self, name: str, vocabulary: int, rows: int, source: str) -> None:
        self.reads(name, vocabulary, source, (Span(0, 0, rows),))
        if not self._random and rows < vocabulary:
            constant = Constant(range(rows, vocabulary), self.stream.small, _FILLER_WEIGHT)
            self.plans[-1] = replace(self.plans[-1], constant=constant)

    def fuse(self, name: str, taps: int) -> None:
        """Add the draft's first matrix [width, taps * width], which keeps one tap's constant."""
        stream = self.stream
        shape = (stream.large, taps * stream.large)
        kind = self._type(name, shape, name)
        self._add(
            TensorPlan(
                name,
                shape,
                kind,
                zero=tuple(stream.read(kind, tap * stream.large) for tap in range(taps)),
                source=name,
                rows=(Span(0, 0, stream.small),),
                columns=tuple(Span(t * stream.small, t * stream.large, stream.small) for t in range(taps)),
                constant=Constant(range(stream.small, stream.small + 1), stream.small, 1.0),
            )
        )


def layer_indices(spec: ModelSpec, layers: int) -> list[int]:
    """Return each small layer's index: whole groups, evenly spaced; the layers between are identities."""
    every = interval(spec)
    groups, small_groups = layers // every, len(spec.layers) // every
    return [i // every * groups // small_groups * every + i % every for i in range(len(spec.layers))]


def plan_target(spec: ModelSpec, source: TensorSource, shape: PairShape, *, random: bool) -> list[TensorPlan]:
    """Return the target's tensor plans."""
    large, delta = shape.target, spec.delta
    assert delta is not None

    def type_of(name: str, dimensions: int, row: int) -> QuantType:
        types = shape.types or {}
        if name in types:
            return fitting_type(types[name], row)
        wanted = wanted_type(name, dimensions, mix="q4_k_m", layers=large.layers, interval=interval(spec))
        return fitting_type(wanted, row)

    plans = PlanBuilder(source, Stream(spec.width, large.width, spec.eps), type_of, random=random)
    plans.embedding("token_embd.weight", large.vocab_size, spec.vocab_size)
    plans.norm("output_norm.weight", "output_norm.weight", before_head=True)
    head = "token_embd.weight" if spec.tied_head else "output.weight"
    plans.head("output.weight", large.vocab_size, spec.vocab_size, head)
    small_of = {index: layer for layer, index in enumerate(layer_indices(spec, large.layers))}
    every = interval(spec)
    for index in range(large.layers):
        small = small_of.get(index)

        def original(part: str, small: int | None = small) -> str | None:
            return None if small is None else f"blk.{small}.{part}"

        block = f"blk.{index}."
        plans.norm(f"{block}attn_norm.weight", original("attn_norm.weight"))
        if (index + 1) % every:
            _delta_layer(plans, block, original, shape=shape, spec=spec)
        else:
            _attention_layer(plans, block, original, shape=shape, spec=spec)
        plans.norm(f"{block}post_attention_norm.weight", original("post_attention_norm.weight"))
        if large.experts is not None:
            _experts(plans, block, large.experts, large.width)
        else:
            _feed_forward(plans, block, original, large=large.feed_forward, small=spec.feed_forward)
    return plans.plans


Original = Callable[[str], str | None]


def _attention_layer(
    plans: PlanBuilder, block: str, original: Original, *, shape: PairShape, spec: ModelSpec
) -> None:
    large, dim = shape.target, spec.head_dim
    for part, heads, small in (
        # a query and a gate for every head
        ("attn_q.weight", 2 * large.heads, 2 * spec.heads),
        ("attn_k.weight", large.kv_heads, spec.kv_heads),
        ("attn_v.weight", large.kv_heads, spec.kv_heads),
    ):
        plans.reads(block + part, heads * dim, original(part), (Span(0, 0, small * dim),))
    spans = (Span(0, 0, spec.heads * dim),)
    plans.writes(f"{block}attn_output.weight", large.heads * dim, original("attn_output.weight"), spans)
    for part in ("attn_q_norm.weight", "attn_k_norm.weight"):
        plans.vector(block + part, dim, original(part), (Span(0, 0, dim),))


def _delta_layer(
    plans: PlanBuilder, block: str, original: Original, *, shape: PairShape, spec: ModelSpec
) -> None:
    assert spec.delta is not None
    dim, keys, small = spec.delta.head_dim, shape.target.key_heads, spec.delta.key_heads
    values = shape.target.value_heads

    # value head h uses key head h % keys, so the small heads form one run for each h // keys
    def tiled(size: int, large_from: int = 0, small_from: int = 0) -> tuple[Span, ...]:
        return tuple(
            Span(small_from + run * small * size, large_from + run * keys * size, small * size)
            for run in range(values // keys)
        )

    channels = (2 * keys + values) * dim
    mixed = (
        Span(0, 0, small * dim),
        Span(small * dim, keys * dim, small * dim),
        *tiled(dim, 2 * keys * dim, 2 * small * dim),
    )
    plans.reads(f"{block}attn_qkv.weight", channels, original("attn_qkv.weight"), mixed)
    plans.reads(f"{block}attn_gate.weight", values * dim, original("attn_gate.weight"), tiled(dim))
    for part in ("ssm_alpha.weight", "ssm_beta.weight"):
        plans.reads(block + part, values, original(part), tiled(1))
    plans.vector(f"{block}ssm_a", values, original("ssm_a"), tiled(1), fill=_DECAY)
    plans.vector(f"{block}ssm_dt.bias", values, original("ssm_dt.bias"), tiled(1), fill=0.0)
    kernel = (channels, spec.delta.conv_width)
    plans.conv(f"{block}ssm_conv1d.weight", kernel, original("ssm_conv1d.weight"), mixed)
    plans.vector(f"{block}ssm_norm.weight", dim, original("ssm_norm.weight"), (Span(0, 0, dim),))
    plans.writes(f"{block}ssm_out.weight", values * dim, original("ssm_out.weight"), tiled(dim))


def _feed_forward(plans: PlanBuilder, block: str, original: Original, *, large: int, small: int) -> None:
    spans = (Span(0, 0, small),)
    for part in ("ffn_gate.weight", "ffn_up.weight"):
        plans.reads(block + part, large, original(part), spans)
    plans.writes(f"{block}ffn_down.weight", large, original("ffn_down.weight"), spans)


def _experts(plans: PlanBuilder, block: str, experts: ExpertSpec, width: int) -> None:
    """Add a router, its experts and the shared one, all random."""
    plans.noise(f"{block}ffn_gate_inp.weight", (experts.count, width))
    for suffix, inner, lead in (
        ("exps", experts.width, (experts.count,)),
        ("shexp", experts.shared_width, ()),
    ):
        for part in ("gate", "up"):
            plans.noise(f"{block}ffn_{part}_{suffix}.weight", (*lead, inner, width))
        plans.noise(f"{block}ffn_down_{suffix}.weight", (*lead, width, inner))
    plans.vector(f"{block}ffn_gate_inp_shexp.weight", width, None, (), fill=0.0)


def plan_draft(
    spec: DraftSpec, source: TensorSource, shape: DraftShape, width: int, *, random: bool
) -> list[TensorPlan]:
    """Return the draft's tensor plans; new layers come last and have the types of the first layer."""

    def type_of(name: str, dimensions: int, row: int) -> QuantType:
        model = name if name in source.tensors else f"blk.0.{name.split('.', 2)[2]}"
        return fitting_type(source.require_tensor(model).type, row)

    plans, dim = (
        PlanBuilder(source, Stream(spec.width, width, spec.eps), type_of, random=random),
        spec.head_dim,
    )
    plans.fuse("fc.weight", len(spec.taps))
    plans.norm("enc.output_norm.weight", "enc.output_norm.weight")
    for index in range(shape.layers):
        block = f"blk.{index}."

        def original(part: str, block: str = block, new: bool = index >= len(spec.layers)) -> str | None:
            return None if new else block + part

        plans.norm(f"{block}attn_norm.weight", original("attn_norm.weight"))
        for part, heads, small in (
            ("attn_q.weight", shape.heads, spec.heads),
            ("attn_k.weight", shape.kv_heads, spec.kv_heads),
            ("attn_v.weight", shape.kv_heads, spec.kv_heads),
        ):
            plans.reads(block + part, heads * dim, original(part), (Span(0, 0, small * dim),))
        spans = (Span(0, 0, spec.heads * dim),)
        plans.writes(f"{block}attn_output.weight", shape.heads * dim, original("attn_output.weight"), spans)
        for part in ("attn_q_norm.weight", "attn_k_norm.weight"):
            plans.vector(block + part, dim, original(part), (Span(0, 0, dim),))
        plans.norm(f"{block}ffn_norm.weight", original("ffn_norm.weight"))
        _feed_forward(plans, block, original, large=shape.feed_forward, small=spec.feed_forward)
    plans.norm("output_norm.weight", "output_norm.weight", before_head=True)
    return plans.plans
