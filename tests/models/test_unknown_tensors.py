"""A tensor that no model of ours reads is refused before any weight is read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.native import NativeDecoder
from tests.kernels.native_library import needs_native, opened
from tests.models.biased import with_vectors


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_unknown_tensors(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    path = with_vectors(
        tiny_model(), tmp_path / "odd.gguf", {"blk.1.attn_sinks.weight": np.zeros(4, np.float32)}
    )

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
