"""Tiny targets and drafts under the names of real ones, and a client that asks the hub they are on."""

from pathlib import Path

import pytest

from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from tests.hub.fake_hub import FakeHub
from tests.tiny_draft import draft_config, save_draft

TARGET, DRAFT = "unsloth/Qwen3.6-27B-GGUF", "z-lab/Qwen3.6-27B-DFlash"


def make_draft(target: Path, folder: Path, **changes) -> Path:
    """A random draft of a target."""
    with GGUFFile.open(target) as file:
        save_draft(folder, draft_config(ModelSpec.from_gguf(file), **changes))
    return folder


def add_pair(hub: FakeHub, target: Path, folder: Path, *, repos: tuple[str, str] = (TARGET, DRAFT)) -> None:
    """A target in two quantisations, which here are the same but for a byte, and a draft."""
    stem = repos[0].rpartition("/")[2].removesuffix("-GGUF")
    data = target.read_bytes()
    hub.repos[repos[0]] = {
        "README.md": b"about it",
        f"{stem}-Q4_K_M.gguf": data,
        f"{stem}-Q8_0.gguf": data + b"\0",
    }
    draft = make_draft(target, folder)
    hub.repos[repos[1]] = {
        "README.md": b"about it",
        "config.json": (draft / "config.json").read_bytes(),
        "dflash.py": b"code that nobody runs",
        "model.safetensors": (draft / "model.safetensors").read_bytes(),
    }


def use_hub(patch: pytest.MonkeyPatch, cache: Path, endpoint: str = "http://127.0.0.1:9") -> None:
    """The client in this process, without the settings of whoever runs the tests."""
    from huggingface_hub import constants

    patch.delenv("HF_TOKEN", raising=False)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
