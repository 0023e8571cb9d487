"""SnapshotFiles: snapshots on disk, one file each, written by a background thread.

A file holds a header, the tokens, the bytes of the KV pages, the rest of the state, and a checksum. Its name
begins with the identity of the model and of everything else that the bytes depend on, so that several models
can share a folder. Damaged files and other versions are ignored; on a full disk no new files are written.
"""

import contextlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from bough.errors import UsageError
from bough.prefix_cache.boundaries import SnapshotKind
from bough.prefix_cache.snapshot import Snapshot
from bough.state.draft_ring import SavedRings
from bough.state.sequences import PAGE
from bough.state.snapshots import SavedPage, SavedSequence, SnapshotStore

log = logging.getLogger(__name__)

_MAGIC = b"Bough snapshot 3\n"
_SUFFIX = ".snapshot"
_START, _END = struct.Struct("<I"), struct.Struct("<I")  # the header's length; the checksum
_MAX_HEADER = 1 << 20
_QUEUE_LIMIT = 4  # snapshots; beyond it the oldest is not written
_ABANDONED = 3600  # seconds after which a partial file has no writer any more
_SAMPLES, _SAMPLE, _HEAD = 256, 4096, 1 << 20  # of a model's file: their count, bytes of each and of the head

_Damage = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    RuntimeError,
)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotFile:
    path: Path
    tokens: bytes
    kind: SnapshotKind
    length: int
    nbytes: int
    after_answer: bool


