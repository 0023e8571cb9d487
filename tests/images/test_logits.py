"""Prompts with images: logits against transformers' whole model, in chunks, and then step by step."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bough.engine.images as engine_images
from bough.convert.convert import convert
from bough.engine.engine import Engine
from bough.engine.images import PictureEncoder, PlacedPicture, offset_at, rope_positions
from bough.engine.sequence import Request
from bough.gguf.reader import GGUFFile
from bough.images.pixels import Picture, picture
from bough.kernels.native import Library
from bough.models.decoder import Decoder, Target
from bough.models.native import NativeDecoder
from bough.models.step import Step
from bough.models.vision import VisionTower
from bough.prefix_cache.boundaries import SnapshotKind
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.state.sequences import SequenceStates
from tests.convert.hf_models import _HYBRID, _RECIPES, randomise, save_hf
from tests.engine.driving import run
from tests.images.oracle_pixels import image
from tests.images.test_pixels import patches
from tests.images.tiny_tower import vision_settings, write_mmproj
from tests.kernels.native_library import needs_native
from workshop.steps import commit

PAD, START, END = 290, 291, 292
# Runs of text, and images (width, height): first, last, adjacent, in the middle, of one row, of one column.
PROMPTS: dict[str, list[int | tuple[int, int]]] = {
    "middle": [9, (300, 200), 30],
    "first": [(256, 256), 12],
    "last": [20, (130, 700)],
    "two": [5, (300, 200), 17, (200, 300), 6],
    "adjacent": [3, (256, 300), (300, 256), 11],
    "row": [7, (2100, 32), 9],
    "column": [7, (30, 1900), 9],
}


@dataclass
class Seer:
    """The same model twice, and its tower."""

    hf: Any
    path: Path
    target: Target
    tower: VisionTower

    def expected(self, ids: list[int], images: list[PlacedPicture]) -> torch.Tensor:
        plain = [PAD if token < 0 else token for token in ids]
        pixels = [torch.from_numpy(patches(each.picture.pixels)).double() for each in images]
        grids = [[1, 2 * each.picture.rows, 2 * each.picture.columns] for each in images]
        with torch.no_grad():
            output = self.hf(
                input_ids=torch.tensor([plain]),
                mm_token_type_ids=torch.tensor([[int(token < 0) for token in ids]], dtype=torch.int32),
                pixel_values=torch.cat(pixels),
                image_grid_thw=torch.tensor(grids),
                use_cache=False,
            )
        return output.logits[0].float()


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe", "sections"])
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    from transformers.models import qwen3_5, qwen3_5_moe

    family = "qwen35" if request.param == "sections" else request.param
    modules = {"qwen35": (qwen3_5, "Qwen3_5"), "qwen35moe": (qwen3_5_moe, "Qwen3_5Moe")}
    module, prefix = modules[family]
    settings = vision_settings("small", out=64)
    text = {**_RECIPES[family][2], "num_hidden_layers": 4}
    if request.param == "sections":
        # The published share of the axes in a larger head: 11, 11, 10 of 32.
        rope = {**_HYBRID["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]}
        text |= {"head_dim": 128, "rope_parameters": rope}
    config = getattr(module, f"{prefix}Config")(
        text_config=text,
        vision_config=settings,
        image_token_id=PAD,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=293,
    )
    config._attn_implementation = "eager"
    model = randomise(getattr(module, f"{prefix}ForConditionalGeneration")(config), 5)
    folder = tmp_path_factory.mktemp(request.param)
    language = getattr(module, f"{prefix}ForCausalLM")(config.text_config)
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    convert(save_hf(language, config.text_config, folder / "hf"), folder / "model.gguf", mix="f32")
    mmproj = write_mmproj(folder / "mmproj.gguf", settings, model.model.visual.state_dict())
    with GGUFFile.open(folder / "model.gguf") as file, GGUFFile.open(mmproj) as encoder:
        target, tower = Decoder.load(file), VisionTower(encoder, torch.device("cpu"), torch.float32)
    model.set_experts_implementation("eager")  # others have no float64
    # In float32 the reference's own error is up to 1.1e-5, ours 5e-6.
    return Seer(model.double(), folder / "model.gguf", target, tower)


def prompt_of(name: str, *, seed: int = 1) -> tuple[list[int], list[PlacedPicture]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    images: list[PlacedPicture] = []
    for part in PROMPTS[name]:
        if isinstance(part, int):
            ids += torch.randint(0, PAD, (part,), generator=generator).tolist()
        else:
            ids.append(START)
            images.append(PlacedPicture(len(ids), picture(image(*part), most_tokens=96)))
            ids += [*images[-1].picture.ids, END]
    return ids, images


def finished(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Reading:
    """A sequence that reads a prompt as the engine does."""

    def __init__(self, target: Target, tower: VisionTower):
        self.target, self.encoder = target, PictureEncoder(tower)
        self.states = SequenceStates(target.spec, max_ctx=512)
        self.slot = self.states.open()
        self.slots = torch.tensor([self.slot])

    def chunk(self, ids: list[int], images: list[PlacedPicture], start: int, stop: int) -> torch.Tensor:
        tokens = [max(0, token) for token in ids[start:stop]]
        self.states.reserve(self.slot, len(tokens))
        step = Step.chunk(self.slots, torch.tensor([tokens]), self.states.buffers.lengths[self.slots])
        step = replace(step, images=finished(self.encoder.chunk(images, start, stop)))
        output = self.target.forward(step, self.states.buffers)
        self.states.advance(step)
        self.states.set_offset(self.slot, offset_at(images, stop))
        return self.target.logits(output.hidden[0])

    def step(self, token: int) -> torch.Tensor:
        self.states.reserve(self.slot, 1)
        lengths = self.states.buffers.lengths[self.slots]
        step = Step.tree(self.slots, torch.tensor([[token]]), torch.tensor([[-1]]), lengths)
        _, logits = self.target.verify(step, self.states.buffers)
        commit(self.states, step, torch.tensor([0]))
        return logits[0]

    def prompt(self, ids: list[int], images: list[PlacedPicture], *, chunk: int = 512) -> torch.Tensor:
        bounds = range(0, len(ids), chunk)
        return torch.cat([self.chunk(ids, images, start, min(start + chunk, len(ids))) for start in bounds])


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative RMS error."""
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_the_references(seer: Seer, name: str) -> None:
    ids, images = prompt_of(name)
    expected = seer.expected(ids, images)
    assert error(Reading(seer.target, seer.tower).prompt(ids, images), expected) < 1e-5
    # Of 50 tokens: chunks end inside images.
    assert error(Reading(seer.target, seer.tower).prompt(ids, images, chunk=50), expected) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("name", ["two", "row"])
