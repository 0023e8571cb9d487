"""The models in the hub's cache that can be run: targets, drafts, which belong together. Imports no torch."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import ModelFileError, ModelNotFound
from bough.hub import catalog
from bough.hub.cache import Cached, contents
from bough.hub.catalog import ModelCard
from bough.session.pairing import card_of

DRAFT_ARCHITECTURE = "dflash"


@dataclass(frozen=True, slots=True)
class CachedTarget:
    files: Cached
    architecture: str
    card: ModelCard | None


@dataclass(frozen=True, slots=True)
class Inventory:
    targets: list[CachedTarget]
    drafts: list[Cached]
    others: int  # GGUF models that cannot be run

    def users(self, repo: str) -> list[CachedTarget]:
        """Return the targets here whose draft is in this repository."""
        names = {card.name for card in catalog.of_draft(repo)}
        return [target for target in self.targets if target.card is not None and target.card.name in names]

    def draft_of(self, card: ModelCard) -> Cached | None:
        repo = card.draft.repo.lower() if card.draft else None
        return next((draft for draft in self.drafts if draft.repo.lower() == repo), None)


@dataclass(frozen=True, slots=True)
class Proposer:
    name: str
    size: int
    vocabulary: Mapping[str, Any]  # the metadata of its tokenizer

    def small_models(self, others: Sequence["Proposer"]) -> list[str]:
        """Return those that fit, at less than half this one's size, the smallest first."""
        from bough.text.vocabulary import vocabulary_gap  # loads tokenizers

        small = sorted((other for other in others if 2 * other.size < self.size), key=lambda each: each.size)
        return [each.name for each in small if vocabulary_gap(self.vocabulary, each.vocabulary) is None]


def proposers(paths: Iterable[tuple[str, Path]]) -> list[Proposer]:
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import FAMILIES

    models = []
    for name, path in paths:
        with contextlib.suppress(ModelFileError, ModelNotFound), GGUFFile.open(path) as file:
            if file.architecture in FAMILIES:
                models.append(Proposer(name, file.size_bytes, file.metadata))
    return models


def inventory() -> Inventory:
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import FAMILIES

    targets, drafts, others = [], [], 0
    for files in contents():
        if files.path.suffix != ".gguf":
            drafts.append(files)
            continue
        try:
            with GGUFFile.open(files.path) as file:
                architecture = file.architecture
                card = card_of(file, files.repo) if architecture in FAMILIES else None
        except (ModelNotFound, ModelFileError):
            others += 1
            continue
        if architecture == DRAFT_ARCHITECTURE:
            drafts.append(files)
        elif architecture in FAMILIES:
            targets.append(CachedTarget(files, architecture, card))
        else:
            others += 1
    return Inventory(targets, drafts, others)
