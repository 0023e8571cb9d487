"""Damaged model files in the native library: refused before its code sees them, or they run to the end."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.errors import BoughError
from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.native import Library
from bough.models.native import NativeDecoder, native_gap
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.state.sequences import SequenceStates
from tests.gguf.test_fuzz import header_bytes, mutate
from tests.kernels.native_library import needs_native, opened

pytestmark = needs_native


@torch.inference_mode()
def load_and_step(path: Path, library: Library) -> str:
    """Load a file, run a chunk and a tree; return what came of it."""
    kv = (FORMATS["f32"], FORMATS["f32"])
    try:
        with GGUFFile.open(path) as file:
            spec = ModelSpec.from_gguf(file)
            if (gap := native_gap(file, spec, kv)) is not None:
                return "gap" if gap else "no gap"
            target = NativeDecoder.load(file, library)
    except BoughError as error:
        return type(error).__name__
    states = SequenceStates(spec, max_ctx=64, max_rows=4)
    slot = states.open()
    states.reserve(slot, 12)
    slots = torch.tensor([slot])
    tokens = torch.arange(8)[None] % spec.vocab_size
    chunk = Step.chunk(slots, tokens, states.buffers.lengths[slots])
    target.forward(chunk, states.buffers)
    states.advance(chunk)
    lengths = states.buffers.lengths[slots]
    tree = Step.tree(slots, tokens[:, :3], torch.tensor([[-1, 0, 0]]), lengths)
    target.verify(tree, states.buffers)
    return "ran"


def survive(path: Path, folder: Path, count: int, *, seed: int) -> Counter[str]:
    whole, library, rng = path.read_bytes(), opened(1), random.Random(seed)
    with GGUFFile.open(path) as file:
        header = header_bytes(whole, file)
    sizes = whole.find(b"tokenizer.ggml.")  # what comes before are the model's sizes
    assert load_and_step(path, library) == "ran"
    outcomes: Counter[str] = Counter()
    damaged = folder / "damaged.gguf"
    for index in range(count):
        content = (
            mutate(whole, header, rng)
            if index % 3 == 0
            else changed(whole, rng, *((0, sizes) if index % 3 == 1 else (header // 2, header)))
        )
        damaged.unlink(missing_ok=True)  # a mapped file must not be cut
        damaged.write_bytes(content)
        outcomes[load_and_step(damaged, library)] += 1
    return outcomes


def changed(whole: bytes, rng: random.Random, start: int, stop: int) -> bytes:
    """Change one byte: sizes and types of tensors stay readable, and become wrong."""
    content, at = bytearray(whole), rng.randrange(start, stop)
    content[at] = rng.choice((0, 1, 255, content[at] ^ 1 << rng.randrange(8), (content[at] + 1) % 256))
    return bytes(content)


@pytest.mark.parametrize("family", ["qwen35", "llama"])
def test_damaged_files(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    outcomes = survive(tiny_model(family, layers=4), tmp_path, 300, seed=1)
    assert outcomes["ran"] > 20 and outcomes.total() - outcomes["ran"] > 100, outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["qwen35", "qwen3", "qwen2", "llama"])
def test_thousands_of_damaged_files(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """20,000 in all, with quantised weights."""
    path = tiny_model(family, layers=4, width=256, mix="q4_k_m")
    outcomes = survive(path, tmp_path, 5_000, seed=2)
    assert outcomes["ran"] > 100 and outcomes.total() - outcomes["ran"] > 1_000, outcomes
