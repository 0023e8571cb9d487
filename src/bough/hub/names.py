"""Parses model names and selects a repository's files by them. Does no I/O."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bough.errors import ModelNotFound, UsageError

DEFAULT_QUANT = "Q4_K_M"
# In the config.json of a checkpoint; those of DSpark have many names.
DRAFT_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DSpineDraftModel", "TreeFlashDraftModel")
ASSISTANT = "MuseGlimmerAssistantModel"  # a DFlash draft, as transformers has it
SITES = (
    "https://huggingface.co/",
    "http://huggingface.co/",
    "huggingface.co/",
    "https://hf.co/",
    "hf.co/",
    "hf://",
)
# Files that are not models: image encoders, importance matrices.
_COMPANIONS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_ENCODER = re.compile(r"mmproj.*\.gguf$", re.IGNORECASE)
_ENCODERS = (
    "BF16",
    "F16",
    "FP16",
    "F32",
    "FP32",
    "Q8_0",
)  # types, the best first: weights are published in BF16
# Drafts that some publish beside their target, by the start of the file name; never a target.
_SIDECARS = re.compile(r"(?:mtp|eagle3?|dflash|dspark|draft)[-_.]", re.IGNORECASE)
_DRAFT_SIDECARS = re.compile(
    r"(?:dflash|dspark|draft)[-_.]", re.IGNORECASE
)  # of these, the kinds that we run
_SPLIT = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:[IP]?Q[1-9](?:_[A-Z0-9]+)*|P?TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RepoName:
    """A repository on the hub, and one of its models, by quantisation or file name."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file:
            return f"hf://{self.repo}/{self.file}"
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class GGUFSet:
    """One model: the names of its file or its split files in order, and their total bytes."""

    files: tuple[str, ...]
    size: int

    @property
    def label(self) -> str:
        """Return the name of the quantisation in the file name, or the file name."""
        labels = _QUANT.findall(_SPLIT.sub("", self.files[0]).removesuffix(".gguf"))
        return labels[-1].upper() if labels else self.files[0]

    @property
    def complete(self) -> bool:
        match = _SPLIT.search(self.files[0])
        return match is None or len(self.files) == int(match["count"])


def parse_repo(name: str) -> RepoName | None:
    """Parse USER/REPO[:QUANT], with or without hf:// or the site's URL; return None for other names."""
    site = next((site for site in SITES if name.lower().startswith(site)), "")
    rest = name[len(site) :].split("?")[0].rstrip("/")
    # URLs pasted from a browser: .../blob/main/FILE, .../tree/main
    parts = rest.split("/")
    if site and len(parts) > 2:
        inside = parts[4:] if parts[2] in ("blob", "resolve", "tree") else parts[2:]
        file = "/".join(inside)
        if file and not file.lower().endswith(".gguf"):
            raise UsageError(f"{name}: {file!r} is not a .gguf file", f"use {'/'.join(parts[:2])}[:QUANT]")
        rest = "/".join(parts[:2])
        if _REPO.fullmatch(rest):
            return RepoName(rest, file=file or None)
    repo, colon, quant = rest.partition(":")
    if not _REPO.fullmatch(repo) or (repo.lower().endswith(".gguf") and not site):
        if site:
            raise UsageError(f"{name!r} names no repository, needed: {site}USER/REPO[:QUANT]")
        return None
    if colon and not quant:
        raise UsageError(f"{name!r} ends in a colon, needed: USER/REPO or USER/REPO:QUANT", f"try {repo}")
    return RepoName(repo, quant or None)


def group(files: Iterable[tuple[str, int]], *, sidecars: bool = False) -> list[GGUFSet]:
    """Group (name, bytes) into models, split files together; other files are left out.

    `sidecars`: drafts that lie beside their target too.
    """
    sets: dict[str, list[tuple[str, int]]] = {}
    for name, size in sorted(files):
        if _is_model(name.rsplit("/", 1)[-1], sidecars=sidecars):
            match = _SPLIT.search(name)
            # Splits of different counts are different models.
            key = f"{name[: match.start()]}-of-{match['count']}" if match else name
            sets.setdefault(key, []).append((name, size))
    return [
        GGUFSet(tuple(name for name, _ in parts), sum(size for _, size in parts)) for parts in sets.values()
    ]


def draft_sidecars(files: Iterable[tuple[str, int]]) -> list[GGUFSet]:
    """Return the drafts that lie beside their target, of the kinds that we run."""
    return [each for each in group(files, sidecars=True) if each.complete and is_draft_file(each.files[0])]


