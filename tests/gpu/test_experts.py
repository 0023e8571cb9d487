"""Routed experts on a GPU: against the reference, bits of a row, CUDA graphs, no synchronisation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.config import EngineConfig, SpecConfig
from bough.engine.engine import Request
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.experts import ExpertStack, Routing, combine, expert_matmul, reference, route_rows
from bough.kernels.experts import triton_kernels as experts_triton
from bough.kernels.experts.stack import most_chunks, padded
from bough.kernels.norm_rope import silu_rows
from bough.kernels.quant_matmul import PackedRows, pack
from bough.models.decoder import Decoder
from bough.models.expert_caches import ExpertCaches
from bough.models.layers import Experts
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.session.loading import load_session
from bough.state.sequences import SequenceStates
from tests.engine.driving import run
from tests.gpu.inputs import DEVICE, random_trees
from tests.gpu.numerics import assert_close, assert_same_bits, captured, nan_filled_memory, worst_row_error
from tests.gpu.test_decoder import logits_of
from tests.gpu.texts import NEAR_TIE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

EXPERTS, USED, WIDTH, INNER = 64, 8, 512, 256
FEW = 11  # experts, three of which a row takes, where the interpreter runs too
Q = QuantType
COUNTS = (1, 2, 7, 8, 9, 16, 24, 33, 64)
MANY = (65, 300)
TYPES = (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.IQ4_XS, Q.F16)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stack_of(type: QuantType, rows: int, columns: int, seed: int) -> ExpertStack:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return ExpertStack.of(pack(random_rows(type, EXPERTS * rows, columns, generator), type), EXPERTS, rows)


@dataclass(frozen=True, slots=True)
class Layer:
    """The routed part of a layer, with an identity for the shared expert."""

    router: Tensor
    gate: Tensor
    gate_up: ExpertStack
    down: ExpertStack

    @classmethod
    def random(cls, type: QuantType = QuantType.Q4_K) -> "Layer":
        stacks = (stack_of(type, 2 * INNER, WIDTH, 1), stack_of(type, WIDTH, INNER, 2))
        return cls(torch.randn(EXPERTS, WIDTH, device=DEVICE), torch.randn(WIDTH, device=DEVICE), *stacks)

    def route(self, x: Tensor) -> tuple[PackedRows, Tensor, Routing]:
        layouts = (self.gate_up.layout, self.down.layout)
        return route_rows(x, self.router, self.gate, used=USED, layouts=layouts)

    def __call__(self, x: Tensor) -> Tensor:
        packed, logits, routing = self.route(x)
        gate, up = expert_matmul(packed, self.gate_up, routing).chunk(2, -1)
        outputs = expert_matmul(silu_rows(gate, up), self.down, routing)
        return combine(x, logits, outputs, routing.weights)


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer.random()


def made_rows(count: int, seed: int = 0) -> Tensor:
    """Return rows of which many are alike, so that experts have several rows and several chunks."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(count, WIDTH, device=DEVICE, generator=generator)
    x[::2] = x[:1] + 0.1 * x[::2]
    return x


@pytest.mark.parametrize("rows", [*COUNTS, *MANY])
def test_routing_is_the_references(layer: Layer, rows: int) -> None:
    with nan_filled_memory():
        _, logits, routing = layer.route(made_rows(rows))
    expected = made_rows(rows).double() @ torch.cat([layer.router, layer.gate[None]]).double().T
    assert_close(logits, expected, tolerance=1e-5)
    assert_routing(routing, logits, USED)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
@pytest.mark.parametrize("rows", [1, 9, 64, 300])
def test_matmuls_are_the_references(type: QuantType, rows: int) -> None:
    layer, x = Layer.random(type), made_rows(rows)
    packed, _, routing = layer.route(x)
    weights = layer.gate_up.unpacked()
    expected = reference.expert_matmul(x.double(), weights.double(), routing.chosen)
    with nan_filled_memory():
        found = expert_matmul(packed, layer.gate_up, routing)
    assert worst_row_error(found, expected) < 3e-3
    x = torch.randn(rows * USED, INNER, device=DEVICE)
    packed = silu_rows(x, torch.ones_like(x))
    rows_of = torch.nn.functional.silu(x).double()
    expected = reference.expert_matmul(rows_of, layer.down.unpacked().double(), routing.chosen)
    assert worst_row_error(expert_matmul(packed, layer.down, routing), expected) < 3e-3


