"""Drafts with planted mismatches: each is named, and the text is that of plain decoding all the same."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.errors import UnsupportedModel
from bough.models.dflash import DFlashDraft
from bough.models.draft_spec import DraftSpec
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.diagnosis import DraftWatch, diagnosis
from tests.gpu.texts import embedded_pair
from tests.tiny_draft import draft_config, save_draft

PROMPT = "Write a function that returns the n-th Fibonacci number, and one that tests it."
SURE = "Write a Python function that reverses a list."  # a wrong causal flag costs most wherever it is cut


def session_of(draft: Path | None, costs: Path | None = None, **settings: Any) -> Session:
    speculation = SpecConfig(**settings) if draft else None
    proposing = DraftConfig(draft) if draft else None
    config = EngineConfig("cpu", max_ctx=1024, speculation=speculation, draft=proposing, costs=costs)
    return load_session(embedded_pair()[0], config)


def answer(session: Session, temperature: float = 0.0, prompt: str = PROMPT) -> Finished:
    request = TextRequest(
        messages=[{"role": "user", "content": prompt}],
        max_tokens=120,
        sampling=SamplingParams(temperature=temperature, seed=5),
    )
    *_, last = session.generate(request)
    assert isinstance(last, Finished)
    return last


@pytest.fixture(scope="module")
def plain() -> dict[float, list[int]]:
    session = session_of(None)
    return {temperature: answer(session, temperature).tokens for temperature in (0.0, 0.8)}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[DFlashDraft, Any, list[int]]]:
    """Give the embedded pair's models, and a text of the target."""
    torch.manual_seed(0)
    session = session_of(embedded_pair()[1])
    text = answer(session).tokens
    draft, target = session.engine.drafter._draft.watched
    yield draft, target, text


def planted(draft: DFlashDraft, **changes: Any) -> DFlashDraft:
    """Return the draft as a wrong config would load it: with the same weights."""
    from bough.spec.diagnosis import _with_spec

    return _with_spec(draft, replace(draft.spec, **changes))


