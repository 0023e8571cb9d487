"""SnapshotFiles: damaged, foreign and too large files are ignored, and never raise an error."""

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.prefix_cache.files import SnapshotFiles, identity
from bough.state.sequences import PAGE
from tests.prefix_cache.recorder import IDENTITY, Recorder

WORDS = [position % 190 + 1 for position in range(3 * PAGE)]
END = 2 * PAGE + 9


@pytest.fixture(scope="module")
def spec(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model()) as file:
        return ModelSpec.from_gguf(file)


def written(spec: ModelSpec, folder: Path) -> Path:
    """Return the only file that a recorder has written."""
    reader = Recorder(spec, folder=folder)
    reader.read(WORDS, {END: "turn"})
    assert reader.files is not None
    reader.files.flush()
    (path,) = folder.iterdir()
    return path


def test_damage_is_ignored_with_one_warning(
    spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, choose = written(spec, tmp_path), random.Random(5)
    content = path.read_bytes()
    offsets = [*range(0, 60, 7), *choose.sample(range(len(content)), 40), *range(-8, 0)]
    flipped = [bytearray(content) for _ in offsets]
    for offset, changed in zip(offsets, flipped, strict=True):
        changed[offset] ^= 1 << choose.randrange(8)
    cut = [content[: choose.randrange(len(content))] for _ in range(20)]
    for damaged in (*flipped, *cut, b"", content + b"x"):
        path.write_bytes(damaged)
        caplog.clear()
        assert Recorder(spec, folder=tmp_path).read(WORDS, {}) == 0
        assert len(caplog.records) == 1 and "ignored" in caplog.text
    path.write_bytes(content)
    assert Recorder(spec, folder=tmp_path).read(WORDS, {}) == END


def test_what_is_no_file_is_ignored(
    spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(spec, tmp_path)
    for create in (
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink("/nowhere", path),
    ):
        path.rmdir() if path.is_dir() else path.unlink()
        create(path)
        caplog.clear()
        assert Recorder(spec, folder=tmp_path).read(WORDS, {}) == 0
        assert len(caplog.records) == 1 and "ignored" in caplog.text


def test_another_model_leaves_its_files_alone(
    spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(spec, tmp_path)
    other = f"fedcba98{IDENTITY[8:]}"
    assert Recorder(spec, folder=tmp_path, identity=other).read(WORDS, {}) == 0
    assert not caplog.records
    # Renamed, its header still holds the other identity.
    path.rename(path.with_name(path.name.replace(IDENTITY[:16], other[:16])))
    assert Recorder(spec, folder=tmp_path, identity=other).read(WORDS, {}) == 0
    assert len(caplog.records) == 1


def test_the_identity_covers_files_and_facts(tmp_path: Path) -> None:
    model, draft = tmp_path / "model.gguf", tmp_path / "draft"
    draft.mkdir()
    model.write_bytes(bytes(3_000_000))
    (draft / "weights").write_bytes(bytes(5000))
    first = identity([model, draft], kv="f16")
    assert first == identity([model, draft], kv="f16") and len(first) == 32
    assert first != identity([model, draft], kv="q8_0") != identity([model], kv="q8_0")
    (draft / "weights").write_bytes(bytes(4999) + b"x")
    assert first != identity([model, draft], kv="f16")
    (draft / "weights").write_bytes(bytes(5000))
    model.write_bytes(bytes(3_000_001))
    assert first != identity([model, draft], kv="f16")


def test_a_full_disk_is_one_warning(
    spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    reader = Recorder(spec, folder=tmp_path)
    assert reader.files is not None
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        for seed in range(3):
            assert reader.read([seed, *WORDS], {END: "turn"}) == 0
            reader.files.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    assert not list(tmp_path.iterdir()) and reader.read([0, *WORDS], {}) == END
    # Writing works again once there is space.
    reader.read([9, *WORDS], {END: "turn"})
    reader.files.flush()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_size_is_limited(
    spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = written(spec, tmp_path).stat().st_size
    reader = Recorder(spec, folder=tmp_path, limit=3 * size + 100)
    assert reader.files is not None
    for seed in range(4):
        # Files of other models count; the least recently used is deleted first.
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)):
            os.utime(path, (1000 + age, 1000 + age))
        reader.read([seed, *WORDS[:-1]], {END: "turn"})
        reader.files.flush()
        assert len(list(tmp_path.iterdir())) == min(seed + 2, 3)
    usage = reader.cache.usage
    assert usage.disk_snapshots == 3 and usage.disk_bytes == 3 * size
    again = reader.restarted(spec, folder=tmp_path)
    assert [again.read([seed, *WORDS[:-1]], {}) for seed in range(4)] == [0, END, END, END]
    small = Recorder(spec, folder=tmp_path, limit=size - 1)
    assert small.files is not None
    assert not caplog.records
    small.read([7, *WORDS], {END: "turn"})
    small.files.flush()
    assert len(list(tmp_path.iterdir())) == 3
    assert len(caplog.records) == 1 and "`prefix_cache_dir_size`" in caplog.text


def test_a_later_snapshot_supersedes_an_earlier_one(spec: ModelSpec, tmp_path: Path) -> None:
    reader = Recorder(spec, folder=tmp_path)
    reader.read(WORDS, {20: "head", 90: "turn"})
    reader.read(WORDS, {150: "turn"})
    reader.read(WORDS, {160: "answer", 100: "grid"})
    again = reader.restarted(spec, folder=tmp_path)
    assert again.files is not None
    assert sorted((each.length, each.kind) for each in again.files.entries) == [
        (20, "head"),
        (150, "turn"),
        (160, "answer"),
    ]


def test_a_deleted_file_is_ignored(spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(spec, tmp_path)
    reader = Recorder(spec, folder=tmp_path)
    path.unlink()
    assert reader.read(WORDS, {}) == 0 and not caplog.records


def test_an_unusable_folder_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="a writable folder: Not a directory"):
        SnapshotFiles(tmp_path / "file" / "below", IDENTITY, limit=1)


def test_old_partial_files_are_deleted(spec: ModelSpec, tmp_path: Path) -> None:
    old, new = tmp_path / "a.1.part", tmp_path / "b.2.part"
    for path in (old, new):
        path.write_bytes(b"begun")
    os.utime(old, (1000, 1000))
    Recorder(spec, folder=tmp_path)
    assert not old.exists() and new.exists()


def test_only_the_owner_can_read_snapshots(spec: ModelSpec, tmp_path: Path):
    before = os.umask(0o022)
    try:
        path = written(spec, tmp_path / "new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
