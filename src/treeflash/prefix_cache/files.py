"""Snapshots as files that outlive the process: one file for each, written behind the engine's back.

A file holds a header, the tokens, the pages' bytes, the rest of the state, and a checksum. Its name begins
with the identity of the model and of everything else that the bytes depend on, so that files of several
models may lie in one folder. What is damaged, or of another version, is ignored; a full disk only means that
nothing new is kept. Knows no prompts.
"""

import contextlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from treeflash.errors import UsageError
from treeflash.prefix_cache.boundaries import Kind
from treeflash.prefix_cache.snapshot import Snapshot
from treeflash.state.draft_ring import SavedRings
from treeflash.state.sequences import PAGE
from treeflash.state.snapshots import SavedPage, SavedSequence, SavedStates

log = logging.getLogger(__name__)

_MAGIC = b"TreeFlash snapshot 1\n"
_SUFFIX = ".snapshot"
_START, _END = struct.Struct("<I"), struct.Struct("<I")  # the header's length; the checksum
_LONGEST_HEADER = 1 << 20
_WAITING = 4  # snapshots; of more the oldest are not written
_ABANDONED = 3600  # seconds after which a file that somebody began to write has nobody left who does
_SAMPLES, _SAMPLE, _HEAD = 256, 4096, 1 << 20  # of a model's file, and their bytes

_Damage = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotFile:
    path: Path
    tokens: bytes
    kind: Kind
    length: int
    nbytes: int


