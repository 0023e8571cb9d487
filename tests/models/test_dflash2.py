"""DFlash2 drafts, in both file formats, against a plain implementation of the same description."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.dflash import DFlashDraft, DynamicConvolution
from bough.models.draft_spec import SecondSpec
from bough.models.spec import ModelSpec
from tests.models.plain_dflash import PlainDraft
from tests.models.test_dflash import compare
from tests.tiny_draft import SECOND, arrays, draft_config, gguf_metadata, save_draft, save_gguf

TOLERANCE = 1e-5
# As the published draft of Qwen3.8-27B.
PUBLISHED = {
    "nested": True,
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 13,
    "is_causal": False,
    "method": {**SECOND, "block_size": 8},
}
CASES: dict[str, dict[str, Any]] = {
    "as published": PUBLISHED,
    "settings at the top": {"method": SECOND},
    "three taps, smaller groups": {
        "nested": True,
        "method": {**SECOND, "conv_kernel_size": 3, "conv_group_size": 4, "block_size": 16},
    },
    "a block shorter than a kernel": {"method": {**SECOND, "conv_kernel_size": 5, "block_size": 3}},
}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        return ModelSpec.from_gguf(file)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_block_equals_the_plain_draft(case: str, form: str, target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, **CASES[case])
    tensors = save_draft(tmp_path, config)
    path = tmp_path
    if form == "gguf":
        path = save_gguf(tmp_path / "draft.gguf", gguf_metadata(config), tensors)
    draft = DFlashDraft.load(path, target)
    settings = {**SECOND, **CASES[case]["method"]}
    assert draft.spec.second == SecondSpec(
        kernel=settings["conv_kernel_size"], group=settings["conv_group_size"], rank=24, candidates=6
    )
    assert compare(draft, PlainDraft(config, arrays(tensors)), rounds=(20, 3, 8)) <= TOLERANCE


CONVOLVE = DynamicConvolution._convolve
BUGS: dict[str, Callable[[DynamicConvolution, Tensor, Tensor, int], Tensor]] = {
    "sides swapped": lambda conv, x, kernels, side: CONVOLVE(conv, x, kernels, 1 - side),
    "no dynamic part": lambda conv, x, kernels, side: CONVOLVE(conv, x, torch.zeros_like(kernels), side),
    "taps in the other order": lambda conv, x, kernels, side: CONVOLVE(conv, x, kernels.flip(3), side),
    "rows in the other order": lambda conv, x, kernels, side: CONVOLVE(
        conv, x.flip(1), kernels.flip(1), side
    ).flip(1),
    "kernels of the row before": lambda conv, x, kernels, side: CONVOLVE(conv, x, kernels.roll(1, 1), side),
    "nothing after the half": lambda conv, x, kernels, side: x if side else CONVOLVE(conv, x, kernels, 0),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(
    bug: str, target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = draft_config(target, **PUBLISHED)
    plain = PlainDraft(config, arrays(save_draft(tmp_path, config)))
    monkeypatch.setattr(DynamicConvolution, "_convolve", BUGS[bug])
    assert compare(DFlashDraft.load(tmp_path, target), plain, rounds=(5, 3)) > 1e-3


def test_channels_of_a_group_are_neighbours(target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, **PUBLISHED)
    tensors = save_draft(tmp_path, config)
    for name in tensors:
        if "kernel_projection" in name:
            tensors[name] = tensors[name].unflatten(0, (2, 2, -1)).flip(2).flatten(0, 2)
    assert compare(DFlashDraft.load(tmp_path, target), PlainDraft(config, arrays(tensors))) > 1e-3


def test_wrong_files(target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, **{**PUBLISHED, "method": {**SECOND, "conv_group_size": 24}})
    save_draft(tmp_path / "group", config)
    with pytest.raises(UnsupportedModel, match="conv_group_size is 24, needed a divisor of 64"):
        DFlashDraft.load(tmp_path / "group", target)
    config = draft_config(target, **PUBLISHED)
    tensors = save_draft(tmp_path, config)
    del tensors["layers.1.mlp_conv.base_kernel"]
    path = save_gguf(tmp_path / "draft.gguf", gguf_metadata(config), tensors)
    with pytest.raises(ModelFileError, match="ffn_conv_base"):
        DFlashDraft.load(path, target)
    # The tensors without the settings that say what they are for.
    plain = draft_config(target)
    keys = gguf_metadata(plain)
    path = save_gguf(tmp_path / "plain.gguf", keys, save_draft(tmp_path / "second", config))
    with pytest.raises(UnsupportedModel, match="is not part of a DFlash draft"):
        DFlashDraft.load(path, target)