class SnapshotFiles:
    def __init__(self, folder: Path, identity: str, *, limit: int):
        """`identity`: of all that a state depends on, except its tokens; `limit`: bytes of the folder."""
        self._folder, self._identity, self._limit = folder, identity, limit
        self._lock = threading.Lock()
        self._queue: list[Snapshot] = []
        self._current: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._warned = False
        try:
            # Snapshots hold the conversations' tokens: only the owner may read them.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.entries: tuple[SnapshotFile, ...] = tuple(self._scan())
        except OSError as error:
            raise UsageError(
                f"`prefix_cache_dir` is {folder}, needed a writable folder: {_reason(error)}",
                "create it with mkdir; without the setting nothing is stored on disk",
                param="prefix_cache_dir",
            ) from error

    def write(self, snapshot: Snapshot) -> None:
        """Queue a snapshot, whose pages have host copies, for writing; until then it must not change."""
        with self._lock:
            self._queue = [*self._queue, snapshot][-_QUEUE_LIMIT:]
            if self._thread is None or not self._thread.is_alive():
                # Not a daemon: the process ends after it.
                self._thread = threading.Thread(target=self._work, name="snapshots", daemon=False)
                self._thread.start()

    def is_writing(self, snapshot: Snapshot) -> bool:
        with self._lock:
            return snapshot is self._current or any(each is snapshot for each in self._queue)

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def read(
        self, entry: SnapshotFile, store: SnapshotStore
    ) -> tuple[SavedSequence, SavedRings | None] | None:
        """Read a state into host memory; return None, with a warning, where the file is damaged."""
        try:
            with entry.path.open("rb") as file:
                return _read_state(file, entry, self._identity, store)
        except _Damage as error:
            if not isinstance(error, FileNotFoundError):  # another process may have evicted it
                log.warning("the snapshot %s is ignored: %s", entry.path, error)
            self._drop(entry)
            return None

    def touch(self, tokens: bytes) -> None:
        """Mark the snapshot of these tokens as used."""
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
                if not path.is_file():  # opening a pipe waits for a writer
                    raise ValueError("it is not a regular file")
                with path.open("rb") as file:
                    header, _ = _read_header(file, self._identity)
                    tokens = file.read(4 * header["length"])
                if path != self._path(tokens):
                    raise ValueError("its tokens do not match its name")
                yield _entry(path, tokens, header)
            except _Damage:
                damaged += 1
        if damaged:
            log.warning("%d snapshots in %s are ignored: damaged or inconsistent", damaged, self._folder)

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
                self._warn(f"snapshots cannot be written to {self._folder}: {_reason(error)}")
            finally:
                with self._lock:
                    self._current = None

    def _store(self, snapshot: Snapshot) -> None:
        path = self._path(snapshot.tokens)
        header = _encoded(_header_of(snapshot, self._identity))
        size = len(header) + sum(len(blob) for blob in _blobs(snapshot)) + _END.size
        if not self._evict(size, path):
            limits = f"{size / 2**20:.1f} MiB, `prefix_cache_dir_size` {self._limit / 2**20:.1f} MiB"
            return self._warn(f"a snapshot is not written to {self._folder}: it takes {limits}")
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(part, "wb", opener=_private) as file:
                checksum = 0
                for blob in (header, *_blobs(snapshot)):
                    file.write(blob)
                    checksum = zlib.crc32(blob, checksum)
                file.write(_END.pack(checksum))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        facts = (snapshot.tokens, snapshot.kind, snapshot.length, size, snapshot.after_answer)
        self._replace(SnapshotFile(path, *facts))

    def _warn(self, text: str) -> None:
        """Warn once: the next snapshot will most likely fail for the same reason."""
        if not self._warned:
            log.warning("%s", text)
        self._warned = True

    def _replace(self, new: SnapshotFile) -> None:
        """Add an entry and delete those that it supersedes."""
        staying = []
        for entry in self.entries:
            older = entry.kind == new.kind != "head" and new.tokens.startswith(entry.tokens)
            if not older and entry.path != new.path:
                staying.append(entry)
            elif entry.path != new.path:
                entry.path.unlink(missing_ok=True)
        self.entries = (*staying, new)

    def _evict(self, size: int, path: Path) -> bool:
        """Delete least recently used files until `size` more bytes fit; return whether they do."""
        files = []
        for file in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = file.stat()
                files.append((status.st_mtime, status.st_size, file))
        total = sum(nbytes for _, nbytes, file in files if file != path)
        for _, nbytes, file in sorted(files):
            if size > self._limit or total + size <= self._limit:
                break
            if file != path:
                file.unlink(missing_ok=True)
                total -= nbytes
                self.entries = tuple(entry for entry in self.entries if entry.path != file)
        return total + size <= self._limit

    def _drop(self, entry: SnapshotFile) -> None:
        self.flush()
        self.entries = tuple(each for each in self.entries if each is not entry)


def _entry(path: Path, tokens: bytes, header: Mapping[str, Any]) -> SnapshotFile:
    # A file without the mark is from before it was written.
    after_answer = header.get("after_answer", True)
    return SnapshotFile(path, tokens, header["kind"], header["length"], path.stat().st_size, after_answer)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _reason(error: OSError) -> str:
    """Return the error's text without its number and the path of a partial file."""
    return "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)


def identity(files: Sequence[Path], **facts: object) -> str:
    """Return a hash of a model's files, by their sizes and samples of their bytes, and of `facts`."""
    digest = blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    for file in files:
        for path in sorted(file.iterdir()) if file.is_dir() else [file]:
            if path.is_file():
                digest.update(_fingerprint(path))
    return digest.hexdigest()


def _fingerprint(path: Path) -> bytes:
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return digest.digest()


def _header_of(snapshot: Snapshot, identity: str) -> dict[str, Any]:
    state, draft = snapshot.state, snapshot.draft
    return {
        "identity": identity,
        "kind": snapshot.kind,
        "after_answer": snapshot.after_answer,
        "length": state.length,
        "folding": state.pending,
        "offset": state.offset,
        "page": 0 if not state.pages else _size(state.pages[0].host),
        "tail": _size(state.tail),
        "layers": [[_form(tensor) for tensor in layer] for layer in state.layers],
        "draft": draft
        and {
            "length": draft.length,
            "start": draft.start,
            "rings": [[_form(tensor) for tensor in pair] for pair in draft.rings],
        },
    }


