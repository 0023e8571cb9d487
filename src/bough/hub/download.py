"""Downloads models from the Hugging Face hub into its shared cache, and resumes interrupted downloads.

The hub's own client restarts a file from zero after an interrupted run. So files are downloaded here, into a
partial file next to the cache's blobs, and added to the client's cache once they are complete.
"""

import contextlib
import hashlib
import importlib.util
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypedDict, Unpack

from bough.errors import BoughError, DownloadFailed, ModelNotFound, ResourceError
from bough.hub.failures import explained
from bough.hub.names import (
    GGUFSet,
    RepoName,
    choose,
    draft_sidecars,
    encoders,
    extra_needed,
    group,
    readable,
)

TRIES = 5  # in a row without progress
TIMEOUT_S = 15
# The site serves larger files to its own client only.
MAX_FILE = 50_000_000_000

# Selects from a repository's (name, bytes) the files to download, in order; raises if they are missing.
Pick = Callable[[list[tuple[str, int]]], tuple[str, ...]]


class FetchProgress(Protocol):
    """Receives the progress of a download, in bytes; what a subclass leaves as it is, it discards."""

    def downloading(self, name: str, done: int, total: int) -> None:
        return

    def checking(self, name: str, done: int, total: int) -> None:
        return

    def notice(self, text: str) -> None:
        return


class Silent(FetchProgress):
    pass


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    url: str
    size: int
    etag: str
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.etag}.bough.incomplete")

    @property
    def present(self) -> int:
        if self.blob.exists():
            return self.size
        return self.partial.stat().st_size if self.partial.exists() else 0


class FetchOptions(TypedDict, total=False):
    """`endpoint` and `cache` default to the hub's settings."""

    offline: bool
    progress: FetchProgress | None
    endpoint: str | None
    cache: Path | None


def fetch(name: RepoName, **options: Unpack[FetchOptions]) -> Path:
    """Download a model and return the path of its (first) GGUF file in the cache.

    Drafts that lie beside it are offered in a notice.
    """
    progress = options.get("progress") or Silent()
    listed: list[tuple[str, int]] = []

    def pick(files: list[tuple[str, int]]) -> tuple[str, ...]:
        listed[:] = files
        names = gguf_files(name)(files)
        if (text := extra_needed(names[0])) and importlib.util.find_spec("gguf") is None:
            progress.notice(text)
        return names

    path = fetch_files(name, pick, **options)[0]
    for draft in draft_sidecars(listed):
        file = RepoName(name.repo, file=draft.files[0])
        progress.notice(f"The repository has a draft too ({readable(draft.size)}): {file}")
    return path


def fetch_encoder(
    repo: str, model: Path, *, progress: FetchProgress | None = None, endpoint: str | None = None
) -> Path | None:
    """Download the image encoder that a repository has beside a model's file; None: there is none."""
    root = next((folder for folder in model.parents if folder.parent.name == "snapshots"), model.parent)
    inside = model.relative_to(root).as_posix()

    def pick(files: list[tuple[str, int]]) -> tuple[str, ...]:
        return tuple(encoders([name for name, _ in files], inside)[:1])

    return next(iter(fetch_files(RepoName(repo), pick, progress=progress, endpoint=endpoint)), None)


def offered(repo: str) -> list[GGUFSet]:
    """Return the complete models of a repository on the hub, the smallest first."""
    from huggingface_hub import HfApi, constants

    with explained(RepoName(repo), constants.ENDPOINT):
        info = HfApi().model_info(repo, files_metadata=True, timeout=TIMEOUT_S)
    sets = group([(each.rfilename, each.size or 0) for each in info.siblings or []])
    return sorted((each for each in sets if each.complete), key=lambda each: each.size)


def gguf_files(name: RepoName) -> Pick:
    """Return a pick of the model that `name` refers to; only a file name finds a draft beside it."""
    named = name.file is not None
    return lambda files: choose([each for each in group(files, sidecars=named) if each.complete], name).files