KINDS = {
    "taps in another order": (
        lambda spec: {"taps": tuple(reversed(spec.taps))},
        "target_layer_ids is [5, ",
    ),
    "taps of other layers": (lambda spec: {"taps": (3, 4, 5, 6, 7)}, "target_layer_ids is [3, 4, 5, 6, 7]"),
    "mask": (lambda spec: {"mask_id": 300}, "mask_token_id is 300, 16383 fits"),
    "block": (lambda spec: {"block_size": 4}, "block_size is 4, 16 fits"),
    "causal flag": (lambda spec: {"causal": (True,) * 3}, "causal is [True, True, True], the opposite"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_setting_is_named(pair: tuple[DFlashDraft, Any, list[int]], kind: str) -> None:
    draft, target, text = pair
    changes, name = KINDS[kind]
    found = diagnosis(planted(draft, **changes(draft.spec)), target, text)
    assert found is not None and found.startswith(name), found


def test_a_draft_that_fits_has_nothing_wrong(pair: tuple[DFlashDraft, Any, list[int]]) -> None:
    draft, target, text = pair
    assert diagnosis(draft, target, text) is None


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a random draft of the embedded target's sizes: the weights of another model."""
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec

    folder = tmp_path_factory.mktemp("stranger")
    with GGUFFile.open(embedded_pair()[0]) as file:
        save_draft(
            folder, draft_config(ModelSpec.from_gguf(file), layers=1, method={"target_layer_ids": [4]})
        )
    return folder


@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_another_models_draft_is_said_after_a_few_answers(
    stranger: Path, plain: dict[float, list[int]], tmp_path: Path, lookup: bool, temperature: float
) -> None:
    """With the planner, which hardly calls it; the share of lookup is not the draft's."""
    session, notes = session_of(stranger, tmp_path / "costs.json", lookup=lookup), []
    while not notes:  # at most three answers
        finished = answer(session, temperature)
        assert finished.tokens == plain[temperature]
        notes = finished.stats.notes
    (note,) = notes
    assert finished.stats.shares.draft == 0 and (finished.stats.shares.lookup > 0) <= lookup
    # Which of the two notices it first depends on how often the planner calls it.
    assert note.startswith(("the draft does not fit: ", "not one token of ")) and "of another model" in note
    assert answer(session, temperature).stats.notes == []  # once
    assert session.engine.drafter.notes(-1).warnings == [note]  # and in `ps`


def test_calls_without_an_accepted_token_are_looked_into_at_any_time(stranger: Path) -> None:
    (note,) = answer(session_of(stranger, lookup=False, adaptive=False)).stats.notes
    assert note.startswith("not one token of ") and "draft calls accepted: no other layers" in note


def test_a_draft_for_another_depth_is_refused(stranger: Path, tmp_path: Path) -> None:
    shutil.copytree(stranger, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_target_layers": 64}))
    with pytest.raises(UnsupportedModel, match="num_target_layers is 64, needed the target's layers, 8"):
        session_of(tmp_path / "draft")


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_text_that_lookup_reads_is_the_answer(monkeypatch: pytest.MonkeyPatch, adaptive: bool) -> None:
    """Also of steps that nobody plans, from the first token on."""
    texts: list[list[int]] = []
    monkeypatch.setattr(DraftWatch, "look_into", lambda _, tokens: texts.append(list(tokens)))
    finished = answer(session_of(embedded_pair()[1], adaptive=adaptive), prompt=SURE)
    assert [text[-len(finished.tokens) :] for text in texts] == [finished.tokens]


@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_a_first_contact_names_what_is_wrong_and_the_text_is_plain(
    plain: dict[float, list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Through the engine: the config says something else than the weights were trained for."""
    whole, (changes, name) = DraftSpec.from_gguf, KINDS.get(kind, (lambda spec: {}, ""))
    monkeypatch.setattr(
        DraftSpec, "from_gguf", lambda *a, **k: replace(spec := whole(*a, **k), **changes(spec))
    )
    monkeypatch.setattr("bough.spec.diagnosis._FIRST_SECONDS", 60.0)  # also where other programs compute
    costs = tmp_path / "costs.json"
    other = answer(session_of(embedded_pair()[1], costs=costs), prompt=SURE)
    session = session_of(embedded_pair()[1], costs=costs)  # what it suspects is kept
    first = answer(session, prompt=SURE)
    assert other.tokens == first.tokens == answer(session_of(None), prompt=SURE).tokens
    assert answer(session).tokens == plain[0.0] and answer(session, 0.8).tokens == plain[0.8]
    notes = session.engine.drafter.notes(-1).warnings
    if not name:
        assert other.stats.notes == first.stats.notes == notes == []
    else:
        assert first.stats.notes == notes and f": {name}" in notes[0]
    # A later start does not look again.
    monkeypatch.setattr("bough.spec.diagnosis.diagnosis", lambda *a: pytest.fail("looked again"))
    assert json.loads(costs.read_text()).popitem()[1]["checked"] is True
    assert answer(session_of(embedded_pair()[1], costs=costs)).tokens == plain[0.0]


@pytest.mark.parametrize("adaptive", [True, False])
def test_an_experiment_that_fails_fails_no_answer(
    stranger: Path,
    plain: dict[float, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    adaptive: bool,
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("bough.spec.diagnosis.experiment", fail)
    first = answer(session_of(stranger, tmp_path / "costs.json", lookup=False, adaptive=adaptive))
    assert first.tokens == plain[0.0]
    assert adaptive or "why could not be found out (CUDA out of memory" in first.stats.notes[0]


def test_shares_are_counted_apart() -> None:
    watch = DraftWatch()
    watch.begin(0)
    watch.observe(0, [1, 2, 3], [1, 2, 9], drafted=True)  # two were copied, too
    watch.observe(0, [4, 5], [4, 5], drafted=False)
    watch.observe(1, [7], [], drafted=True)
    assert (watch.shares(0).draft, watch.shares(0).lookup) == (1, 4)
    assert (watch.shares(1).draft, watch.shares(1).lookup) == (1, 0)
