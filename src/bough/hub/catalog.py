"""The catalogue: short names for targets and their drafts, with recommended settings. No network.

Each model is a TOML card in the folder `cards`, read at first use.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from bough.hub.names import RepoName, parse_repo

FOLDER = Path(__file__).with_name("cards")
PACKAGE = Path(__file__).parents[1]
MODES = ("thinking", "plain")
EMBEDDED = "bough-40m"  # the card of the pair inside the package
FROM_CARD = "bough.from_card"  # in the metadata of a file that is made of a card's shape


@dataclass(frozen=True, slots=True)
class Match:
    """Identifies a file as the card's target, by its name and shape."""

    names: tuple[str, ...]
    architecture: str
    width: int
    layers: int  # without MTP blocks
    without: tuple[str, ...] = ()  # words that make it another model


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    _: KW_ONLY
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Files that are part of the package."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class Shape:
    """What a target's header says beside `Match`: enough to plan before the download."""

    _: KW_ONLY
    heads: tuple[int, int, int]  # query heads, KV heads, dims
    vocabulary: int
    context: int
    feed_forward: int = 0  # 0 where every layer has experts
    delta: tuple[int, int] | None = None  # key heads, value heads; None: no Gated DeltaNet
    experts: tuple[int, int, int] | None = None  # how many, of which used, their width
    theta: float = 1e6  # of rope, where there is no Gated DeltaNet
    window: int = 0  # of the sliding layers, three of four; 0: there are none
    tied: bool = False
    draft: tuple[int, int] | None = None  # layers and feed-forward of the draft; None: there is none


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    title: str
    aliases: tuple[str, ...]
    target: RepoName | None  # None: part of the package
    draft: RepoName | None  # None: there is none, or it is part of the package
    pair: Pair | None
    match: Match
    budget: int
    thinking: bool  # whether it reasons by default
    effort: str  # of its reasoning where a request does not say; empty: its template's default
    shape: Shape | None  # None: of a pair that is part of the package
    sampling: Mapping[str, Sampling]  # recommended, by mode; empty: what the file recommends
    published: Mapping[str, float]  # acceptance lengths that others measured with the draft, by suite
    published_by: str


def cards() -> tuple[ModelCard, ...]:
    return _load(FOLDER)


def named(text: str) -> tuple[ModelCard, str | None] | None:
    """Return the card and the quantisation of NAME or NAME:QUANT, None for any other text."""
    name, colon, quant = text.partition(":")
    for card in cards():
        if name.lower() in (card.name, *card.aliases) and bool(colon) == bool(quant):
            return card, quant or None
    return None


def recognise(
    names: Iterable[str], *, architecture: str, width: int, layers: int, repo: str | None = None
) -> ModelCard | None:
    """Return a model's card by its repository or, where the shape matches, by the first matching name."""
    for card in cards():
        if repo is not None and card.target is not None and card.target.repo.lower() == repo.lower():
            return card
    for name in names:
        for card in cards():
            match = card.match
            shape = (match.architecture, match.width, match.layers)
            if shape == (architecture, width, layers) and _matches(name, match):
                return card
    return None


def of_repo(repo: str) -> ModelCard | None:
    """Return the card whose target a repository holds, judged by its name."""
    for card in cards():
        if card.target is not None and card.target.repo.lower() == repo.lower():
            return card
    return next((card for card in cards() if _matches(repo.rpartition("/")[2], card.match)), None)


def of_draft(repo: str) -> list[ModelCard]:
    return [card for card in cards() if card.draft is not None and card.draft.repo.lower() == repo.lower()]


def similar(text: str) -> list[str]:
    """Return names of cards similar to `text`."""
    return difflib.get_close_matches(text.lower(), [card.name for card in cards()], n=3)


def _matches(name: str, match: Match) -> bool:
    words = _words(name)
    # Some put the publisher before the name: Qwen_Qwen3.6-27B.
    words = words[1:] if words[:1] == ["qwen"] else words
    begins = any(words[: len(_words(each))] == _words(each) for each in match.names)
    return begins and not set(match.without) & set(words)


def _words(name: str) -> list[str]:
    return [word.strip(".") for word in re.split(r"[^a-z0-9.]+", name.lower()) if word.strip(".")]


@functools.cache
def _load(folder: Path) -> tuple[ModelCard, ...]:
    return tuple(sorted(map(_read, folder.glob("*.toml")), key=lambda card: card.name))


def _read(path: Path) -> ModelCard:
    """Return a card of this package, whose values its tests check."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    pair, shape, draft = table.get("pair"), table.get("shape"), table.get("draft")
    published = dict(table.get("published", {}))
    return ModelCard(
        name=table["name"],
        title=table["title"],
        aliases=tuple(table.get("aliases", ())),
        target=parse_repo(table["target"]) if pair is None else None,
        draft=parse_repo(draft) if draft is not None else None,
        pair=pair and Pair(**{name: PACKAGE / file for name, file in pair.items()}),
        match=Match(**_tuples(table["match"])),
        shape=shape and Shape(**_tuples(shape)),
        sampling={mode: Sampling(**values) for mode, values in table.get("sampling", {}).items()},
        published_by=published.pop("by", ""),
        published=published,
        **({"effort": ""} | table["settings"]),
    )


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