def fetch_files(
    name: RepoName,
    pick: Pick,
    check: Callable[[Path], None] = lambda path: None,
    **options: Unpack[FetchOptions],
) -> list[Path]:
    """Download the files that `pick` selects; `check` may refuse each before the next. Return their paths."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    progress, endpoint = options.get("progress") or Silent(), options.get("endpoint")
    cache = options.get("cache") or cache_folder()
    if options.get("offline") or constants.HF_HUB_OFFLINE:
        return cached(name, pick, cache=cache)
    site = endpoint or constants.ENDPOINT
    try:
        with explained(name, site):
            info = HfApi(endpoint=endpoint).model_info(name.repo, files_metadata=True, timeout=TIMEOUT_S)
    except DownloadFailed as error:
        # Without a network use a cached copy; if there is none, report the network error.
        with contextlib.suppress(BoughError):
            local = cached(name, pick, cache=cache)
            progress.notice(f"{error.message}: using the copy in the cache")
            return local
        raise
    files = pick([(each.rfilename, each.size or 0) for each in info.siblings or []])
    paths = {
        file: try_to_load_from_cache(name.repo, file, cache_dir=cache, revision=info.sha) for file in files
    }
    if missing := [file for file, path in paths.items() if not isinstance(path, str)]:
        with explained(name, site):
            paths |= _download(
                name.repo, missing, endpoint=endpoint, cache=cache, progress=progress, check=check
            )
    return [Path(str(paths[file])) for file in files]


def fetch_heads(
    name: RepoName, pick: Pick, folder: Path, *, length: int, endpoint: str | None = None
) -> list[Path]:
    """Write the first `length` bytes of the files that `pick` selects into a folder; return their paths.

    The files have their full size, with holes: enough to read shapes from, without the download.
    """
    from huggingface_hub import HfApi, constants, hf_hub_url

    paths = []
    with explained(name, endpoint or constants.ENDPOINT):
        info = HfApi(endpoint=endpoint).model_info(name.repo, files_metadata=True, timeout=TIMEOUT_S)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        for file in pick(list(sizes.items())):
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(_head(hf_hub_url(name.repo, file, endpoint=endpoint), min(length, sizes[file])))
                out.truncate(sizes[file])
            paths.append(path)
    return paths


def _head(url: str, length: int) -> bytes:
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes=0-{max(0, length - 1)}"}
    received = bytearray()
    with get_session().stream(
        "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():  # all of the file, if the server ignores ranges
            received += chunk
            if len(received) >= length:
                break
    return bytes(received[:length])


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _download(
    repo: str,
    files: list[str],
    *,
    endpoint: str | None,
    cache: Path,
    progress: FetchProgress,
    check: Callable[[Path], None],
) -> dict[str, str]:
    """Download files and return their paths in the cache, by name."""
    from huggingface_hub import hf_hub_download

    described = [_describe(repo, file, endpoint=endpoint, cache=cache) for file in files]
    _check_space(described, cache)
    total = sum(file.size for file in described)
    before, paths = 0, {}
    for file in described:
        _complete(file, _Share(progress, file.name, before, total))
        before += file.size
        # Finds the blob and adds the cache's links to it.
        paths[file.name] = hf_hub_download(repo, file.name, cache_dir=cache, endpoint=endpoint)
        check(Path(paths[file.name]))
    return paths


@dataclass(frozen=True, slots=True)
class _Share:
    """Reports one file's share of the whole download."""

    progress: FetchProgress
    name: str
    before: int
    total: int

    def downloading(self, done: int) -> None:
        self.progress.downloading(self.name, self.before + done, self.total)

    def checking(self, done: int, size: int) -> None:
        self.progress.checking(self.name, done, size)


def _describe(repo: str, file: str, *, endpoint: str | None, cache: Path) -> _File:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(repo, file, endpoint=endpoint)
    metadata = get_hf_file_metadata(url, timeout=TIMEOUT_S, endpoint=endpoint)
    size, etag = metadata.size, metadata.etag or ""
    if size is None or not re.fullmatch(r"[\w-]+", etag):
        raise DownloadFailed(f"{url} has size {size} and ETag {etag!r}, needed both")
    if size > MAX_FILE:
        raise DownloadFailed(
            f"{file} has {size / 1e9:.1f} GB, the hub serves up to {MAX_FILE / 1e9:.0f} GB in one piece",
            f"hf download {repo} {file}   and then this again: the cache is shared",
        )
    blobs = cache / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    return _File(file, url, size, etag, blobs / etag)


