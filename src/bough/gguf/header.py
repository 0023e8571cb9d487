"""Parses the header of a GGUF file from a buffer: metadata and tensor directory. Does no I/O.

A header is untrusted: every count and length is checked against the remaining bytes before anything is
allocated for it, and every failure is a BoughError that names the file.
"""

import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bough.errors import BadGGUF, UnsupportedQuant
from bough.gguf.types import QuantType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
# Real headers have about 11 MB and 750,000 array elements; a damaged one must not exhaust memory.
MAX_HEADER_BYTES = 1 << 28
MAX_HEADER_ITEMS = 1 << 23
# Share of MAX_HEADER_ITEMS for a key or tensor: its objects take as much memory as about 16 short strings.
ENTRY_ITEMS = 16

FETCH_AGAIN = "the file is damaged or its download is incomplete: fetch it again"


class ValueType(IntEnum):
    """Types of metadata values, ids as stored in a file, with numpy's name where they are numbers."""

    dtype: str

    def __new__(cls, number: int, dtype: str = "") -> "ValueType":
        member = int.__new__(cls, number)
        member._value_, member.dtype = number, dtype
        return member

    UINT8 = 0, "<u1"
    INT8 = 1, "<i1"
    UINT16 = 2, "<u2"
    INT16 = 3, "<i2"
    UINT32 = 4, "<u4"
    INT32 = 5, "<i4"
    FLOAT32 = 6, "<f4"
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10, "<u8"
    INT64 = 11, "<i8"
    FLOAT64 = 12, "<f8"


NUMBER_TYPES = {kind: np.dtype(kind.dtype) for kind in ValueType if kind.dtype}

# ggml's names of types we do not read, for the error message only
_OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 26: "I32", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}

_OLD_Q2_0 = "an older Q2_0 file has blocks of 128 weights, needed 64: choose its -Q2_0_g64 file"

_unpack_u32 = struct.Struct("<I").unpack_from
_unpack_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's name, shape (torch order, last dimension fastest) and type."""

    name: str
    shape: tuple[int, ...]
    type: QuantType

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; `offsets` are from the start of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]


