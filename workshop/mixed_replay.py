"""Compares the tree of a draft, of the target's MTP block and of both: recorded steps, replayed.

    python -m workshop mixed_replay FILE --data FOLDER --model TARGET-MTP.gguf --draft PATH
    python -m workshop mixed_replay FILE
    python -m workshop mixed_replay tests/spec/recorded_outcomes.json --outcomes

With a model FILE is written: prompts of three suites are decoded greedily on a CPU. At every position all
drafts are called, and the rows of each one's tree that the text followed are kept. Without a model FILE is
replayed: with trees of a fixed number of rows from each source, and with the row policy, which chooses rows
and sources by the costs of a machine. It prints a JSON line for each suite and appends it to
benchmarks/results/mixed.jsonl. --outcomes writes what a draft call of the embedded pair would give at every
position of PROMPTS' texts, for tests/spec/test_policy_replay.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.bench.suites import load
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine
from bough.engine.sequence import Phase, Request, Sequence
from bough.kernels.tree.reference import accept_path
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.costs import StepCosts
from bough.spec.draft_call import Ask, DraftCall, DraftReport
from bough.spec.policy import Plan, RowPolicy
from bough.spec.speculator import Speculator
from bough.spec.tree import Tree
from workshop.case import DRAFT, RESULTS, TARGET, case
from workshop.report import Report

SOURCES = ("draft", "mtp", "both")
PROMPTS = (
    "def fibonacci(n):",
    "Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many apples does he have?",
    "Write a short story about a lighthouse.",
    "What is the capital of France?",
    'def is_palindrome(text: str) -> bool:\n    """Return whether the text reads the same backwards."""\n',
)
ROUNDS = 4  # each text is replayed so often

Step = list[tuple[list[float], list[int]]]  # for each source: weights of its tree's rows, accepted rows


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step by rows, and of a draft call of each source."""

    step: dict[int, float]
    draft: tuple[float, float, float]


# 27B shapes on an H200, with an MTP block that costs four calls of the head and of a block; and the embedded
# pair on two CPU cores.
MACHINES = {
    "H200": Machine({1: 6.41, 8: 6.53, 16: 7.44, 24: 8.56}, (1.25, 2.0, 3.25)),
    "CPU": Machine(
        {1: 12.7, 2: 21.6, 4: 24.1, 6: 26.7, 8: 29.2, 12: 34.3, 16: 39.4, 24: 49.5}, (20.3, 25.0, 45.3)
    ),
}


@torch.inference_mode()
def record(
    session: Session, messages: list[Any], tokens: int, ask: Callable[[Sequence, int, list[int]], Any]
) -> list[Any]:
    """Return what `ask` says of each token of a plain text: it gets the token and those that follow."""
    request = TextRequest(messages=messages, max_tokens=tokens, draft_budget=0)
    finished = list(session.generate(request))[-1]
    assert isinstance(finished, Finished)
    answer, engine = finished.tokens, session.engine
    sequence = engine.add(Request(session.encode(request), max_tokens=tokens + 1))
    while sequence.phase is not Phase.DECODE:
        engine.step()
    steps = [ask(sequence, anchor, answer[index + 1 :]) for index, anchor in enumerate(answer[:-1])]
    engine.release(sequence)
    return steps


def every_draft(engine: Engine, sequence: Sequence, anchor: int, following: list[int]) -> Step:
    assert isinstance(engine.drafter, Speculator)
    call, report = compared(engine.drafter, sequence.slot, anchor, len(sequence.tokens) - 1)
    engine.pipeline.probe(sequence, Tree.root(anchor), draft=False)
    trees = [followed(tree, following) for tree in (*report.alone, report)]
    call.learn(report, following[: len(trees[-1][1])])
    return trees


def one_draft(engine: Engine, sequence: Sequence, anchor: int, following: list[int]) -> Step:
    assert isinstance(engine.drafter, Speculator)
    engine.pipeline.probe(sequence, Tree.root(anchor))
    return followed(engine.drafter._call.reports()[0], following)


def record_outcomes(file: Path) -> None:
    trees = SpecConfig(budget=23, lookup=False, adaptive=False)
    config = EngineConfig("cpu", 1024, speculation=trees, draft=DraftConfig(DRAFT), prefix_cache=0)
    session = load_session(TARGET, config)
    turns = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [record(session, turn, 100, partial(one_draft, session.engine)) for turn in turns]
    file.write_text(json.dumps(texts, separators=(",", ":")) + "\n")


def compared(drafter: Speculator, slot: int, anchor: int, position: int) -> tuple[DraftCall, DraftReport]:
    """Call all drafts; the report has the tree of all, and of each alone."""
    text, call = drafter._texts[slot], drafter._draft_calls[len(drafter._mixes) - 1, True]
    if len(text.lookup) == position:
        text.lookup.append([anchor])
    call([Ask(slot, anchor, *text.looked_up())])
    return call, call.reports()[0]


