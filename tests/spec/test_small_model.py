"""A small model as a draft: its state is that of the text, what it proposes, what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Request
from bough.engine.events import Done, Tokens
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Sequence
from bough.errors import ModelFileError, UsageError
from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Decoder
from bough.models.step import SIZES, Step
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.spec.costs import StepCosts
from bough.spec.small_model import RECENT, SMALL_ROWS, SmallModel
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal
from bough.state.sequences import CacheConfig, SequenceStates
from bough.text.grammar import Grammar
from bough.text.vocabulary import vocabulary_gap
from tests.engine.driving import cut_after, run
from tests.every_draft import ITSELF, SMALL, EveryDraft
from tests.gguf_edit import edited

TEXT = [(7 * i * i + 3 * i + 11) % 300 for i in range(70)]
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
SLOT = torch.tensor([0])
FAMILIES = ["qwen35", "qwen3"]  # with and without recurrent states
FORMS = {"host": False, "static": True}


def log_rank(
    logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    assert positions.shape == logits.shape[:2]
    best = logits.log_softmax(-1).topk(count, -1)
    return best.indices, best.values


class Case:
    def __init__(self, path: Path, *, slots: int = 1, max_ctx: int = 256, pages: int | None = None):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
        self.slots, self.max_ctx, self.pages = slots, max_ctx, pages

    def model(
        self, costs: StepCosts | None = None, *, vocabulary: int = 320, static: bool = False, passes: int = 7
    ) -> SmallModel:
        """`static`: calls of fixed shapes, which make `passes`."""
        cache = CacheConfig(FORMATS["f32"], FORMATS["f32"], pages=self.pages)
        shape = {"max_ctx": self.max_ctx, "slots": self.slots + 1, "max_rows": SMALL_ROWS, "static": static}
        states = SequenceStates(self.target.spec, **shape, cache=cache)
        model = SmallModel(self.target, states, vocabulary=vocabulary, costs=costs, static=static)
        model.passes = passes
        return model


@torch.inference_mode()
def proposed(model: SmallModel, text: list[int], *, slot: int = 0, count: int = 8) -> Proposal:
    model.flush(slot, text)
    anchor, slots = torch.tensor([text[-1]]), torch.tensor([slot])
    return model.candidates(anchor, slots, log_rank, count).one(0)  # ty: ignore[invalid-argument-type]


def chains_of(proposal: Proposal) -> dict[tuple[int, ...], list[float]]:
    lines = zip(proposal.chains.tolist(), proposal.chain_scores.tolist(), strict=True)
    return {tuple(token for token in ids if token >= 0): scores for ids, scores in lines}


def assert_same(proposal: Proposal, other: Proposal) -> None:
    assert torch.equal(proposal.ids, other.ids)
    assert torch.allclose(proposal.scores, other.scores, atol=1e-4)
    assert chains_of(proposal).keys() == chains_of(other).keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_whole_text(tiny_model: Callable[..., Path], family: str, form: str) -> None:
    """Every path of the tree against a plain forward pass over the text and the path."""
    case = Case(tiny_model(family))
    proposal = proposed(case.model(static=FORMS[form]), TEXT)
    chains = {path: scores for path, scores in chains_of(proposal).items() if path}
    assert len(chains) > 10 and max(map(len, chains)) >= 4
    for path, scores in chains.items():
        states = SequenceStates(case.target.spec, max_ctx=256)
        text = [*TEXT, *path]
        states.reserve(states.open(), len(text))
        with torch.inference_mode():
            step = Step.chunk(SLOT, torch.tensor([text]), torch.tensor([0]))
            logits = case.target.logits(case.target.forward(step, states.buffers).hidden[0])
        expected = logits[len(TEXT) - 1 : -1].log_softmax(-1)
        for depth, token in enumerate(path):
            assert scores[depth] == pytest.approx(float(expected[depth, token]), abs=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [0, 1, 4, 6, 15, 30])
def test_a_call_reads_what_is_new(
    tiny_model: Callable[..., Path], family: str, length: int, form: str
) -> None:
    """Whatever part of its tree a text followed, and whatever came then: as if all had been read at once."""
    case = Case(tiny_model(family))
    model, fresh = (case.model(static=FORMS[form]) for _ in range(2))
    chains = chains_of(proposed(model, TEXT))
    path = sorted(chains, key=lambda path: (-len(path), path))[len(chains) % 3]
    chunks: list[int] = []
    forward = case.target.forward

    def counted(step: Any, *args: Any, **options: Any) -> Any:
        chunks.append(step.rows if step.is_chunk else 0)
        return forward(step, *args, **options)

    case.target.forward = counted  # ty: ignore[invalid-assignment]
    text = [*TEXT, *(list(path) + TEXT)[:length], 17]
    again = proposed(model, text)
    assert sum(chunks) == (length if length >= RECENT else 0)
    assert len(chunks) - (length >= RECENT) == model.passes
    case.target.forward = forward  # ty: ignore[invalid-assignment]
    assert_same(again, proposed(fresh, text))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_may_be_made_again(tiny_model: Callable[..., Path], family: str, form: str) -> None:
    """As where a function is captured when it is first called."""
    case = Case(tiny_model(family))
    model = case.model(static=FORMS[form])
    first = proposed(model, TEXT)
    anchor = torch.tensor(TEXT[-1:])
    with torch.inference_mode():
        again = model.candidates(anchor, SLOT, log_rank, 8).one(0)  # ty: ignore[invalid-argument-type]
    assert_same(again, first)
    assert_same(proposed(model, TEXT), first)
    assert_same(proposed(model, [*TEXT, 5]), proposed(case.model(static=FORMS[form]), [*TEXT, 5]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_continues_another_is_not_read_again(
    tiny_model: Callable[..., Path], family: str, form: str
) -> None:
    case = Case(tiny_model(family), slots=2)
    model = case.model(static=FORMS[form])
    proposed(model, TEXT)
    proposed(model, TEXT[:20][::-1], slot=1)
    # In another slot than before.
    for slot in (0, 1):
        model.begin(slot)
    longer = [*TEXT, *range(30, 60)]
    assert model.unread(1, longer) == len(longer) - len(TEXT) - RECENT
    fresh = case.model(static=FORMS[form])
    assert_same(proposed(model, longer, slot=1), proposed(fresh, longer))
    # One that differs before its end: what has no recurrent states goes on after the common beginning.
    model.begin(1)
    other = [*longer[:50], *range(100, 130)]
    assert model.unread(0, other) == len(other) - (50 if family == "qwen3" else 0) - RECENT
    assert_same(proposed(model, other), proposed(fresh, other, slot=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_texts_in_one_call(tiny_model: Callable[..., Path], family: str, form: str) -> None:
    """In a call for four the third of three texts is too long, and the first fills up."""
    case = Case(tiny_model(family), slots=3, max_ctx=80)
    options = {"static": FORMS[form], "passes": 4}  # three rounds of four nodes, in any company
    model, texts = case.model(**options), [TEXT[:20], TEXT[:29], TEXT]
    for step in range(2):
        for slot, text in enumerate(texts):
            model.flush(slot, text)
        slots = torch.tensor([0, 1, 2, 0][: 4 if FORMS[form] else 3])
        anchors = torch.tensor([texts[slot][-1] for slot in slots.tolist()])
        with torch.inference_mode():
            together = model.candidates(anchors, slots, log_rank, 8)  # ty: ignore[invalid-argument-type]
        for place, slot in enumerate(slots.tolist()):
            if slot < 2:
                assert_same(together.one(place), proposed(case.model(**options), texts[slot]))
        assert not bool((together.one(2).scores > -torch.inf).any())
        texts = [[*text, 7 + step, 9] for text in texts]


@pytest.mark.parametrize("form", FORMS)
def test_pages_are_short(tiny_model: Callable[..., Path], form: str) -> None:
    """What nobody reads is dropped; a text for which there are none gets nothing."""
    # A page for rows that nobody reads, and two for each of two texts.
    model = Case(tiny_model("qwen3"), slots=4, pages=5).model(static=FORMS[form])

    def proposes(text: list[int], slot: int) -> bool:
        return bool((proposed(model, text, slot=slot).scores > -torch.inf).any())

    assert proposes(TEXT, 0) and proposes(TEXT[::-1], 1)
    assert not proposes(TEXT[3:], 2)
    model.begin(0)
    assert proposes(TEXT[3:], 2) and proposes([*TEXT[::-1], 3], 1) and not proposes(TEXT, 0)


@pytest.mark.parametrize("vocabulary", [300, 320, 340])
def test_tokens_of_one_file_alone_are_not_proposed(tiny_model: Callable[..., Path], vocabulary: int) -> None:
    model = Case(tiny_model("qwen3")).model(vocabulary=vocabulary)
    seen: list[Tensor] = []

    def rank(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return log_rank(logits, *args)

    with torch.inference_mode():
        model.flush(0, [*TEXT, -7, 339])  # an image, and a token that the file lacks
        proposal = model.candidates(torch.tensor([339]), SLOT, rank, 8)  # ty: ignore[invalid-argument-type]
    assert all(logits.shape[-1] == vocabulary for logits in seen)
    tokens = [int(part.max()) for part in (proposal.ids, proposal.chains)]
    assert max(tokens) < min(vocabulary, 320)
    assert all(bool((logits[..., 320:] == -torch.inf).all()) for logits in seen)


def test_a_text_beyond_its_context_gets_nothing(tiny_model: Callable[..., Path]) -> None:
    model = Case(tiny_model("qwen3"), max_ctx=80).model()
    assert bool((proposed(model, TEXT[:50]).ids >= 0).any())
    proposal = proposed(model, TEXT)
    assert not bool((proposal.scores > -torch.inf).any()) and {*chains_of(proposal)} == {()}
    assert model.unread(0, TEXT) == 0


def test_it_looks_as_far_as_passes_pay(tiny_model: Callable[..., Path]) -> None:
    """By what a pass and a row cost beside a plain step of the target."""
    case = Case(tiny_model("qwen3"))

    def least(plain: float, four: float) -> float:
        return case.model(StepCosts({1: plain, 4: four}, {0: 1.0}))._limits().least

    assert least(100.0, 100.0) == pytest.approx(0.3)
    assert least(2.0, 2.0) == pytest.approx(0.5)
    assert least(2.0, 2.9) == pytest.approx(0.65)
    assert least(0.5, 0.5) == pytest.approx(0.95)


@pytest.fixture(scope="module")
def drafts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> EveryDraft:
    return EveryDraft(tiny_model(layers=8), tmp_path_factory.mktemp("drafts"))


SAMPLINGS = [
    SamplingParams(temperature=0.8 * (n % 2), repetition_penalty=1.0 + 0.1 * (n % 3), seed=n)
    for n in range(8)
]


@pytest.mark.parametrize("proposers", [SMALL, ITSELF])
@pytest.mark.parametrize("adaptive", [False, True])
def test_eight_texts_at_once_and_pages_for_few(drafts: EveryDraft, proposers: str, adaptive: bool) -> None:
    """Some are parked and come back."""
    plain = drafts.plain().engine
    expected = [run(plain, Request([*PROMPT, n], 40, each))[0] for n, each in enumerate(SAMPLINGS)]
    session = drafts.session(proposers, parallel=8, adaptive=adaptive)
    options = {"max_ctx": 128, "slots": 8, "max_rows": 23, "cache": CacheConfig(pages=6)}
    engine = Engine(session.engine.target, drafter=session.engine.drafter, **options)
    requests = [Request([*PROMPT, n], 40, each) for n, each in enumerate(SAMPLINGS)]
    sequences = [engine.add(request) for request in requests]
    texts: list[list[int]] = [[] for _ in sequences]
    ended, parked = 0, False
    while ended < len(sequences):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[sequences.index(sequence)] += event.ids
            ended += isinstance(event, Done)
        parked |= any(sequence.parked is not None for sequence in sequences)
    assert texts == expected and parked


def static_engine(drafts: EveryDraft, proposers: str, *, slots: int, adaptive: bool) -> Engine:
    """Return an engine with the buffers and functions of a GPU."""
    session = drafts.session(proposers, cpu_backend="torch")
    target, small = session.engine.target, session.engine.drafter._draft._model  # ty: ignore[unresolved-attribute]
    # As of a GPU: padding is nearly free.
    costs = StepCosts({1: 1.0, 8: 1.05, 16: 1.15, 24: 1.3, 32: 1.5, 48: 1.9, 64: 2.3}, {0: 0.15})
    shape = {"max_ctx": 128, "slots": slots + 1, "max_rows": SMALL_ROWS}
    cache = CacheConfig(pages=3 + 2 * slots)
    states = SequenceStates(small.spec, **shape, cache=cache, static=True)
    options = {"vocabulary": 320, "static": True, "costs": costs if adaptive else None}
    drafter = Speculator(
        SmallModel(small, states, **options),
        SpecConfig(adaptive=adaptive),
        costs,
        sizes=SIZES,
        on_host=False,
    )
    return Engine(target, max_ctx=128, slots=slots, drafter=drafter, max_rows=23, runner="graph")


@pytest.mark.parametrize(("proposers", "slots"), [(ITSELF, 1), (ITSELF, 8), (SMALL, 8)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_over_static_buffers(drafts: EveryDraft, proposers: str, slots: int, adaptive: bool) -> None:
    """Greedy, sampled and with penalties, alone and in company; a text may end before its last step."""
    plain = drafts.plain(cpu_backend="torch").engine
    requests = [Request([*PROMPT, n], 10 + 4 * n, each) for n, each in enumerate(SAMPLINGS)]
    expected = [run(plain, request)[0] for request in requests]
    engine = static_engine(drafts, proposers, slots=slots, adaptive=adaptive)
    texts: dict[Sequence, list[int]] = {engine.add(request): [] for request in requests}
    stats = []
    while len(stats) < len(texts):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[sequence] += event.ids
            elif isinstance(event, Done):
                stats.append(event.stats)
    assert [*texts.values()] == expected
    steps, tokens = sum(each.steps for each in stats), sum(each.step_tokens for each in stats)
    assert tokens > (2.5 if proposers == ITSELF and not adaptive else 1.0) * steps


@pytest.mark.parametrize("proposers", [SMALL, ITSELF])
def test_a_grammar(drafts: EveryDraft, proposers: str) -> None:
    request = TextRequest(
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=40,
        sampling=SamplingParams(seed=3),
        thinking=False,
        grammar=Grammar("regex", r"(yes|no), because [a-z ]{10,30}\."),
    )
    plain, drafted = drafts.plain(), drafts.session(proposers, budget=22)
    answers = [list(session.generate(request)) for session in (plain, drafted)]
    texts = ["".join(getattr(event, "text", "") for event in events) for events in answers]
    assert texts[0] == texts[1] and "because" in texts[0]


def test_after_a_cut_the_state_is_that_of_the_text(drafts: EveryDraft) -> None:
    engine, fresh = (drafts.session(ITSELF).engine for _ in range(2))
    sampling = SamplingParams(temperature=0.7, seed=4)
    cut = cut_after(13)[0]
    tokens, _ = run(engine, Request(PROMPT, 24, sampling, may_stop=True), cut=cut)
    text = [*PROMPT, *tokens, 33]
    models = []
    for each in (engine, fresh):
        assert isinstance(each.drafter, Speculator) and isinstance(each.drafter._draft, SmallModel)
        each.drafter.open(0)
        models.append(each.drafter._draft)
    assert_same(proposed(models[0], text), proposed(models[1], text))


def test_memory_is_planned(drafts: EveryDraft) -> None:
    without = drafts.session("lookup").plan.estimate.parts
    small, itself = (drafts.session(name).plan.estimate.parts for name in (SMALL, ITSELF))
    assert "draft" not in without
    assert itself["draft"] == itself["weights"] + itself["token embedding"] > small["draft"] > 0
    states = itself["recurrent states"]
    assert itself["draft context"] > states > 0


def test_what_is_refused(tiny_model: Callable[..., Path], drafts: EveryDraft, tmp_path: Path) -> None:
    target, small = tiny_model(layers=8, mtp=True), tiny_model("qwen3")

    def load(draft: DraftConfig, **settings: Any) -> None:
        load_session(target, EngineConfig("cpu", 256, draft=draft, speculation=SpecConfig(**settings)))

    with pytest.raises(UsageError, match="a forward pass of the model"):
        load(DraftConfig(small), mtp="on")
    with pytest.raises(UsageError, match="`draft_quant` is q4_k"):
        load(DraftConfig(small, quant="q4_k"))
    tokens = [f"{n}" for n in range(320)]
    other = edited(small, tmp_path / "other.gguf", keys={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(ModelFileError, match=r"other.gguf cannot propose tokens for .*: its token 5 is '5'"):
        load(DraftConfig(other))


TOKENS = [f"t{n}" for n in range(400)]
BPE = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS}


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({}, None),
        ({"tokens": TOKENS[:272]}, None),
        ({"tokens": [*TOKENS, *(f"x{n}" for n in range(128))]}, None),
        ({"tokens": ["a", "b", "c", "d", "e", *TOKENS[5:]]}, None),
        ({"eos_token_id": 7}, None),
        ({"tokens": TOKENS[:271]}, "it has 271 tokens, the target 400, at most 128 may be extra"),
        ({"tokens": ["u", "v"]}, "it has 2 tokens, the target 400, at most 128 may be extra"),
        ({"tokens": [*TOKENS[:7], "z", *TOKENS[8:]]}, "its token 7 is 'z', the target's 't7'"),
        (
            {"tokens": [*TOKENS[:7], "z"]},
            "it has 8 tokens, the target 400, at most 128 may be extra; "
            "its token 7 is 'z', the target's 't7'",
        ),
        ({"model": "llama"}, "its tokenizer is llama, the target's gpt2"),
        ({"pre": "llama-bpe", "bos_token_id": 3}, "it adds token 3 as BOS to a text, the target none"),
        ({"add_eos_token": True, "eos_token_id": 2}, "it adds token 2 as EOS to a text, the target none"),
    ],
)
def test_the_vocabulary_rule(change: dict[str, Any], gap: str | None) -> None:
    draft = BPE | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    assert vocabulary_gap(BPE, draft) == gap
