"""The vision tower against transformers' on random tiny models, from files of every type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bough.models.vision as vision
from bough.errors import BadGGUF, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.images.pixels import picture
from bough.models.measure import held_bytes
from bough.models.spec import ModelSpec
from bough.models.vision import VisionTower
from bough.models.vision_spec import VisionSpec, tower_bytes
from tests.images.oracle_pixels import image
from tests.images.test_pixels import patches
from tests.images.tiny_tower import SHAPES, hf_tower, random_weights, vision_settings, write_mmproj

ERRORS = {"F32": 1e-5, "F16": 2e-3, "BF16": 1.5e-2, "Q8_0": 2e-2}
GRIDS = [(256, 256), (512, 128), (64, 1024), (300, 200), (2100, 32), (30, 1900)]


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    with GGUFFile.open(path) as file:
        return VisionTower(file, torch.device("cpu"), dtype)


def encoded(tower: VisionTower, pixels: np.ndarray) -> torch.Tensor:
    steps = tower.encode(torch.from_numpy(pixels.copy()))
    for _ in range(tower.spec.depth):
        next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


@torch.no_grad()
def expected(model: Any, pixels: np.ndarray) -> torch.Tensor:
    grid = torch.tensor([[1, pixels.shape[0] // 16, pixels.shape[1] // 16]])
    return model(torch.from_numpy(patches(pixels).copy()), grid).pooler_output


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    settings = vision_settings(request.param)
    model = hf_tower(settings)
    path = tmp_path_factory.mktemp("tower") / "mmproj.gguf"
    return model, write_mmproj(path, settings, model.state_dict())


@torch.inference_mode()
def test_rows_are_the_references(pair: tuple[Any, Path]) -> None:
    model, path = pair
    tower = loaded(path)
    for width, height in GRIDS:
        pixels = picture(image(width, height), most_tokens=80).pixels
        assert error(encoded(tower, pixels), expected(model, pixels)) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("kind", ERRORS)
def test_types_of_files(tmp_path: Path, kind: str) -> None:
    settings = vision_settings("wide")
    model = hf_tower(settings)
    path = write_mmproj(tmp_path / "mmproj.gguf", settings, model.state_dict(), kind=kind)
    if kind == "Q8_0":
        with GGUFFile.open(path) as file:
            types = {name: info.type.name for name, info in file.tensors.items()}
        assert types["mm.0.weight"] == "Q8_0" and types["v.blk.0.ffn_down.weight"] == "F16"
    pixels = picture(image(300, 200), most_tokens=80).pixels
    assert error(encoded(loaded(path), pixels), expected(model, pixels)) < ERRORS[kind]


def _mistaken_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vision.gelu
    monkeypatch.setattr(vision, "gelu", lambda x, approximate="tanh": plain(x, approximate="tanh"))


def _mistaken_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    def taps(count: int, side: int, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        places = ((torch.arange(count) + 0.5) * side / count - 0.5).clamp(0, side - 1)
        low = places.floor()
        return (low.long(), (low + 1).clamp(max=side - 1).long()), (1 - places + low, places - low)

    monkeypatch.setattr(vision, "_taps", taps)


def _mistaken_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = VisionTower._angles
    monkeypatch.setattr(
        VisionTower,
        "_angles",
        lambda tower, h, w: tuple(torch.roll(part, 8, -1) for part in plain(tower, h, w)),
    )


def _mistaken_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "in_blocks", lambda grid: grid.flatten(0, 1))


@torch.inference_mode()
@pytest.mark.parametrize("plant", [_mistaken_gelu, _mistaken_corners, _mistaken_axes, _mistaken_blocks])
def test_planted_mistakes_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    settings = vision_settings("heads")
    weights = random_weights(settings)
    tower = loaded(write_mmproj(tmp_path / "mmproj.gguf", settings, weights))
    pixels = picture(image(300, 200), most_tokens=80).pixels
    right = encoded(tower, pixels)
    plant(monkeypatch)
    assert error(encoded(tower, pixels), right) > 2e-5


@torch.inference_mode()
def test_sixteen_bits_are_near(pair: tuple[Any, Path]) -> None:
    model, path = pair
    pixels = picture(image(300, 200), most_tokens=80).pixels
    assert error(encoded(loaded(path, torch.bfloat16), pixels).float(), expected(model, pixels)) < 3e-2


def test_older_files_name_the_mlp_the_other_way(tmp_path: Path) -> None:
    settings = vision_settings()
    weights = random_weights(settings)
    right = loaded(write_mmproj(tmp_path / "new.gguf", settings, weights))
    swap = {"linear_fc1": "linear_fc2", "linear_fc2": "linear_fc1"}
    swapped = {
        ".".join(swap.get(word, word) for word in name.split(".")) if "mlp" in name else name: tensor
        for name, tensor in weights.items()
    }
    old = loaded(write_mmproj(tmp_path / "old.gguf", settings, swapped))
    pixels = np.asarray(Image.new("RGB", (256, 256), (200, 30, 90)))
    assert torch.equal(encoded(old, pixels), encoded(right, pixels))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "qwen2.5vl_merger"}, "clip.projector_type is 'qwen2.5vl_merger'"),
        ({"clip.vision.is_deepstack_layers": [False, True]}, "deepstack"),
        ({"clip.vision.patch_size": 14}, "patch_size is 14, needed 16"),
        ({"clip.vision.spatial_merge_size": 1}, "spatial_merge_size is 1"),
        ({"clip.vision.image_mean": [0.48, 0.45, 0.4]}, "image_mean"),
        ({"clip.has_vision_encoder": False}, "needed 'clip'"),
        ({"clip.vision.block_count": 0}, "block_count is 0"),
        ({"clip.vision.attention.head_count": 5}, "5 heads"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = vision_settings()
    path = write_mmproj(tmp_path / "mmproj.gguf", settings, random_weights(settings), **changes)
    with pytest.raises(UnsupportedModel, match=message) as refused:
        loaded(path)
    assert str(path) in refused.value.message


def test_damaged_files_are_refused_by_tensor(tmp_path: Path) -> None:
    settings = vision_settings()
    weights = random_weights(settings)
    missing = {name: tensor for name, tensor in weights.items() if name != "blocks.1.norm2.bias"}
    with pytest.raises(BadGGUF, match=r"v\.blk\.1\.ln2\.bias"):
        loaded(write_mmproj(tmp_path / "a.gguf", settings, missing))
    with pytest.raises(BadGGUF, match=r"mm\.2\.weight"):
        loaded(write_mmproj(tmp_path / "b.gguf", settings | {"out_hidden_size": 65}, weights))


def test_an_encoder_of_another_model_is_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    settings = vision_settings(out=96)
    path = write_mmproj(tmp_path / "mmproj.gguf", settings, random_weights(settings))
    with GGUFFile.open(path) as file, GGUFFile.open(tiny_model()) as model:
        target = ModelSpec.from_gguf(model)
        with pytest.raises(UnsupportedModel, match=rf"96 values.* has {target.width}"):
            VisionSpec.from_gguf(file).check_target(file, target)
    settings = vision_settings(out=target.width)
    path = write_mmproj(tmp_path / "right.gguf", settings, random_weights(settings))
    with GGUFFile.open(path) as file, GGUFFile.open(tiny_model("qwen3")) as model:
        spec, blind = VisionSpec.from_gguf(file), ModelSpec.from_gguf(model)
        with pytest.raises(UnsupportedModel, match="takes no images"):
            spec.check_target(file, blind)


def test_bytes_are_those_held(tmp_path: Path) -> None:
    settings = vision_settings()
    path = write_mmproj(tmp_path / "mmproj.gguf", settings, random_weights(settings), kind="Q8_0")
    tower = loaded(path, torch.bfloat16)
    with GGUFFile.open(path) as file:
        assert tower_bytes(file, 2) == held_bytes(tower) - tower._frequencies.nbytes