def followed(report: DraftReport, following: list[int]) -> tuple[list[float], list[int]]:
    depths = [0]
    for parent in report.parents[1:]:
        depths.append(depths[parent] + 1)
    text = [*following, *[-1] * (max(depths) + 1)]
    path = accept_path(report.tokens, report.parents, [text[depth] for depth in depths])
    return [round(weight, 3) for weight in report.probabilities], path


def fixed(texts: list[list[Step]], source: int, rows: int) -> float:
    """Return tokens a step with trees of a number of rows."""
    tokens = steps = 0
    for text in texts:
        position = 0
        while position < len(text):
            accepted = sum(0 < row < rows for row in text[position][source][1])
            position, steps, tokens = position + 1 + accepted, steps + 1, tokens + 1 + accepted
    return tokens / steps


def chosen(texts: list[list[Step]], sources: list[int], on: Machine) -> tuple[float, list[int]]:
    """Return tokens a second by the row policy, and the calls of each source."""
    policy = RowPolicy(StepCosts(), max_rows=24, drafts=len(sources), sizes=tuple(on.step))
    tokens, spent, calls = 0, 0.0, [0] * len(sources)
    for text in texts * ROUNDS:
        policy, position = policy.fork(), 0
        while position < len(text):
            plan, trees = policy.plan(), [text[position][source] for source in sources]
            step_s = next(cost for size, cost in on.step.items() if plan.rows <= size) / 1e3
            policy.costs.observe_step(plan.rows, step_s)
            spent, accepted = spent + step_s, 0
            if plan.draft:
                draft_s = on.draft[sources[plan.mix]] / 1e3
                policy.costs.observe_draft(draft_s, plan.mix)
                spent, accepted = spent + draft_s, learn(policy, plan, trees)
                calls[plan.mix] += 1
            position, tokens = position + 1 + accepted, tokens + 1 + accepted
    return tokens / spent, calls


def learn(policy: RowPolicy, plan: Plan, trees: Step) -> int:
    """Let the policy learn from a draft call, as the speculator does; return the accepted tokens."""
    weights, path = trees[plan.mix]
    verified = plan.rows if plan.rows > 1 else len(weights)
    kept = [row for row in path if row < verified]
    policy.history.observe(weights, kept, verified=verified, waited=plan.waited, mix=plan.mix)
    if plan.compares:
        policy.mixes.observe([each for _, each in trees])
        for mix, (own, other) in enumerate(trees[:-1]):
            policy.history.observe(own, other, verified=len(own), waited=plan.waited, mix=mix)
    return len(kept) - 1 if plan.rows > 1 else 0


def summary(texts: list[list[Step]]) -> dict[str, Any]:
    found: dict[str, Any] = {"texts": len(texts), "steps": sum(map(len, texts))}
    for rows in (8, 16, 23):
        found[f"acceptance_{rows}_rows"] = {
            name: round(fixed(texts, source, rows), 3) for source, name in enumerate(SOURCES)
        }
    for name, on in MACHINES.items():
        alone = {SOURCES[source]: round(chosen(texts, [source], on)[0], 2) for source in (0, 1)}
        speed, calls = chosen(texts, [0, 1, 2], on)
        best = max(*alone.values(), 1e3 / on.step[1])
        found[name] = {
            "tok_s": {**alone, "policy": round(speed, 2)},
            "calls": dict(zip(SOURCES, calls, strict=True)),
            "policy_over_best": round(speed / best, 4),
        }
    return found


@case(out=RESULTS / "mixed.jsonl")
def main(
    report: Report,
    file: Path,
    *,
    data: Path | None = None,
    model: Path | None = None,
    draft: Path | None = None,
    suites: str = "humaneval,gsm8k,math500",
    prompts: int = 6,
    n_gen: int = 80,
    note: Annotated[str, "of the drafts, for the results"] = "",
    outcomes: bool = False,
) -> None:
    if outcomes:
        return record_outcomes(file)
    if model is None:
        for suite, texts in json.loads(file.read_text()).items():
            report.line(what="mixed replay", note=note, suite=suite, **summary(texts))
        return None
    assert draft is not None, "to record, --draft is needed"
    trees = SpecConfig(budget=22, mtp="on")
    config = EngineConfig("cpu", 1024, speculation=trees, draft=DraftConfig(draft), prefix_cache=0, threads=1)
    session, recorded = load_session(model, config), {}
    for suite in suites.split(","):
        items = load(suite, prompts, data=data, offline=True)
        ask = partial(every_draft, session.engine)
        recorded[suite] = [record(session, list(prompt.messages), n_gen, ask) for prompt in items]
        print(suite, [len(text) for text in recorded[suite]], flush=True)
    file.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
