"""The card of a model file and the draft that belongs to it. Imports no torch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bough.config import EngineConfig, SpecConfig
from bough.errors import ModelFileError, UsageError
from bough.hub import catalog
from bough.hub.catalog import ModelCard
from bough.hub.drafts import cached_draft
from bough.hub.local import encoders_beside, paired_draft
from bough.hub.names import RepoName

if TYPE_CHECKING:
    from bough.gguf.reader import GGUFFile

log = logging.getLogger(__name__)

AUTO, NONE, MTP, LOOKUP = "auto", "none", "mtp", "lookup"  # drafts that are no names
_BESIDE = f",{MTP}"


@dataclass(frozen=True, slots=True)
class NamedDraft:
    """What a user named as the draft."""

    name: str  # a path, a repository, or one of the words above
    mtp: Literal["auto", "on", "off"]  # whether the target's MTP block proposes; auto: without a draft

    @classmethod
    def read(cls, text: str) -> "NamedDraft":
        """Read a name; `NAME,mtp`: the draft and the target's MTP block in one tree."""
        name = text.removesuffix(_BESIDE)
        if name == text:
            return cls(name, "off" if name == LOOKUP else "auto")
        if name in ("", NONE, MTP, LOOKUP):
            raise UsageError(
                f"`draft` is {text}: the MTP block can stand beside a draft only",
                f"auto{_BESIDE}, or the draft's path or repository before {_BESIDE}",
            )
        return cls(name, "on")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How tokens are proposed for a target."""

    config: SpecConfig | None  # None: plain decoding
    path: Path | None = None  # of the draft
    missing: RepoName | None = None  # where the listed draft is, which is not on this machine


def plan_draft(
    named: NamedDraft,
    target: Path,
    card: ModelCard | None,
    *,
    resolve: Callable[[str], Path],
    budget: int | None = None,
    chain: bool = False,
) -> DraftPlan:
    """Return what a name means for a target. resolve: finds a path or repository; budget None: the card's."""
    if named.name == NONE:
        return DraftPlan(None)
    recommended = card.budget if card else SpecConfig().budget
    config = SpecConfig(budget=budget or recommended, chain=chain, mtp=named.mtp)
    if named.name in (MTP, LOOKUP):
        return DraftPlan(config)
    if named.name != AUTO:
        return DraftPlan(config, resolve(named.name))
    path = draft_at_hand(target, card)
    return DraftPlan(config, path, card.draft if path is None and card is not None else None)


def card_of(file: "GGUFFile", repo: str | None = None) -> ModelCard | None:
    """Return the card of a target, else that of the model that it is made from."""
    return _own_card(file, repo) or base_card(file, repo)


def base_card(file: "GGUFFile", repo: str | None = None) -> ModelCard | None:
    """Return the card of the model that a fine-tune's file names; None if it has a card of its own."""
    if _own_card(file, repo) is not None:
        return None
    keys = [key for key in file.metadata if key.startswith("general.base_model.")]
    stated = [str(file.metadata[key]) for key in keys if key.endswith((".name", ".repo_url"))]
    return _recognised(file, [name.rstrip("/").rpartition("/")[2] for name in stated])


def _own_card(file: "GGUFFile", repo: str | None) -> ModelCard | None:
    names = [file.get("general.name", str, ""), file.path.stem, *([repo.rpartition("/")[2]] if repo else [])]
    return _recognised(file, names, repo)


def _recognised(file: "GGUFFile", names: list[str], repo: str | None = None) -> ModelCard | None:
    from bough.models.spec import ModelSpec

    spec = ModelSpec.from_gguf(file)
    shape = {"width": spec.width, "layers": len(spec.layers)}
    return catalog.recognise(names, architecture=spec.architecture, **shape, repo=repo)


def sees(path: Path) -> bool:
    """Return whether a model takes images, if it has an image encoder."""
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec

    try:
        with GGUFFile.open(path) as file:
            return bool(ModelSpec.from_gguf(file).rope_sections)
    except ModelFileError:
        return False


def with_encoder(file: "GGUFFile", config: EngineConfig) -> EngineConfig:
    """Return the settings with the file of the model's image encoder, if there is one that fits."""
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec
    from bough.models.vision_spec import VisionSpec

    if config.no_images:
        return replace(config, mmproj=None)
    target = ModelSpec.from_gguf(file)
    if config.mmproj is not None:
        with GGUFFile.open(config.mmproj) as encoder:
            VisionSpec.from_gguf(encoder).check_target(encoder, target)
        return config
    for path in encoders_beside(file.path) if target.rope_sections else ():
        try:
            with GGUFFile.open(path) as encoder:
                VisionSpec.from_gguf(encoder).check_target(encoder, target)
            return replace(config, mmproj=path)
        except ModelFileError as error:
            log.warning("the image encoder beside the model is left out: %s", error.message)
    return config


def local_draft(card: ModelCard) -> Path | None:
    """Return the card's draft, if it is on this machine."""
    if card.pair is not None:
        return card.pair.draft
    return cached_draft(card.draft) if card.draft is not None else None


def draft_at_hand(path: Path, card: ModelCard | None) -> Path | None:
    """Return the draft that belongs to a target, if it is on this machine: the card's, else one beside it."""
    listed = local_draft(card) if card is not None else None
    return listed or paired_draft(path)