def tied_logits(rows: int) -> Tensor:
    """Return logits [rows, FEW + 1] with ties; one expert is in all rows and has several chunks."""
    logits = torch.randint(-4, 4, (rows, FEW + 1), device=DEVICE).float()
    logits[:, 5] = 9.0
    return logits


def assert_routing(routing: Routing, logits: Tensor, used: int) -> None:
    weights, chosen = reference.route(logits[:, :-1], used)
    assert torch.equal(routing.chosen.long(), chosen)
    assert_close(routing.weights, weights, tolerance=1e-5)
    order, chunks = reference.grouped(chosen.cpu(), routing.tokens)
    assert torch.equal(routing.order.cpu().long(), order)
    assert int(routing.count) == len(chunks) <= len(routing.chunks)
    assert torch.equal(routing.chunks[: len(chunks), :3].cpu().long(), chunks[:, :3])


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 3, 33, 70])
def test_tied_logits_are_routed_as_by_the_reference(rows: int) -> None:
    logits = tied_logits(rows)
    with nan_filled_memory():
        routing = experts_triton.route(logits, 3, 8)
    assert_routing(routing, logits, 3)


@pytest.mark.interpreted
def test_chunks_have_room_when_every_pair_has_its_own_expert() -> None:
    logits = torch.full((3, FEW + 1), -5.0, device=DEVICE)
    for row in range(3):
        logits[row, 3 * row : 3 * row + 3] = 1.0
    routing = experts_triton.route(logits, 3, 16)
    assert_routing(routing, logits, 3)
    assert int(routing.count) == 9 == most_chunks(9, FEW, 16)


