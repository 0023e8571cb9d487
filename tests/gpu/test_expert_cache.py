"""Experts in host memory: their places against the reference, and the bits of rows wherever they are."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.experts import (
    ExpertCache,
    ExpertStack,
    cache_kernels,
    cuda,
    expert_matmul,
    placed,
    reference,
)
from bough.kernels.experts import triton_kernels as experts_triton
from bough.kernels.experts.cache import ROUNDS, stage_bytes, staged_at_once
from bough.kernels.experts.stack import Routing, padded
from bough.kernels.quant_matmul import pack
from bough.kernels.quant_matmul.layout import LAYOUTS
from bough.kernels.runtime.device import card_of
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.state.sequences import SequenceStates
from tests.gpu.inputs import CUDA_KERNELS, DEVICE, INTERPRETED, random_trees
from tests.gpu.numerics import assert_same_bits, captured, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.usefixtures("inference_mode")]

TYPES = (QuantType.Q4_K, QuantType.Q6_K)
EXPERTS, USED = (11, 3) if INTERPRETED else (256, 8)
ROWS, WIDTH = (40, 256) if INTERPRETED else (1024, 2048)
PLACES = (USED, EXPERTS // 2, EXPERTS - 1)


def logits_of(chosen: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [rows, EXPERTS + 1] with which rows take these experts, in this order."""
    logits = torch.full((len(chosen), EXPERTS + 1), -9.0)
    for row, experts in enumerate(chosen):
        for rank, expert in enumerate(experts):
            logits[row, expert] = 4.0 - rank
    return logits.to(DEVICE)


def some(rows: int, choice: random.Random, among: int = EXPERTS) -> list[list[int]]:
    return [choice.sample(range(among), USED) for _ in range(rows)]


def on_host(stack: ExpertStack, slots: int) -> ExpertStack:
    stack = stack.cached(slots)
    assert stack.host is not None
    pinned = stack.host.cpu().pin_memory() if DEVICE.type == "cuda" else stack.host
    stack.data.fill_(255)  # what no one has copied is seen
    return replace(stack, host=pinned)


