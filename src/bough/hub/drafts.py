"""Drafts on the hub: selects and downloads the files of a draft in a repository."""

import json
from pathlib import Path
from typing import Any, Unpack

from bough.errors import ModelNotFound, UnsupportedModel
from bough.hub.download import FetchOptions, Pick, cached, fetch_files, fetch_heads
from bough.hub.names import (
    DRAFT_ARCHITECTURES,
    RepoName,
    choose,
    draft_sidecars,
    group,
    is_draft_architecture,
    one_checkpoint,
)

CONFIG = "config.json"
# The mask is not a token of the target: such drafts are unsupported, which is reported before the download.
_MASK_FILE = "mask_embedding.pt"


def fetch_draft(name: RepoName, **options: Unpack[FetchOptions]) -> Path:
    """Download a draft and return the path of its weights: safetensors next to a config, or a GGUF file."""
    return _weights(fetch_files(name, draft_files(name), _check_config, **options))


def draft_head(name: RepoName, folder: Path, *, length: int) -> Path:
    """Write a draft's config and the beginning of its weights into a folder; return the weights' path."""
    return _weights(fetch_heads(name, draft_files(name), folder, length=length))


def cached_draft(name: RepoName, *, cache: Path | None = None) -> Path | None:
    """Return the path of a cached draft's weights, None if it is not in the cache."""
    try:
        return _weights(cached(name, draft_files(name), cache=cache))
    except ModelNotFound:
        return None


def draft_files(name: RepoName) -> Pick:
    """Return a pick of config.json and the safetensors of one checkpoint, or of a GGUF file."""

    def pick(files: list[tuple[str, int]]) -> tuple[str, ...]:
        names = [file for file, _ in files]
        weights = [file for file in names if file.endswith(".safetensors") and "/" not in file]
        if name.quant or name.file or (not weights and any(file.endswith(".gguf") for file in names)):
            return _gguf_draft(name, files)
        if not one_checkpoint(weights) or CONFIG not in names:
            listed = f"{len(weights)} .safetensors files and {'a' if CONFIG in names else 'no'} {CONFIG}"
            raise ModelNotFound(
                f"{name.repo} holds no draft: found {listed}, needed one, or all shards of one, and its"
                f" {CONFIG}",
                "bough list shows the available drafts",
            )
        if _MASK_FILE in names:
            raise UnsupportedModel(
                f"{name.repo}: the draft brings {_MASK_FILE}, needed one whose mask is a token of the target"
            )
        # The first shard last: the path of a checkpoint is that of its last file here.
        return CONFIG, *sorted(weights, reverse=True)

    return pick


def _gguf_draft(name: RepoName, files: list[tuple[str, int]]) -> tuple[str, ...]:
    """Return a GGUF draft: one beside a target, or the model of a repository of its own."""
    sets = [each for each in group(files, sidecars=True) if each.complete]
    if name.file is None:
        sets = draft_sidecars(files) or sets
    return choose(sets, name).files


def is_draft_config(path: Path) -> bool:
    """Return whether a config.json belongs to a supported draft."""
    return is_draft_architecture(_architecture(path))


def _check_config(path: Path) -> None:
    """Refuse other models by their config, before gigabytes of weights are downloaded."""
    class_name = _architecture(path) if path.name == CONFIG else None
    if class_name is not None and not is_draft_architecture(class_name):
        raise UnsupportedModel(
            f"{path}: architectures is {class_name!r}, needed {' or '.join(DRAFT_ARCHITECTURES)} for a draft",
            "drafts are small models made for one target; bough list shows the available ones",
        )


def _architecture(path: Path) -> str | None:
    """Return the architecture in the config, None if it has none."""
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        return str(config["architectures"][0])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None


def _weights(paths: list[Path]) -> Path:
    return paths[0] if paths[0].suffix == ".gguf" else paths[-1]
