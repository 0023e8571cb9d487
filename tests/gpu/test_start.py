"""A start on a GPU: all kernels are compiled ahead, and weights read ahead are those of the file."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config import DraftConfig, EngineConfig
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.weights import WeightLoader
from bough.session.loading import load_session
from tests.gpu.fresh_process import run_in_fresh_process
from tests.gpu.inputs import DEVICE
from tests.gpu.texts import embedded_pair, expected_texts, generate

pytestmark = pytest.mark.gpu


def first_start(caches: str) -> dict[str, list[str]]:
    """Start the embedded pair with empty caches and answer; return what is compiled in each phase."""
    from triton import knobs

    from bough.kernels.runtime import nvrtc

    knobs.cache.dir = caches
    found: list[str] = []
    phases: dict[str, list[str]] = {}
    compile_cuda = nvrtc._compile

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(src.name)

    def compiled_cuda(library: Any, source: str, options: list[str]) -> bytes:
        found.append(" ".join(options))
        return compile_cuda(library, source, options)

    def end(phase: str) -> None:
        phases[phase] = found.copy()
        found.clear()

    knobs.compilation.listener, nvrtc._compile = listener, compiled_cuda
    target, draft = embedded_pair()
    session = load_session(target, EngineConfig("cuda", max_ctx=4096, draft=DraftConfig(draft)), graphs=False)
    end("ahead")
    assert session.engine.warmup.capture()
    end("capturing")
    for prompt in ("Hello", expected_texts()[0].prompt, "Write a sorted list of numbers. " * 60):
        assert generate(session, prompt, max_tokens=32).tokens
    end("answers")
    return phases


def test_all_kernels_are_compiled_ahead(tmp_path: Path) -> None:
    phases = run_in_fresh_process(first_start, str(tmp_path))
    assert len(phases["ahead"]) > 50 and len(set(phases["ahead"])) > 30
    assert phases["capturing"] == [] and phases["answers"] == []
    assert list((tmp_path / "bough").glob("*.compiled"))  # the next start has nothing to do


@torch.inference_mode()
def test_weights_read_ahead_are_those_of_the_file() -> None:
    with GGUFFile.open(embedded_pair()[0]) as file:
        spec = ModelSpec.from_gguf(file)
        ahead = Decoder.load(file, device=DEVICE)
        plain = Decoder(spec, WeightLoader(file, device=DEVICE), DEVICE)
    assert torch.equal(ahead.embed.data, plain.embed.data)
    rows = torch.randn(3, spec.width, device=DEVICE)
    assert torch.equal(ahead.logits(rows), plain.logits(rows))
    for one, other in zip(ahead._blocks, plain._blocks, strict=True):
        for mine, its in zip(one._ffn._in.matrices, other._ffn._in.matrices, strict=True):
            assert torch.equal(mine.data.data, its.data.data)
            assert torch.equal(mine.data.row_scale, its.data.row_scale)
