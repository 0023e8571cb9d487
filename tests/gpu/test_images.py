"""Image turns on a GPU: the tower near float32, its bits the same again, and the text of plain decoding."""

from pathlib import Path

import pytest
import torch

from bough.engine.events import Done, Tokens
from bough.engine.images import PictureEncoder, PlacedPicture
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Request
from bough.gguf.reader import GGUFFile
from bough.models.vision import VisionTower
from tests.engine.driving import run
from tests.every_draft import PROPOSERS, EveryDraft
from tests.gpu.inputs import DEVICE
from tests.images.seeing import make_seeing, seeing_request, shown
from tests.images.tiny_tower import SHAPES, random_weights, vision_settings, write_mmproj

pytestmark = pytest.mark.gpu

FIRST, SECOND = shown(300, 200), shown(64, 500)
PARTS = [[40, FIRST, 30], [25, SECOND, 9, FIRST, 14]]
SAMPLINGS = [SamplingParams(seed=1), SamplingParams(temperature=0.8, top_p=0.95, seed=2)]


def requests() -> list[Request]:
    pairs = zip(PARTS, SAMPLINGS, strict=True)
    return [seeing_request(parts, max_tokens=100, sampling=sampling) for parts, sampling in pairs]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> EveryDraft:
    folder = tmp_path_factory.mktemp("seeing")
    target = make_seeing(folder, layers=8, mtp=True, width=256, mix="q4_k_m", kind="BF16")
    return EveryDraft(target, tmp_path_factory.mktemp("drafts"), device=str(DEVICE))


@pytest.fixture(scope="module")
def plain(drafts: EveryDraft) -> list[list[int]]:
    engine = drafts.plain().engine
    return [run(engine, request)[0] for request in requests()]


@pytest.mark.parametrize("proposers", PROPOSERS)
def test_same_text(drafts: EveryDraft, plain: list[list[int]], proposers: str) -> None:
    for graphs in (False, True):
        engine = drafts.session(proposers, budget=22, graphs=graphs).engine
        for request, expected in zip(requests(), plain, strict=True):
            assert run(engine, request)[0] == expected


@pytest.mark.parametrize("adaptive", [False, True])
def test_same_text_of_several_at_once(drafts: EveryDraft, plain: list[list[int]], adaptive: bool) -> None:
    engine = drafts.session("dflash2, mtp, lookup", budget=22, parallel=2, adaptive=adaptive).engine
    sequences = [engine.add(request) for request in requests()]
    texts: list[list[int]] = [[] for _ in sequences]
    ended = 0
    while ended < len(sequences):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[sequences.index(sequence)] += event.ids
            ended += isinstance(event, Done)
    assert texts == plain


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tower_is_near_float32(tmp_path: Path, shape: str) -> None:
    settings = vision_settings(shape)
    path = write_mmproj(tmp_path / "mmproj.gguf", settings, random_weights(settings), kind="BF16")
    rows = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16), (DEVICE, torch.bfloat16)):
        with GGUFFile.open(path) as file:
            encoder = PictureEncoder(VisionTower(file, torch.device(device), dtype))
        steps = encoder.chunk([PlacedPicture(0, FIRST)], 0, FIRST.tokens)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                rows.append(end.value.embeddings)
                break
    assert torch.equal(rows[1], rows[2])
    assert (rows[1].float().cpu() - rows[0]).norm() <= 2e-2 * rows[0].norm()
