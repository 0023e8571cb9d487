"""Resolves a model name to the path of a file, downloading it if necessary."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from bough.errors import ModelNotFound, UsageError
from bough.hub import catalog
from bough.hub.catalog import ModelCard
from bough.hub.download import FetchProgress, cached, fetch, gguf_files
from bough.hub.drafts import fetch_draft
from bough.hub.local import draft_in, meant_as_file, model_in, no_such_file
from bough.hub.names import RepoName, parse_repo


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name refers to: a local file or a repository, and the card if it is a catalogue name."""

    path: Path | None = None
    repo: RepoName | None = None
    card: ModelCard | None = None
    name: str = ""  # as it was given

    @property
    def fetched(self) -> RepoName | None:
        """Return what to download: for a catalogue name without a quantisation, the card's target."""
        if self.card is not None and self.repo is not None and self.repo.quant is None:
            return self.card.target
        return self.repo


def meaning(name: str) -> Meaning:
    """Interpret a name: a path on disk takes precedence over the catalogue, and that over a repository."""
    if (path := _on_disk(name)) is not None:
        return Meaning(path=model_in(path) if path.is_dir() else path)
    if (listed := catalog.named(name)) is not None:
        card, quant = listed
        if card.target is None:
            return Meaning(path=card.pair.target if card.pair else None, card=card)
        return Meaning(repo=RepoName(card.target.repo, quant), card=card, name=name)
    return Meaning(repo=_repo(name), name=name)


def here(meant: Meaning) -> Path | None:
    """Return the file if it is local or cached."""
    if meant.repo is None:
        return meant.path
    # A catalogue name prefers its own quantisation, else the only cached one.
    for name in dict.fromkeys(filter(None, (meant.fetched, meant.repo))):
        with contextlib.suppress(ModelNotFound):
            return cached(name, gguf_files(name))[0]
    return None


def resolve(name: str | Meaning, *, offline: bool = False, progress: FetchProgress | None = None) -> Path:
    """Return the file of a path, a folder with one model, a catalogue name, or USER/REPO[:QUANT].

    Cached files of catalogue models are used directly; for other repositories the hub is queried.
    """
    meant = meaning(name) if isinstance(name, str) else name
    if meant.path is not None:
        return meant.path
    if meant.card is not None and (path := here(meant)) is not None:
        return path
    assert meant.fetched is not None
    try:
        return fetch(meant.fetched, offline=offline, progress=progress)
    except ModelNotFound as error:
        if offline and meant.card is not None:  # its short name brings the draft, too
            error.hint = f"fetch it while online: bough pull {meant.name}"
        raise


def resolve_draft(name: str, *, offline: bool = False, progress: FetchProgress | None = None) -> Path:
    """Return a draft's file: of a path or folder, a catalogue name's draft, or USER/REPO[:QUANT]."""
    if (path := _on_disk(name)) is not None:
        return draft_in(path) if path.is_dir() else path
    if (listed := catalog.named(name)) is not None:
        card, _ = listed
        if card.pair is not None:
            return card.pair.draft
        repo = card.draft
        if repo is None:
            raise UsageError(
                f"no draft is listed for {card.name}", "set `draft` to a path or USER/REPO", param="draft"
            )
    else:
        repo = _repo(name)
    return fetch_draft(repo, offline=offline, progress=progress)


def _repo(name: str) -> RepoName:
    repo = parse_repo(name)
    if repo is None or meant_as_file(name):
        raise no_such_file(name, catalog.similar(name))
    return repo


def _on_disk(name: str) -> Path | None:
    if not name.strip():
        raise UsageError("the name of the model is empty", "is a variable unset?")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
        if path.is_symlink():
            raise ModelNotFound(f"{name} is a link to {path.readlink()}, which does not exist")
        return None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"{name[:200]!r} is not a file name: {error}") from error
