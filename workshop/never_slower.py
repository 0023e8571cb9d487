"""Short answers in fresh processes, with the draft and without: is speculation ever slower?

    python -m workshop never_slower [--model M.gguf] [--draft D] [--rounds 3] [--prompts 40] [--threads N]
        [--cpu-time] [--out FILE]

Each prompt is answered by `bough run --greedy` in a process of its own, with speculation and with --no-draft
in turns; the best of the rounds counts, as other programs only make a run slower. The processes are forked
after their imports, which take 3 of 4 seconds of a start. Costs of steps are those that earlier processes
left, as for a user: one answer that is not counted comes first. Texts must be equal.

`--cpu-time` counts seconds of the CPU instead of the clock's, for a machine that is not idle: those of the
engine's thread, with one thread, from the first token to the last.
"""

import json
import os
import sys
import time
from typing import Annotated, Any, NoReturn

import bough.session.loading  # noqa: F401  # before a process is forked
from bough.cli.main import main as run_bough
from bough.engine.stats import RequestStats
from workshop.case import case, prompt_lists
from workshop.report import Report

PROMPTS: list[tuple[str, int]] = [(text, limit) for text, limit in prompt_lists()["short"]]


class ThreadTimes:
    """CPU seconds of this thread at the first token of an answer and at the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._arrived = RequestStats.token_arrived
        RequestStats.token_arrived = lambda stats: self.note(stats)

    def note(self, stats: RequestStats) -> None:
        self._arrived(stats)
        self.seconds.append(time.thread_time())


def answer(prompt: str, limit: int, flags: list[str]) -> dict[str, Any]:
    """Return what `bough run --json` prints, with the CPU seconds from the first token to the last."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        _answer_here(["run", "-p", prompt, "-n", str(limit), "--greedy", "--json", *flags], writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as output:
        *reply, seconds = output.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert not status, f"bough run ended with status {status}"
    return json.loads("\n".join(reply)) | {"cpu_s": json.loads(seconds)}


def _answer_here(arguments: list[str], writer: int) -> NoReturn:
    """Run `bough` in this process and end it; its CPU seconds of decoding follow its output."""
    sys.argv, times, code = ["bough", *arguments], ThreadTimes(), 0
    with open(os.devnull) as sys.stdin, open(writer, "w", encoding="utf-8") as sys.stdout:
        try:
            run_bough()
        except SystemExit as end:
            code = int(end.code or 0)
        print(json.dumps(times.seconds[-1] - times.seconds[0]), flush=True)
        os._exit(code)


def speed(reply: dict[str, Any], *, cpu_time: bool) -> float:
    """Return tokens a second after the first one."""
    stats = reply["stats"]
    return (stats["generated_tokens"] - 1) / reply["cpu_s"] if cpu_time else stats["decode_tok_s"]


def measure(
    prompt: str, limit: int, ways: dict[str, list[str]], rounds: int, **clock: bool
) -> dict[str, Any]:
    """Return the best speeds of a prompt with speculation and plain."""
    answers = {way: [] for way in ways}
    for _ in range(rounds):
        for way, options in ways.items():
            answers[way].append(answer(prompt, limit, options))
    texts = {tuple(reply["tokens"]) for replies in answers.values() for reply in replies}
    best = {way: max(replies, key=lambda reply: speed(reply, **clock)) for way, replies in answers.items()}
    trees, plain = (speed(best[way], **clock) for way in ("trees", "plain"))
    stats = best["trees"]["stats"]
    return {
        "prompt": prompt,
        "tokens": stats["generated_tokens"],
        "tokens_a_step": round(stats["acceptance_length"], 2),
        "trees_tok_s": round(trees, 1),
        "plain_tok_s": round(plain, 1),
        "ratio": round(trees / plain, 3),
        "same_text": len(texts) == 1,
    }


@case()
def main(
    report: Report,
    *,
    model: Annotated[str, "the embedded pair unless told"] = "",
    draft: str = "",
    rounds: int = 3,
    prompts: int = len(PROMPTS),
    threads: int | None = None,
    cpu_time: bool = False,
) -> bool:
    threads = 1 if cpu_time else threads
    common = [*([model] if model else []), *(["--threads", f"{threads}"] if threads else [])]
    ways = {"trees": common + (["--draft", draft] if draft else []), "plain": [*common, "--no-draft"]}
    answer(PROMPTS[0][0], 64, ways["trees"])
    rows = []
    for prompt, limit in PROMPTS[:: max(1, len(PROMPTS) // prompts)]:
        row = measure(prompt, limit, ways, rounds, cpu_time=cpu_time)
        rows.append(row)
        print(*(f"{value}" for value in row.values()), sep="\t", flush=True)
        report.write(**report.head(), what="never_slower", **row)
    slow = [row for row in rows if row["ratio"] < 0.97]
    same = all(row["same_text"] for row in rows)
    print(f"{len(rows)} prompts, {len(slow)} below 0.97 of plain, texts {'equal' if same else 'DIFFER'}")
    return bool(slow) or not same
