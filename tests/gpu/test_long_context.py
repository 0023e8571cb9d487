"""200,000 tokens of a grown 27B: within 24 GiB, and the same KV cache and text without the limit."""

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bough.engine.engine import Engine
from bough.kernels.kv_cache.format import KVFormat
from bough.models.decoder import Decoder
from bough.state.sequences import CacheConfig
from tests.gpu.device_memory import PeakMemory
from tests.gpu.fresh_process import run_in_fresh_process
from tests.gpu.long_text import DEPTHS, Needles, compile_slices, long_text, read, stored
from tests.gpu.numerics import relative_error
from tests.gpu.texts import NEAR_TIE, divergence, load_session

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

GIB = 1 << 30
LIMIT = 24 * GIB
WHOLE = 262_144  # tokens of context asked for within the limit
PROMPT = 200_000
GENERATED = 64  # tokens after the prompt


@dataclass(frozen=True)
class Limited:
    """Results of the process with the limit."""

    prompt: list[int]
    needles: list[int]  # their positions
    kv: tuple[KVFormat, KVFormat]
    chunk: int
    found: Needles


def limited(folder: Path, tokens: int, out: Path) -> None:
    """Process the text within the limit, in the KV format that the planner picks, and save the results."""
    peak = PeakMemory()
    with peak:
        session = load_session(
            folder / "target.gguf", folder / "draft.gguf", graphs=False, prefix_cache=0, vram_limit=LIMIT,
            max_ctx=WHOLE,
        )  # fmt: skip
    plan, engine = session.plan, session.engine
    # No other thread may call CUDA while a graph is captured; what the capture takes stays allocated.
    assert engine.warmup.capture(), "no CUDA graphs"
    peak.sample()
    compile_slices(engine)
    release()
    assert plan.max_ctx == WHOLE, f"context of {plan.max_ctx}"
    prompt, needles = long_text(session, min(tokens, plan.max_ctx - 2 * GENERATED))
    with peak:
        found = read(engine, prompt, needles, GENERATED)
    assert peak.samples > 100
    assert peak.bytes <= LIMIT, f"{peak.bytes / GIB:.3f} GiB in use, limit {LIMIT / GIB}"
    assert peak.bytes <= plan.total, f"{peak.bytes / GIB:.3f} GiB in use, planned {plan.total / GIB:.3f}"
    assert 0 < len(found.tokens) <= GENERATED
    assert bool(found.rows.isfinite().all()), "K or V are not finite"
    torch.save(Limited(prompt, needles, plan.kv, plan.prefill_chunk, found), out)


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def unlimited(folder: Path, saved: Path) -> None:
    """Process it again without the limit, in the same KV format and in 16 bits, by plain decoding."""
    other: Limited = torch.load(saved, weights_only=False)
    session = load_session(
        folder / "target.gguf", folder / "draft.gguf", graphs=False, prefix_cache=0, max_ctx=None
    )
    target, kv = session.engine.target, session.plan.kv
    del session
    compare(target, other, kv=other.kv, prefill_chunk=other.chunk)
    compare(target, other, kv=kv)


def compare(target: Decoder, other: Limited, *, kv: tuple[KVFormat, KVFormat], **settings: int) -> None:
    release()
    engine = Engine(target, max_ctx=len(other.prompt) + 2 * GENERATED, cache=CacheConfig(*kv), **settings)
    found = read(engine, other.prompt, other.needles, GENERATED)
    assert 0 < len(found.tokens) <= GENERATED
    assert bool(found.rows.isfinite().all()), "K or V are not finite"
    for side, format in enumerate(other.kv):
        expected, limited = found.rows[:, side], other.found.rows[:, side]
        # A grown model has layers and heads that are zero.
        layers = [layer for layer in range(len(expected)) if expected[layer].norm() > 0]
        rounding = relative_error(stored(expected[layers], format), expected[layers])
        # In another format, the inputs of all layers but the first differ, too.
        allowed = 1e-3 if kv == other.kv else 2 * rounding + 0.01
        for number, depth in enumerate(DEPTHS):
            error = relative_error(limited[layers, number], expected[layers, number])
            assert error <= allowed, f"{'KV'[side]} at {depth:.0%} of the text: {error:.1e} of {allowed:.1e}"
    index = divergence(other.found.tokens, found.tokens)
    if kv == other.kv and index is not None:
        assert index < len(found.gaps), f"texts of {len(other.found.tokens)} and {len(found.tokens)} tokens"
        assert found.gaps[index] < NEAR_TIE, f"diverges at token {index}, gap {found.gaps[index]}"


def test_a_long_prompt_within_the_limit_and_without(grown_27b: Path, tmp_path: Path) -> None:
    saved = tmp_path / "limited.pt"
    run_in_fresh_process(limited, grown_27b, PROMPT, saved)
    run_in_fresh_process(unlimited, grown_27b, saved)