def _blobs(snapshot: Snapshot) -> Iterator[memoryview | bytes]:
    """Yield everything after the header, in file order."""
    yield snapshot.tokens
    for page in snapshot.state.pages:
        assert page.host is not None
        yield _bytes_of(page.host)
    if snapshot.state.tail is not None:
        yield _bytes_of(snapshot.state.tail)
    for tensors in (*snapshot.state.layers, *(snapshot.draft.rings if snapshot.draft else ())):
        yield from map(_bytes_of, tensors)


def _encoded(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return _MAGIC + _START.pack(len(text)) + text


def _read_header(file: BufferedReader, identity: str) -> tuple[dict[str, Any], int]:
    """Return the header of a file, whose size it is checked against, and the checksum so far."""
    start = file.read(len(_MAGIC) + _START.size)
    if not start.startswith(_MAGIC):
        raise ValueError("not a snapshot of this version")
    (length,) = _START.unpack(start[len(_MAGIC) :])
    if length > _MAX_HEADER:
        raise ValueError(f"its header has {length} bytes, the limit is {_MAX_HEADER}")
    text = file.read(length)
    header = json.loads(text)
    if header["identity"] != identity:
        raise ValueError("it belongs to another model, draft or format")
    if header["kind"] not in get_args(SnapshotKind):
        raise ValueError(f"its kind is {header['kind']!r}")
    tokens, draft = header["length"], header["draft"]
    forms = [form for group in (*header["layers"], *(draft["rings"] if draft else ())) for form in group]
    needed = len(start) + length + 4 * tokens + tokens // PAGE * header["page"] + header["tail"] + _END.size
    needed += sum(_nbytes(form) for form in forms)
    size = os.fstat(file.fileno()).st_size
    if size != needed:
        raise ValueError(f"it has {size} bytes, needed {needed}")
    return header, zlib.crc32(text, zlib.crc32(start))


def _read_state(
    file: BufferedReader, entry: SnapshotFile, identity: str, store: SnapshotStore
) -> tuple[SavedSequence, SavedRings | None]:
    header, checksum = _read_header(file, identity)
    if file.read(len(entry.tokens)) != entry.tokens:
        raise ValueError("its tokens have changed")
    checksum = zlib.crc32(entry.tokens, checksum)
    count = header["length"] // PAGE
    if any(size not in (0, store.page_bytes) for size in (header["page"], header["tail"])):
        raise ValueError(f"its pages have {header['page']} bytes, needed {store.page_bytes}")
    limit = store.states.buffers.pending.path.shape[1]
    if header["folding"] > limit:
        raise ValueError(f"it has {header['folding']} pending rows, a step here has at most {limit}")
    draft = header["draft"]
    state = SavedSequence(
        length=header["length"],
        pages=[SavedPage(None, store.allocate_host_page(), references=1) for _ in range(count)],
        tail=store.allocate_host_page() if header["tail"] else None,
        layers=[tuple(map(_empty, layer)) for layer in header["layers"]],
        pending=header["folding"],
        offset=header["offset"],
    )
    try:
        rings = draft and SavedRings(
            draft["length"], draft["start"], [(_empty(k), _empty(v)) for k, v in draft["rings"]]
        )
        pages = [page.host for page in state.pages] + [state.tail]
        groups = (*state.layers, *(rings.rings if rings else ()))
        for tensor in (*pages, *(tensor for group in groups for tensor in group)):
            if tensor is not None:
                buffer = _bytes_of(tensor)
                if file.readinto(buffer) != len(buffer):
                    raise ValueError("it is truncated")
                checksum = zlib.crc32(buffer, checksum)
        if _END.unpack(file.read(_END.size)) != (checksum,):
            raise ValueError("its checksum is wrong")
    except BaseException:
        store.release(state)
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
