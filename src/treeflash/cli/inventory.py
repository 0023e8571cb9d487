"""The models in the hub's cache that can be run: targets, drafts, which belong together. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treeflash.errors import ModelFileError, ModelNotFound
from treeflash.hub import catalog
from treeflash.hub.cache import Cached, contents
from treeflash.hub.catalog import Card
from treeflash.hub.drafts import cached_draft

if TYPE_CHECKING:
    from treeflash.gguf.reader import GGUFFile

DRAFT_ARCHITECTURE = "dflash"


@dataclass(frozen=True, slots=True)
class Target:
    files: Cached
    architecture: str
    card: Card | None


@dataclass(frozen=True, slots=True)
class Inventory:
    targets: list[Target]
    drafts: list[Cached]
    others: int  # GGUF models that cannot be run

    def users(self, repo: str) -> list[Target]:
        """Return the targets here whose draft is in this repository."""
        names = {card.name for card in catalog.of_draft(repo)}
        return [target for target in self.targets if target.card is not None and target.card.name in names]

    def draft_of(self, card: Card) -> Cached | None:
        repo = card.draft.repo.lower() if card.draft else None
        return next((draft for draft in self.drafts if draft.repo.lower() == repo), None)


def inventory() -> Inventory:
    from treeflash.gguf.reader import GGUFFile
    from treeflash.models.spec import FAMILIES

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
            targets.append(Target(files, architecture, card))
        else:
            others += 1
    return Inventory(targets, drafts, others)


def card_of(file: "GGUFFile", repo: str | None = None) -> Card | None:
    """Return the card of a target, found by its repository or by its file's metadata."""
    from treeflash.models.spec import ModelSpec

    spec = ModelSpec.from_gguf(file)
    names = [spec.name, file.path.stem, *([repo.rpartition("/")[2]] if repo else [])]
    return catalog.recognise(
        names, architecture=spec.architecture, width=spec.width, layers=len(spec.layers), repo=repo
    )


def local_draft(card: Card) -> Path | None:
    """Return the card's draft, if it is on this machine."""
    if card.pair is not None:
        return card.pair.draft
    return cached_draft(card.draft) if card.draft is not None else None