@pytest.mark.interpreted
def test_a_row_of_nan_has_valid_experts() -> None:
    logits = tied_logits(2)
    logits[0] = torch.nan
    routing = experts_triton.route(logits, 3, 8)
    assert int(routing.chosen.min()) >= 0 and int(routing.chosen.max()) < FEW
    assert sorted(routing.order.tolist()) == list(range(6))


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 5, 66])
def test_router(rows: int) -> None:
    """Logits and packed rows of any size; a row's bits do not depend on the others."""
    width = 96
    x = torch.randn(rows, width, device=DEVICE) * torch.logspace(-4, 4, rows, device=DEVICE)[:, None]
    weight, gate = torch.randn(FEW, width, device=DEVICE), torch.randn(width, device=DEVICE)
    with nan_filled_memory():
        packed, logits = experts_triton.router(x, weight, gate)
    assert worst_row_error(logits, x.double() @ torch.cat([weight, gate[None]]).double().T) < 1e-6
    values = packed.halves()
    assert worst_row_error(values[:, :width] * packed.scale[:, None], x) < 1e-3
    assert not bool(values[:, width:].any())
    alone = experts_triton.router(x[-1:].contiguous(), weight, gate)[1]
    assert_same_bits(alone[0], logits[-1])


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("type", "rows", "each"), [(Q.Q4_K, 2, 3), (Q.Q6_K, 7, 1), (Q.Q8_0, 20, 1), (Q.F16, 3, 3)]
)
def test_triton_matmul(type: QuantType, rows: int, each: int) -> None:
    """What cards without the CUDA C++ kernels run; `each` pairs share a row of x."""
    size, columns, generator = 40, 256, torch.Generator(DEVICE).manual_seed(rows)
    blocks = random_rows(type, FEW * size, columns, generator).view(FEW, size, -1)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, padded(size) - size))
    stack = ExpertStack.of(pack(blocks.flatten(0, 1), type), FEW, size)
    routing = experts_triton.route(tied_logits(rows), 3, experts_triton.TOKENS)
    x = torch.randn(rows * 3 // each, columns, device=DEVICE)
    zeros = torch.zeros(columns, device=DEVICE)
    packed = experts_triton.router(x, zeros[None], zeros)[0]
    out = torch.full((rows * 3, size), torch.nan, device=DEVICE)
    experts_triton.matmul(packed, stack, routing, stack.cold, out)
    expected = reference.expert_matmul(x.double(), stack.unpacked().double(), routing.chosen)
    assert worst_row_error(out, expected) < 3e-3


@pytest.mark.interpreted
def test_combine() -> None:
    shared, logits = torch.randn(3, 96, device=DEVICE), torch.randn(3, FEW + 1, device=DEVICE)
    outputs, weights = torch.randn(9, 96, device=DEVICE), torch.rand(3, 3, device=DEVICE)
    found = experts_triton.combine(shared, logits, outputs, weights)
    expected = reference.combine(shared, logits[:, -1], outputs.view(3, 3, 96), weights)
    assert_close(found, expected, tolerance=1e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["qwen35moe", "qwen3moe"])
def test_a_layer_in_tiles_is_the_layer(tiny_model: Callable[..., Path], family: str) -> None:
    """All kernels together, against the experts one after the other."""
    path = tiny_model(family, width=256, mix="q4_k_m")
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        tiles, plain = (
            Experts(spec, WeightLoader(file, device=device, tiles=tiles), "blk.0")
            for device, tiles in ((DEVICE, True), (torch.device("cpu"), False))
        )
    x = torch.randn(1, 7, spec.width)
    assert_close(tiles(x.to(DEVICE)).cpu(), plain(x), tolerance=3e-3)


@pytest.mark.interpreted
def test_a_layer_in_host_memory_has_the_same_bits(tiny_model: Callable[..., Path]) -> None:
    """Read as users load it, over steps that hit and miss; the counts say how many."""
    with GGUFFile.open(tiny_model("qwen35moe", width=256, mix="q4_k_m")) as file:
        spec = ModelSpec.from_gguf(file)
        assert spec.experts is not None
        whole, cached = (
            Experts(spec, WeightLoader(file, device=DEVICE, tiles=True, expert_slots=slots), "blk.0")
            for slots in (None, spec.experts.count // 2)
        )
    caches = ExpertCaches.of([cached])
    caches.fill(None)
    x = torch.randn(3, spec.width, device=DEVICE)
    for rows in (x[:1], x, x[:1], x[:2]):
        assert_same_bits(cached(rows), whole(rows))
    use = caches.use
    assert use is not None and use.hits and use.misses
    assert sum(map(sum, caches.uses)) == use.hits + use.misses


def test_a_row_has_the_same_bits_alone_and_among_others(layer: Layer) -> None:
    x = made_rows(300)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(64)])
    for rows in (*COUNTS, *MANY):
        assert_same_bits(layer(x[:rows])[:64], alone[:rows], f"{rows} rows")
    shuffled = torch.randperm(64, device=DEVICE)
    assert_same_bits(layer(x[shuffled]), alone[shuffled], "another order")


def test_a_captured_layer_follows_its_input(layer: Layer) -> None:
    for rows in (1, 8, 24, 64):
        x = made_rows(rows)
        graph, out = captured(lambda x=x: layer(x))
        for seed in (1, 2):
            x.copy_(made_rows(rows, seed))
            graph.replay()
            assert_same_bits(out, layer(x), f"{rows} rows, seed {seed}")


def test_a_layer_does_not_synchronise(layer: Layer) -> None:
    for rows in (1, 24, 64, 300):
        x = made_rows(rows)
        layer(x)  # compiles
        with no_synchronisation():
            layer(x)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen35moe", mtp=True, width=256, mix="q4_k_m")


