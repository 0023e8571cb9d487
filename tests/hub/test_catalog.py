"""The cards of the package, and what makes a card."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from bough.gguf.reader import GGUFFile
from bough.hub import catalog
from bough.hub.names import RepoName
from bough.models.draft_spec import DraftSpec
from bough.models.spec import FAMILIES, ModelSpec

CARDS = catalog.cards()
GOOD = """\
name = "tiny"
title = "Tiny"
target = "me/Tiny-GGUF:Q8_0"
draft = "me/Tiny-DFlash"
[match]
names = ["tiny random"]
architecture = "qwen35"
width = 64
layers = 8
[settings]
budget = 7
thinking = false
[sampling]
thinking = { temperature = 1.0, top_p = 0.95, top_k = 20, presence_penalty = 0.0 }
plain = { temperature = 0.7, top_p = 0.8, top_k = 20, presence_penalty = 0.0 }
"""


def test_every_file_is_a_card_of_its_name():
    files = sorted(catalog.FOLDER.iterdir())
    assert [file.name for file in files] == sorted(f"{card.name}.toml" for card in CARDS)
    assert {"qwen3.5-27b", "qwen3.6-27b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-2b", "qwen3.5-0.8b"} <= {
        card.name for card in CARDS
    }
    assert {"qwen3.6-35b-a3b", "qwen3.8-27b", "qwen3.5-35b-a3b", "qwen3-4b", "qwen3-8b"} <= {
        card.name for card in CARDS
    }
    for file in files:
        tomllib.loads(file.read_text())


def values_of(card: object) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the type and the value of each field of a card and of the records in it."""
    hints = get_type_hints(type(card))
    for field in fields(card):
        value = getattr(card, field.name)
        yield f"{type(card).__name__}.{field.name}", hints[field.name], value
        for record in value.values() if isinstance(value, Mapping) else [value]:
            if is_dataclass(record):
                yield from values_of(record)


def fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(fits(value, part) for part in parts)
    if kind is tuple:
        parts = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return type(value) is tuple and len(value) == len(parts) and all(map(fits, value, parts))
    if issubclass(kind, Mapping):
        return all(fits(key, parts[0]) and fits(each, parts[1]) for key, each in value.items())
    return isinstance(value, kind) if kind in (Path, float) else type(value) is kind


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_has_values_of_the_right_types(card):
    """Nothing checks them in the program: they are a part of it."""
    assert [name for name, hint, value in values_of(card) if not fits(value, hint)] == []
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", card.name)
    names = [name for other in CARDS for name in (other.name, *other.aliases)]
    assert len(set(names)) == len(names)
    keys = set(tomllib.loads((catalog.FOLDER / f"{card.name}.toml").read_text()))
    assert keys <= {field.name for field in fields(card)} | {"settings"}


FETCHED = [card for card in CARDS if card.pair is None]


def test_the_embedded_pair_is_in_the_package():
    (card,) = (card for card in CARDS if card.pair is not None)
    sizes = [path.stat().st_size for path in (card.pair.target, card.pair.draft)]
    assert min(sizes) > 1e6 and sum(sizes) <= 44e6
    with GGUFFile.open(card.pair.target) as file:
        spec = ModelSpec.from_gguf(file)
        name = file.metadata["general.name"]
    shape = {"architecture": spec.architecture, "width": spec.width, "layers": len(spec.layers)}
    assert catalog.recognise([name], **shape) is card
    with GGUFFile.open(card.pair.draft) as file:
        DraftSpec.from_gguf(file).check_target(spec)


@pytest.mark.parametrize("card", FETCHED, ids=lambda card: card.name)
def test_values_are_in_range(card):
    assert (
        card.target is not None
        and card.target.quant.endswith("Q4_K_M")
        and card.target.repo.endswith("-GGUF")
    )
    assert (card.draft is None) == (card.name in ("qwen3.5-2b", "qwen3.5-0.8b"))
    if card.draft is not None:
        owner, name = card.draft.repo.lower().split("/")
        assert owner in ("z-lab", "incoai", "inference-optimization", "meta-models")
        assert "dflash" in name or name == "muse-glimmer-30b-assistant"
        assert card.draft.quant is None
    assert card.match.architecture in FAMILIES
    assert 1 <= card.budget <= 63 and card.title
    for sampling in card.sampling.values():
        assert 0 < sampling.temperature <= 1 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
        assert 0 <= sampling.presence_penalty <= 2


