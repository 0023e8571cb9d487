"""The native draft against the plain implementation, and against torch with the weights of the package."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.gguf.reader import GGUFFile
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.native import NativeLoader
from bough.models.native_draft import NativeDraft, draft_gap
from bough.models.spec import ModelSpec
from tests.kernels.native_library import needs_native, opened
from tests.models.plain_dflash import PlainDraft
from tests.models.test_dflash import CASES, SLIDING, TOLERANCE, compare
from tests.tiny_draft import arrays, draft_config, poisoned, random_rows, save_draft

pytestmark = needs_native

PAIR = Path(__file__).parents[2] / "src/bough/pair"


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        return ModelSpec.from_gguf(file)


def native(path: Path, target: ModelSpec, threads: int = 1) -> NativeDraft:
    with open_draft(path, target) as (spec, source):
        assert draft_gap(source, spec) is None
        return NativeDraft(spec, NativeLoader(source, opened(threads)))


@pytest.mark.parametrize("case", [case for case in CASES if case != "other sizes"])
def test_block_equals_the_plain_draft(case: str, target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, **CASES[case])
    tensors = save_draft(tmp_path, config)
    assert compare(native(tmp_path, target, threads=2), PlainDraft(config, arrays(tensors))) <= TOLERANCE


@pytest.mark.parametrize("context", [1, 7, 31, 70])
def test_rings_that_wrap(context: int, target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, layer_types=SLIDING, sliding_window=13)
    tensors = save_draft(tmp_path, config)
    plain = PlainDraft(config, arrays(tensors), context=context)
    found = compare(native(tmp_path, target), plain, rounds=(5, 140, 3, 8, 1, 90, 2), context=context)
    assert found <= TOLERANCE


def test_skipped_positions_are_not_seen(target: ModelSpec, tmp_path: Path) -> None:
    save_draft(tmp_path, draft_config(target))
    slots, found = torch.zeros(1, dtype=torch.int64), []
    for draft in (DFlashDraft.load(tmp_path, target), native(tmp_path, target)):
        buffers = poisoned(draft)
        for pool in (*buffers.keys, *buffers.values):
            pool.fill_(9.0)  # torch multiplies hidden positions by zero: no NaN
        draft.append(random_rows(1, 20, len(draft.spec.taps) * target.width), slots, buffers, skipped=300)
        found.append(draft.block(random_rows(1, 16, target.width, seed=1), slots, buffers))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_the_pair_in_the_package() -> None:
    """8-bit activations and weights: near enough to rank the same candidates."""
    with GGUFFile.open(PAIR / "target.gguf") as file:
        spec = ModelSpec.from_gguf(file)
    slots, found = torch.zeros(1, dtype=torch.int64), []
    for draft in (DFlashDraft.load(PAIR / "draft.gguf", spec), native(PAIR / "draft.gguf", spec, 2)):
        buffers = poisoned(draft)
        draft.append(random_rows(1, 200, len(draft.spec.taps) * spec.width), slots, buffers)
        found.append(draft.block(random_rows(1, 16, spec.width, seed=1), slots, buffers))
    assert (found[0] - found[1]).norm() < 0.03 * found[0].norm()


def test_a_draft_that_native_code_does_not_run(target: ModelSpec, tmp_path: Path) -> None:
    save_draft(tmp_path, draft_config(target, **CASES["other sizes"]))
    with open_draft(tmp_path, target) as (spec, source):
        assert "head size of 10" in (draft_gap(source, spec) or "")
