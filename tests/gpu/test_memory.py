"""Memory in use on a GPU against the planner's estimate."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Progress, Request, Tokens
from bough.memory.device import CUDA_LIBRARIES
from bough.memory.estimate import EMBEDDING, KV_CACHE, PARTIAL_SUMS, prefill_bytes
from bough.models.measure import held_bytes
from bough.models.step import Step
from tests.gpu.device_memory import in_use
from tests.gpu.fresh_process import run_in_fresh_process
from tests.gpu.inputs import DEVICE
from tests.gpu.numerics import relative_error
from tests.gpu.texts import GREEDY, embedded_pair, load_session

pytestmark = pytest.mark.gpu

GIB = 1 << 30
# Parts of the plan that are exact to the byte and allocated once there is an engine.
EXACT = (
    "weights", EMBEDDING, "draft", "draft context", "recurrent states", "tree rows", "sampling", KV_CACHE,
    PARTIAL_SUMS,
)  # fmt: skip


def library_bytes() -> int:
    """Return what the CUDA libraries take outside torch's allocator; needs a fresh process."""
    before = in_use()
    half = torch.randn(4096, 4096, device=DEVICE, dtype=torch.float16)
    torch.mm(half, half, out_dtype=torch.float32)
    torch.nn.functional.silu(half).sum().item()
    torch.cuda.synchronize()
    return in_use() - before - torch.cuda.memory_reserved(DEVICE)


def test_cuda_libraries_take_no_more_than_is_planned() -> None:
    taken = run_in_fresh_process(library_bytes)
    assert taken <= CUDA_LIBRARIES, f"{taken >> 20} MiB, planned {CUDA_LIBRARIES >> 20}"


def test_weights_take_what_is_planned() -> None:
    session = load_session(*embedded_pair(), graphs=False)
    held = held_bytes(session.engine.target)
    assert held == session.plan.weights, f"{held} bytes, planned {session.plan.weights}"


def check_limited(folder: Path, limit: int, tokens: int) -> None:
    """Generate after a long prompt within a limit, and compare the memory in use with the plan."""
    before = torch.cuda.memory_allocated(DEVICE)
    session = load_session(
        folder / "target.gguf", folder / "draft.gguf", graphs=False, max_ctx=None, speculation=SpecConfig(),
        vram_limit=limit,
    )  # fmt: skip
    plan, engine = session.plan, session.engine
    planned = sum(plan.parts[name] for name in EXACT if name in plan.parts)
    allocated = torch.cuda.memory_allocated(DEVICE) - before
    assert abs(allocated - planned) <= 0.005 * planned, f"{allocated} bytes, planned {planned}"
    used = [in_use()]
    assert engine.warmup.capture()
    torch.cuda.empty_cache()
    used.append(in_use())
    count, found = min(tokens, plan.max_ctx - 128), []
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, engine.target.spec.vocab_size, (count,), generator=generator).tolist()
    for event in engine.generate(Request(prompt=prompt, max_tokens=64, sampling=GREEDY)):
        if isinstance(event, Progress):
            used.append(in_use())
        elif isinstance(event, Tokens):
            found += event.ids
    used.append(in_use())
    assert 0 < len(found) <= 64, f"{len(found)} tokens after a prompt of {count}"
    assert max(used) <= plan.total, f"{max(used)} bytes in use, planned {plan.total}"
    assert max(used) <= limit, f"{max(used)} bytes in use, limit {limit}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_27b_stays_within_its_plan_and_24_gib(random_27b: Path) -> None:
    run_in_fresh_process(check_limited, random_27b, 24 * GIB, 16384)


@torch.inference_mode()
def last_logits(engine: Engine, prompt: list[int], chunk: int) -> Tensor:
    """Return the logits [vocabulary] after a prompt that is processed in chunks of at most `chunk` tokens."""
    target, states = engine.target, engine.states
    slot = states.open()
    slots, tokens = torch.tensor([slot], device=DEVICE), torch.tensor([prompt], device=DEVICE)
    logits = torch.empty(0)
    try:
        for part in tokens.split(chunk, 1):
            states.reserve(slot, part.shape[1])
            step = Step.chunk(slots, part, states.buffers.lengths[slots])
            logits = target.logits(target.forward(step, states.buffers).hidden[:, -1])
            states.advance(step)
    finally:
        states.close(slot)
    return logits[0]


def random_prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5000, (tokens,), generator=generator).tolist()


def check_prefill(folder: Path, longest: int) -> None:
    """Compare logits of one chunk and of several, then peak memory of prompts with the estimate."""
    session = load_session(
        folder / "target.gguf", folder / "draft.gguf", graphs=False, max_ctx=longest + 256,
        speculation=SpecConfig(budget=22, adaptive=False),
    )  # fmt: skip
    engine, prompt = session.engine, random_prompt(700)
    one, several = last_logits(engine, prompt, 8192), last_logits(engine, prompt, 150)
    error = relative_error(one, several)
    assert error < 3e-2, f"logits of one chunk and of several: relative error {error:.1e}"
    for tokens in (512, 2048, 8192, 32768, longest):
        if tokens <= 8192:  # compiles
            first_token(engine, random_prompt(tokens))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first_token(engine, random_prompt(tokens, seed=1))
        peak = torch.cuda.max_memory_allocated() - before
        chunk = min(engine.prefill_chunk, tokens)
        planned = prefill_bytes(engine.target.spec, chunk, len(engine.drafter.features.taps))
        assert peak <= planned, f"{tokens} tokens: {peak >> 20} MiB, planned {planned >> 20}"


def first_token(engine: Engine, prompt: list[int]) -> None:
    *_, done = engine.generate(Request(prompt=prompt, max_tokens=1))
    assert isinstance(done, Done)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefill_of_a_27b_in_chunks_and_its_memory(random_27b: Path) -> None:
    run_in_fresh_process(check_prefill, random_27b, 131072)
