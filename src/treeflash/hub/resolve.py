"""Turns the name a user gave into the path of a GGUF file, fetching it if need be."""

from pathlib import Path

from treeflash.errors import ModelNotFound
from treeflash.hub.download import FetchProgress, fetch
from treeflash.hub.local import model_in, no_such_file
from treeflash.hub.names import parse_repo


def resolve(name: str, *, offline: bool = False, progress: FetchProgress | None = None) -> Path:
    """A path as it is, a folder's one model, or USER/REPO[:QUANT] through the hub's shared cache.

    What exists on disk wins over a repository of the same name.
    """
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return model_in(path)
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"{name[:200]!r} is not a file name: {error}") from error
    repo = parse_repo(name)
    if repo is not None:
        return fetch(repo, offline=offline, progress=progress)
    raise no_such_file(name)
