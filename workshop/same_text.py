"""The tokens of many short answers, alone and several at a time, in a file: two commits must write the same.

    python -m workshop same_text FILE [--prompts 200] [--together 8] [--threads 1]

The embedded pair on a CPU, with its draft; greedy and at temperature 0.8. `cmp` of two files says whether
texts are the same; within a run those of alone and together must be.
"""

import itertools
import json
from pathlib import Path

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from workshop.case import DRAFT, TARGET, case
from workshop.never_slower import PROMPTS
from workshop.report import Report

ENDINGS = ("", " Be brief.", " Explain each step.", " Then do it again, in another way.", " Begin with 'So'.")
LENGTHS = (16, 24, 40, 64)


def answers(engine: Engine, requests: list[Request], together: int) -> list[list[int]]:
    """Return the tokens of each request, at most `together` at a time."""
    texts: list[list[int]] = [[] for _ in requests]
    waiting, running = list(enumerate(requests)), {}
    while waiting or running:
        while waiting and len(running) < together:
            index, request = waiting.pop(0)
            running[engine.add(request)] = index
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[running[sequence]] += event.ids
        running = {sequence: index for sequence, index in running.items() if not sequence.finished}
    return texts


@case()
def main(report: Report, file: Path, *, prompts: int = 200, together: int = 8, threads: int = 1) -> bool:
    config = EngineConfig(
        "cpu",
        max_ctx=512,
        threads=threads,
        speculation=SpecConfig(),
        draft=DraftConfig(DRAFT),
        prefix_cache=0,
        parallel=together,
    )
    session = load_session(TARGET, config)
    engine = session.engine
    requests = []
    for index, (ending, (prompt, _)) in enumerate(itertools.product(ENDINGS, PROMPTS)):
        ids = session.encode(TextRequest(messages=[{"role": "user", "content": prompt + ending}]))
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=index)
            stops = session.tokenizer.stop_ids
            requests.append(Request(ids, LENGTHS[index % len(LENGTHS)], sampling, stop_ids=stops))
    requests = requests[: 2 * prompts]
    alone, company = (answers(engine, requests, count) for count in (1, together))
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in zip(alone, company, strict=True)))
    same = sum(one == other for one, other in zip(alone, company, strict=True))
    tokens = sum(map(len, alone))
    print(f"{len(requests)} texts, {tokens} tokens; alone and {together} at a time: {same} the same")
    return same < len(requests)
