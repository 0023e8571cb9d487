"""The same prompt from Python and from the command line: same text, same speed?

python -m workshop python_door --repeats 5

Each run is a process of its own, the order alternates. Prints one JSON line with the medians.
"""

import json
import statistics
import subprocess
import sys
import time

from workshop.case import case
from workshop.report import Report

PROMPT = "Write a bubble sort in Python."
TOKENS = 128
LINES = f"""\
import json
from bough import LLM, SamplingParams

llm = LLM()
answer = llm.chat({PROMPT!r}, SamplingParams(temperature=0, max_tokens={TOKENS}))
stats = answer.stats
print(json.dumps({{"text": answer, "tok_s": stats.decode_tok_s, "ttft_s": stats.ttft_s}}))
llm.close()
"""
COMMAND = ["-m", "bough", "run", "-p", PROMPT, "-n", str(TOKENS), "--greedy", "--json"]


def run(arguments: list[str]) -> dict[str, float | str]:
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - begun
    found = json.loads(done.stdout)
    speed = found["tok_s"] if "tok_s" in found else found["stats"]["decode_tok_s"]
    return {"text": found["text"], "tok_s": speed, "wall_s": wall}


@case()
def main(report: Report, *, repeats: int = 5) -> None:
    ways = {"python": ["-c", LINES], "command line": COMMAND}
    for arguments in ways.values():
        run(arguments)
    found: dict[str, list[dict]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            found[name].append(run(ways[name]))
    texts = {each["text"] for runs in found.values() for each in runs}
    medians = {
        name: {
            field: round(statistics.median(each[field] for each in runs), 2) for field in ("tok_s", "wall_s")
        }
        for name, runs in found.items()
    }
    report.line(**{"repeats": repeats, "one text": len(texts) == 1}, **medians)
