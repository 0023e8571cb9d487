"""The header parser on files made by hand: every way to be wrong gives one clear error."""

import os
import struct
from pathlib import Path

import gguf
import pytest

import bough.gguf.header as header_module
from bough.errors import BadGGUF, BoughError, UnsupportedQuant
from bough.gguf import GGUFFile, QuantType, ValueType


def text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dimensions: list[int], *, type: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", type, offset)
    )


def build(keys: list[bytes], tensors: list[bytes], *, data: int = 0, alignment: int = 32) -> bytes:
    """A file by hand, so that it can be wrong in any way."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def refuse(path: Path, content: bytes, error: type[BoughError], *parts: str) -> BoughError:
    path.write_bytes(content)
    with pytest.raises(BoughError) as caught:
        GGUFFile.open(path)
    assert type(caught.value) is error
    for part in (str(path), *parts):
        assert part in caught.value.message
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_odd_bytes_in_vocabularies_and_texts(path: Path) -> None:
    tokens = struct.pack("<IQ", ValueType.STRING, 2) + text(b"\xff\xfe") + text("ok")
    path.write_bytes(build([key("tokens", ValueType.ARRAY, tokens), key("name", 8, text(b"a\xffb"))], []))
    with GGUFFile.open(path) as file:
        assert file.metadata["tokens"][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"
        assert file.metadata["name"] == "a\ufffdb"


@pytest.mark.parametrize(
    ("content", "resembles", "hint"),
    [
        (b"<!DOCTYPE html><html>", "a web page", "not the page"),
        (b"\n\n<html lang=en>", "a web page", "not the page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a git-lfs pointer", "git lfs pull"),
        (b"PK\x03\x04" + bytes(99), "PyTorch checkpoint", "convert"),
        (b"\x80\x02\x8a\nl\xfc\x9c", "PyTorch checkpoint", "convert"),
        (struct.pack("<Q", 90) + b'{"__metadata__":{}}', "a safetensors file", "bough convert"),
        (b"tjgg\x03\0\0\0" + bytes(99), "before GGUF", "fetch"),
        (b"FUGG\x03\0\0\0" + bytes(99), "big-endian", "little-endian"),
        (bytes(5000), "not begun", "fetch it again"),
        (b'{"error": "Repository not found"}\n', "like text", "server's error message"),
        (b"\x93\xff\x11\x00\x13", "b'\\x93\\xff", "fetch it again"),
        (b"GGU", "b'GGU'", "server"),
    ],
)
def test_other_files(path: Path, content: bytes, resembles: str, hint: str) -> None:
    error = refuse(path, content, BadGGUF, "not a GGUF file", "needed: b'GGUF'", resembles)
    assert hint in error.hint


def test_empty_file(path: Path) -> None:
    assert "fetch it again" in refuse(path, b"", BadGGUF, "empty (0 bytes)").hint


@pytest.mark.parametrize(
    ("version", "seen"),
    [(0, "is 0,"), (1, "is 1,"), (4, "is 4,"), (3 << 24, "is 3 in big-endian order"), (77777, "is 77777,")],
)
def test_versions(path: Path, version: int, seen: str) -> None:
    content = b"GGUF" + struct.pack("<IQQ", version, 0, 0)
    refuse(path, content, BadGGUF, f"GGUF version {seen}", "needed: 2 or 3, little-endian")


NUMBERS = struct.pack("<IQ", ValueType.UINT32, 2**40)
STRINGS = struct.pack("<IQ", ValueType.STRING, 2**61)
ARRAYS = struct.pack("<IQ", ValueType.ARRAY, 2**40)
DEEP = struct.pack("<IQ", ValueType.ARRAY, 1) * 4 + struct.pack("<IQ", ValueType.UINT8, 0)
CUT_STRING = struct.pack("<IQ", ValueType.STRING, 2) + text("abc") + struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            [key("k", 9, NUMBERS)],
            ["'k' claims 1099511627776 elements of at least 4 bytes", "the file has 64 bytes"],
        ),
        (
            [key("k", 9, STRINGS)],
            [f"'k' claims {2**61} elements of at least 8 bytes", "the file has 64 bytes"],
        ),
        (
            [key("k", 9, ARRAYS)],
            [f"'k' claims {2**40} elements of at least 12 bytes", "the file has 64 bytes"],
        ),
        ([key("k", 9, DEEP)], ["'k' nests arrays 5 deep", "at most 4 levels"]),
        ([key("k", 9, CUT_STRING)], ["'k' ends inside string 1 of 2", "the file has 96 bytes"]),
        (
            [key("k", 8, struct.pack("<Q", 2**63 - 1))],
            [f"'k' needs {2**63 - 1} bytes", "the file has 64 bytes"],
        ),
        ([key("k", 13, bytes(8))], ["'k' has value type 13", "needed: 0 to 12"]),
        ([key("k", 9, struct.pack("<IQ", 99, 1))], ["'k' has value type 99", "needed: 0 to 12"]),
        ([key("k", 7, b"\x02")], ["'k' has the byte 2 as a bool", "needed: 0 or 1"]),
        ([key("k", 9, struct.pack("<IQ", 7, 2) + b"\x01\x09")], ["'k' has the byte 9 as a bool"]),
        ([key("k", 0, b"\x01"), key("k", 0, b"\x02")], ["metadata key 'k' occurs twice"]),
        ([key("", 0, b"\x01")], ["metadata key 1 of 1 has an empty name"]),
        ([key(b"a\xff", 0, b"\x01")], ["metadata key 1 of 1 has the name b'a\\xff'", "needed: UTF-8"]),
        (
            [struct.pack("<Q", 2**64 - 1) + bytes(8)],
            ["metadata key 1 of 1", f"needs {2**64 - 1} bytes at offset 32"],
        ),
        ([key("general.alignment", 4, struct.pack("<I", 0))], ["'general.alignment' is 0", "a power of two"]),
        (
            [key("general.alignment", 4, struct.pack("<I", 48))],
            ["'general.alignment' is 48", "a power of two"],
        ),
        (
            [key("general.alignment", 4, b"\0\0\0\x80")],
            ["'general.alignment' is 2147483648", "up to 1048576"],
        ),
        ([key("general.alignment", 8, text("32"))], ["'general.alignment' is '32'", "a power of two"]),
        ([key("general.alignment", 7, b"\x01")], ["'general.alignment' is True", "a power of two"]),
    ],
)
def test_bad_metadata(path: Path, keys: list[bytes], parts: list[str]) -> None:
    refuse(path, build(keys, []), BadGGUF, *parts)


BIG = 2**62


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ([tensor("w", [])], ["'w' has 0 dimensions", "needed: 1 to 4"]),
        ([tensor("w", [1, 1, 1, 1, 1])], ["'w' has 5 dimensions", "needed: 1 to 4"]),
        ([tensor("w", [32, 0])], ["'w' has shape [0, 32]", "no dimension of 0"]),
        (
            [tensor("w", [BIG, BIG, BIG, BIG])],
            ["'w' (F32, shape", f"needs {4 * BIG**4} bytes", "the file has 320 bytes"],
        ),
        ([tensor("w", [48], type=8)], ["'w' has rows of 48", "Q8_0 needs a multiple of 32"]),
        ([tensor("w", [32, 8], type=12)], ["'w' has rows of 32", "Q4_K needs a multiple of 256"]),
        ([tensor("w", [8], offset=4)], ["'w' has offset 4", "needed: a multiple of 32"]),
        (
            [tensor("w", [8], offset=256)],
            ["'w' (F32, shape [8]) needs 32 bytes at 320", "ends at 352", "has 320 bytes"],
        ),
        ([tensor("w", [8], offset=2**64 - 32)], ["'w'", f"ends at {2**64 + 64}", "the file has 320 bytes"]),
        (
            [tensor("v", [16]), tensor("w", [8], offset=32)],
            ["'w' starts at offset 32", "at least 64, where tensor 'v'"],
        ),
        ([tensor("w", [8]), tensor("w", [8], offset=32)], ["tensor 'w' occurs twice"]),
        ([tensor("", [8])], ["tensor 1 of 1 has an empty name"]),
        ([tensor("v", [8]), tensor(b"\xc3", [8])], ["tensor 2 of 2 has the name b'\\xc3'", "needed: UTF-8"]),
    ],
)
def test_bad_tensors(path: Path, tensors: list[bytes], parts: list[str]) -> None:
    content = build([], tensors, data=256)
    size = f"{len(content)} bytes"
    refuse(path, content, BadGGUF, *(part.replace("320 bytes", size) for part in parts))


@pytest.mark.parametrize(
    ("type", "name"),
    [(9, "Q8_1"), (15, "Q8_K"), (31, "Q4_0_4_4"), (26, "I32"), (999, "unknown")],
)
def test_unsupported_types(path: Path, type: int, name: str) -> None:
    error = refuse(
        path,
        build([], [tensor("blk.0.ffn_up.weight", [256], type=type)], data=1024),
        UnsupportedQuant,
        f"'blk.0.ffn_up.weight' has type {type} ({name})",
        "needed: one of F32, F16, Q4_0",
        "MXFP4",
    )
    assert "quantisation" in error.hint


def test_q2_0_in_blocks_of_128_is_refused(path: Path) -> None:
    tensors = [tensor("a", [4096], type=42), tensor("b", [4096], type=42, offset=4096 // 128 * 34)]
    error = refuse(path, build([], tensors, data=4096), BadGGUF, "'b' starts at offset 1088")
    assert "Q2_0_g64" in error.hint


def test_our_names_of_types_are_ggml_names() -> None:
    theirs = {int(type): type.name for type in gguf.GGMLQuantizationType}
    for number, name in header_module._OTHER_TYPES.items():
        assert theirs.get(number, name) == name
        assert number not in list(QuantType)
    assert not set(theirs) - set(header_module._OTHER_TYPES) - set(QuantType)


@pytest.mark.parametrize(
    ("tensors", "keys", "parts"),
    [
        (0, 2**63, ["metadata claims 9223372036854775808 elements", "the file has 24 bytes"]),
        (2**64 - 1, 0, ["tensor directory claims 18446744073709551615 elements", "the file has 24 bytes"]),
    ],
)
def test_absurd_counts(path: Path, tensors: int, keys: int, parts: list[str]) -> None:
    refuse(path, b"GGUF" + struct.pack("<IQQ", 3, tensors, keys), BadGGUF, *parts)


def test_counts_that_would_fit_a_huge_file_are_limited(path: Path) -> None:
    """A sparse file of 2 GiB has room for large counts; the reader still allocates nothing for it."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    cases = {
        key("k", 9, struct.pack("<IQ", 0, 2**30)): "headers may have 268435456 bytes",
        key("k", 9, struct.pack("<IQ", 0, 2**24)): "claims 16777216 elements, more than the 8388608",
        key("k", 9, struct.pack("<IQ", 8, 2**24)): "claims 16777216 elements, more than the 8388608",
        key("k", 8, struct.pack("<Q", 2**30)): "headers may have 268435456 bytes",
    }
    for content, part in cases.items():
        path.write_bytes(head + content)
        os.truncate(path, 2**31)
        with pytest.raises(BadGGUF) as caught:
            GGUFFile.open(path)
        assert part in caught.value.message
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**20))
    os.truncate(path, 2**31)
    with pytest.raises(BadGGUF, match="metadata claims 1048576 elements, more than the 524288"):
        GGUFFile.open(path)


def test_file_cut_at_every_byte(path: Path) -> None:
    whole = build(
        [
            key("general.architecture", 8, text("llama")),
            key("n", 4, struct.pack("<I", 7)),
            key("tokens", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")),
            key("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQH", 2, 1, 5)),
        ],
        [tensor("v", [8]), tensor("w", [32, 2], type=8, offset=32)],
        data=32 + 68,
    )
    path.write_bytes(whole)
    with GGUFFile.open(path) as file:
        assert file.metadata["nested"] == [[5]] and file.raw("w").shape == (2, 34)
    for size in range(len(whole)):
        error = refuse(path, whole[:size], BadGGUF)
        if size >= 4:
            assert f"the file has {size} bytes" in error.message
            assert "fetch it again" in error.hint
