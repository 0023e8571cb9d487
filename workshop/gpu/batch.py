"""Times steps of several sequences of a 27B with random weights; tests/gpu/test_batch.py checks their bits.

    python -m workshop gpu.batch --out batch.jsonl [--model FOLDER] [--repeats 10]

A step has 64 rows in all, or one row a sequence. `verify_ms`: forward, sampling, acceptance and commit;
`draft_ms`: the draft of all sequences as one call; `step_ms`: both, with the host's time and the read-back.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch

from bough.bench.machine import of_session
from bough.config import SpecConfig
from bough.engine.runner import GraphRunner, StepTimes
from bough.session.session import Session
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_call import Ask
from bough.spec.speculator import Speculator
from bough.state.draft_ring import draft_buffers
from bough.state.sequences import CacheConfig
from tests.engine import company
from tests.gpu.texts import load_session
from workshop.case import case
from workshop.gpu.stages import grown_pair
from workshop.report import Report

SLOTS, CONTEXT, BUDGET = 64, 256, 63


def make_machine(session: Session, slots: int) -> company.Machine:
    target, draft = session.engine.target, session.engine.drafter._draft._draft  # ty: ignore[unresolved-attribute]
    rings = draft_buffers(draft.spec, max_ctx=1024, slots=slots, device=target.device, dtype=torch.float16)
    config = SpecConfig(budget=BUDGET, adaptive=False)
    drafter = Speculator(DFlashModel(draft, target, rings), config, StepCosts(), device=target.device)
    formats = session.engine.states._keys.format, session.engine.states._values.format
    return company.Machine(
        target, slots=slots, runner=GraphRunner, cache=CacheConfig(*formats), drafter=drafter
    )


@torch.inference_mode()
def time_steps(report: Report, machine: company.Machine, repeats: int, traced: Sequence[int]) -> None:
    vocabulary = machine.target.spec.vocab_size
    texts = company.make_texts(SLOTS, vocabulary)
    slots = []
    for index, text in enumerate(texts):
        text.masked, text.sampling = False, company.SAMPLINGS[0]
        text.prompt = [(7 * n + 11 * index) % 5000 for n in range(CONTEXT)]
        slot, token = machine.begin(text)
        slots.append(slot)
        text.answer = [token]
    for sequences in (1, 2, 4, 8, 16, 32, 64):
        for rows in sorted({1, 64 // sequences} if sequences > 1 else {1, 8, 24, 64}, reverse=True):
            if sequences in traced:
                kernels(report, machine, slots[:sequences], texts[:sequences], rows)
            draft = rows > 1 and sequences <= 16
            found = [
                one_step(machine, slots[:sequences], texts[:sequences], rows, draft=draft, seed=number)
                for number in range(repeats + 3)
            ][3:]
            times = {
                "draft_ms": [times.draft_s for times, _ in found] if draft else [0.0],
                "forward_ms": [times.forward_s for times, _ in found],
                "verify_ms": [times.verify_s for times, _ in found],
                "step_ms": [wall for _, wall in found],
            }
            medians = {name: round(1000 * statistics.median(each), 3) for name, each in times.items()}
            report.time("step", sequences=sequences, rows=rows, total=rows * sequences, **medians)


def one_step(
    machine: company.Machine,
    slots: list[int],
    texts: list[company.Text],
    rows: int,
    *,
    draft: bool,
    seed: int,
) -> tuple[StepTimes, float]:
    begin = time.perf_counter()
    call = machine.drafter._call  # ty: ignore[unresolved-attribute]
    if draft:
        asks = [Ask(slot, text.answer[-1], [], 0.0) for slot, text in zip(slots, texts, strict=True)]
        machine.runner.draft(lambda: call(asks))
        # One sequence's tree stays on the device; those of several are read back, to share the rows.
        trees = [call.tree(rows)]
        if len(slots) > 1:
            trees = [each.tree(rows) for each in call.reports()]
    else:
        trees = [
            company.make_tree(text, len(text.answer), rows, 5000, (seed, slot))
            for slot, text in zip(slots, texts, strict=True)
        ]
        machine.runner.draft(lambda: None)
        begin = time.perf_counter()
    parts = list(zip(slots, texts, trees, strict=True))
    for text, (_, accepted) in zip(texts, machine.step(parts), strict=True):
        text.answer += accepted.tokens
    return machine.times, time.perf_counter() - begin


def kernels(
    report: Report, machine: company.Machine, slots: list[int], texts: list[company.Text], rows: int
) -> None:
    """Print the kernels of a step without its draft, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    for seed in range(3):
        one_step(machine, slots, texts, rows, draft=False, seed=seed)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for seed in range(4):
            one_step(machine, slots, texts, rows, draft=False, seed=seed)
        torch.cuda.synchronize()
    times = {each.key: each.self_device_time_total / 4 for each in found.key_averages()}
    longest = dict(sorted(times.items(), key=lambda pair: -pair[1])[:24])
    report.time(
        "kernels",
        sequences=len(slots),
        rows=rows,
        us={name[:60]: round(us, 1) for name, us in longest.items()},
        total_us=round(sum(times.values())),
    )


@case()
def main(
    report: Report,
    *,
    model: Annotated[Path | None, "folder of a grown 27B with random weights"] = None,
    repeats: int = 10,
    trace: Annotated[Sequence[int], "sequences to list the kernels of"] = (),
) -> None:
    with grown_pair(report, model, random=True) as (target, draft):
        session = load_session(
            target, draft, graphs=False, max_ctx=1024, speculation=SpecConfig(budget=BUDGET, adaptive=False)
        )
    report.write(**report.head() | {"settings": {"slots": SLOTS, "context": CONTEXT}}, **of_session(session))
    report.log("loaded")
    with torch.inference_mode():
        machine = make_machine(session, SLOTS)
        slot = machine.states.open()
        machine.drafter.open(slot)
        machine.states.reserve(slot, 192)
        report.check("captured", machine.runner.capture())
        machine.states.close(slot)
    report.log("captured", peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2))
    report.part(lambda report: time_steps(report, machine, repeats, trace))
    report.log("done", peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2))
