"""One random Hugging Face model of every family, and the GGUF our converter makes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.convert.convert import convert
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from tests.convert.hf_models import build_hf, save_hf

# Where there is a GPU the same tests run on it as well, in float32.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = [
    "qwen35",
    "qwen35-tied",
    "qwen35-mtp",
    "qwen35-rope",
    "qwen35moe",
    "qwen3moe",
    "qwen3moe-tied",
    "qwen3-tied",
    "qwen2",
    "llama",
    "llama3",
    "muse",
]


@dataclass
class Pair:
    """The same function twice: transformers' model and ours, read from the converted file."""

    name: str
    hf: Any
    ours: Decoder
    path: Path
    device: str

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """transformers' logits [T, V] of one sequence."""
        with torch.no_grad():
            return self.hf(ids[None], use_cache=False).logits[0]


@pytest.fixture(scope="module", params=[f"{case}@{device}" for device in DEVICES for case in CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case, _, device = request.param.partition("@")
    family, _, variant = case.partition("-")
    folder = tmp_path_factory.mktemp(case)
    rope = {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "rope_type": "default",
    }
    changes = {"rope_parameters": rope} if variant == "rope" else {}
    model, config = build_hf(family, seed=11, tie=variant == "tied", **changes)
    save_hf(model, config, folder / "hf", mtp=variant == "mtp")
    path = folder / "model.gguf"
    convert(folder / "hf", path, mix="f32")
    with GGUFFile.open(path) as file:
        return Pair(case, model, Decoder.load(file, device=device), path, device)
