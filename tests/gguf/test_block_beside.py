"""MTP blocks that lie in a file beside the model's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.errors import BadGGUF
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import rotation_of
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec, has_mtp
from tests.gguf_edit import edited
from tests.models.rotated import write_rotated

COUNT, LAYERS = "qwen35.nextn_predict_layers", "qwen35.block_count"


def cut(
    whole: Path, folder: Path, block: str = "mtp-Tiny-Q4_0.gguf", keys: Mapping[str, Any] | None = None
) -> Path:
    """Cut a model into its trunk and a file with the block, an embedding and a norm; return the trunk."""
    with GGUFFile.open(whole) as file:
        depth = file.metadata[LAYERS] - 1
        names = [name for name in file.tensors if name.startswith(f"blk.{depth}.")]
        ours = (*names, "token_embd.weight", "output_norm.weight")
        others = [name for name in file.tensors if name not in ours]
    trunk = edited(
        whole, folder / "Tiny-Q8_0.gguf", keys={LAYERS: depth, COUNT: None, **(keys or {})}, without=names
    )
    edited(whole, folder / block, without=others)
    return trunk


@pytest.mark.parametrize("quant", ["Q4_0", "PQ2_0", "PTQ1_0"])
def test_the_block_is_part_of_the_model(tiny_model: Callable[..., Path], tmp_path: Path, quant: str) -> None:
    whole = tiny_model(mtp=True)
    trunk = cut(whole, tmp_path, f"mtp-Tiny-{quant}.gguf")
    with GGUFFile.open(trunk) as file, GGUFFile.open(whole) as expected:
        assert dict(file.metadata) == dict(expected.metadata) and set(file.tensors) == set(expected.tensors)
        assert all(np.array_equal(file.raw(name), expected.raw(name)) for name in file.tensors)
        assert has_mtp(file, ModelSpec.from_gguf(file))
        assert Decoder.load(file).spec.mtp_layers == 1
    with GGUFFile.open(tmp_path / f"mtp-Tiny-{quant}.gguf") as file:
        assert len(file.paths) == 1


@pytest.mark.parametrize("block", ["mtp-Other-Q4_0.gguf", "mtp-Tiny2-Q4_0.gguf"])
def test_the_block_of_another_model_is_left_alone(
    tiny_model: Callable[..., Path], tmp_path: Path, block: str
) -> None:
    with GGUFFile.open(cut(tiny_model(mtp=True), tmp_path, block)) as file:
        assert len(file.paths) == 1 and not has_mtp(file, ModelSpec.from_gguf(file))


def test_a_block_that_does_not_fit_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    trunk = cut(tiny_model(mtp=True), tmp_path)
    edited(tiny_model(mtp=True, layers=4), tmp_path / "mtp-Tiny-Q4_0.gguf")
    with pytest.raises(BadGGUF, match=r"mtp-Tiny-Q4_0.gguf: .* are \('qwen35', 64, 5, 1\), needed"):
        GGUFFile.open(trunk)


def test_a_block_in_the_basis_of_its_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Both files name their own rotated weights; another basis is refused."""
    rotated, plain = write_rotated(tiny_model(width=128, layers=4, mtp=True), tmp_path, block=32)
    names = "prism.hadamard.weight_names"
    with GGUFFile.open(rotated) as file:
        listed = file.metadata[names]
    ours = [name for name in listed if not name.startswith("blk.4.")]
    assert 0 < len(ours) < len(listed)
    trunk = cut(rotated, tmp_path, keys={names: ours})
    with GGUFFile.open(trunk) as file, GGUFFile.open(rotated) as expected:
        assert rotation_of(file).names == rotation_of(expected).names
        assert set(file.tensors) == set(expected.tensors)
    block = tmp_path / "mtp-Tiny-Q4_0.gguf"
    edited(block, tmp_path / "block.gguf", keys={"prism.hadamard.block_size": 16}).replace(block)
    with pytest.raises(BadGGUF, match=r"block_size is 16, needed 32 as in Tiny-Q8_0\.gguf"):
        GGUFFile.open(trunk)
    cut(plain, tmp_path)
    edited(rotated, block)
    with pytest.raises(BadGGUF, match="is 1, needed 'none'"):
        GGUFFile.open(trunk)
