"""The writer's files, read back by our reader and by the gguf package; and what it refuses."""

import errno
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import BadGGUF, BoughError, ResourceError, UsageError
from bough.gguf import GGUFFile, GGUFWriter, QuantType, ValueType

METADATA: dict[str, tuple[Any, ValueType | None]] = {
    "general.name": ("Ein Test – 模型", None),
    "test.bool": (True, None),
    "test.int": (42, None),
    "test.negative": (-42, None),
    "test.large": (2**32, None),
    "test.largest": (2**64 - 1, None),
    "test.most_negative": (-(2**63), None),
    "test.float": (0.5, None),
    "test.double": (math.pi, ValueType.FLOAT64),
    "test.byte": (255, ValueType.UINT8),
    "test.short": (-32768, ValueType.INT16),
    "test.ints": ([11, 11, 10, 0], ValueType.INT32),
    "test.floats": ([1.0, 2, -0.25], None),
    "test.bools": ([True, False, True], None),
    "test.strings": (["<|im_start|>", "", "Ġdie", "\udcff\udc80"], None),
    "test.empty": ([], ValueType.STRING),
    "test.numpy": (np.arange(5), None),
    "test.numpy_scalar": (np.float32(0.25), None),
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def random_bytes(shape: tuple[int, ...], type: QuantType) -> np.ndarray:
    return np.random.default_rng(len(type.name)).integers(
        0, 256, (*shape[:-1], type.row_bytes(shape[-1])), dtype=np.uint8
    )


def write_all_types(
    path: Path, types: Iterable[QuantType] = QuantType, *, alignment: int = 32, backwards: bool = False
) -> dict[str, np.ndarray]:
    data = {}
    with GGUFWriter(path, "qwen35", alignment=alignment) as writer:
        for key, (value, kind) in METADATA.items():
            writer.add(key, value, kind)
        for index, type in enumerate(types):
            shape = (2, 3, 256)[index % 3 :] if index % 2 else (5, 512)
            writer.add_tensor(f"blk.{index}.{type.name}", shape, type)
            data[f"blk.{index}.{type.name}"] = random_bytes(shape, type)
        writer.write_header()
        for name in reversed(data) if backwards else data:
            writer.write_tensor(name, data[name])
    return data


@pytest.mark.parametrize(("alignment", "backwards"), [(32, False), (32, True), (256, False), (8, True)])
def test_round_trip_of_every_type_and_value(tmp_path: Path, alignment: int, backwards: bool) -> None:
    path = tmp_path / "all.gguf"
    data = write_all_types(path, alignment=alignment, backwards=backwards)
    assert os.listdir(tmp_path) == ["all.gguf"]
    with GGUFFile.open(path) as file:
        assert file.architecture == "qwen35"
        assert file.metadata.get("general.alignment", 32) == alignment
        for key, (value, _) in METADATA.items():
            assert file.metadata[key] == plain(value), key
            assert type(file.metadata[key]) is type(plain(value)), key
        assert list(file.tensors) == list(data)
        assert file.size_bytes == path.stat().st_size
        for name, expected in data.items():
            assert np.array_equal(file.raw(name), expected)
            assert file.tensors[name].nbytes == expected.nbytes


@pytest.mark.parametrize("alignment", [32, 128])
def test_gguf_package_reads_our_files(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "all.gguf"
    # A release of the package may know fewer types than llama.cpp.
    numbers = {int(type) for type in gguf.GGMLQuantizationType}
    known = [type for type in QuantType if type in numbers]
    assert set(QuantType) - set(known) <= {QuantType.Q2_0, QuantType.PQ2_0, QuantType.PTQ1_0}
    data = write_all_types(path, known, alignment=alignment)
    theirs = gguf.GGUFReader(path)
    for key, (value, _) in METADATA.items():
        if key not in ("test.empty", "test.strings"):
            assert theirs.get_field(key).contents() == plain(value), key
    assert [
        bytes(theirs.get_field("test.strings").parts[i]) for i in theirs.get_field("test.strings").data
    ] == [text.encode("utf-8", "surrogateescape") for text in METADATA["test.strings"][0]]
    kinds = {key: [kind.name for kind in theirs.get_field(key).types] for key in METADATA}
    assert kinds["test.ints"] == ["ARRAY", "INT32"]
    assert kinds["test.numpy"] == ["ARRAY", "UINT32"]
    assert kinds["test.negative"] == ["INT32"]
    assert kinds["test.large"] == ["UINT64"]
    assert kinds["test.float"] == ["FLOAT32"]
    with GGUFFile.open(path) as ours:
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert tuple(int(size) for size in tensor.shape[::-1]) == info.shape
            assert tensor.tensor_type.name == info.type.name
            assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), data[tensor.name].reshape(-1))