class SnapshotFiles:
    def __init__(self, folder: Path, identity: str, *, limit: int):
        """`identity`: of all that a state depends on but its tokens; `limit`: bytes of the whole folder."""
        self._folder, self._identity, self._limit = folder, identity, limit
        self._lock = threading.Lock()
        self._queue: list[Snapshot] = []
        self._current: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._complained = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.entries: tuple[SnapshotFile, ...] = tuple(self._scan())
        except OSError as error:
            raise UsageError(
                f"--prefix-cache-dir is {folder}, needed a folder that can be written: {_reason(error)}",
                "mkdir makes one; without the flag nothing is kept on disk",
            ) from error

    def write(self, snapshot: Snapshot) -> None:
        """Soon, by another thread; until then the snapshot must stay as it is. Its pages have copies."""
        with self._lock:
            self._queue = [*self._queue, snapshot][-_WAITING:]
            if self._thread is None or not self._thread.is_alive():
                # The program waits for it before it ends.
                self._thread = threading.Thread(target=self._work, name="snapshots", daemon=False)
                self._thread.start()

    def is_writing(self, snapshot: Snapshot) -> bool:
        with self._lock:
            return snapshot is self._current or any(each is snapshot for each in self._queue)

    def flush(self) -> None:
        """Waits until everything is written."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def read(self, entry: SnapshotFile, saves: SavedStates) -> tuple[SavedSequence, SavedRings | None] | None:
        """The state in a file, its pages outside the pool; None, and a warning, where it is damaged."""
        try:
            with entry.path.open("rb") as file:
                return _read_state(file, entry, self._identity, saves)
        except _Damage as error:
            if not isinstance(error, FileNotFoundError):  # another program may have needed the room
                log.warning("the snapshot %s is ignored: %s", entry.path, error)
            self._forget(entry)
            return None

    def touch(self, tokens: bytes) -> None:
        """The snapshot of these tokens was used."""
        if any(each.tokens == tokens for each in self.entries):
            with contextlib.suppress(OSError):
                os.utime(self._path(tokens))

    def _path(self, tokens: bytes) -> Path:
        name = blake2b(tokens, digest_size=10).hexdigest()
        return self._folder / f"{self._identity[:16]}-{name}{_SUFFIX}"

    def _scan(self) -> Iterator[SnapshotFile]:
        damaged = 0
        for part in self._folder.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED:
                    part.unlink()
        for path in sorted(self._folder.glob(f"{self._identity[:16]}-*{_SUFFIX}")):
            try:
                with path.open("rb") as file:
                    header, _ = _read_header(file, self._identity)
                    tokens = file.read(4 * header["length"])
                if path != self._path(tokens):
                    raise ValueError("its tokens are not those it is named after")
                yield SnapshotFile(path, tokens, header["kind"], header["length"], path.stat().st_size)
            except _Damage:
                damaged += 1
        if damaged:
            log.warning(
                "%d snapshots in %s are ignored: damaged, or not what they claim", damaged, self._folder
            )

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                self._current = self._queue.pop(0)
            try:
                if not self._current.superseded:
                    self._store(self._current)
            except OSError as error:
                self._complain(f"snapshots cannot be written to {self._folder}: {_reason(error)}")
            finally:
                with self._lock:
                    self._current = None

    def _store(self, snapshot: Snapshot) -> None:
        path = self._path(snapshot.tokens)
        header = _encoded(_header_of(snapshot, self._identity))
        size = len(header) + sum(len(blob) for blob in _blobs(snapshot)) + _END.size
        if not self._make_room(size, path):
            limits = f"{size / 2**20:.1f} MiB, --prefix-cache-dir-size {self._limit / 2**20:.1f} MiB"
            return self._complain(f"a snapshot is not written to {self._folder}: it has {limits}")
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                checksum = 0
                for blob in (header, *_blobs(snapshot)):
                    file.write(blob)
                    checksum = zlib.crc32(blob, checksum)
                file.write(_END.pack(checksum))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._replace(SnapshotFile(path, snapshot.tokens, snapshot.kind, snapshot.length, size))

    def _complain(self, text: str) -> None:
        """Once: what cannot be written now will not be for the next answer, either."""
        if not self._complained:
            log.warning("%s", text)
        self._complained = True

    def _replace(self, new: SnapshotFile) -> None:
        """Takes the place of those that it stands for from now on."""
        kept = []
        for each in self.entries:
            older = each.kind == new.kind != "head" and new.tokens.startswith(each.tokens)
            if not older and each.path != new.path:
                kept.append(each)
            elif each.path != new.path:
                each.path.unlink(missing_ok=True)
        self.entries = (*kept, new)

    def _make_room(self, size: int, path: Path) -> bool:
        """Deletes what was used longest ago, until `size` more bytes are within the limit."""
        found = []
        for each in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = each.stat()
                found.append((status.st_mtime, status.st_size, each))
        total = sum(nbytes for _, nbytes, each in found if each != path)
        for _, nbytes, each in sorted(found):
            if size > self._limit or total + size <= self._limit:
                break
            if each != path:
                each.unlink(missing_ok=True)
                total -= nbytes
                self.entries = tuple(entry for entry in self.entries if entry.path != each)
        return total + size <= self._limit

    def _forget(self, entry: SnapshotFile) -> None:
        self.flush()
        self.entries = tuple(each for each in self.entries if each is not entry)


def _reason(error: OSError) -> str:
    """In words, without a number and a path that nobody gave."""
    return "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)


def identity(files: Sequence[Path], **facts: object) -> str:
    """Of a model's files, by their sizes and samples of their bytes, and of whatever else matters."""
    seen = blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    for file in files:
        for path in sorted(file.iterdir()) if file.is_dir() else [file]:
            if path.is_file():
                seen.update(_fingerprint(path))
    return seen.hexdigest()


def _fingerprint(path: Path) -> bytes:
    size = path.stat().st_size
    seen = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        seen.update(file.read(_HEAD))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            seen.update(file.read(_SAMPLE))
    return seen.digest()


def _header_of(snapshot: Snapshot, identity: str) -> dict[str, Any]:
    state, draft = snapshot.state, snapshot.draft
    return {
        "identity": identity,
        "kind": snapshot.kind,
        "length": state.length,
        "folding": state.folding,
        "page": 0 if not state.pages else _size(state.pages[0].cell),
        "tail": _size(state.tail),
        "layers": [[_form(part) for part in layer] for layer in state.layers],
        "draft": draft
        and {
            "length": draft.length,
            "start": draft.start,
            "rings": [[_form(part) for part in pair] for pair in draft.rings],
        },
    }


