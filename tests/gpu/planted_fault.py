"""A first start with a planted fault, in a process of its own: prints the texts and the log as a JSON line.

    python -m tests.gpu.planted_fault FAULT FOLDER [DEVICE]

FOLDER holds the compiled kernels and the verdict: two processes with one folder are a first and a second
start. `27B` is none of the faults: the self-check of kernels of a 27B's shapes, timed.
"""

import ctypes
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bough.config import DraftConfig, EngineConfig
from tests.gpu.texts import embedded_pair

QUESTION = "def fibonacci(n):"
LONG = "Sort these words: " + "pear apple fig plum date lime kiwi melon " * 220  # some 2,900 tokens
TAKEN = 500 << 20  # bytes


def wrong() -> None:
    """The delta rule decays otherwise."""
    from bough.kernels.delta_rule import cuda

    whole = cuda.source()
    changed = whole.replace("expf(ahead.gate[i])", "0.5f * expf(ahead.gate[i])")
    assert changed != whole
    cuda.source = lambda: changed


def uncompilable() -> None:
    from bough.kernels.delta_rule import cuda

    whole = cuda.source()
    cuda.source = lambda: whole + "\n#error planted\n"


def shared() -> None:
    """The delta rule asks for more shared memory than any card has."""
    from bough.kernels.delta_rule import cuda

    plain = cuda.spread
    cuda.spread = lambda card, shared, blocks: plain(card, shared, blocks) + (256 << 10)


def known_architectures(*names: str) -> None:
    from bough.kernels.runtime import device

    device.architectures = lambda: names


def failing_capture(error: BaseException) -> None:
    """The third capture fails, once."""
    from bough.state import graphs

    capture, calls = graphs.CapturedFunction.capture, []

    def failing(self: Any, pool: Any) -> None:
        calls.append(pool)
        if len(calls) == 3:
            raise error
        capture(self, pool)

    graphs.CapturedFunction.capture = failing


def full_card() -> None:
    """What the plan needs is free, and the reserve; then another program takes 500 MB of it."""
    from bough.gguf.reader import GGUFFile
    from bough.memory import device as memory
    from bough.memory.planner import MemoryPlanner
    from bough.models.spec import ModelSpec
    from bough.session import loading

    memory._SHARED_SHARE = 0.0  # of a card as large as this one it is more than 512 MiB
    device = torch.device("cuda", 0)
    torch.cuda.synchronize()  # makes the context
    free, total = torch.cuda.mem_get_info(device)
    with GGUFFile.open(embedded_pair()[0]) as file:
        spec = ModelSpec.from_gguf(file)
        budget = memory.assumed_budget(total)
        plan = MemoryPlanner.create(file, spec, config_of("cuda"), device, budget).plan()
    take(free - (plan.total - budget.in_use) - memory.SHARED_RESERVE - (64 << 20))
    limit = loading.limit_allocator

    def limited(budget: Any, device: torch.device) -> None:
        limit(budget, device)
        take(TAKEN)

    loading.limit_allocator = limited


def take(size: int) -> None:
    """Allocate memory of the GPU as another program would: outside torch's allocator."""
    from bough.kernels.runtime import driver

    pointer = ctypes.c_uint64()
    driver._check(driver._driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))


def other_draft(**changes: Any) -> None:
    """The draft's config says something else than its weights were trained for."""
    from bough.models.draft_spec import DraftSpec

    whole = DraftSpec.from_gguf
    DraftSpec.from_gguf = lambda *a, **k: replace(whole(*a, **k), **changes)


DRAFTS: dict[str, dict[str, Any]] = {
    "draft fits": {},
    "draft taps": {"taps": (3, 4, 5, 6, 7)},
    "draft mask": {"mask_id": 300},
    "draft block": {"block_size": 4},
    "draft causal": {"causal": (True,) * 3},
}
FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "wrong": wrong,
    "compile": uncompilable,
    "shared": shared,
    "older NVRTC": lambda: known_architectures("sm_75", "sm_80", "sm_86", "sm_89"),
    "unknown to NVRTC": lambda: known_architectures("sm_75"),
    "capture": lambda: failing_capture(RuntimeError("CUDA driver error 999: planted")),
    "out of memory": lambda: failing_capture(torch.OutOfMemoryError("CUDA out of memory. Planted.")),
    "memory": full_card,
    **{name: partial(other_draft, **changes) for name, changes in DRAFTS.items()},
}


def config_of(device: str, costs: Path | None = None) -> EngineConfig:
    kv, draft = "f16" if device == "cuda" else "auto", DraftConfig(embedded_pair()[1])
    return EngineConfig(device, max_ctx=4096, draft=draft, kv_k=kv, kv_v=kv, costs=costs)


def timed_experiments() -> list[float]:
    """Return the list of seconds that trying a draft with other settings takes from now on."""
    from bough.spec import diagnosis

    whole, seconds = diagnosis.experiment, list[float]()

    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return whole(*arguments)
        finally:
            seconds.append(round(time.perf_counter() - begin, 2))

    diagnosis.experiment = timed
    return seconds


def start(fault: str, folder: str, device: str) -> dict[str, Any]:
    """Plant a fault, load the small pair, and answer a short and a long prompt."""
    from bough.session.loading import load_session
    from tests.gpu.texts import generate

    FAULTS[fault]()
    begin = time.perf_counter()
    examined = timed_experiments()
    costs = Path(folder, "costs.json") if fault in DRAFTS else None
    session = load_session(embedded_pair()[0], config_of(device, costs))
    loaded = time.perf_counter() - begin
    prompts = [QUESTION, *[QUESTION] * (fault in DRAFTS), LONG]  # two texts have to agree on a draft
    answers = [generate(session, prompt, max_tokens=64) for prompt in prompts]
    return {
        "texts": [session.tokenizer.decode(answer.tokens) for answer in (answers[0], answers[-1])],
        "prompt_tokens": [answer.stats.prompt_tokens for answer in answers],
        "notes": [note for answer in answers for note in answer.stats.notes],
        "examined_s": examined,
        "captured": getattr(session.engine.runner, "captured", False),
        "load_s": round(loaded, 2),
        "phases": {name: round(seconds, 3) for name, seconds in session.load_seconds.items()},
    }


def check_of_27b(device: str) -> dict[str, Any]:
    """Compile and check the kernels of a 27B as its start would."""
    from bough.kernels.check.shapes import COMMON
    from bough.kernels.runtime.ahead import CompileAhead
    from bough.session.self_check import SelfCheck

    shapes = replace(COMMON[0], kv=(("q8_0", "q8_0"),), rows=(1, 8, 16, 24), int8=False, sequences=1)
    placed = torch.device(device, 0)
    check, begin = SelfCheck(lambda: [shapes], placed), time.perf_counter()
    with CompileAhead(lambda: None, placed, facts="27B", check=check) as ahead:
        ahead.wait()
        compiled = time.perf_counter()
        ahead.check()
    if device == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    return {"compiling_s": round(compiled - begin, 2), "checking_s": round(end - compiled, 3)}


def main(fault: str, folder: str, device: str = "cuda") -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("bough").addHandler(Lines())
    facts: dict[str, Any] = {}
    try:
        facts = check_of_27b(device) if fault == "27B" else start(fault, folder, device)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"[:1000]}
    verdicts = [path.read_text() for path in Path(folder).rglob("*.checked")]
    print(json.dumps({"fault": fault, **facts, "log": lines, "verdicts": verdicts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