def test_data_may_be_bytes_memoryview_floats_or_strided(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    forms = [values.tobytes(), memoryview(values.tobytes()), memoryview(values), values, values.T.copy().T]
    with GGUFWriter(tmp_path / "forms.gguf", "llama") as writer:
        for index in range(len(forms)):
            writer.add_tensor(f"t{index}", values.shape, QuantType.F32)
        writer.write_header()
        for index, form in enumerate(forms):
            writer.write_tensor(f"t{index}", form)
    with GGUFFile.open(tmp_path / "forms.gguf") as file:
        for name in file.tensors:
            assert np.array_equal(file.raw(name).view(np.float32), values)


def test_file_without_tensors(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "vocabulary.gguf", "qwen3") as writer:
        writer.add("tokenizer.ggml.tokens", ["a", "b"])
    with GGUFFile.open(tmp_path / "vocabulary.gguf") as file:
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        assert not file.tensors


texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32),
    st.lists(texts, min_size=1),
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
)


@settings(max_examples=60, deadline=None)
@given(metadata=st.dictionaries(texts.map("test.{}".format), values))
def test_any_metadata_survives(tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    with GGUFWriter(path, "test") as writer:
        for key, value in metadata.items():
            writer.add(key, value)
    with GGUFFile.open(path) as file:
        read = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
        assert repr(read) == repr(metadata)


@pytest.mark.parametrize(
    ("value", "kind", "parts"),
    [
        (None, None, ["None", "str, bool, 64-bit int, float"]),
        ([], None, ["[]", "list"]),
        ([1, "a"], None, ["[1, 'a']", "list"]),
        ([True, 1], None, ["[True, 1]", "list"]),
        ([[1]], None, ["[[1]]", "list"]),
        (2**64, None, [str(2**64), "64-bit int"]),
        ([-1, 2**63], None, ["-1", "64-bit int"]),
        (256, ValueType.UINT8, ["256", "needed: UINT8"]),
        (-1, ValueType.UINT32, ["-1", "needed: UINT32"]),
        ([0, 2**31], ValueType.INT32, [str(2**31), "needed: INT32"]),
        (1e39, None, ["1e+39", "needed: FLOAT32"]),
        (10**400, ValueType.FLOAT64, ["(int)", "needed: FLOAT64"]),
        ("a", ValueType.UINT32, ["'a' (str)", "needed: UINT32"]),
        (1, ValueType.BOOL, ["1 (int)", "needed: BOOL"]),
        (b"a", ValueType.STRING, ["b'a' (bytes)", "needed: STRING"]),
        ([1], ValueType.ARRAY, ["[1]", "needed: ARRAY"]),
        ("\ud800", None, ["ud800", "valid Unicode"]),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, value: Any, kind: ValueType | None, parts: list[str]) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    with pytest.raises(BadGGUF) as caught:
        writer.add("some.key", value, kind)
    for part in ["x.gguf", "'some.key'", *parts]:
        assert part in caught.value.message
    assert not os.listdir(tmp_path)


def test_names_are_checked(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_tensor("a", (32,), QuantType.F32)
    for key in ("", "general.architecture"):
        with pytest.raises(BadGGUF, match="set twice or empty"):
            writer.add(key, 1)
    for name in ("", "a"):
        with pytest.raises(BadGGUF, match="declared twice or empty"):
            writer.add_tensor(name, (32,), QuantType.F32)
    with pytest.raises(BadGGUF, match="valid Unicode"):
        writer.add("\udcff", 1)
    with pytest.raises(BadGGUF, match="valid Unicode"):
        writer.add_tensor("\udcff", (32,), QuantType.F32)


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1), (0,), (4, 0, 32), (-1, 32)])
def test_shapes_are_checked(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadGGUF, match=r"tensor 'w' has shape .* 1 to 4 dimensions of at least 1"):
        GGUFWriter(tmp_path / "x.gguf", "test").add_tensor("w", shape, QuantType.F32)


def test_rows_are_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(BadGGUF, match="tensor 'w' has rows of 128, Q4_K needs a multiple of 256"):
        GGUFWriter(tmp_path / "x.gguf", "test").add_tensor("w", (2, 128), QuantType.Q4_K)


