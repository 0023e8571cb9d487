"""GGUFFile on files of the gguf package and of our writer, on split models, and its typed access."""

import errno
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bough.errors import BadGGUF, ModelFileError, ModelNotFound
from bough.gguf import GGUFFile, GGUFWriter, QuantType, TensorInfo, ValueType


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write_with_gguf(path: Path) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_uint8("test.uint8", 200)
    writer.add_int8("test.int8", -100)
    writer.add_uint16("test.uint16", 60000)
    writer.add_int16("test.int16", -30000)
    writer.add_uint32("test.uint32", 4_000_000_000)
    writer.add_int32("test.int32", -2_000_000_000)
    writer.add_uint64("test.uint64", 2**64 - 1)
    writer.add_int64("test.int64", -(2**63))
    writer.add_float32("test.float32", 0.1)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "Grüße, 世界")
    writer.add_array("test.ints", [3, -1, 2])
    writer.add_array("test.bools", [True, False])
    writer.add_array("test.nested", [[1, 2], [3], [4, 5, 6]])
    writer.add_token_list(["a", "ä", "Ġthe"])
    rng = np.random.default_rng(0)
    values = {
        "plain": rng.standard_normal((3, 64)).astype(np.float32),
        "half": rng.standard_normal((2, 5, 7)).astype(np.float16),
        "vector": rng.standard_normal(48).astype(np.float32),
        "four": rng.standard_normal((2, 3, 4, 32)).astype(np.float32),
    }
    for name, value in values.items():
        writer.add_tensor(name, value)
    eight = gguf.quants.quantize(values["plain"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("eight", eight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {**values, "eight": eight}


def check_gguf_file(path: Path, values: dict[str, np.ndarray]) -> None:
    with GGUFFile.open(path) as file:
        metadata = {name[5:]: value for name, value in file.metadata.items() if name.startswith("test.")}
        assert metadata == {
            "uint8": 200,
            "int8": -100,
            "uint16": 60000,
            "int16": -30000,
            "uint32": 4_000_000_000,
            "int32": -2_000_000_000,
            "uint64": 2**64 - 1,
            "int64": -(2**63),
            "float32": float(np.float32(0.1)),
            "float64": 0.1,
            "bool": True,
            "string": "Grüße, 世界",
            "ints": [3, -1, 2],
            "bools": [True, False],
            "nested": [[1, 2], [3], [4, 5, 6]],
        }
        assert type(metadata["bool"]) is bool and type(metadata["bools"][0]) is bool
        assert type(metadata["uint8"]) is int and type(metadata["ints"][0]) is int
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ä", "Ġthe"]
        assert file.architecture == "qwen35"
        assert list(file.tensors) == list(values)
        for name, value in values.items():
            raw = file.raw(name)
            assert raw.dtype == np.uint8 and not raw.flags.writeable and not raw.flags.owndata
            assert np.array_equal(raw.view(value.dtype), value)
        assert file.tensors["half"] == TensorInfo("half", (2, 5, 7), QuantType.F16)
        assert file.tensors["half"].elements == 70 and file.tensors["half"].nbytes == 140
        assert file.tensors["eight"].shape == (3, 64) and file.raw("eight").shape == (3, 68)


def test_file_of_the_gguf_package(path: Path) -> None:
    check_gguf_file(path, write_with_gguf(path))


def test_version_2_reads_like_version_3(path: Path) -> None:
    values = write_with_gguf(path)
    content = bytearray(path.read_bytes())
    assert content[4:8] == b"\x03\0\0\0"
    content[4] = 2
    path.write_bytes(content)
    check_gguf_file(path, values)


def test_arrays_outlive_the_file(path: Path) -> None:
    values = write_with_gguf(path)
    with GGUFFile.open(str(path)) as file:
        raw = file.raw("plain")
    assert np.array_equal(raw.view(np.float32), values["plain"])
    with pytest.raises(ValueError, match="read-only"):
        raw[0, 0] = 1
    with pytest.raises(AssertionError, match="closed"):
        file.raw("plain")
    file.close()


def test_metadata_and_tensors_cannot_be_changed(path: Path) -> None:
    write_with_gguf(path)
    with GGUFFile.open(path) as file:
        with pytest.raises(TypeError):
            file.metadata["new"] = 1  # type: ignore[index]
        with pytest.raises(TypeError):
            file.tensors["new"] = file.tensors["plain"]  # type: ignore[index]


def typed(path: Path) -> GGUFFile:
    with GGUFWriter(path, "llama") as writer:
        writer.add("int", 3)
        writer.add("bool", True)
        writer.add("float", 0.5)
        writer.add("nan", float("nan"))
        writer.add("text", "x" * 10_000)
        writer.add("list", list(range(10_000)))
        writer.add_tensor("w", (2, 32), QuantType.F32)
        writer.write_header()
        writer.write_tensor("w", bytes(256))
    return GGUFFile.open(path)


def test_require_and_get(path: Path) -> None:
    with typed(path) as file:
        assert file.require("int", int) == 3
        assert type(file.require("int", float)) is float
        assert type(file.require("int", (int, float))) is int
        assert file.require("float", (int, float)) == 0.5
        assert file.require("list", (int, list))[-1] == 9999
        assert file.get("int", int, 7) == 3
        assert file.get("absent", int, 7) == 7
        assert file.get("absent", int, None) is None


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("absent", int, ["'absent' is missing", "needed: int"]),
        ("bool", int, ["'bool' is True (bool)", "needed: int"]),
        ("bool", float, ["'bool' is True (bool)", "needed: float"]),
        ("int", bool, ["'int' is 3 (int)", "needed: bool"]),
        ("float", int, ["'float' is 0.5 (float)", "needed: int"]),
        ("nan", float, ["'nan' is nan", "needed: a finite number"]),
        ("text", (int, list), ["'text' is 'xxx", "(str)", "needed: int or list"]),
        ("list", str, ["'list' is [0, 1, 2", "(list)", "needed: str"]),
    ],
)
def test_require_names_file_key_value_and_type(path: Path, name: str, kind: Any, parts: list[str]) -> None:
    with typed(path) as file, pytest.raises(BadGGUF) as caught:
        file.require(name, kind)
    for part in [str(path), *parts]:
        assert part in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))


