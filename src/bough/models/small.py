"""A small model of the target's family as a draft: what fits, before weights are read."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.spec import FAMILIES, ModelSpec
from bough.text.vocabulary import vocabulary_gap


def is_small_model(path: Path) -> bool:
    """Return whether a draft's path is that of a whole model."""
    if path.suffix != ".gguf":
        return False
    with GGUFFile.open(path) as file:
        return file.architecture in FAMILIES


@contextmanager
def open_small_model(path: Path, target: GGUFFile) -> Generator[tuple[GGUFFile, ModelSpec]]:
    """Open a small model, checked against the target's file."""
    with GGUFFile.open(path) as file:
        if (gap := vocabulary_gap(target.metadata, file.metadata)) is not None:
            raise UnsupportedModel(
                f"{path.name} cannot propose tokens for {target.path.name}: {gap}",
                "take a smaller model of the same family and generation",
            )
        yield file, ModelSpec.from_gguf(file)
