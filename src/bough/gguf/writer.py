"""GGUFWriter: declares keys and tensors, then streams the data tensor by tensor. Imports no torch."""

import contextlib
import errno
import os
import secrets
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from bough.errors import BadGGUF, BoughError, ResourceError, UsageError
from bough.gguf.header import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMENSIONS,
    NUMBER_TYPES,
    TensorInfo,
    ValueType,
    shorten,
)
from bough.gguf.types import QuantType

VERSION = 3
_FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class GGUFWriter:
    """Call add() and add_tensor(), write_header(), write_tensor() in any order, then close().

    The data goes to a .part file next to PATH, which close() renames to PATH once every tensor is written.
    Leaving a `with` closes the file, or removes the .part after an exception.
    """

    def __init__(self, path: Path, architecture: str, *, alignment: int = DEFAULT_ALIGNMENT):
        self.path = Path(path)
        self.part_path = self.path.with_name(f"{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        self._file: BinaryIO | None = None
        self._closed = False
        self._metadata: dict[str, bytes] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._unwritten: set[str] = set()
        self._data_start = 0
        self._data_bytes = 0
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self._refuse(f"alignment is {alignment}, needed: a power of two up to {MAX_ALIGNMENT}")
        self._alignment = alignment
        self.add("general.architecture", architecture)
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment)

    def add(self, key: str, value: Any, kind: ValueType | None = None) -> None:
        """Set a metadata value; `kind` is its type, or that of the elements of a list.

        Without `kind`: str, bool, float32, or the first of uint32, int32, uint64, int64 that holds the ints.
        """
        assert self._file is None and not self._closed, "the header is written"
        what = f"metadata key {shorten(key)}"
        if not key or key in self._metadata:
            self._refuse(f"{what} is set twice or empty, needed: a name used once")
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        values = list(value) if is_list else [value]
        kind = _infer(values) if kind is None else ValueType(kind)
        data = None if kind is None else self._encode(what, values, kind)
        if kind is None or data is None:
            needed = "str, bool, 64-bit int, float, or a list of one of them" if kind is None else kind.name
            self._refuse(f"{what} is {shorten(value)} ({type(value).__name__}), needed: {needed}")
        if is_list:
            data = struct.pack("<IIQ", ValueType.ARRAY, kind, len(values)) + data
        else:
            data = struct.pack("<I", kind) + data
        self._metadata[key] = self._string(what, key, errors="strict") + data

    def add_tensor(self, name: str, shape: tuple[int, ...], type: QuantType) -> None:
        """Declare a tensor, its shape in torch order; the file has the data in the order of declaration."""
        assert self._file is None and not self._closed, "the header is written"
        info = TensorInfo(name, tuple(int(size) for size in shape), type)
        what = f"tensor {shorten(name)}"
        if not name or name in self._tensors:
            self._refuse(f"{what} is declared twice or empty, needed: a name used once")
        if not 1 <= len(info.shape) <= MAX_DIMENSIONS or min(info.shape) < 1:
            self._refuse(
                f"{what} has shape {list(shape)}, needed: 1 to {MAX_DIMENSIONS} dimensions of at least 1"
            )
        if info.shape[-1] % type.block_elements:
            self._refuse(
                f"{what} has rows of {shape[-1]}, {type.name} needs a multiple of {type.block_elements}"
            )
        self._string(what, name, errors="strict")
        self._tensors[name] = info
        self._offsets[name] = self._data_bytes
        self._data_bytes += info.nbytes + self._padding(info.nbytes)

    def write_header(self, *, holes: bool = False) -> None:
        """Check that the disk has space for the whole file, then write all but the tensor data.

        With `holes` the tensors are left out: the file has the size of a whole one, and takes no space.
        """
        assert self._file is None and not self._closed, "the header is written"
        header = bytearray(MAGIC)
        header += struct.pack("<IQQ", VERSION, len(self._tensors), len(self._metadata))
        for entry in self._metadata.values():
            header += entry
        for name, info in self._tensors.items():
            dimensions = info.shape[::-1]
            header += self._string(name, name)
            header += struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            header += struct.pack("<IQ", info.type, self._offsets[name])
        header += bytes(self._padding(len(header)))
        self._data_start = len(header)
        self._unwritten = set(self._tensors)
        try:
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self.part_path.unlink(missing_ok=True)
            space = self._data_start + (0 if holes else self._data_bytes)
            if shutil.disk_usage(self.path.parent).free < space:
                self._refuse_space(os.strerror(errno.ENOSPC))
            # not in a `with`: the file stays open until close()
            self._file = self.part_path.open("wb")
            self._file.write(header)
            if holes:
                self._file.truncate(self._data_start + self._data_bytes)
                self._unwritten.clear()
        except OSError as error:
            self._translate(error)

    def write_tensor(self, name: str, data: bytes | memoryview | np.ndarray) -> None:
        """Write the bytes of a declared tensor, rows of whole blocks as `GGUFFile.raw` returns them."""
        assert self._file is not None, "write_header() comes first"
        if name not in self._unwritten:
            problem = "was already written" if name in self._tensors else "was not declared"
            self._refuse(f"tensor {name!r} {problem}, needed: one of {len(self._unwritten)} that are left")
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        view = memoryview(data).cast("B")
        info = self._tensors[name]
        if view.nbytes != info.nbytes:
            self._refuse(
                f"tensor {name!r} is given {view.nbytes} bytes, "
                f"{info.type.name} of shape {list(info.shape)} needs {info.nbytes}"
            )
        try:
            self._file.seek(self._data_start + self._offsets[name])
            self._file.write(view)
            self._file.write(bytes(self._padding(info.nbytes)))
        except OSError as error:
            self._translate(error)
        self._unwritten.remove(name)

    def close(self) -> None:
        """Move the finished file to PATH; remove it and raise if tensors are missing."""
        if self._closed:
            return
        if self._file is None:
            self.write_header()
        assert self._file is not None
        if self._unwritten:
            listed = ", ".join(repr(name) for name in self._tensors if name in self._unwritten)
            self.abort()
            self._refuse(
                f"{shorten(listed)} of {len(self._tensors)} declared tensors not written, needed: all"
            )
        try:
            self._file.flush()
            # a crash after the rename must not leave a file of the right name without its data
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.part_path, self.path)
        except OSError as error:
            self._translate(error)
        self._closed = True

    def abort(self) -> None:
        """Remove the .part and leave PATH unchanged."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self.part_path.unlink()
        self._file = None
        self._closed = True

    def __enter__(self) -> "GGUFWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _padding(self, size: int) -> int:
        return -size % self._alignment

    def _refuse(self, problem: str) -> NoReturn:
        raise BadGGUF(f"{self.path}: {problem}")

    def _refuse_space(self, reason: str) -> NoReturn:
        needed = f"the file needs {self._data_start + self._data_bytes} bytes"
        free = shutil.disk_usage(self.path.parent).free
        self.abort()
        raise ResourceError(
            f"{self.path}: {reason}: {needed}, {free} bytes are free on its disk",
            "free some space, or write to another disk",
        )

    def _translate(self, error: OSError) -> NoReturn:
        if error.errno in _NO_SPACE:
            self._refuse_space(os.strerror(error.errno))
        self.abort()
        problem = f"{self.path} cannot be written: {error.strerror or error}"
        if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError):
            raise UsageError(problem, "name a folder that exists and that you may write to") from error
        raise BoughError(problem) from error

    def _encode(self, what: str, values: list[Any], kind: ValueType) -> bytes | None:
        """Return the values' bytes, or None where they are not of that kind."""
        types = {type(value) for value in values}
        if kind is ValueType.STRING and types <= {str}:
            return b"".join(self._string(what, value) for value in values)
        if kind is ValueType.BOOL and types <= {bool}:
            return bytes(values)
        if kind in _FLOATS and types <= {int, float}:
            return _encode_floats(values, NUMBER_TYPES[kind])
        if kind in NUMBER_TYPES and types <= {int} and _fits(kind, values):
            return np.array(values, NUMBER_TYPES[kind]).tobytes()
        return None

    def _string(self, what: str, text: str, *, errors: str = "surrogateescape") -> bytes:
        """Return length and UTF-8; surrogate escapes, which the reader keeps, become their bytes again."""
        try:
            encoded = text.encode("utf-8", errors)
        except UnicodeEncodeError:
            self._refuse(f"{what} has the text {shorten(text)}, needed: valid Unicode")
        return struct.pack("<Q", len(encoded)) + encoded


def _infer(values: list[Any]) -> ValueType | None:
    types = {type(value) for value in values}
    if types == {str}:
        return ValueType.STRING
    if types == {bool}:
        return ValueType.BOOL
    if types in ({float}, {int, float}):
        return ValueType.FLOAT32
    if types == {int}:
        kinds = (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64)
        return next((kind for kind in kinds if _fits(kind, values)), None)
    return None


def _fits(kind: ValueType, values: list[int]) -> bool:
    bits = 8 * NUMBER_TYPES[kind].itemsize
    low, high = (-(1 << bits - 1), 1 << bits - 1) if NUMBER_TYPES[kind].kind == "i" else (0, 1 << bits)
    return not values or (low <= min(values) and max(values) < high)


def _encode_floats(values: list[float], number_type: np.dtype) -> bytes | None:
    try:
        exact = np.array(values, np.float64)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        rounded = exact.astype(number_type)
    return rounded.tobytes() if np.array_equal(np.isinf(rounded), np.isinf(exact)) else None
