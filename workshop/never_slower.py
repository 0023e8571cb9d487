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
from workshop.case import case
from workshop.report import Report

# Code, sums, prose and small talk; the limits give answers of 10 to 200 tokens.
PROMPTS = (
    ("def fibonacci(n):", 200),
    ("Write a Python function that returns the sum of squares of a list.", 200),
    ("Write a Python function that counts the vowels in a string.", 200),
    ("Write a Python function that says whether a number is prime.", 200),
    ("Write a Python function that reverses a list.", 120),
    ("Write a bubble sort in Python.", 200),
    ("Write a Python function that merges two sorted lists.", 200),
    ("Write a Python class for a stack with push and pop.", 200),
    ("Write a Python function that removes duplicates from a list.", 60),
    ("Write a Python function that returns the factorial of n.", 40),
    ("Write a Python function that flattens a nested list.", 30),
    ("Write a Python function that returns the larger of two numbers.", 20),
    ("Write a Python function that converts Celsius to Fahrenheit.", 10),
    ("Write a binary search in Python.", 200),
    ("Write a Python function that checks whether a word is a palindrome.", 80),
    ("Tom has 12 apples and gives away 5. How many are left?", 200),
    ("A book costs 8 dollars and a pen 3. What do 2 books and 4 pens cost?", 200),
    ("A train travels 60 miles an hour for 3 hours. How far does it go?", 120),
    ("What is 17 + 26?", 60),
    ("What is 9 times 8?", 30),
    ("Anna reads 20 pages a day. How many days does she need for 300 pages?", 200),
    ("There are 5 boxes with 12 eggs each. 7 eggs break. How many are left?", 100),
    ("What is half of 90 plus 15?", 40),
    ("A shirt of 40 dollars is 25% off. What does it cost?", 200),
    ("Explain what a river is.", 200),
    ("Explain why the sky is blue.", 120),
    ("Tell me a story about a dog.", 200),
    ("Tell me a story about a small boat.", 150),
    ("Describe a garden in spring.", 80),
    ("What is a computer?", 60),
    ("Write a letter to a friend.", 200),
    ("Name three animals.", 20),
    ("Hello, how are you?", 30),
    ("What is your name?", 10),
    ("Good morning!", 20),
    ("Give me advice for an exam.", 100),
    ("What do you like to eat?", 40),
    ("Why do people sleep?", 150),
    ("Tell me a joke.", 60),
    ("List the days of the week.", 50),
)


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