def test_a_step_does_not_synchronise(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        model = Decoder.load(file, device=DEVICE)
    states = SequenceStates(model.spec, max_ctx=256, max_rows=16, device=DEVICE)
    slots = torch.tensor([states.open()], device=DEVICE)
    states.reserve(0, 64)
    lengths = states.buffers.lengths[slots]
    chunk = Step.chunk(slots, torch.arange(16, device=DEVICE)[None], lengths)
    model.forward(chunk, states.buffers)
    states.advance(chunk)
    tokens, parents = torch.arange(16, device=DEVICE)[None], random_trees(16, device=DEVICE).parents
    step = Step.tree(slots, tokens, parents, states.buffers.lengths[slots])
    first = model.verify(step, states.buffers)[1]
    with no_synchronisation():
        again = model.verify(step, states.buffers)[1]
    assert_same_bits(again, first)


@pytest.mark.parametrize("family", ["qwen35moe", "qwen3moe"])
def test_logits_match_the_cpu(tiny_model: Callable[..., Path], family: str) -> None:
    """But for the few rows where rounding chooses another of two nearly equal experts."""
    path = tiny_model(family, layers=4)
    expected = logits_of(path, torch.device("cpu")).flatten(0, -2).double()
    found = logits_of(path, DEVICE).flatten(0, -2).double()
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 3e-3 and float((errors < 1e-2).double().mean()) > 0.9, errors


PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 20


@pytest.mark.parametrize("family", ["qwen35moe", "qwen3moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding_and_steps_are_captured(
    tiny_model: Callable[..., Path], family: str, temperature: float
) -> None:
    options = {"mtp": True} if family == "qwen35moe" else {}  # the other is drafted by lookup
    tiny = tiny_model(family, width=256, mix="q4_k_m", **options)
    request = Request(prompt=PROMPT, max_tokens=120, sampling=SamplingParams(temperature=temperature, seed=3))
    speculation = SpecConfig(budget=40, adaptive=False, lookup=family == "qwen3moe")
    texts = []
    for chosen in (None, speculation):
        config = EngineConfig(device=str(DEVICE), max_ctx=2048, speculation=chosen)
        engine = load_session(tiny, config).engine
        assert engine.runner.captured
        texts.append(run(engine, request)[0])
    assert texts[0] == texts[1]


def test_experts_in_host_memory_give_the_same_bits(tiny: Path) -> None:
    request = Request(prompt=PROMPT, max_tokens=64, sampling=SamplingParams(temperature=0.8, seed=3))
    texts = []
    for cold in (0, 2, 6):
        config = EngineConfig(device=str(DEVICE), max_ctx=2048, experts_host=cold)
        session = load_session(tiny, config)
        assert session.engine.runner.captured
        target = session.engine.target
        assert isinstance(target, Decoder)
        pinned = [stack.host is not None and stack.host.is_pinned() for stack in target.routed]
        assert all(pinned) == bool(cold) == any(pinned)
        texts.append(run(session.engine, request)[0])
        use = target.expert_caches.use
        assert (use is not None and use.hits > 0 and use.misses > 0) == bool(cold)
    assert texts[0] == texts[1] == texts[2]


def nearest_tie(monkeypatch: pytest.MonkeyPatch, model: Decoder, tokens: list[int]) -> float:
    """Return the smallest gap on a CPU: of the two best logits, or of the last expert and the next."""
    gaps: list[float] = []
    plain_route = reference.route

    def route(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
        best = logits.topk(used + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))
        return plain_route(logits, used)

    monkeypatch.setattr(reference, "route", route)
    states = SequenceStates(model.spec, max_ctx=512, max_rows=1)
    slots = torch.tensor([states.open()])
    states.reserve(0, len(tokens))
    step = Step.chunk(slots, torch.tensor([tokens]), states.buffers.lengths[slots])
    best = model.logits(model.forward(step, states.buffers).hidden[:, -1]).topk(2).values[0]
    return min(float(best[0] - best[1]), *gaps)


def test_greedy_text_is_the_cpus_up_to_a_near_tie(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(prompt=PROMPT, max_tokens=64, sampling=SamplingParams(seed=3))
    texts = [
        run(load_session(tiny, EngineConfig(device=device, max_ctx=2048), graphs=False).engine, request)[0]
        for device in ("cpu", str(DEVICE))
    ]
    index = next((i for i, pair in enumerate(zip(*texts, strict=True)) if pair[0] != pair[1]), None)
    if index is not None:
        with GGUFFile.open(tiny) as file:
            gap = nearest_tie(monkeypatch, Decoder.load(file), [*PROMPT, *texts[0][:index]])
        assert gap < NEAR_TIE, f"diverges at token {index}"
