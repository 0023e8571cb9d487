"""Chats and regenerated answers by default settings: does the text repeat itself?

    python -m workshop chats --model FILE [--chats 10] [--turns 8] [--regenerate 20] [--n-gen 160]

Each chat asks about one subject, turn by turn, with the sampling recommended for the model; the seed of an
answer is 100 * chat + turn. A line for each chat: how often the most frequent sentence of prose stands in it
and in one answer, and the longest run of a period of up to 200 tokens. Fails where a sentence stands more
than three times in a chat or a period four times in an answer, or where two regenerated answers are equal.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bough.engine.sampler import SamplingParams
from bough.llm import LLM
from workshop.case import RESULTS, case
from workshop.report import Report

SUBJECTS = (
    "a dragon who is afraid of fire", "binary search in Python", "a week of meals for two",
    "the French Revolution", "an email to a landlord about heating", "the Rust borrow checker",
    "a walk by the sea in winter", "a unit test for a date parser", "how tides work",
    "a birthday speech for a colleague",
)  # fmt: skip
TURNS = (
    "Write a very long text about {}.", "Go on.", "What is the most important point?",
    "Give me a list of ten.", "Explain it to a child.", "Now tell it from the other side.",
    "Make it longer.", "How would you end it?",
)  # fmt: skip
NAMED = ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty")
PERIODS = 200  # tokens of the longest that is looked for
SHORT = 4  # words: shorter sentences may stand again and again


@case(out=RESULTS / "chats.jsonl", device="auto")
def main(
    report: Report,
    *,
    model: Path,
    chats: int = 10,
    turns: int = 8,
    regenerate: int = 20,
    question: str = "Write a very long story about a dragon.",
    n_gen: int = 160,
    greedy: bool = False,
) -> None:
    with LLM(model, device=report.device, max_ctx=max(4096, turns * (n_gen + 64)), progress=False) as llm:
        sampling = SamplingParams() if greedy else llm.session.sampling_for(None)
        report.line(
            model=model.name,
            **{name: getattr(sampling, name) for name in NAMED},
            **report.head("settings"),
        )
        for number in range(chats):
            line = one_chat(llm, number, turns, sampling, n_gen)
            report.check(f"chat {number}", line["in_a_chat"] <= 3 and line["run"] < 4, **line)
        answers = {
            str(llm.chat(question, replace(sampling, seed=seed), max_tokens=60)) for seed in range(regenerate)
        }
    report.check("regenerated", len(answers) == regenerate, answers=regenerate, different=len(answers))


def one_chat(llm: LLM, number: int, turns: int, sampling: SamplingParams, n_gen: int) -> dict[str, float]:
    """Return how often a sentence stands in the chat and in one answer, and the longest run of a period."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn, question in enumerate(TURNS[:turns]):
        messages.append({"role": "user", "content": question.format(SUBJECTS[number])})
        seeded = replace(sampling, seed=100 * number + turn)
        answers.append(llm.chat(messages, seeded, max_tokens=n_gen))
        messages.append({"role": "assistant", "content": str(answers[-1])})
    return {
        "in_a_chat": most_frequent(answers),
        "in_an_answer": max(most_frequent([answer]) for answer in answers),
        "run": round(max(longest_run(answer.tokens) for answer in answers), 2),
        "tokens": sum(len(answer.tokens) for answer in answers),
    }


def sentences(text: str) -> list[str]:
    """Return the sentences of prose; code is left out."""
    prose = re.sub(r"```.*?(```|$)", "\n", text, flags=re.DOTALL)
    parts = re.split(r"(?<=[.!?])\s+|\n+", prose)
    return [part.strip() for part in parts if len(part.split()) >= SHORT]


def most_frequent(texts: Sequence[str]) -> int:
    counts = Counter(sentence for text in texts for sentence in sentences(text))
    return max(counts.values(), default=0)


def longest_run(tokens: Sequence[int]) -> float:
    """Return how many times a period of up to PERIODS tokens stands in a row, at most."""
    longest = 1.0
    for period in range(3, min(PERIODS, len(tokens) // 2) + 1):
        equal = 0
        for at in range(period, len(tokens)):
            equal = equal + 1 if tokens[at] == tokens[at - period] else 0
            longest = max(longest, 1 + equal / period)
    return longest
