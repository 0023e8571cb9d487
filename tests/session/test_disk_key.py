"""The key of prefix-cache files: every setting that changes the bits of a state changes it, no other does.

Identities are those that loading a session passes on; a snapshot of another identity is never read
(tests/prefix_cache/test_files.py).
"""

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config import CompressConfig, DraftConfig, EngineConfig, SpecConfig
from bough.gguf.reader import GGUFFile
from bough.memory.planner import plan_memory
from bough.models.spec import ModelSpec
from bough.prefix_cache.files import SnapshotFiles
from bough.session import loading
from bough.session.loading import load_session
from tests.kernels.native_library import needs_native
from tests.tiny_draft import draft_config, save_draft

BASE = EngineConfig(
    "cpu", max_ctx=256, prefill_chunk=64, prefix_cache=1 << 24, speculation=SpecConfig(mtp="off")
)
TORCH = replace(BASE, cpu_backend="torch")
# Each changes the key, beside the base of its row.
CHANGES: dict[str, tuple[EngineConfig, Any]] = {
    "prefill_chunk": (BASE, 128),
    "cpu_backend": (BASE, "torch"),
    "cpu_activations": (BASE, "int8"),
    "kv_k": (BASE, "f16"),
    "kv_v": (BASE, "q8_0"),
    "weights": (TORCH, "packed"),
    "window": (TORCH, 64),
}
DRAFT_CHANGES = {"quant": "q8_0", "causal": True, "context": 100}
# These do not: a cache is read again after they have changed.
KEEPS: dict[str, Any] = {
    "device": "auto",
    "parallel": 2,
    "threads": 1,
    "compress": CompressConfig("auto", above=1000),
    "costs": Path("costs.json"),
    "effort": "low",  # of a template's words: other tokens
    "break_loops": False,
    "no_images": True,
    "image_tokens": 256,  # a picture's name is of its resized pixels
    "prefix_cache": 1 << 25,
    "prefix_cache_exact": True,
    "prefix_cache_dir_size": 1 << 30,
    "max_ctx": 512,
    "speculation": SpecConfig(budget=5, chain=True, lookup=False, adaptive=False, mtp="off"),
}
# Tests of their own; the last two are a GPU's and move or limit memory alone.
ELSEWHERE = {"mmproj", "draft", "prefill", "prefix_cache_dir", "experts_host", "vram_limit"}


@pytest.fixture
def key_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path, EngineConfig], str]:
    """Returns the identity of a session's files."""
    keys: list[str] = []

    class Files(SnapshotFiles):
        def __init__(self, folder: Path, identity: str, *, limit: int):
            keys.append(identity)
            super().__init__(folder, identity, limit=limit)

    monkeypatch.setattr(loading, "SnapshotFiles", Files)

    def load(model: Path, config: EngineConfig) -> str:
        load_session(model, replace(config, prefix_cache_dir=tmp_path / "cache"))
        return keys.pop()

    return load


@pytest.fixture(scope="module")
def drafts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two drafts of the tiny model."""
    folder = tmp_path_factory.mktemp("drafts")
    with GGUFFile.open(tiny_model()) as file:
        config = draft_config(ModelSpec.from_gguf(file))
    for name in ("a", "b"):
        save_draft(folder / name, config, seed=ord(name))
    return [folder / "a", folder / "b"]


def test_every_setting_is_in_a_table() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert names == {*CHANGES, *KEEPS, *ELSEWHERE}
    draft = {field.name for field in fields(DraftConfig)}
    # Files are part of the key; a shortlist changes what is proposed, no state.
    assert draft == {*DRAFT_CHANGES, "path", "head", "shortlist"}
    assert DraftConfig(Path("a"), head=Path("b")).files == [Path("a"), Path("b")]


@needs_native
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_bits(
    tiny_model: Callable[..., Path], key_of: Callable[[Path, EngineConfig], str], name: str
) -> None:
    base, value = CHANGES[name]
    keys = [key_of(tiny_model(), config) for config in (base, replace(base, **{name: value}), base)]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("name", KEEPS)
def test_a_setting_that_changes_none(
    tiny_model: Callable[..., Path],
    key_of: Callable[[Path, EngineConfig], str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert key_of(tiny_model(), BASE) == key_of(tiny_model(), replace(BASE, **{name: KEEPS[name]}))


def test_a_draft_and_its_settings(
    tiny_model: Callable[..., Path], key_of: Callable[[Path, EngineConfig], str], drafts: list[Path]
) -> None:
    draft = DraftConfig(drafts[0], quant="none")
    configs = [None, draft, replace(draft, path=drafts[1])]
    configs += [replace(draft, **{name: value}) for name, value in DRAFT_CHANGES.items()]
    keys = [key_of(tiny_model(), replace(BASE, draft=each)) for each in configs]
    assert len(set(keys)) == len(configs)
    wider = replace(BASE, draft=draft, max_ctx=512)  # its rings hold more
    assert key_of(tiny_model(), wider) not in keys
    assert key_of(tiny_model(), replace(BASE, draft=draft, speculation=None)) == keys[0]


def test_the_model_and_its_mtp_block(
    tiny_model: Callable[..., Path], key_of: Callable[[Path, EngineConfig], str]
) -> None:
    models = [tiny_model(), tiny_model(seed=1), tiny_model(mtp=True)]
    keys = [key_of(model, BASE) for model in models]
    keys += [key_of(models[2], replace(BASE, speculation=SpecConfig(mtp=mtp))) for mtp in ("auto", "on")]
    assert len(set(keys[:4])) == 4 and keys[3] == keys[4]


def test_what_a_gpu_alone_has(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in int8, the card, and which kernels run on it."""
    keys, cards = [], itertools.cycle(["card A", "card B"])
    monkeypatch.setattr(loading, "SnapshotFiles", lambda folder, made_of, limit: keys.append(made_of))
    monkeypatch.setattr(loading, "device_name", lambda _: next(cards))
    kernels = [""]
    monkeypatch.setattr(loading.backends, "identity", lambda: kernels[-1])
    with GGUFFile.open(tiny_model()) as file:
        plan = plan_memory(file, ModelSpec.from_gguf(file), BASE, torch.device("cpu"))
        for prefill, device in itertools.product(("exact", "int8"), ("cpu", "cuda", "cuda")):
            config = replace(BASE, prefill=prefill, prefix_cache_dir=tmp_path)
            loading._prefix_cache(config, file, plan, torch.device(device))
        kernels.append(", attention in Triton")
        loading._prefix_cache(config, file, plan, torch.device("cuda"))
    assert len(set(keys)) == 7
