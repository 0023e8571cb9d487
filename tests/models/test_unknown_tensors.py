"""A tensor that no model of ours reads is refused before any weight is read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.decoder import Decoder
from bough.models.native import NativeDecoder
from tests.kernels.native_library import needs_native, opened


def with_tensor(path: Path, out: Path, name: str) -> Path:
    with GGUFFile.open(path) as file, GGUFWriter(out, "qwen35") as writer:
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.alignment"):
                writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type)
        writer.add_tensor(name, (4,), QuantType.F32)
        writer.write_header()
        for each in file.tensors:
            writer.write_tensor(each, file.raw(each))
        writer.write_tensor(name, np.zeros(4, np.float32))
    return out


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_unknown_tensors(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    path = with_tensor(tiny_model(), tmp_path / "odd.gguf", "blk.1.attn_sinks.weight")

    def raw(file: GGUFFile, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(GGUFFile, "raw", raw)
    with (
        GGUFFile.open(path) as file,
        pytest.raises(UnsupportedModel, match=r"tensor blk\.1\.attn_sinks\.weight is not part of"),
    ):
        if native:
            NativeDecoder.load(file, opened(1))
        else:
            Decoder.load(file)