def test_steps_after_images_are_the_references(seer: Seer, name: str) -> None:
    ids, images = prompt_of(name)
    read = images[-1].end + 2
    reading = Reading(seer.target, seer.tower)
    reading.prompt(ids[:read], images)
    logits = torch.cat([reading.step(token) for token in ids[read:]])
    assert error(logits, seer.expected(ids, images)[read:]) < 1e-5


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("seer", ["qwen35", "sections"], indirect=True)
def test_native_logits_are_the_references(seer: Seer) -> None:
    ids, images = prompt_of("two")
    with GGUFFile.open(seer.path) as file:
        target = NativeDecoder.load(file, Library(1))
    reading = Reading(target, seer.tower)
    logits = torch.cat([reading.prompt(ids[:-4], images, chunk=50), *map(reading.step, ids[-4:])])
    assert error(logits, seer.expected(ids, images)) < 5e-5


@torch.inference_mode()
@pytest.mark.parametrize("name", ["middle", "two", "row"])
def test_texts_of_an_engine_are_the_references(seer: Seer, name: str) -> None:
    """Read in chunks, then from a snapshot after the last image, with its offset."""
    ids, images = prompt_of(name)
    boundaries: dict[int, SnapshotKind] = {images[-1].end: "image"}
    ends = frozenset({PAD})  # which the reference would take for an image
    request = Request(ids, max_tokens=12, stop_ids=ends, boundaries=boundaries, images=tuple(images))
    options: dict[str, Any] = {
        "max_ctx": 512,
        "prefill_chunk": 50,
        "prefix_cache": PrefixCacheConfig(1 << 28),
    }
    engine = Engine(seer.target, tower=seer.tower, **options)
    for cached in (0, images[-1].end):
        text, done = run(engine, request)
        assert text and done.stats.cached_tokens >= cached
        assert text == seer.expected([*ids, *text], images)[len(ids) - 1 : -1].argmax(-1).tolist()


@torch.inference_mode()
def test_planted_positions_are_seen(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, images = prompt_of("middle")
    expected = seer.expected(ids, images)
    reading = Reading(seer.target, seer.tower)
    reading.prompt(ids[:-1], images)
    reading.states.set_offset(reading.slot, 0)  # text after the image at its index
    assert error(reading.step(ids[-1]), expected[-1:]) > 1e-3

    def plain(images: list[PlacedPicture], start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop).repeat(3, 1)

    def turned(images: list[PlacedPicture], start: int, stop: int) -> torch.Tensor:
        return rope_positions(images, start, stop)[[0, 2, 1]]

    for mistake in (plain, turned):
        monkeypatch.setattr(engine_images, "rope_positions", mistake)
        assert error(Reading(seer.target, seer.tower).prompt(ids, images), expected) > 1e-4


def test_positions_of_a_prompt() -> None:
    small = Picture(np.zeros((96, 64, 3), np.uint8), b"")  # 3 x 2 tokens
    placed = [PlacedPicture(start, small) for start in (3, 11)]
    whole = rope_positions(placed, 0, 20)
    assert whole[0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, *[8] * 6, 11, 12, 13]
    assert whole[1].tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 8, 9, 9, 10, 10, 11, 12, 13]
    assert whole[2].tolist() == [0, 1, 2, 3, 4, 3, 4, 3, 4, 6, 7, 8, 9, 8, 9, 8, 9, 11, 12, 13]
    assert [offset_at(placed, index) for index in (0, 3, 8, 9, 16, 17, 30)] == [0, 0, 0, -3, -3, -6, -6]
    for start in range(20):
        for stop in range(start + 1, 21):
            assert torch.equal(rope_positions(placed, start, stop), whole[:, start:stop])
