"""The model that is used when none is named: until a trained one ships, a tiny random one."""

import os
import tempfile
from pathlib import Path

from treeflash.errors import ModelFileError, ModelNotFound
from treeflash.gguf.reader import GGUFFile

NOTICE = (
    "No model given: using a tiny random model, which writes nonsense. "
    "Name one: treeflash run PATH|USER/REPO[:QUANT]"
)


def default_model() -> Path:
    """Path of the model in the user's cache folder, made when it is not there or damaged."""
    from platformdirs import user_cache_dir

    path = Path(user_cache_dir("treeflash")) / "tiny-random-v1.gguf"
    if not _sound(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _make(path)
    return path


def _sound(path: Path) -> bool:
    try:
        GGUFFile.open(path).close()
    except (ModelNotFound, ModelFileError):
        return False
    return True


def _make(path: Path) -> None:
    from treeflash.tools.tiny import make_tiny

    # Beside its place, then moved: a second run never sees half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        os.replace(make_tiny(Path(folder) / path.name), path)