@dataclass
class Layer:
    """Two matrices of each routed expert, of types that differ."""

    stacks: tuple[ExpertStack, ExpertStack]
    cache: ExpertCache | None = None

    @classmethod
    def random(cls) -> "Layer":
        stacks = []
        for seed, type in enumerate(TYPES):
            generator = torch.Generator(DEVICE).manual_seed(seed)
            blocks = random_rows(type, EXPERTS * padded(ROWS), WIDTH, generator)
            stacks.append(ExpertStack.of(pack(blocks, type), EXPERTS, ROWS))
        return cls((stacks[0], stacks[1]))

    def cached(self, slots: int, experts: Sequence[int] | None = None) -> "Layer":
        """Return the layer with so many places, in which these experts are at first."""
        stacks = tuple(on_host(stack, slots) for stack in self.stacks)
        cache = ExpertCache.of(stacks)
        cache.fill(stacks, range(slots) if experts is None else experts)
        stage = torch.full((stage_bytes(stacks),), 255, dtype=torch.uint8, device=DEVICE)
        cache.share(stage, cache.mirror, cache.uses)
        return Layer((stacks[0], stacks[1]), cache)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return what the experts that `chosen` logits name make of x: [rows, USED, all rows of matrices]."""
        routing = route(chosen)
        if self.cache is not None:
            routing = placed(routing, self.cache, self.stacks)
        return self.multiplied(x, routing)

    def multiplied(self, x: Tensor, routing: Routing) -> Tensor:
        zeros = torch.zeros(WIDTH, device=DEVICE)
        packed = experts_triton.router(x, zeros[None], zeros)[0]
        parts = [expert_matmul(packed, stack, routing) for stack in self.stacks]
        return torch.cat(parts, -1).view(len(x), USED, -1)


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer.random()


def rows_of(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to(DEVICE)


def route(logits: Tensor) -> Routing:
    """Return the routing in chunks that the matmul of this device takes."""
    tokens = experts_triton.TOKENS
    if CUDA_KERNELS:
        layouts = (LAYOUTS[type] for type in TYPES)
        tokens = cuda.chunk_tokens(card_of(DEVICE), layouts, len(logits))
    return experts_triton.route(logits, USED, tokens)


def as_lists(cache: ExpertCache) -> tuple[list[int], list[int], list[int]]:
    return cache.places.tolist(), cache.owners.tolist(), cache.stamps.tolist()


@pytest.mark.parametrize("slots", PLACES)
def test_places_are_the_references(layer: Layer, slots: int) -> None:
    """Over steps of one row and of many: hits, evictions, and more misses than there is room."""
    choice, cache = random.Random(slots), layer.cached(slots).cache
    assert cache is not None
    places, owners, stamps = as_lists(cache)
    totals = [0, 0]
    for now in range(1, 25):
        chosen = some(choice.choice([1, 2, 9]), choice)
        with nan_filled_memory():
            routing = route(logits_of(chosen))
            cache_kernels.resolve(routing, cache)
        used = sorted({expert for row in chosen for expert in row})
        hits = sum(places[expert] >= 0 for expert in used)
        totals = [totals[0] + hits, totals[1] + len(used) - hits]
        copies = reference.resolve(used, places, owners, stamps, now)
        number = int(cache.copies.count)
        assert [tuple(pair) for pair in cache.copies.pairs[:number].tolist()] == copies
        assert as_lists(cache) == (places, owners, stamps)
        assert cache.totals.tolist() == cache.mirror.tolist() == [now, *totals]
        for expert, *_, place in routing.chunks[: int(routing.count)].tolist():
            assert place == (places[expert] if places[expert] >= 0 else -1 - expert)
    assert int(cache.uses.sum()) == sum(totals) and totals[0] and totals[1]


@pytest.mark.parametrize("slots", PLACES)
def test_rounds_are_the_references(layer: Layer, slots: int) -> None:
    choice = random.Random(slots)
    cache = layer.cached(slots, choice.sample(range(EXPERTS), slots)).cache
    assert cache is not None
    for rows in (65, 70):
        routing, places = route(logits_of(some(rows, choice))), cache.places.tolist()
        chunks = [tuple(chunk) for chunk in routing.chunks[: int(routing.count)].tolist()]
        expected = reference.rounds(chunks, places, staged_at_once(EXPERTS))
        parts = cache_kernels.rounds(routing, cache)
        assert len(parts) == ROUNDS >= len(expected)
        for number, part in enumerate(parts):
            own, copies = expected[number] if number < len(expected) else ([], [])
            assert [tuple(chunk) for chunk in part.chunks[: int(part.count[0])].tolist()] == own
            assert [tuple(pair) for pair in part.copies.pairs[: int(part.copies.count[0])].tolist()] == copies
        assert cache.places.tolist() == places  # a prompt evicts nothing


@pytest.mark.parametrize("slots", PLACES)
def test_bits_are_those_of_experts_on_the_device(layer: Layer, slots: int) -> None:
    """All hot, some cold, after evictions, from random places; alone, in company and in a prompt."""
    choice = random.Random(slots)
    cached = layer.cached(slots, choice.sample(range(EXPERTS), slots))
    hot = [list(range(USED))] * 2
    prompt = [some(66, choice)] if slots == PLACES[1] or not INTERPRETED else []
    for chosen in (hot, some(3, choice), *prompt, hot):
        x, logits = rows_of(len(chosen)), logits_of(chosen)
        with nan_filled_memory():
            found = cached(x, logits)
        expected = layer(x, logits)
        assert_same_bits(found, expected, f"{len(chosen)} rows")
        if len(chosen) > 1:
            alone = cached(x[-1:].contiguous(), logits[-1:].contiguous())
            assert_same_bits(alone, expected[-1:], "alone")


def test_any_table_of_places_gives_the_same_bits(layer: Layer) -> None:
    """Also where an expert is read in host memory although it has a place, and beside one that is not."""
    choice = random.Random(3)
    x, chosen = rows_of(4), some(4, choice)
    logits = logits_of(chosen)
    expected = layer(x, logits)
    for slots in PLACES:
        experts = choice.sample(range(EXPERTS), slots)
        cached = layer.cached(slots, experts)
        routing = route(logits)
        for chunk in range(int(routing.count)):
            expert = int(routing.chunks[chunk, 0])
            hot = expert in experts and choice.random() < 0.7
            routing.chunks[chunk, 3] = experts.index(expert) if hot else -1 - expert
        assert_same_bits(cached.multiplied(x, routing), expected, f"{slots} places")


@pytest.mark.skipif(INTERPRETED, reason="took 220 s in the interpreter, and passed")
def test_a_model_gives_the_same_bits_from_any_places(tiny_model: Callable[..., Path]) -> None:
    """A prompt of more rows than a step has, then trees, over static buffers; hits and misses are counted."""
    path = tiny_model("qwen35moe", layers=4, width=256, mix="q4_k_m")
    outputs, shares = [], []
    for slots in (None, 2, 7):
        with GGUFFile.open(path) as file:
            spec = ModelSpec.from_gguf(file)
            loader = WeightLoader(file, device=DEVICE, tiles=True, expert_slots=slots)
            model = Decoder(spec, loader, DEVICE)
        model.expert_caches.fill(None)
        states = SequenceStates(spec, max_ctx=128, max_rows=8, device=DEVICE)
        slot = torch.tensor([states.open()], device=DEVICE)
        states.reserve(0, 96)
        chunk = Step.chunk(
            slot, torch.arange(66, device=DEVICE)[None] * 3 % 250, states.buffers.lengths[slot]
        )
        found = [model.forward(chunk, states.buffers).hidden]
        states.advance(chunk)
        for seed in (1, 2, 1):
            tokens, tree = torch.arange(5, device=DEVICE)[None] * seed, random_trees(5, seed=seed)
            step = Step.tree(slot, tokens, tree.parents, states.buffers.lengths[slot])
            found.append(model.verify(step, states.buffers)[1])
        outputs.append(found)
        shares.append(model.expert_caches.use)
    for found in outputs[1:]:
        for part, expected in zip(found, outputs[0], strict=True):
            assert_same_bits(part, expected)
    assert shares[0] is None and shares[1] is not None and shares[2] is not None
    # The last tree is one that was there before: what has many places misses nothing then.
    assert shares[1].share < shares[2].share < 1 and shares[1].hits


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_captured_step_evicts_and_does_not_synchronise(layer: Layer) -> None:
    choice, cached, x = random.Random(5), layer.cached(EXPERTS // 4), rows_of(9)
    logits = logits_of(some(9, choice))
    graph, out = captured(lambda: cached(x, logits))
    for _ in range(8):
        logits.copy_(logits_of(some(9, choice)))
        graph.replay()
        assert_same_bits(out, layer(x, logits))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cached(x, logits)
        cached(*(part.repeat(8, 1) for part in (x, logits)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cached.cache is not None and int(cached.cache.totals[2]) > 0
