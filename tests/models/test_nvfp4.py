"""NVFP4 matrices with the scales beside them: the same bits as a file of the floats that they stand for."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.decoder import Decoder
from tests.models.test_biases import logits_of

IDS = torch.arange(60, 90)


def matrices(source: Path) -> dict[str, tuple[int, ...]]:
    with GGUFFile.open(source) as file:
        infos = [info for info in file.tensors.values() if info.shape[-1] % 64 == 0]
        return {
            info.name: info.shape for info in infos if len(info.shape) > 1 and "ffn_gate_inp" not in info.name
        }


def packed(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random NVFP4 rows of weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 64, 36), generator=generator)
    blocks[..., :4] = 0x30 + blocks[..., :4] % 16
    return blocks.to(torch.uint8).flatten(-2)


def written(source: Path, path: Path, *, floats: bool, scales: Mapping[str, Tensor]) -> Path:
    """Copy a model with random matrices in NVFP4, or as the floats that these and their scales mean."""
    shapes = matrices(source)
    rows = {name: packed(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    with GGUFFile.open(source) as file, GGUFWriter(path, file.architecture) as writer:
        for key, value in file.metadata.items():
            if key != "general.architecture":
                writer.add(key, value)
        for info in file.tensors.values():
            type = info.type if info.name not in rows else QuantType.F32 if floats else QuantType.NVFP4
            writer.add_tensor(info.name, info.shape, type)
        beside = {} if floats else {f"{name.removesuffix('weight')}scale": scales[name] for name in scales}
        if not floats:
            beside["blk.0.attn_q.input_scale"] = torch.tensor([3.0])
        for name, values in beside.items():
            writer.add_tensor(name, tuple(values.shape), QuantType.F32)
        writer.write_header()
        for info in file.tensors.values():
            if info.name not in rows:
                writer.write_tensor(info.name, file.raw(info.name))
            elif floats:
                values, scale = dequantise(rows[info.name], QuantType.NVFP4), scales.get(info.name)
                if scale is not None:
                    values = values * scale.view(-1, *[1] * (values.ndim - 1))
                writer.write_tensor(info.name, values.numpy())
            else:
                writer.write_tensor(info.name, rows[info.name].numpy())
        for name, values in beside.items():
            writer.write_tensor(name, values.numpy())
    return path


@pytest.fixture(params=["qwen3", "qwen3moe"])
def source(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(request.param, width=128)


def scales_of(source: Path) -> dict[str, Tensor]:
    """A scale for each matrix but the output's, which files may lack; experts have one each."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: shape for name, shape in matrices(source).items() if name != "output.weight"}
    counts = {name: shape[0] if len(shape) > 2 else 1 for name, shape in shapes.items()}
    return {name: 0.02 + 0.02 * torch.rand(count, generator=generator) for name, count in counts.items()}


def test_the_bits_are_those_of_the_floats(source: Path, tmp_path: Path) -> None:
    scales = scales_of(source)
    nvfp4 = written(source, tmp_path / "nvfp4.gguf", floats=False, scales=scales)
    floats = written(source, tmp_path / "floats.gguf", floats=True, scales=scales)
    with GGUFFile.open(nvfp4) as file, GGUFFile.open(floats) as other:
        assert torch.equal(logits_of(Decoder.load(file), IDS), logits_of(Decoder.load(other), IDS))
        half = Decoder.load(file, expand=False)
        expected = logits_of(Decoder.load(other), IDS)
        error = (logits_of(half, IDS) - expected).norm() / expected.norm()
        assert error < 1e-2  # held in float16
    plain = written(source, tmp_path / "plain.gguf", floats=False, scales={})
    with GGUFFile.open(plain) as file:
        assert not torch.allclose(logits_of(Decoder.load(file), IDS), expected, atol=0.1)


def test_a_scale_of_another_type_is_refused(source: Path, tmp_path: Path) -> None:
    path = written(
        source, tmp_path / "x.gguf", floats=False, scales={"blk.0.attn_norm.weight": torch.ones(1)}
    )
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_norm\.scale"):
        Decoder.load(file)