def encoders(files: Iterable[str], model: str) -> list[str]:
    """Return a model's image encoders among files: those in its folder or above it, the likeliest first.

    A folder may have those of several models, and each in several types.
    """
    stem = (
        _QUANT.split(_SPLIT.sub("", model.rpartition("/")[2]).removesuffix(".gguf"))[0].strip("-._").lower()
    )

    def order(name: str) -> tuple[int, bool, int, str]:
        folder, _, file = name.rpartition("/")
        labels = [label.upper() for label in _QUANT.findall(file.removesuffix(".gguf"))]
        rank = _ENCODERS.index(labels[-1]) if labels and labels[-1] in _ENCODERS else len(_ENCODERS)
        return -len(folder), stem not in file.lower(), rank, name

    above = [name for name in files if model.startswith(name[: name.rfind("/") + 1])]
    return sorted((name for name in above if _ENCODER.search(name.rpartition("/")[2])), key=order)


def is_draft_architecture(name: object) -> bool:
    """Return whether an entry of a config's `architectures` is a draft's; those of DSpark have many names."""
    return isinstance(name, str) and (name in (*DRAFT_ARCHITECTURES, ASSISTANT) or "DSpark" in name)


def is_draft_file(name: str) -> bool:
    """Return whether a file's name says that it is a draft of a kind that we run."""
    return _DRAFT_SIDECARS.match(name.rsplit("/", 1)[-1]) is not None


def one_checkpoint(weights: Sequence[str]) -> bool:
    """Return whether safetensors files are one file, or all shards of one checkpoint."""
    shards = [SHARD.fullmatch(file) for file in sorted(weights)]
    if len(shards) == 1 and shards[0] is None:
        return True
    numbered = [(shard["stem"], int(shard["number"]), int(shard["count"])) for shard in shards if shard]
    return bool(numbered) and numbered == [
        (numbered[0][0], number, len(shards)) for number in range(1, len(shards) + 1)
    ]


def _is_model(file: str, *, sidecars: bool) -> bool:
    if not file.lower().endswith(".gguf") or _COMPANIONS.search(file):
        return False
    return sidecars or not _SIDECARS.match(file)


def choose(sets: list[GGUFSet], name: RepoName) -> GGUFSet:
    """Return the model that `name` refers to; raise with the choices if there is none or more than one."""
    if not sets:
        raise ModelNotFound(
            f"{name.repo} holds no GGUF file",
            "find a repository whose name ends in GGUF, or download this one and run bough convert",
        )
    if name.file:
        matching = [each for each in sets if name.file in each.files]
    elif name.quant is None and len(sets) == 1:
        matching = sets
    else:
        matching = _matching(sets, name.quant or DEFAULT_QUANT)
    if len(matching) == 1:
        return matching[0]
    if not matching:
        asked_for = name.file or name.quant or f"{DEFAULT_QUANT} (the default)"
        raise ModelNotFound(f"{name.repo} has no {asked_for}; it has {listing(sets)}", _example(sets, name))
    raise ModelNotFound(
        f"{name} matches {len(matching)} models: {listing(matching, by_file=True)}",
        f"name one file: hf://{name.repo}/{matching[0].files[0]}",
    )


def listing(sets: list[GGUFSet], *, by_file: bool = False) -> str:
    """Return the models with sizes, for an error message."""
    shown = sorted(sets, key=lambda each: each.size)[:24]
    names = [f"{each.files[0] if by_file else each.label} ({readable(each.size)})" for each in shown]
    return ", ".join(names) + (f" and {len(sets) - len(shown)} more" if len(sets) > len(shown) else "")


def readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _matching(sets: list[GGUFSet], quant: str) -> list[GGUFSet]:
    upper = quant.upper()
    exact = [each for each in sets if each.label.upper() == upper]
    if exact:
        return exact
    # Q4_K_XL also finds UD-Q4_K_XL, but Q4_K does not find Q4_K_M.
    inside = re.compile(rf"(?<![A-Za-z0-9]){re.escape(upper)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [each for each in sets if inside.search(each.files[0])]


def _example(sets: list[GGUFSet], name: RepoName) -> str:
    smallest = min(sets, key=lambda each: each.size)
    if smallest.label in smallest.files:
        return f"for example {RepoName(name.repo, file=smallest.files[0])}"
    return f"for example {RepoName(name.repo, smallest.label)}"


def extra_needed(file: str) -> str:
    """Return a sentence about the extra that a file's types need, judged by its name; empty: none."""
    install = "pip install 'bough[iq3]'"
    if match := re.search(r"IQ[123]_[A-Z]+", file, re.IGNORECASE):
        return f"{match[0].upper()} weights need the optional extra: {install}"
    if match := re.search(r"UD-Q[234]_[A-Z_]*", file, re.IGNORECASE):
        return f"{match[0].upper()} files often hold IQ3 weights, which need the optional extra: {install}"
    return ""
