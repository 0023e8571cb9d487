"""GGUFFile: a memory-mapped GGUF model with typed access to keys and tensors. Imports no torch."""

import contextlib
import errno
import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from bough.errors import BadGGUF, ModelFileError, ModelNotFound
from bough.gguf.header import FETCH_AGAIN, Header, TensorInfo, read_header, shorten
from bough.gguf.rotation import NAMES, PREFIX

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_BLOCK = "mtp-"  # before the name of a file that holds a model's MTP block
_QUANT = re.compile(r"[-_.](?:UD-)?(?:[IP]?Q[1-9]|P?TQ[12]|BF16|F16|F32|MXFP4|NVFP4|gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Part:
    """One file on disk and its header."""

    path: Path
    handle: BinaryIO  # the same file as the mapping, even if another gets its name
    mapping: mmap.mmap
    header: Header
    keys: dict[str, Any] = field(default_factory=dict)  # that it changes in the first part's metadata

    def close(self) -> None:
        """Unmap the file, or leave that to the last array of it that is still in use."""
        self.handle.close()
        with contextlib.suppress(BufferError):
            self.mapping.close()


class GGUFFile:
    """A GGUF model, of one file or of several split files, mapped read-only.

    Metadata values are plain int, float, bool, str and list. Strings inside arrays
    (vocabularies) keep bytes that are not UTF-8 as surrogate escapes; in single strings they become U+FFFD.
    """

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self._part_of = {name: part for part in parts for name in part.header.tensors}
        self.path = parts[0].path
        self.paths = [part.path for part in parts]
        self.size_bytes = sum(len(part.mapping) for part in parts)
        self.metadata: Mapping[str, Any] = MappingProxyType(parts[0].header.metadata | parts[-1].keys)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: info for part in parts for name, info in part.header.tensors.items()}
        )

    @classmethod
    def open(cls, path: Path | str) -> "GGUFFile":
        """Open a model by its file, or by any of its split files."""
        parts = [_read_part(Path(path))]
        try:
            count = _typed(parts[0].path, parts[0].header.metadata, "split.count", int, default=1)
            if count > 1:
                names = _split_names(parts[0], count)
                parts.extend(_read_part(name) for name in names if name != parts[0].path)
                parts.sort(key=lambda part: part.path.name)
                _check_split(parts)
            if (block := _block_beside(parts[0])) is not None:
                parts.append(block)
            return cls(parts)
        except BaseException:
            for part in parts:
                part.close()
            raise

    def raw(self, name: str) -> np.ndarray:
        """Return the tensor's bytes without a copy, read-only: uint8 [*shape[:-1], row_bytes]."""
        info = self.require_tensor(name)
        assert self._parts, f"{self.path} was closed"
        part = self._part_of[name]
        flat = np.frombuffer(part.mapping, np.uint8, count=info.nbytes, offset=part.header.offsets[name])
        return flat.reshape(*info.shape[:-1], info.row_bytes)

    def release(self, name: str) -> None:
        """Unmap the tensor's pages: they count as this process's memory, and stay in the system's cache."""
        part, info = self._part_of[name], self.tensors[name]
        start = part.header.offsets[name] // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and info.nbytes:
            length = part.header.offsets[name] + info.nbytes - start
            part.mapping.madvise(mmap.MADV_DONTNEED, start, length)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the tensor's bytes from `start` on, without page faults. Thread-safe."""
        part = self._part_of[name]
        at = part.header.offsets[name] + start
        if not hasattr(os, "preadv"):
            out[:] = part.mapping[at : at + len(out)]
            return
        try:
            while out:
                count = os.preadv(part.handle.fileno(), [out], at)
                if not count:
                    raise BadGGUF(
                        f"{part.path} ends at byte {at} while it is read, needed {len(out)} more", FETCH_AGAIN
                    )
                at, out = at + count, out[count:]
        except OSError as error:
            raise ModelFileError(f"{part.path} cannot be read: {error.strerror or error}") from error

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a metadata value of that type; a bool is no int, an int converts to a finite float."""
        return _typed(self.path, self.metadata, key, kind)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return a metadata value as `require` does, or `default` when the key is absent."""
        return _typed(self.path, self.metadata, key, kind, default=default)

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """Return the tensor's description, checked against `shape` (torch order) where one is given."""
        info = self.tensors.get(name)
        if info is None:
            needed = "" if shape is None else f" of shape {list(shape)}"
            raise BadGGUF(
                f"{self.path}: tensor {name!r}{needed} is missing; the file has {len(self.tensors)} others"
            )
        if shape is not None and info.shape != tuple(shape):
            raise BadGGUF(f"{self.path}: tensor {name!r} has shape {list(info.shape)}, needed {list(shape)}")
        return info

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def close(self) -> None:
        """Unmap the file, or leave that to the last array from `raw` that is still in use."""
        for part in self._parts:
            part.close()
        self._parts = []
        self._part_of = {}

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_REQUIRED = object()


def _typed(
    path: Path,
    metadata: Mapping[str, Any],
    key: str,
    kind: type | tuple[type, ...],
    *,
    default: Any = _REQUIRED,
) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    needed = " or ".join(each.__name__ for each in kinds)
    if key not in metadata:
        if default is _REQUIRED:
            raise BadGGUF(f"{path}: metadata key {key!r} is missing, needed: {needed}")
        return default
    value = metadata[key]
    if float in kinds and type(value) is float and not math.isfinite(value):
        raise BadGGUF(f"{path}: metadata key {key!r} is {value}, needed: a finite number")
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    seen = f"{shorten(value)} ({type(value).__name__})"
    raise BadGGUF(f"{path}: metadata key {key!r} is {seen}, needed: {needed}")


