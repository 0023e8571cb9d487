"""Portable checkpoints: bfloat16 weights and the place in the run, in files small enough to carry anywhere.

The optimiser's state stays behind; a run that goes on from one warms its learning rate up again.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bough.errors import ModelFileError
from bough.train.files import write_whole

PIECE = 15 << 20  # bytes of a file, at most: what carries them may allow less than 16 MiB
_NAME = re.compile(r"portable-(\d{7})\.(\d\d)-of-(\d\d)")
_FACTS = "bough"  # key of the metadata


def write_portable(folder: Path, step: int, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint in pieces, then remove those of earlier steps; facts: as JSON."""
    tensors = {name: tensor.detach().to(torch.bfloat16).cpu() for name, tensor in weights.items()}
    data = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {_FACTS: json.dumps(dict(facts))}
    )
    # Every piece begins with the sum of the whole, so that pieces of different checkpoints are not joined.
    whole, size = hashlib.sha256(data).digest(), PIECE - hashlib.sha256().digest_size
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    earlier = _files(folder)
    names = [f"portable-{step:07}.{index:02}-of-{len(pieces):02}" for index in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        write_whole(folder / name, lambda file, piece=piece: file.write(whole + piece), needed=len(piece))
    for path in earlier:
        if path.name not in names:
            path.unlink(missing_ok=True)


def read_portable(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return weights and facts of the newest checkpoint whose pieces are all there; None: there is none."""
    pieces: dict[tuple[str, str], list[Path]] = {}  # by step and number of pieces
    for path in _files(folder):
        matched = _NAME.fullmatch(path.name)
        assert matched is not None
        pieces.setdefault((matched[1], matched[3]), []).append(path)
    whole = [paths for (_, count), paths in sorted(pieces.items()) if len(paths) == int(count)]
    if not whole:
        return None
    parts = [path.read_bytes() for path in whole[-1]]
    digest = hashlib.sha256().digest_size
    data = b"".join(part[digest:] for part in parts)
    if any(part[:digest] != hashlib.sha256(data).digest() for part in parts):
        raise ModelFileError(
            f"{whole[-1][0]}: the pieces of this checkpoint do not belong together, or are damaged",
            "copy all of them again, or remove them",
        )
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load(data), json.loads(header["__metadata__"][_FACTS])
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelFileError(f"{whole[-1][0]}: not a portable checkpoint: {error}") from error


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
