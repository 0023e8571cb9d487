"""Weights of one and two bits, rotated or not, and NVFP4: the text of plain decoding with trees."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.engine.engine import Engine, Request, Tokens
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.models.decoder import Decoder, Target
from bough.models.native import NativeDecoder
from bough.spec.drafter import Drafter
from tests.engine.oracles import Oracle, RandomTrees
from tests.engine.test_lossless import SAMPLINGS
from tests.kernels.native_library import needs_native, opened
from tests.models.rotated import write_rotated
from tests.models.test_nvfp4 import scales_of, written

TYPES = (QuantType.PQ2_0, QuantType.PTQ1_0, QuantType.Q2_0, QuantType.Q1_0)
PROMPT, COUNT = [72, 101, 108, 108, 111, 32, 119, 111], 60
every_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)


def text(target: Target, drafter: Drafter | None = None) -> list[int]:
    engine = Engine(target, max_ctx=256, drafter=drafter, max_rows=16)
    request = Request(prompt=PROMPT, max_tokens=COUNT, sampling=SAMPLINGS["T 0.7, filters"])
    return [id for event in engine.generate(request) if isinstance(event, Tokens) for id in event.ids]


def same_text(target: Target) -> None:
    expected, vocabulary = text(target), target.spec.vocab_size
    assert len(expected) == COUNT
    assert text(target, RandomTrees(len(PROMPT), expected, vocabulary=vocabulary)) == expected
    assert text(target, Oracle(len(PROMPT), expected, budget=15, vocabulary=vocabulary)) == expected


@every_type
def test_in_torch(tiny_model: Callable[..., Path], tmp_path: Path, type: QuantType) -> None:
    rotated, _ = write_rotated(tiny_model(width=256, layers=4), tmp_path, block=128, type=type)
    with GGUFFile.open(rotated) as file:
        same_text(Decoder.load(file))


@needs_native
@every_type
def test_in_native_code(tiny_model: Callable[..., Path], tmp_path: Path, type: QuantType) -> None:
    rotated, _ = write_rotated(tiny_model(width=256, layers=4), tmp_path, block=128, type=type)
    with GGUFFile.open(rotated) as file:
        same_text(NativeDecoder.load(file, opened(2)))


def test_nvfp4(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("qwen3", width=128)
    with GGUFFile.open(written(source, tmp_path / "x.gguf", floats=False, scales=scales_of(source))) as file:
        same_text(Decoder.load(file))