def _check_space(files: list[_File], cache: Path) -> None:
    needed = sum(file.size - min(file.present, file.size) for file in files)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"the download needs {readable(needed)}, {readable(free)} are free in {cache}",
            "make room, or set HF_HOME to a folder on a larger disk",
        )


def _complete(file: _File, share: _Share) -> None:
    """Download the rest of a file, check it, and move it into the cache."""
    from huggingface_hub.utils import WeakFileLock

    file.blob.parent.mkdir(parents=True, exist_ok=True)
    locks = file.blob.parents[2] / ".locks" / file.blob.parents[1].name
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{file.etag}.lock"):
        if file.blob.exists():
            return
        if file.present > file.size:
            file.partial.unlink()
        with open(file.partial, "ab") as out:
            _receive(file, out, share)
        _check(file, share)
        file.partial.replace(file.blob)


def _receive(file: _File, out: IO[bytes], share: _Share) -> None:
    from huggingface_hub.errors import HTTPError

    failures = 0
    while (start := out.tell()) < file.size:
        share.downloading(start)
        try:
            for chunk in _stream(file.url, out):
                out.write(chunk)
                share.downloading(out.tell())
        except HTTPError as error:
            failures = 1 if out.tell() > start else failures + 1
            status = getattr(getattr(error, "response", None), "status_code", 503)
            if failures == TRIES or not (status == 429 or status >= 500):
                raise
            time.sleep(0.5 * 2**failures)


def _stream(url: str, out: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes that follow those in `out`; truncate it where the server sends the whole file."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={out.tell()}-"}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            out.seek(0)
            out.truncate()
        yield from response.iter_bytes()


def _check(file: _File, share: _Share) -> None:
    """Compare size and, for large files, whose ETag it is, the SHA-256; raise and delete on a mismatch."""
    size = file.partial.stat().st_size
    problem = f"has {size} bytes, needed {file.size}" if size != file.size else ""
    if not problem and re.fullmatch("[0-9a-f]{64}", file.etag):
        digest = hashlib.sha256()
        with open(file.partial, "rb") as data:
            while chunk := data.read(1 << 24):
                digest.update(chunk)
                share.checking(data.tell(), size)
        if digest.hexdigest() != file.etag:
            problem = f"has SHA-256 {digest.hexdigest()[:12]}..., needed {file.etag[:12]}..."
    if problem:
        file.partial.unlink()
        raise DownloadFailed(f"{file.name} arrived damaged: it {problem}", "run the same command again")


def cached(name: RepoName, pick: Pick, *, cache: Path | None = None) -> list[Path]:
    """Return cached files: of the branch's last seen commit, or of the newest one that has them.

    A name without a quantisation refers to the only one in the cache.
    """
    cache = cache or cache_folder()
    problem = None
    for snapshot in snapshots(name.repo, cache):
        inside = [each for each in snapshot.rglob("*") if each.is_file()]
        files = [(each.relative_to(snapshot).as_posix(), each.stat().st_size) for each in inside]
        try:
            return [snapshot / file for file in pick(files)]
        except ModelNotFound as error:
            problem = problem or (error if group(files) else None)
    what = f" ({problem.message})" if problem else ""
    raise ModelNotFound(
        f"{name} is not in the cache at {cache}{what}",
        f"fetch it while online: bough pull {name}",
    )


def snapshots(repo: str, cache: Path) -> list[Path]:
    """Return the cached commits of a repository, the branch's last seen one first, then the newest."""
    from huggingface_hub.file_download import repo_folder_name

    folder = cache / repo_folder_name(repo_id=repo, repo_type="model")
    folders = sorted(folder.glob("snapshots/*"), key=lambda each: each.stat().st_mtime, reverse=True)
    with contextlib.suppress(OSError):
        current = (folder / "refs" / "main").read_text().strip()
        folders.sort(key=lambda each: each.name != current)
    return folders