@pytest.mark.parametrize("alignment", [0, -32, 24, 2**21])
def test_alignment_is_checked(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(BadGGUF, match=f"alignment is {alignment}, needed: a power of two"):
        GGUFWriter(tmp_path / "x.gguf", "test", alignment=alignment)


def declared(path: Path) -> GGUFWriter:
    writer = GGUFWriter(path, "test")
    writer.add_tensor("first", (4, 32), QuantType.Q8_0)
    writer.add_tensor("second", (8,), QuantType.F32)
    writer.write_header()
    return writer


def test_tensor_data_is_checked(tmp_path: Path) -> None:
    writer = declared(tmp_path / "x.gguf")
    with pytest.raises(
        BadGGUF, match=r"tensor 'first' is given 135 bytes, Q8_0 of shape \[4, 32\] needs 136"
    ):
        writer.write_tensor("first", bytes(135))
    with pytest.raises(BadGGUF, match="tensor 'third' was not declared"):
        writer.write_tensor("third", bytes(136))
    writer.write_tensor("first", bytes(136))
    with pytest.raises(BadGGUF, match="tensor 'first' was already written"):
        writer.write_tensor("first", bytes(136))
    with pytest.raises(BadGGUF, match=r"'second'.* of 2 declared tensors not written"):
        writer.close()
    assert not os.listdir(tmp_path)


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"the old file")
    with pytest.raises(KeyboardInterrupt), declared(path) as writer:
        writer.write_tensor("first", bytes(136))
        assert len(os.listdir(tmp_path)) == 2 and len(list(tmp_path.glob("x.gguf.*.part"))) == 1
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["x.gguf"]
    assert path.read_bytes() == b"the old file"


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    first, second = declared(tmp_path / "x.gguf"), declared(tmp_path / "x.gguf")
    for writer, byte in ((first, b"\x01"), (second, b"\x02")):
        writer.write_tensor("first", byte * 136)
        writer.write_tensor("second", byte * 32)
    for writer, byte in ((first, 1), (second, 2)):
        writer.close()
        with GGUFFile.open(tmp_path / "x.gguf") as file:
            assert set(file.raw("first").flatten().tolist()) == {byte}
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_the_old_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"the old file")
    with declared(path) as writer:
        writer.write_tensor("first", bytes(136))
        writer.write_tensor("second", bytes(32))
        assert path.read_bytes() == b"the old file"
    writer.close()
    assert os.listdir(tmp_path) == ["x.gguf"]
    assert set(GGUFFile.open(path).tensors) == {"first", "second"}


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing/x\.gguf cannot be written: No such file") as caught:
        GGUFWriter(tmp_path / "missing" / "x.gguf", "test").write_header()
    assert "folder" in caught.value.hint
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UsageError, match=r"folder\.gguf cannot be written: Is a directory"):
        GGUFWriter(tmp_path / "folder.gguf", "test").write_header()


def test_a_full_disk_is_an_error_before_writing(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_tensor("huge", (2**30, 2**30), QuantType.F32)
    with pytest.raises(
        ResourceError,
        match=rf"x\.gguf: No space left on device: the file needs {2**62 + 128} bytes, \d+ bytes are free",
    ) as caught:
        writer.write_header()
    assert "another disk" in caught.value.hint
    assert not os.listdir(tmp_path)


class FailingFile:
    """A file whose disk breaks at a given call."""

    def __init__(self, file: Any, call: str, code: int):
        self.file, self.call, self.code = file, call, code

    def __getattr__(self, name: str) -> Any:
        if name == self.call:
            raise OSError(self.code, os.strerror(self.code))
        return getattr(self.file, name)


@pytest.mark.parametrize("call", ["seek", "write", "flush"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_errors_while_writing(tmp_path: Path, call: str, code: int) -> None:
    writer = declared(tmp_path / "x.gguf")
    writer._file = FailingFile(writer._file, call, code)  # type: ignore[assignment]
    expected = BoughError if code == errno.EIO else ResourceError
    with pytest.raises(BoughError) as caught:
        writer.write_tensor("first", bytes(136))
        writer.write_tensor("second", bytes(32))
        writer.close()
    assert type(caught.value) is expected
    assert "x.gguf" in caught.value.message
    assert ("Input/output error" if code == errno.EIO else "the file needs 352 bytes") in caught.value.message
    assert not os.listdir(tmp_path)


def test_a_file_size_limit_while_writing(tmp_path: Path) -> None:
    """The system's own limit on file sizes makes a write fail halfway."""
    script = """if True:
        import resource, signal, sys
        from bough.errors import ResourceError
        from bough.gguf import GGUFWriter, QuantType
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            with GGUFWriter(sys.argv[1], "test") as writer:
                writer.add_tensor("w", (1 << 20,), QuantType.F32)
                writer.write_header()
                writer.write_tensor("w", bytes(4 << 20))
        except ResourceError as error:
            sys.exit(0 if "needs" in error.message else 3)
        sys.exit(2)
    """
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.gguf")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0
    assert not os.listdir(tmp_path)


def test_importing_the_package_loads_no_torch() -> None:
    script = "import sys, bough.gguf; sys.exit('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert run.returncode == 0
