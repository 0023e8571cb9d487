"""Sequences in company: each has the logits, paths and tokens that it has alone, whatever the others do."""

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.runner import GraphRunner, StepRunner
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder, Target
from bough.models.mtp import MTPBlock
from bough.models.native import NativeDecoder
from bough.models.step import DeltaBuffers
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_call import Ask, DraftReport
from bough.spec.mtp import MTPModel
from bough.spec.speculator import Speculator
from bough.spec.tree import Tree
from bough.state.draft_ring import draft_buffers, mtp_buffers
from bough.state.graphs import CapturedFunction
from tests.engine import company
from tests.engine.test_embedded_pair import session
from tests.kernels.native_library import needs_native, opened
from tests.models.test_native import FAMILIES, PAIR

STEPS = 6


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check(
    target: Target, *, sequences: int, runner: type[StepRunner] = StepRunner, tolerance: float = 0.0
) -> None:
    """With a tolerance of 0 no bit may differ."""
    texts = company.make_texts(sequences, target.spec.vocab_size, seed=sequences)
    single = company.Machine(target, slots=1)
    for text in texts:
        company.answer(single, text, 60)
    options = {"steps": STEPS, "total": 64}
    machine = company.Machine(target, slots=sequences, runner=runner)
    together = company.run(machine, texts, **options)
    longest = 0
    for index, text in enumerate(texts):
        [alone] = company.run(single, texts, **options, alone=index)
        found = together[index]
        assert found.accepted == alone.accepted and found.tokens == alone.tokens
        assert found.tokens == text.answer[: len(found.tokens)]
        longest = max(longest, *(len(each.path) for each in found.accepted))
        for own, other in zip(found.logits, alone.logits, strict=True):
            assert (own - other).norm() <= tolerance * other.norm()
    assert longest > 2


@needs_native
@pytest.mark.parametrize("model", ["pair", *FAMILIES])
def test_the_same_bits_natively(tiny_model: Callable[..., Path], model: str) -> None:
    with GGUFFile.open(PAIR if model == "pair" else tiny_model(model, layers=4)) as file:
        target = NativeDecoder.load(file, opened(2))
    check(target, sequences=3 if model == "pair" else 5)


@pytest.mark.parametrize("runner", [StepRunner, GraphRunner])
@pytest.mark.parametrize("family", ["qwen35", "qwen35moe", "qwen3moe", "llama", "muse-glimmer"])
def test_the_same_text_in_torch(
    tiny_model: Callable[..., Path], family: str, runner: type[StepRunner]
) -> None:
    with GGUFFile.open(tiny_model(family, layers=4)) as file:
        target = Decoder.load(file)
    check(target, sequences=5, runner=runner, tolerance=1e-4)


def test_one_row_each(tiny_model: Callable[..., Path]) -> None:
    """More sequences than trees have rows for, in a padded step."""
    with GGUFFile.open(tiny_model("qwen35", layers=4)) as file:
        target = Decoder.load(file)
    texts = company.make_texts(20, target.spec.vocab_size)
    single = company.Machine(target, slots=1)
    for text in texts:
        company.answer(single, text, 5)
    machine = company.Machine(target, slots=20, runner=GraphRunner)
    for text, found in zip(texts, company.run(machine, texts, steps=4, total=20), strict=True):
        assert found.tokens == text.answer