def _block_beside(trunk: _Part) -> _Part | None:
    """Return the MTP block that a model has in a file beside its own: mtp-NAME in any quantisation.

    Such a file also has an embedding and a head; those of the model are used.
    """
    keys, path = trunk.header.metadata, trunk.path
    architecture = keys.get("general.architecture")
    layers, count = (f"{architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    if path.name.startswith(_BLOCK) or keys.get(count) or not isinstance(keys.get(layers), int):
        return None
    model = _QUANT.split(path.name)[0]
    others = [other for other in sorted(path.parent.glob(f"{_BLOCK}*.gguf"))]
    others = [other for other in others if _QUANT.split(other.name.removeprefix(_BLOCK))[0] == model]
    if not others:
        return None
    part = _read_part(others[0])
    width, found = f"{architecture}.embedding_length", part.header.metadata
    expected = (architecture, keys.get(width), keys[layers] + 1, 1)
    seen = (found.get("general.architecture"), *(found.get(key) for key in (width, layers, count)))
    if seen != expected:
        part.close()
        raise BadGGUF(
            f"{part.path}: architecture, width, blocks and MTP blocks are {seen}, needed {expected}",
            "move it out of the model's folder",
        )
    prefix = f"blk.{keys[layers]}."
    tensors = {name: info for name, info in part.header.tensors.items() if name.startswith(prefix)}
    changed = {layers: expected[2], count: 1} | _shared_basis(trunk, part, prefix)
    return replace(part, header=replace(part.header, tensors=tensors), keys=changed)


def _shared_basis(trunk: _Part, block: _Part, prefix: str) -> dict[str, Any]:
    """Return the names of rotated weights in both files; refuse a block in another basis than its model."""
    theirs, ours = (
        {key: value for key, value in part.header.metadata.items() if key.startswith(PREFIX)}
        for part in (block, trunk)
    )
    if not theirs:
        return {}
    names = [name for name in theirs.get(NAMES, []) if str(name).startswith(prefix)]
    differing = [key for key in theirs if theirs[key] != ours.get(key) and not key.endswith("weight_names")]
    if differing:
        block.close()
        raise BadGGUF(
            f"{block.path}: {differing[0]} is {shorten(theirs[differing[0]])}, "
            f"needed {shorten(ours.get(differing[0], 'none'))} as in {trunk.path.name}",
            "move it out of the model's folder",
        )
    return {NAMES: [*ours.get(NAMES, []), *names]}


def _split_names(part: _Part, count: int) -> list[Path]:
    """Return the paths of all parts, which are next to the given one."""
    number = _typed(part.path, part.header.metadata, "split.no", int) + 1
    match = _SPLIT_NAME.fullmatch(part.path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, count):
        raise BadGGUF(
            f"{part.path}: this is part {number} of {count} of a split model, "
            f"needed: a name that ends in -{number:05d}-of-{count:05d}.gguf",
            "give the parts the names they were published with, all in one folder",
        )
    names = [
        part.path.with_name(f"{match['stem']}-{each:05d}-of-{count:05d}.gguf") for each in range(1, count + 1)
    ]
    missing = [name.name for name in names if not name.exists()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelNotFound(
            f"{part.path}: {len(missing)} of the {count} parts of this model are missing beside it: {listed}",
            "put all parts into one folder",
        )
    return names


def _check_split(parts: list[_Part]) -> None:
    for index, part in enumerate(parts):
        seen = tuple(_typed(part.path, part.header.metadata, key, int) for key in ("split.no", "split.count"))
        if seen != (index, len(parts)):
            raise BadGGUF(
                f"{part.path}: split.no, split.count are {seen}, needed {(index, len(parts))} as in its name",
                "the parts belong to different models or were renamed",
            )
    first = parts[0]
    seen_in: dict[str, Path] = {}
    for part in parts:
        for name in part.header.tensors:
            if name in seen_in:
                raise BadGGUF(f"{part.path}: tensor {name!r} is also in {seen_in[name]}, needed: once")
            seen_in[name] = part.path
    declared = _typed(first.path, first.header.metadata, "split.tensors.count", int, default=len(seen_in))
    if declared != len(seen_in):
        raise BadGGUF(
            f"{first.path}: split.tensors.count is {declared}, but the {len(parts)} parts hold {len(seen_in)}"
        )


def _read_part(path: Path) -> _Part:
    handle, mapping = _map(path)
    try:
        return _Part(path, handle, mapping, read_header(path, mapping))
    except BaseException:
        handle.close()
        mapping.close()
        raise


def _map(path: Path) -> tuple[BinaryIO, mmap.mmap]:
    try:
        # a pipe would block the open below for ever
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            inside = sorted(each.name for each in path.glob("*.gguf"))
            hint = f"name a file inside it: {', '.join(inside[:3])}" if inside else "it holds no .gguf file"
            raise ModelNotFound(f"{path} is a directory, needed: a .gguf file", hint)
        if not stat.S_ISREG(mode):
            raise ModelNotFound(f"{path} is not a regular file, needed: a .gguf file")
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(path.open("rb", buffering=0))
            if os.fstat(file.fileno()).st_size == 0:
                raise BadGGUF(f"{path} is empty (0 bytes), needed: a GGUF file", FETCH_AGAIN)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            opened.pop_all()
            return file, mapping
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise ModelNotFound(f"{path}: no such file") from error
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelNotFound(f"{str(path)!r} is not a file name: {error}") from error