@pytest.mark.parametrize("card", FETCHED, ids=lambda card: card.name)
def test_a_card_matches_its_own_files_only(card):
    shape = {
        "architecture": card.match.architecture,
        "width": card.match.width,
        "layers": card.match.layers,
    }
    repo = card.target.repo.rpartition("/")[2]
    stem = repo.removesuffix("-GGUF")
    for name in (stem, f"{stem}-Q4_K_M", f"{stem}-UD-Q4_K_XL-00001-of-00002", f"Qwen_{stem}-Q8_0", repo):
        assert catalog.recognise([name], **shape) is card
        assert catalog.recognise(["unknown", name.replace("-", " ")], **shape) is card
    assert catalog.of_repo(f"bartowski/Qwen_{repo}") is card
    assert catalog.recognise([stem], **(shape | {"width": 7})) is None
    assert catalog.recognise([stem], **(shape | {"layers": 7})) is None
    assert catalog.recognise([f"{stem}-Base"], **shape) is None
    assert catalog.recognise(["model"], **shape) is None
    assert catalog.recognise(["model"], **(shape | {"width": 7}), repo=card.target.repo) is card
    assert [each for each in CARDS if each.draft and each.draft == card.draft] in ([card], [])


@pytest.mark.parametrize(
    "name", ["Qwen3-4B-Instruct-2507", "DeepSeek-R1-0528-Qwen3-8B", "Qwen3-Embedding-4B", "Qwen3-40B", "Qwen"]
)
def test_other_models_of_the_same_shape(name):
    for width in (2560, 4096):
        assert catalog.recognise([name], architecture="qwen3", width=width, layers=36) is None


def test_the_first_matching_name_counts():
    shape = {"architecture": "qwen35", "width": 5120, "layers": 64}
    assert catalog.recognise(["Qwen3.5-27B", "Qwen3.6-27B"], **shape).name == "qwen3.5-27b"
    assert catalog.recognise(["weights", "Qwen3.6-27B"], **shape).name == "qwen3.6-27b"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("qwen3.6-27b", ("qwen3.6-27b", None)),
        ("Qwen3.6-27B", ("qwen3.6-27b", None)),
        ("qwen3.6-27b:Q8_0", ("qwen3.6-27b", "Q8_0")),
        ("qwen3.5-35b", ("qwen3.5-35b-a3b", None)),
        ("qwen3.6-27b:", None),
        ("qwen3.6", None),
        ("", None),
    ],
)
def test_short_names(text, wanted):
    found = catalog.named(text)
    assert (found and (found[0].name, found[1])) == wanted


def test_drafts_lead_to_their_cards():
    assert [card.name for card in catalog.of_draft("z-lab/qwen3.6-27b-dflash")] == ["qwen3.6-27b"]
    assert catalog.of_draft("z-lab/other") == []


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    return tmp_path


def test_a_card_of_an_embedded_pair(folder):
    text = GOOD.replace('target = "me/Tiny-GGUF:Q8_0"\ndraft = "me/Tiny-DFlash"\n', "")
    (folder / "tiny.toml").write_text(text + '[pair]\ntarget = "pair/t.gguf"\ndraft = "pair/d.safetensors"\n')
    (card,) = catalog.cards()
    assert card.target is None and card.draft is None
    assert card.pair.target == Path(catalog.__file__).parents[1] / "pair/t.gguf"
    assert card.pair.draft.name == "d.safetensors"


def test_a_good_card(folder):
    (folder / "tiny.toml").write_text(GOOD)
    (card,) = catalog.cards()
    assert card.target == RepoName("me/Tiny-GGUF", "Q8_0") and card.draft == RepoName("me/Tiny-DFlash")
    assert catalog.named("tiny") == (card, None)
    assert set(card.sampling) == set(catalog.MODES)


def test_a_card_may_leave_the_sampling_to_the_file(folder):
    (folder / "tiny.toml").write_text(GOOD.partition("[sampling]")[0])
    (card,) = catalog.cards()
    assert card.sampling == {}


def test_what_is_no_field_is_refused(folder):
    for old, new in (("budget = 7", "budget = 7\nbudgets = 8"), ("top_k = 20", "top_k = 20, top_q = 1")):
        (folder / "tiny.toml").write_text(GOOD.replace(old, new, 1))
        with pytest.raises(TypeError, match=new.split()[-3]):
            catalog.cards()