def _blobs(snapshot: Snapshot) -> Iterator[memoryview | bytes]:
    """What follows the header, in this order."""
    yield snapshot.tokens
    for page in snapshot.state.pages:
        assert page.cell is not None
        yield _bytes_of(page.cell)
    if snapshot.state.tail is not None:
        yield _bytes_of(snapshot.state.tail)
    for parts in (*snapshot.state.layers, *(snapshot.draft.rings if snapshot.draft else ())):
        yield from map(_bytes_of, parts)


def _encoded(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return _MAGIC + _START.pack(len(text)) + text


def _read_header(file: BufferedReader, identity: str) -> tuple[dict[str, Any], int]:
    """The header of a file whose size is what it says, and the checksum so far."""
    start = file.read(len(_MAGIC) + _START.size)
    if not start.startswith(_MAGIC):
        raise ValueError("it is no snapshot of this version")
    (length,) = _START.unpack(start[len(_MAGIC) :])
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header has {length} bytes, at most {_LONGEST_HEADER} were written")
    text = file.read(length)
    header = json.loads(text)
    if header["identity"] != identity:
        raise ValueError("it belongs to another model, draft or format")
    if header["kind"] not in get_args(Kind):
        raise ValueError(f"its kind is {header['kind']!r}")
    tokens, draft = header["length"], header["draft"]
    forms = [form for parts in (*header["layers"], *(draft["rings"] if draft else ())) for form in parts]
    needed = len(start) + length + 4 * tokens + tokens // PAGE * header["page"] + header["tail"] + _END.size
    needed += sum(_nbytes(form) for form in forms)
    size = os.fstat(file.fileno()).st_size
    if size != needed:
        raise ValueError(f"it has {size} bytes, needed {needed}")
    return header, zlib.crc32(text, zlib.crc32(start))


def _read_state(
    file: BufferedReader, entry: SnapshotFile, identity: str, saves: SavedStates
) -> tuple[SavedSequence, SavedRings | None]:
    header, checksum = _read_header(file, identity)
    if file.read(len(entry.tokens)) != entry.tokens:
        raise ValueError("its tokens are not those it had")
    checksum = zlib.crc32(entry.tokens, checksum)
    count = header["length"] // PAGE
    if any(size not in (0, saves.cell_bytes) for size in (header["page"], header["tail"])):
        raise ValueError(f"its pages have {header['page']} bytes, needed {saves.cell_bytes}")
    room = saves.states.buffers.pending.path.shape[1]
    if header["folding"] > room:
        raise ValueError(
            f"it has {header['folding']} rows to be folded in, at most {room} fit in a step here"
        )
    draft = header["draft"]
    state = SavedSequence(
        length=header["length"],
        pages=[SavedPage(None, saves.new_cell(), holders=1) for _ in range(count)],
        tail=saves.new_cell() if header["tail"] else None,
        layers=[tuple(map(_empty, layer)) for layer in header["layers"]],
        folding=header["folding"],
    )
    try:
        rings = draft and SavedRings(
            draft["length"],
            draft["start"],
            [(_empty(keys), _empty(values)) for keys, values in draft["rings"]],
        )
        cells = [page.cell for page in state.pages] + [state.tail]
        groups = (*state.layers, *(rings.rings if rings else ()))
        for tensor in (*cells, *(part for parts in groups for part in parts)):
            if tensor is not None:
                place = _bytes_of(tensor)
                if file.readinto(place) != len(place):
                    raise ValueError("it ends too early")
                checksum = zlib.crc32(place, checksum)
        if _END.unpack(file.read(_END.size)) != (checksum,):
            raise ValueError("its checksum is wrong")
    except BaseException:
        saves.forget(state)
        raise
    return state, rings


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _form(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _nbytes(form: Sequence[Any]) -> int:
    return getattr(torch, form[0]).itemsize * torch.Size(form[1]).numel()


def _empty(form: Sequence[Any]) -> Tensor:
    return torch.empty(form[1], dtype=getattr(torch, form[0]))