def test_get_refuses_a_value_of_the_wrong_type(path: Path) -> None:
    with typed(path) as file, pytest.raises(BadGGUF, match=r"'bool' is True \(bool\), needed: int"):
        file.get("bool", int, 1)


def test_require_tensor(path: Path) -> None:
    with typed(path) as file:
        assert file.require_tensor("w", (2, 32)).type is QuantType.F32
        with pytest.raises(BadGGUF) as caught:
            file.require_tensor("w", (32, 2))
        assert f"{path}: tensor 'w' has shape [2, 32], needed [32, 2]" in caught.value.message
        for call in (lambda: file.require_tensor("blk.0.x", (5,)), lambda: file.raw("blk.0.x")):
            with pytest.raises(BadGGUF, match=r"model\.gguf: tensor 'blk\.0\.x'.* is missing"):
                call()


def test_architecture_is_required(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with GGUFFile.open(path) as file, pytest.raises(BadGGUF, match=r"'general\.architecture' is missing"):
        _ = file.architecture


def write_split(
    folder: Path,
    *,
    count: int = 3,
    change: Callable[[int, dict[str, Any]], None] = lambda index, keys: None,
    tensors: Callable[[int], list[str]] = lambda index: [f"blk.{index}.a", f"blk.{index}.b"] if index else [],
) -> list[Path]:
    total = len({name for index in range(count) for name in tensors(index)})
    paths = []
    for index in range(count):
        paths.append(folder / f"Model-Q4-{index + 1:05d}-of-{count:05d}.gguf")
        keys: dict[str, Any] = {"split.no": index, "split.count": count, "split.tensors.count": total}
        change(index, keys)
        with GGUFWriter(paths[-1], "qwen3") as writer:
            for name, value in keys.items():
                writer.add(name, value, None if isinstance(value, str) else ValueType.UINT16)
            writer.add("test.part", index)
            for name in tensors(index):
                writer.add_tensor(name, (8,), QuantType.F32)
            writer.write_header()
            for name in tensors(index):
                writer.write_tensor(name, np.full(8, index, np.float32))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_split_files_open_by_any_part(tmp_path: Path, given: int) -> None:
    paths = write_split(tmp_path)
    with GGUFFile.open(paths[given]) as file:
        assert file.path == paths[0]
        assert file.metadata["test.part"] == 0
        assert list(file.tensors) == ["blk.1.a", "blk.1.b", "blk.2.a", "blk.2.b"]
        assert file.size_bytes == sum(each.stat().st_size for each in paths)
        for name in file.tensors:
            assert (file.raw(name).view(np.float32) == int(name[4])).all()


def test_split_files_through_links(tmp_path: Path) -> None:
    """A hub cache stores the parts under hashes, and links with the real names in another folder."""
    (tmp_path / "blobs").mkdir()
    for index, path in enumerate(write_split(tmp_path)):
        path.rename(tmp_path / "blobs" / f"hash{index}")
        path.symlink_to(tmp_path / "blobs" / f"hash{index}")
        last = path
    assert len(GGUFFile.open(last).tensors) == 4


def test_split_files_of_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full((4, 32), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "small-00002-of-00003.gguf") as file:
        assert list(file.tensors) == ["t0", "t1", "t2", "t3", "t4"]
        assert (file.raw("t4").view(np.float32) == 4).all()


def test_split_part_missing(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelNotFound) as caught:
        GGUFFile.open(paths[2])
    assert "1 of the 3 parts" in caught.value.message and paths[1].name in caught.value.message
    assert paths[0].name not in caught.value.message


def test_split_part_renamed(tmp_path: Path) -> None:
    path = write_split(tmp_path)[1].rename(tmp_path / "model.gguf")
    with pytest.raises(BadGGUF, match=r"model\.gguf: this is part 2 of 3 .* -00002-of-00003\.gguf"):
        GGUFFile.open(path)


def test_split_parts_swapped(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].rename(tmp_path / "aside")
    paths[2].rename(paths[1])
    (tmp_path / "aside").rename(paths[2])
    with pytest.raises(
        BadGGUF, match=r"00002-of-00003\.gguf: split\.no, split\.count are \(2, 3\), needed \(1, 3\)"
    ):
        GGUFFile.open(paths[0])


def test_split_parts_with_the_same_tensor(tmp_path: Path) -> None:
    paths = write_split(tmp_path, tensors=lambda index: ["same"])
    with pytest.raises(BadGGUF, match=r"00002-of-00003\.gguf: tensor 'same' is also in .*00001-of-00003"):
        GGUFFile.open(paths[0])


def test_split_tensors_missing(tmp_path: Path) -> None:
    paths = write_split(tmp_path, change=lambda index, keys: keys.update({"split.tensors.count": 9}))
    with pytest.raises(BadGGUF, match=r"split\.tensors\.count is 9, but the 3 parts hold 4"):
        GGUFFile.open(paths[1])


def test_split_keys_of_the_wrong_type(tmp_path: Path) -> None:
    paths = write_split(tmp_path, change=lambda index, keys: keys.update({"split.count": "3"}))
    with pytest.raises(BadGGUF, match=r"'split\.count' is '3' \(str\), needed: int"):
        GGUFFile.open(paths[1])


def test_split_part_damaged(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-8])
    with pytest.raises(BadGGUF, match=r"00003-of-00003\.gguf: tensor 'blk\.2\.b'"):
        GGUFFile.open(paths[0])