def read_header(path: Path, data: mmap.mmap | bytes) -> Header:
    """Parse and check the whole header; `path` names the file in errors."""
    cursor = _Cursor(path, data)
    _check_magic(cursor)
    _check_version(cursor)
    tensor_count = cursor.u64()
    key_count = cursor.u64()
    metadata = _read_metadata(cursor, key_count)
    tensors, offsets = _read_tensors(cursor, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.what = "metadata key 'general.alignment'"
        cursor.fail(f"is {shorten(alignment)}, needed: a power of two up to {MAX_ALIGNMENT}")
    data_start = -(-cursor.position // alignment) * alignment
    _check_layout(cursor, tensors, offsets, alignment=alignment, data_start=data_start)
    return Header(metadata, tensors, {name: data_start + offset for name, offset in offsets.items()})


def shorten(value: object) -> str:
    """Return a repr() that is short and cheap for long strings and arrays, and printable for any bytes."""
    text = reprlib.Repr()
    text.maxstring = text.maxlong = text.maxother = 80
    return text.repr(value)


class _Cursor:
    """A position in the header; `what` names the current part in errors."""

    def __init__(self, path: Path, data: mmap.mmap | bytes):
        self.path = path
        self.data = data
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.items_left = MAX_HEADER_ITEMS
        self.what = "header"

    def fail(self, problem: str, hint: str = FETCH_AGAIN) -> NoReturn:
        raise BadGGUF(f"{self.path}: {self.what} {problem}", hint)

    def skip(self, size: int) -> int:
        """Advance by `size` bytes, which must exist, and return where they start."""
        start = self.position
        if size > self.end - start:
            self.fail(f"needs {size} bytes at offset {start}, {self._limit()}")
        self.position = start + size
        return start

    def reserve(self, count: int, *, smallest: int, items: int = 1) -> None:
        """Refuse a count that exceeds the remaining bytes, given the size of the smallest element."""
        if count * smallest > self.end - self.position:
            self.fail(
                f"claims {count} elements of at least {smallest} bytes at offset {self.position}, "
                f"{self._limit()}"
            )
        self.items_left -= count * items
        if self.items_left < 0:
            self.fail(f"claims {count} elements, more than the {MAX_HEADER_ITEMS // items} a header may have")

    def _limit(self) -> str:
        if self.end < len(self.data):
            return f"headers may have {self.end} bytes"
        return f"the file has {self.end} bytes"

    def u32(self) -> int:
        return _unpack_u32(self.data, self.skip(4))[0]

    def u64(self) -> int:
        return _unpack_u64(self.data, self.skip(8))[0]

    def string(self) -> bytes:
        length = self.u64()
        start = self.skip(length)
        return self.data[start : start + length]

    def name(self) -> str:
        """Read the name of a key or tensor: valid UTF-8 and not empty."""
        encoded = self.string()
        if not encoded:
            self.fail("has an empty name, needed: at least one character")
        try:
            return encoded.decode()
        except UnicodeDecodeError:
            self.fail(f"has the name {shorten(encoded)}, needed: UTF-8")

    def value_type(self) -> ValueType:
        number = self.u32()
        if number > ValueType.FLOAT64:
            self.fail(f"has value type {number}, needed: 0 to {int(ValueType.FLOAT64)}")
        return ValueType(number)

    def value(self, kind: ValueType) -> Any:
        if kind is ValueType.ARRAY:
            return self.array(depth=1)
        if kind is ValueType.STRING:
            return self.string().decode(errors="replace")
        return self.numbers(kind, 1)[0]

    def array(self, *, depth: int) -> list[Any]:
        kind = self.value_type()
        count = self.u64()
        if kind is ValueType.STRING:
            return self.strings(count)
        if kind is not ValueType.ARRAY:
            return self.numbers(kind, count)
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"nests arrays {depth + 1} deep, needed: at most {MAX_ARRAY_DEPTH} levels")
        # an empty array is a type and a count
        self.reserve(count, smallest=12, items=ENTRY_ITEMS)
        return [self.array(depth=depth + 1) for _ in range(count)]

    def numbers(self, kind: ValueType, count: int) -> list[Any]:
        number_type = NUMBER_TYPES[ValueType.UINT8 if kind is ValueType.BOOL else kind]
        self.reserve(count, smallest=number_type.itemsize)
        start = self.skip(count * number_type.itemsize)
        # sliced, so that no array keeps the mapping open
        values = np.frombuffer(self.data[start : self.position], number_type)
        if kind is ValueType.BOOL:
            if count and values.max() > 1:
                self.fail(f"has the byte {values.max()} as a bool, needed: 0 or 1")
            values = values.astype(bool)
        return values.tolist()

    def strings(self, count: int) -> list[str]:
        # The only hot loop of opening a file, half a million iterations: no call per length.
        self.reserve(count, smallest=8)
        data, end, position = self.data, self.end, self.position
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end or (position := start + _unpack_u64(data, start - 8)[0]) > end:
                self.fail(
                    f"ends inside string {len(strings)} of {count} at offset {start - 8}, {self._limit()}"
                )
            strings.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return strings


def _check_magic(cursor: _Cursor) -> None:
    start = cursor.data[:256]
    if start[:4] == MAGIC:
        return
    resembles, hint = _guess(start)
    raise BadGGUF(
        f"{cursor.path}: not a GGUF file: it starts with {start[:8]!r}{resembles}, needed: {MAGIC!r}", hint
    )


def _guess(start: bytes) -> tuple[str, str]:
    """Return what a file that is not GGUF resembles, and a hint."""
    text, convert = start.lstrip().lower(), "convert its folder: bough convert FOLDER"
    pages, older = (b"<!doctype", b"<html", b"<?xml"), (b"lmgg", b"fmgg", b"tjgg", b"algg")
    pointer_hint = "run `git lfs pull` in its repository, or fetch the file from the hub"
    archive = start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x04")
    printable = not start.translate(None, b"\r\n\t" + bytes(range(32, 127)))
    guesses = (
        (start[:4] == MAGIC[::-1], "a big-endian GGUF file", "fetch or convert a little-endian file"),
        (start[:4] in older, "a model from before GGUF", "fetch a .gguf file of the model"),
        (text.startswith(pages), "a web page", "fetch the file itself, not the page that shows it"),
        (text.startswith(b"version https://git-lfs"), "a git-lfs pointer", pointer_hint),
        (archive, "a zip archive or PyTorch checkpoint", convert),
        (start[6:9] == b"\0\0{", "a safetensors file", convert),
        (not start.strip(b"\0"), "a download that has not begun", FETCH_AGAIN),
        (printable, "text", "open it: it may hold a server's error message instead of the model"),
    )
    return next(((f" like {what}", hint) for sure, what, hint in guesses if sure), ("", FETCH_AGAIN))


def _check_version(cursor: _Cursor) -> None:
    cursor.skip(len(MAGIC))
    cursor.what = "GGUF version"
    version = cursor.u32()
    if version not in (2, 3):
        # a version this small is only seen byte-swapped in a big-endian file
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        seen = f"is {swapped} in big-endian order" if 0 < swapped < 256 < version else f"is {version}"
        cursor.fail(
            f"{seen}, needed: 2 or 3, little-endian",
            "upgrade bough for a newer version; for an older one convert the model again",
        )
    cursor.what = "header"


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    # the smallest entry: length and one character of the key, type, one byte
    cursor.what = "metadata"
    cursor.reserve(count, smallest=14, items=ENTRY_ITEMS)
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.what = f"metadata key {index + 1} of {count}"
        key = cursor.name()
        cursor.what = f"metadata key {shorten(key)}"
        if key in metadata:
            cursor.fail("occurs twice, needed: once")
        metadata[key] = cursor.value(cursor.value_type())
    return metadata


def _read_tensors(cursor: _Cursor, count: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Read the tensor directory, with offsets from the start of the data."""
    # the smallest entry: length and one character of the name, dimension count, one dimension, type, offset
    cursor.what = "tensor directory"
    cursor.reserve(count, smallest=33, items=ENTRY_ITEMS)
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for index in range(count):
        cursor.what = f"tensor {index + 1} of {count}"
        name = cursor.name()
        cursor.what = f"tensor {shorten(name)}"
        if name in tensors:
            cursor.fail("occurs twice, needed: once")
        dimensions = cursor.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"has {dimensions} dimensions, needed: 1 to {MAX_DIMENSIONS}")
        shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            cursor.fail(f"has shape {list(shape)}, needed: no dimension of 0")
        type_number = cursor.u32()
        if type_number not in QuantType._value2member_map_:
            name_of_type = _OTHER_TYPES.get(type_number, "unknown")
            raise UnsupportedQuant(
                f"{cursor.path}: {cursor.what} has type {type_number} ({name_of_type}), "
                f"needed: one of {', '.join(each.name for each in QuantType)}",
                "choose another quantisation of the model, such as Q4_K_M",
            )
        quant_type = QuantType(type_number)
        if shape[-1] % quant_type.block_elements:
            cursor.fail(
                f"has rows of {shape[-1]}, {quant_type.name} needs a multiple of {quant_type.block_elements}"
            )
        tensors[name] = TensorInfo(name, shape, quant_type)
        offsets[name] = cursor.u64()
    return tensors, offsets


def _check_layout(
    cursor: _Cursor,
    tensors: dict[str, TensorInfo],
    offsets: dict[str, int],
    *,
    alignment: int,
    data_start: int,
) -> None:
    """Check that every tensor is aligned, inside the file, and overlaps no other."""
    size = len(cursor.data)
    previous, free_from, last = "", 0, None
    for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
        info = tensors[name]
        cursor.what = f"tensor {shorten(name)}"
        if offset % alignment:
            cursor.fail(f"has offset {offset}, needed: a multiple of {alignment}")
        start = data_start + offset
        if start + info.nbytes > size:
            cursor.fail(
                f"({info.type.name}, shape {list(info.shape)}) needs {info.nbytes} bytes at {start} "
                f"and ends at {start + info.nbytes}, the file has {size} bytes"
            )
        if offset < free_from:
            cursor.fail(
                f"starts at offset {offset}, needed: at least {free_from}, where tensor {previous} ends",
                _OLD_Q2_0 if last is QuantType.Q2_0 else FETCH_AGAIN,
            )
        previous, free_from, last = shorten(name), offset + info.nbytes, info.type
