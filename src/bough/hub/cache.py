"""Lists and removes models and drafts in the hub's shared cache. Reads no GGUF file."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bough.errors import BoughError, ModelNotFound, ResourceError, UnsupportedModel
from bough.hub.download import cache_folder, snapshots
from bough.hub.drafts import draft_files, is_draft_config
from bough.hub.names import GGUFSet, RepoName, encoders, group, is_draft_file


@dataclass(frozen=True, slots=True)
class Cached:
    """The files of a model or draft, from the newest commit that has them."""

    repo: str
    files: tuple[str, ...]  # names in the repository; of a split model in order, of a draft the weights last
    folder: Path
    size: int

    @property
    def quant(self) -> str:
        """Return the quantisation in the file name; empty for safetensors."""
        return GGUFSet(self.files, self.size).label if self.path.suffix == ".gguf" else ""

    @property
    def path(self) -> Path:
        first = self.folder / self.files[0]
        return first if first.suffix == ".gguf" else self.folder / self.files[-1]

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def contents(cache: Path | None = None) -> list[Cached]:
    """Return every complete GGUF model and every draft in safetensors."""
    cache = cache or cache_folder()
    files = []
    for folder in sorted(cache.glob("models--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        files += of_repo(repo, cache)
    return files


def of_repo(repo: str, cache: Path | None = None) -> list[Cached]:
    cache = cache or cache_folder()
    newest: dict[tuple[str, ...], Cached] = {}
    for snapshot in snapshots(repo, cache):
        inside = [each for each in snapshot.rglob("*") if each.is_file()]
        files = {each.relative_to(snapshot).as_posix(): each.stat().st_size for each in inside}
        sets = [each.files for each in group(files.items(), sidecars=True) if each.complete]
        for names in [*sets, *_draft(repo, snapshot, files)]:
            size = sum(files[name] for name in names)
            newest.setdefault(names, Cached(repo, names, snapshot, size))
    return list(newest.values())


def _draft(repo: str, snapshot: Path, files: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the files of a draft in safetensors, if there is one."""
    try:
        names = draft_files(RepoName(repo))(list(files.items()))
    except (ModelNotFound, UnsupportedModel):
        return []
    return [names] if is_draft_config(snapshot / names[0]) else []


def encoders_of(models: Collection[Cached], cache: Path | None = None) -> list[Cached]:
    """Return the image encoders that these models have and no other one of their repositories."""
    result = {}
    for model in models:
        others = [each for each in of_repo(model.repo, cache) if each not in models]
        if all(is_draft_file(each.files[0]) for each in others):
            names = [each.relative_to(model.folder).as_posix() for each in model.folder.rglob("*.gguf")]
            for name in encoders(names, model.files[0]):
                size = (model.folder / name).stat().st_size
                result[model.repo, name] = Cached(model.repo, (name,), model.folder, size)
    return list(result.values())


def unfinished(repo: str, cache: Path | None = None) -> list[Path]:
    """Return the partial files of interrupted downloads."""
    from huggingface_hub.file_download import repo_folder_name

    folder = (cache or cache_folder()) / repo_folder_name(repo_id=repo, repo_type="model")
    return sorted(folder.glob("blobs/*.bough.incomplete"))


@dataclass(frozen=True, slots=True)
class Removal:
    """Files to delete from all commits, and the bytes that this frees."""

    size: int
    _strategies: list[Any]  # of the hub's client, one for each repository

    def execute(self) -> None:
        for strategy in self._strategies:
            strategy.execute()


def removal(models: Iterable[Cached], cache: Path | None = None) -> Removal:
    """Plan a removal; blobs that other files of the repository use stay."""
    from huggingface_hub import scan_cache_dir

    names: dict[str, set[str]] = {}
    for model in models:
        names.setdefault(model.repo, set()).update(model.files)
    info = scan_cache_dir(cache or cache_folder())
    repos = {repo.repo_id: repo for repo in info.repos if repo.repo_type == "model"}
    strategies = []
    for name, files in names.items():
        if name not in repos:
            raise BoughError(
                f"the cache of {name} is damaged: {'; '.join(map(str, info.warnings))}",
                "remove its folder by hand",
            )
        # Of this repository only: a commit that was copied to another has the same hash there.
        strategies.append(_strategy(replace(info, repos=frozenset([repos[name]])), repos[name], files))
    return Removal(sum(strategy.expected_freed_size for strategy in strategies), strategies)


def _strategy(info: Any, repo: Any, names: set[str]) -> Any:
    selected, commits, whole = [], [], True
    for revision in repo.revisions:
        root = revision.snapshot_path
        files = [file for file in revision.files if file.file_path.relative_to(root).as_posix() in names]
        if files:
            selected += files
            commits.append(revision.commit_hash)
            whole = whole and len(files) == len(revision.files)
    for file in selected:
        if not file.blob_path.is_relative_to(repo.repo_path):
            raise BoughError(
                f"{file.file_path} is a link to {file.blob_path}, outside of the cache",
                "remove it by hand",
            )
    if whole:
        return info.delete_revisions(*commits)
    if not hasattr(info, "delete_files"):
        raise ResourceError(
            "this huggingface-hub cannot remove single files from its cache, needed: 1.32 or newer",
            "pip install --upgrade huggingface-hub",
        )
    return info.delete_files(*selected)