def test_no_file(tmp_path: Path) -> None:
    for missing in (tmp_path / "no.gguf", tmp_path / "no" / "no.gguf", tmp_path / ("x" * 300)):
        with pytest.raises(ModelNotFound, match="no such file") as caught:
            GGUFFile.open(missing)
        assert str(missing) in caught.value.message
    with pytest.raises(ModelNotFound, match="not a file name"):
        GGUFFile.open("a\0b")


def test_directory_names_the_files_inside(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a directory") as caught:
        GGUFFile.open(tmp_path)
    assert "no .gguf file" in caught.value.hint
    (tmp_path / "inside.gguf").touch()
    with pytest.raises(ModelNotFound) as caught:
        GGUFFile.open(tmp_path)
    assert "inside.gguf" in caught.value.hint


def test_pipe_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ModelNotFound, match="not a regular file"):
        GGUFFile.open(path)


def test_system_errors_are_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ModelFileError, match=r"model\.gguf cannot be read: Permission denied"):
        GGUFFile.open(path)


def test_a_vocabulary_of_250k_opens_within_a_second(path: Path) -> None:
    rng = np.random.default_rng(0)
    words = ["Ġ" + "".join(map(chr, row)) for row in rng.integers(97, 123, (250_000, 6)).tolist()]
    merges = [f"{word[:3]} {word[3:]}" for word in words[:247_000]]
    types = rng.integers(1, 6, 250_000).astype(np.int32)
    with GGUFWriter(path, "qwen35") as writer:
        writer.add("tokenizer.ggml.tokens", words)
        writer.add("tokenizer.ggml.token_type", types, ValueType.INT32)
        writer.add("tokenizer.ggml.merges", merges)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        file = GGUFFile.open(path)
        seconds.append(time.perf_counter() - start)
    assert file.metadata["tokenizer.ggml.tokens"] == words
    assert file.metadata["tokenizer.ggml.merges"] == merges
    assert file.metadata["tokenizer.ggml.token_type"] == types.tolist()
    assert min(seconds) < 1.0, seconds
