"""Sequences in company on a GPU: the bits of each are those that it has alone, with and without graphs."""

from collections.abc import Iterator

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.inputs import tree_rows
from bough.engine.runner import GraphRunner
from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Target
from bough.models.dflash import DFlashDraft
from bough.session.session import Session
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_call import Ask
from bough.spec.speculator import Speculator
from bough.state.draft_ring import draft_buffers
from bough.state.sequences import CacheConfig
from tests.engine import company
from tests.gpu.numerics import assert_same_bits, nan_filled_memory
from tests.gpu.texts import embedded_pair, load_session

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

STEPS = 5


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield load_session(*embedded_pair(), graphs=False, max_ctx=256)


def draft_of(session: Session) -> DFlashDraft:
    return session.engine.drafter._draft._draft  # ty: ignore[unresolved-attribute]


def machine(
    session: Session, slots: int, name: str, *, graphs: bool, rows: int = company.ROWS
) -> company.Machine:
    """Return a machine whose drafter keeps the rings of every slot."""
    target, draft = session.engine.target, draft_of(session)
    rings = draft_buffers(draft.spec, max_ctx=1024, slots=slots, device=target.device, dtype=torch.float16)
    drafter = Speculator(
        DFlashModel(draft, target, rings), SpecConfig(adaptive=False), StepCosts(), device=target.device
    )
    cache = CacheConfig(FORMATS[name], FORMATS[name])
    options = {"runner": GraphRunner, "cache": cache, "drafter": drafter, "rows": rows}
    made = company.Machine(target, slots=slots, **options)
    if graphs:
        slot = made.states.open()
        drafter.open(slot)
        made.states.reserve(slot, 192)
        assert made.runner.capture()
        made.states.close(slot)
    return made


def check(session: Session, sequences: int, name: str, *, total: int = 64, graphs: bool) -> None:
    target: Target = session.engine.target
    texts = company.make_texts(sequences, target.spec.vocab_size, seed=sequences)
    # No more kernels than these trees need: most of the time goes into compiling.
    rows = 1 if total == sequences else tree_rows(sequences)
    single = machine(session, 1, name, graphs=graphs, rows=rows)
    for text in texts:
        company.answer(single, text, 30)
    options = {"steps": STEPS, "total": total}
    several = machine(session, sequences, name, graphs=graphs, rows=rows)
    together = company.run(several, texts, **options)
    longest = 0
    for index, text in enumerate(texts):
        [alone] = company.run(single, texts, **options, alone=index)
        found = together[index]
        for number, (own, other) in enumerate(zip(found.logits, alone.logits, strict=True)):
            assert_same_bits(own, other, f"sequence {index}, step {number}")
        assert found.accepted == alone.accepted, f"sequence {index}"
        assert found.tokens == text.answer[: len(found.tokens)], f"sequence {index}"
        longest = max(longest, *(len(each.path) for each in found.accepted))
    assert longest > 2 or total == sequences


@pytest.mark.parametrize(
    ("sequences", "name"), [(2, "f16"), (5, "f16"), (16, "f16"), (16, "q8_0"), (7, "tq3_0")]
)
def test_the_same_bits_with_graphs(session: Session, sequences: int, name: str) -> None:
    check(session, sequences, name, graphs=True)


@pytest.mark.parametrize("sequences", [3, 16])
def test_the_same_bits_with_poisoned_memory(session: Session, sequences: int) -> None:
    with nan_filled_memory():
        check(session, sequences, "f16", graphs=False)


@pytest.mark.parametrize("name", ["f16", "q8_0"])
def test_a_prompt_read_beside_others(session: Session, name: str) -> None:
    """However it is cut, and whatever is verified beside it."""
    texts = company.make_texts(4, session.engine.target.spec.vocab_size, seed=9)
    text, *others = texts
    text.prompt = [(7 * n + 3) % 300 for n in range(130)]
    made = machine(session, 4, name, graphs=True, rows=32)
    for other in others:
        company.answer(made, other, 60)
    expected = company.read(made, text, [32, 32, 32, 32, 2])
    for pieces, beside in (([16] * 8 + [2], others), ([13] * 10, others[:1]), ([1] * 130, ())):
        assert_same_bits(company.read(made, text, pieces, beside), expected, f"{pieces[0]}")


def test_one_row_each(session: Session) -> None:
    check(session, 20, "f16", total=20, graphs=True)


def test_a_batched_draft_call_is_that_of_each(session: Session) -> None:
    """After steps together, whose commits filled the rings of every slot."""
    made = machine(session, 7, "f16", graphs=True, rows=16)
    texts = company.make_texts(7, made.target.spec.vocab_size)
    single = machine(session, 1, "f16", graphs=True, rows=16)
    for text in texts:
        company.answer(single, text, 40)
    company.run(made, texts, steps=3, total=40)
    # The slots' rings are still there.
    call = made.drafter._call  # ty: ignore[unresolved-attribute]
    asks = [Ask(slot, 5 + slot, [slot] * (slot % 3), -0.3) for slot in range(7)]
    call(asks)
    together = call.reports()
    for ask, report in zip(asks, together, strict=True):
        call([ask])
        [alone] = call.reports()
        assert report.tokens == alone.tokens and report.parents == alone.parents, f"slot {ask.slot}"
        assert report.probabilities == pytest.approx(alone.probabilities, rel=1e-5)
    assert len({tuple(report.tokens) for report in together}) == 7
    assert made.runner.capture_next()


def test_sizes_captured_while_nothing_runs(session: Session) -> None:
    """Capturing changes no sequence's state."""
    made = machine(session, 4, "f16", graphs=True, rows=16)
    texts = company.make_texts(3, made.target.spec.vocab_size)
    for text in texts:
        company.answer(made, text, 30)
    before = company.run(made, texts, steps=3, total=20)
    while made.runner.capture_next():
        pass
    after = company.run(made, texts, steps=3, total=20)
    assert not made.runner.capture_next()
    for one, other in zip(before, after, strict=True):
        assert one.tokens == other.tokens
        for own, others in zip(one.logits, other.logits, strict=True):
            assert_same_bits(own, others)


def test_short_pieces_of_a_prompt(session: Session) -> None:
    """Read by the forward of a decode step: what follows has the bits of plain decoding after it."""
    made = machine(session, 2, "f16", graphs=True, rows=24)
    text = company.make_texts(1, made.target.spec.vocab_size)[0]
    text.prompt = [(7 * n + 3) % 5000 for n in range(44)]
    answers = []
    for pieces in ((24, 20), (1,) * 44):
        slot, done = made.states.open(), 0
        made.drafter.open(slot)
        made.runner.sampler.begin(slot, text.sampling, text.prompt, masked=False)
        for size in pieces:
            made.states.reserve(slot, made.runner.step_rows(size))
            forward = made.runner.read(slot, text.prompt[done : done + size])
            made.drafter.prefill(slot, text.prompt[done : done + size], forward.features[:size])
            done += size
        token = int(made.runner.sampler.sample_first(forward.logits[size - 1 : size], slot, done))
        answers.append(company.answered(made, slot, token, text, 12))
        made.states.close(slot)
    (one, tokens), (two, again) = answers
    assert tokens == again
    for logits, expected in zip(one, two, strict=True):
        assert_same_bits(logits, expected)
