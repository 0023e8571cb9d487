"""Records what a draft call would give at every position of some texts, for tests/spec/test_policy_replay.py.

    python -m workshop record_outcomes --out tests/spec/recorded_outcomes.json

The embedded pair, greedy, on a CPU. A text's record holds, for each position, the path probabilities of the
draft tree's rows in order of worth, and the rows that the text then followed.
"""

import json

import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sequence import Phase, Request
from bough.kernels.tree.reference import accept_path
from bough.session.loading import load_session
from bough.session.requests import Finished, TextRequest
from bough.session.session import Session
from bough.spec.speculator import Speculator
from bough.spec.tree import Tree
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report

PROMPTS = (
    "def fibonacci(n):",
    "Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many apples does he have?",
    "Write a short story about a lighthouse.",
    "What is the capital of France?",
    'def is_palindrome(text: str) -> bool:\n    """Return whether the text reads the same backwards."""\n',
)
TOKENS, ROWS = 100, 24


@torch.inference_mode()
def record(session: Session, prompt: str) -> list[list[list[float]]]:
    """Return [weights, path] for every position of the answer."""
    request = TextRequest(messages=[{"role": "user", "content": prompt}], max_tokens=TOKENS, draft_budget=0)
    finished = list(session.generate(request))[-1]
    assert isinstance(finished, Finished)
    answer, engine = finished.tokens, session.engine
    assert isinstance(engine.drafter, Speculator)
    sequence = engine.add(Request(session.encode(request), max_tokens=TOKENS + 1))
    while sequence.phase is not Phase.DECODE:
        engine.step()
    found = []
    for index, anchor in enumerate(answer[:-1]):
        engine.pipeline.probe(sequence, Tree.root(anchor))
        report = engine.drafter._call.reports()[0]
        depths = [0]
        for parent in report.parents[1:]:
            depths.append(depths[parent] + 1)
        following = [*answer[index + 1 :], *[-1] * (max(depths) + 1)]
        path = accept_path(report.tokens, report.parents, [following[depth] for depth in depths])
        found.append([[round(weight, 3) for weight in report.probabilities], path])
    engine.release(sequence)
    return found


@case()
def main(report: Report) -> None:
    speculation = SpecConfig(budget=ROWS - 1, lookup=False, adaptive=False)
    config = EngineConfig("cpu", 1024, speculation=speculation, draft=DraftConfig(DRAFT), prefix_cache=0)
    session = load_session(TARGET, config)
    texts = [record(session, prompt) for prompt in PROMPTS]
    assert report.out is not None, "--out is needed"
    report.out.write_text(json.dumps(texts, separators=(",", ":")) + "\n")