def test_a_step_without_rows_changes_nothing(tiny_model: Callable[..., Path]) -> None:
    """So a size of steps can be captured while sequences wait, whose accepted rows are still pending."""
    with GGUFFile.open(tiny_model("qwen35", layers=4, mtp=True)) as file:
        target = Decoder.load(file)
        block = MTPBlock.load(file, target.spec, device=target.device, dtype=torch.float32)
    model = MTPModel(block, target, mtp_buffers(target.spec, max_ctx=512, slots=3))
    drafter = Speculator(model, SpecConfig(adaptive=False), StepCosts())
    machine = company.Machine(target, slots=3, runner=GraphRunner, drafter=drafter)
    texts = company.make_texts(3, target.spec.vocab_size)
    for text in texts:
        company.answer(machine, text, 30)
    parts = []
    for index, text in enumerate(texts):
        slot, _ = machine.begin(text)
        parts.append((slot, text, company.make_tree(text, 1, 9, target.spec.vocab_size, index)))
    machine.step(parts)
    states, runner = machine.states, machine.runner
    assert int(states.buffers.pending.count.min()) > 0

    def tensors() -> list[torch.Tensor]:
        pools = [plane[:, 1:] for plane in states.planes]  # without the page of padding rows
        deltas = [layer for layer in states.buffers.layers if isinstance(layer, DeltaBuffers)]
        held = [getattr(layer, field.name) for layer in deltas for field in fields(layer)]
        pending = states.buffers.pending
        rings = model._buffers
        newest = (rings.newest.rows[:-1], rings.newest.counts[:-1])
        own = [*newest, rings.ring.lengths, *rings.ring.keys]
        tables = [states.buffers.lengths, pending.path, pending.count, runner.sampler.counts]
        return [tensor.clone() for tensor in (*pools, *held, *tables, *own)]

    before = tensors()
    assert states.buffers.spare_page == 0
    runner._trees.of(4).load([])
    runner._accept(runner._forward(4, 16))
    for old, new in zip(before, tensors(), strict=True):
        assert torch.equal(old, new)


@needs_native
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("pieces", [(20,), (64, 5), (1, 33, 64)])
def test_short_pieces_of_a_prompt(
    tiny_model: Callable[..., Path], native: bool, pieces: tuple[int, ...]
) -> None:
    """Read by decode steps they leave the state of a chunk: natively no bit differs."""
    with GGUFFile.open(tiny_model("qwen35", layers=4)) as file:
        target = NativeDecoder.load(file, opened(1)) if native else Decoder.load(file)
    runner = StepRunner if native else GraphRunner
    chunks, steps = (company.Machine(target, slots=2, runner=runner) for _ in range(2))
    text = company.make_texts(1, target.spec.vocab_size)[0]
    text.prompt = [(7 * n + 3) % 300 for n in range(sum(pieces))]
    found = [company.answered(chunks, *chunks.begin(text), text, 9)]
    other = steps.states.open()  # not the first slot
    slot, _ = steps.begin(replace(text, prompt=text.prompt[:1]))
    steps.states.close(slot)
    slot = steps.states.open()
    steps.runner.sampler.begin(slot, text.sampling, text.prompt, masked=False)
    done = 0
    for size in pieces:
        steps.states.reserve(slot, steps.runner.step_rows(size))
        forward = steps.runner.read(slot, text.prompt[done : done + size])
        done += size
    assert steps.states.lengths[slot] == int(steps.states.buffers.lengths[slot]) == done != 0 and other == 0
    logits = forward.logits[size - 1 : size]
    token = int(steps.runner.sampler.sample_first(logits, slot, done))
    found.append(company.answered(steps, slot, token, text, 9))
    (one, answer), (two, again) = found
    assert answer == again
    for logits, expected in zip(two, one, strict=True):
        assert (logits - expected).norm() <= (0 if native else 1e-4) * expected.norm()


@needs_native
@pytest.mark.parametrize("native", [True, False])
def test_a_prompt_read_beside_others(tiny_model: Callable[..., Path], native: bool) -> None:
    """However it is cut, and whatever is verified beside it; its tokens may be end tokens."""
    with GGUFFile.open(tiny_model("qwen35", layers=4)) as file:
        target = NativeDecoder.load(file, opened(1)) if native else Decoder.load(file)
    runner = StepRunner if native else GraphRunner
    text, *others = company.make_texts(5, target.spec.vocab_size)[:4]
    text.prompt = [(7 * n + 3) % 300 for n in range(65)]
    for other in others:
        company.answer(company.Machine(target, slots=1), other, 60)
    expected = company.read(company.Machine(target, slots=4, runner=runner), text, [64, 1])
    for pieces, beside in (([16, 16, 16, 16, 1], others), ([30, 5, 30], others[:1])):
        found = company.read(company.Machine(target, slots=4, runner=runner), text, pieces, beside)
        assert (found - expected).norm() <= (0 if native else 1e-4) * expected.norm()


