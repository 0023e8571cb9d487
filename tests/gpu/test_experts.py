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
from bough.kernels.norm_rope import silu_rows
from bough.kernels.quant_matmul import PackedRows, pack
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.session.loading import load_session
from bough.state.sequences import SequenceStates
from tests.engine.driving import run
from tests.gpu.inputs import DEVICE, random_trees
from tests.gpu.numerics import assert_close, assert_same_bits, captured, nan_filled_memory, worst_row_error
from tests.gpu.test_decoder import logits_of
from tests.gpu.texts import NEAR_TIE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

EXPERTS, USED, WIDTH, INNER = 64, 8, 512, 256
COUNTS = (1, 2, 7, 8, 9, 16, 24, 33, 64)
MANY = (65, 300)
TYPES = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.IQ4_XS, QuantType.F16)


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
    weights, chosen = reference.route(logits[:, :EXPERTS], USED)
    assert torch.equal(routing.chosen.long(), chosen)
    assert_close(routing.weights, weights, tolerance=1e-5)
    order, chunks = reference.grouped(chosen.cpu(), routing.tokens)
    assert torch.equal(routing.order.cpu().long(), order)
    assert int(routing.count) == len(chunks)
    assert torch.equal(routing.chunks[: len(chunks), :3].cpu().long(), chunks[:, :3])


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


@pytest.mark.parametrize("rows", [3, 20])
def test_triton_matmul(layer: Layer, rows: int) -> None:
    """What cards without the CUDA C++ kernels run."""
    x = made_rows(rows)
    packed, logits = experts_triton.router(x, layer.router, layer.gate)
    routing = experts_triton.route(logits, USED, experts_triton.TOKENS)
    out = torch.full((rows * USED, 2 * INNER), torch.nan, device=DEVICE)
    experts_triton.matmul(packed, layer.gate_up, routing, out)
    expected = reference.expert_matmul(x.double(), layer.gate_up.unpacked().double(), routing.chosen)
    assert worst_row_error(out, expected) < 3e-3


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
    for layers in (0, 2, 4):
        config = EngineConfig(device=str(DEVICE), max_ctx=2048, experts_host=layers)
        session = load_session(tiny, config)
        assert session.engine.runner.captured
        stacks = session.engine.target.routed
        pinned = [stack.data.device.type == "cpu" and stack.data.is_pinned() for stack in stacks]
        assert sum(pinned) == len(stacks) * layers // 4
        texts.append(run(session.engine, request)[0])
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
