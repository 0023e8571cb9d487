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

from bough.errors import ModelFileError
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

    feed_forward: int  # 0 where every layer has experts
    heads: tuple[int, int, int]  # query heads, KV heads, dims
    delta: tuple[int, int] | None  # key heads, value heads; None: no Gated DeltaNet
    experts: tuple[int, int, int] | None  # how many, of which used, their width
    vocabulary: int
    context: int
    tied: bool
    draft: tuple[int, int] | None  # layers and feed-forward of the draft; None: there is none


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


def cards() -> tuple[ModelCard, ...]:
    """Return all cards, sorted by name."""
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
    """Return the cards whose draft a repository holds."""
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
    cards = [_read(path) for path in sorted(folder.glob("*.toml"))]
    seen: set[str] = set()
    for card in cards:
        for name in (card.name, *card.aliases):
            if name in seen:
                raise ModelFileError(f"{folder}: two cards have the name {name!r}")
            seen.add(name)
    return tuple(sorted(cards, key=lambda card: card.name))


def _read(path: Path) -> ModelCard:
    try:
        table = _Table(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise ModelFileError(f"{path}: not readable as TOML: {error}") from error
    match, settings = (table.table(key) for key in ("match", "settings"))
    sampling = table.table("sampling") if table.has("sampling") else None
    pair = table.table("pair") if table.has("pair") else None
    card = ModelCard(
        name=table.name("name"),
        title=table.take("title", str),
        aliases=tuple(table.take("aliases", list, [])),
        target=table.repo("target") if pair is None else None,
        draft=table.repo("draft") if pair is None and table.has("draft") else None,
        pair=None if pair is None else _pair(pair),
        match=Match(
            names=tuple(match.take("names", list)),
            architecture=match.take("architecture", str),
            width=match.take("width", int),
            layers=match.take("layers", int),
            without=tuple(match.take("without", list, [])),
        ),
        budget=settings.take("budget", int),
        thinking=settings.take("thinking", bool),
        effort=settings.take("effort", str, ""),
        shape=_shape(table.table("shape")) if table.has("shape") else None,
        sampling={} if sampling is None else {mode: _sampling(sampling.table(mode)) for mode in MODES},
    )
    for part in (table, match, settings, sampling, pair):
        if part is not None:
            part.finish()
    return card


def _shape(table: "_Table") -> Shape:
    def numbers(key: str, count: int) -> Any:
        return table.numbers(key, count) if table.has(key) else None

    shape = Shape(
        feed_forward=table.take("feed_forward", int, 0),
        heads=table.numbers("heads", 3),
        delta=numbers("delta", 2),
        experts=numbers("experts", 3),
        vocabulary=table.take("vocabulary", int),
        context=table.take("context", int),
        tied=table.take("tied", bool, False),
        draft=numbers("draft", 2),
    )
    table.finish()
    return shape


def _pair(table: "_Table") -> Pair:
    return Pair(PACKAGE / table.take("target", str), PACKAGE / table.take("draft", str))


def _sampling(table: "_Table") -> Sampling:
    sampling = Sampling(
        temperature=table.take("temperature", float),
        top_p=table.take("top_p", float),
        top_k=table.take("top_k", int),
        presence_penalty=table.take("presence_penalty", float),
    )
    table.finish()
    return sampling


class _Table:
    """Values of a card, each taken once; `finish` refuses those that are left."""

    def __init__(self, source: str, values: Mapping[str, Any]):
        self._source = source
        self._values = dict(values)

    def has(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.pop(key, default)
        if type(value) is not kind or (kind is list and any(type(each) is not str for each in value)):
            expected = "a list of strings" if kind is list else f"a value of type {kind.__name__}"
            raise ModelFileError(f"{self._source}: {key} is {value!r}, needed {expected}")
        return value

    def numbers(self, key: str, count: int) -> Any:
        """Return a tuple of `count` whole numbers."""
        value = self._values.pop(key, None)
        if type(value) is not list or len(value) != count or any(type(each) is not int for each in value):
            raise ModelFileError(f"{self._source}: {key} is {value!r}, needed {count} whole numbers")
        return tuple(value)

    def name(self, key: str) -> str:
        value = self.take(key, str)
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", value):
            raise ModelFileError(f"{self._source}: {key} is {value!r}, needed letters, digits, dots, hyphens")
        return value

    def table(self, key: str) -> "_Table":
        return _Table(f"{self._source}: {key}", self.take(key, dict))

    def repo(self, key: str) -> RepoName:
        value = self.take(key, str)
        name = parse_repo(value)
        if name is None:
            raise ModelFileError(f"{self._source}: {key} is {value!r}, needed USER/REPO[:QUANT]")
        return name

    def finish(self) -> None:
        if self._values:
            raise ModelFileError(f"{self._source}: {', '.join(self._values)} is not a field of a card")