@pytest.mark.parametrize("runner", [StepRunner, GraphRunner])
def test_a_batched_draft_call_is_that_of_each(runner: type[StepRunner]) -> None:
    """After steps together, whose commits filled the rings of every slot as steps alone do."""
    made = session(SpecConfig(adaptive=False))
    target, drafter = made.engine.target, made.engine.drafter
    assert isinstance(drafter, Speculator) and isinstance(drafter._draft, DFlashModel)
    draft = drafter._draft._draft

    def machine(slots: int) -> company.Machine:
        rings = draft_buffers(draft.spec, max_ctx=512, slots=slots)
        own = Speculator(DFlashModel(draft, target, rings), SpecConfig(adaptive=False), StepCosts())
        return company.Machine(target, slots=slots, runner=runner, drafter=own)

    def call(of: company.Machine, asks: list[Ask]) -> list[DraftReport]:
        assert isinstance(of.drafter, Speculator)
        of.drafter._call(asks)
        return of.drafter._call.reports()

    single, several = machine(1), machine(5)
    texts = company.make_texts(5, target.spec.vocab_size)
    for text in texts:
        company.answer(single, text, 40)
    company.run(several, texts, steps=3, total=50)
    order = random.Random(5).sample(range(5), 5)  # as `run` begins them
    asks = [Ask(order.index(index), 5 + index, [index] * (index % 3), -0.3) for index in range(5)]
    together = call(several, asks)
    for index, (ask, report) in enumerate(zip(asks, together, strict=True)):
        assert call(several, [ask])[0].tokens == report.tokens
        company.run(single, texts, steps=3, total=50, alone=index)
        [alone] = call(single, [replace(ask, slot=0)])
        assert (report.tokens, report.parents) == (alone.tokens, alone.parents)
        assert report.probabilities == pytest.approx(alone.probabilities, rel=1e-4)
        assert torch.equal(report.proposals[0].ids, alone.proposals[0].ids)
        built = Tree.of(report.tokens[:9], report.parents[:9])
        assert torch.equal(report.tree(9).packed[:, :9], built.packed[:, :9])
    assert len({tuple(report.tokens) for report in together}) == 5


def test_a_step_that_is_not_captured_runs_in_a_larger_one(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is captured when it has been needed often: until then nobody waits for that."""
    with GGUFFile.open(tiny_model("qwen35", layers=4)) as file:
        target = Decoder.load(file)
    captured = []

    class Replay:
        def __init__(self, function: CapturedFunction):
            self.function = function

        def replay(self) -> None:
            self.function._result = self.function._function()

    def capture(function: CapturedFunction, pool: object) -> None:
        captured.append(function)
        function._graph = Replay(function)  # ty: ignore[invalid-assignment]

    monkeypatch.setattr(CapturedFunction, "capture", capture)
    machine = company.Machine(target, slots=8, runner=GraphRunner)
    runner = machine.runner
    assert isinstance(runner, GraphRunner)
    runner._pool = "a pool"
    assert runner._shape(5, 20, 4) == (8, 24) and len(captured) == 2  # nothing holds it: forward and accept
    assert runner._shape(3, 10, 9) == (8, 24) and runner._shape(8, 24, 3) == (8, 24)
    assert runner._shape(2, 20, 17) == (2, 24)  # its trees are too large for steps of 8 sequences
    assert runner._shape(3, 30, 30) == (4, 32) and len(captured) == 6
    texts = company.make_texts(3, target.spec.vocab_size)
    for text in texts:
        company.answer(company.Machine(target, slots=1), text, 20)
    for text, found in zip(texts, company.run(machine, texts, steps=4, total=12), strict=True):
        assert found.tokens == text.answer[: len(found.tokens)]
    assert len(captured) == 6
    for _ in range(64):
        shape = runner._shape(3, 10, 9)
    assert shape == (4, 16) and len(captured) == 8
    while runner.capture_next():
        pass
    assert not runner._later and runner._shape(7, 9, 2) == (8, 16)
