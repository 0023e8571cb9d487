"""Chats and regenerated answers by default settings: does the text repeat itself?

    python benchmarks/chats.py --model FILE [--chats 10] [--turns 8] [--regenerate 20] [--n-gen 160]

Each chat asks about one subject, turn by turn, with the sampling recommended for the model; the seed of an
answer is 100 * chat + turn. Prints for each chat, and in sum, how often the most frequent sentence of prose
stands in it, how often in one answer, and the longest run of a period of up to 200 tokens; then how many of
the regenerated answers differ. Appends the sum to --out as a JSON line.
"""

import argparse
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bough.config import EngineConfig
from bough.engine.sampler import SamplingParams
from bough.session.loading import load_session
from bough.session.requests import Finished, Text, TextRequest
from bough.session.session import Session

SUBJECTS = (
    "a dragon who is afraid of fire", "binary search in Python", "a week of meals for two",
    "the French Revolution",
    "an email to a landlord about heating", "the Rust borrow checker", "a walk by the sea in winter",
    "a unit test for a date parser", "how tides work", "a birthday speech for a colleague",
)  # fmt: skip
TURNS = (
    "Write a very long text about {}.", "Go on.", "What is the most important point?",
    "Give me a list of ten.",
    "Explain it to a child.", "Now tell it from the other side.", "Make it longer.", "How would you end it?",
)  # fmt: skip
NAMED = ("temperature", "top_p", "top_k", "repetition_penalty")
PERIODS = 200  # tokens of the longest that is looked for
SHORT = 4  # words: shorter sentences may stand again and again


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


def answer(
    session: Session, messages: list[dict[str, str]], sampling: SamplingParams, n_gen: int
) -> tuple[str, list[int]]:
    text = ""
    for event in session.generate(TextRequest(messages=messages, sampling=sampling, max_tokens=n_gen)):
        if isinstance(event, Text):
            text += event.text
        if isinstance(event, Finished):
            return text, event.tokens
    raise AssertionError("no end")


def chats(
    session: Session, sampling: SamplingParams, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for chat, subject in enumerate(SUBJECTS[: options.chats]):
        messages: list[dict[str, str]] = []
        texts, runs = [], []
        for turn, asked in enumerate(TURNS[: options.turns]):
            messages.append({"role": "user", "content": asked.format(subject)})
            seeded = replace(sampling, seed=100 * chat + turn)
            text, tokens = answer(session, messages, seeded, options.n_gen)
            messages.append({"role": "assistant", "content": text})
            texts.append(text)
            runs.append(longest_run(tokens))
        each = max(most_frequent([text]) for text in texts)
        yield {
            "chat": chat,
            "in_a_chat": most_frequent(texts),
            "in_an_answer": each,
            "run": round(max(runs), 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--regenerate", type=int, default=20)
    parser.add_argument("--n-gen", type=int, default=160)
    parser.add_argument("--greedy", action="store_true", help="for comparison")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chats.jsonl"))
    options = parser.parse_args()
    session = load_session(options.model, EngineConfig(device=options.device, max_ctx=4096))
    sampling = SamplingParams() if options.greedy else session.sampling_for(None)
    found = []
    for line in chats(session, sampling, options):
        print(json.dumps(line), flush=True)
        found.append(line)
    question = [{"role": "user", "content": "Tell me a joke in one sentence."}]
    again = {
        answer(session, question, replace(sampling, seed=seed), 60)[0] for seed in range(options.regenerate)
    }
    git = ["git", "rev-parse", "--short", "HEAD"]
    whole = {
        "model": options.model.name,
        "source": session.recommended.source,
        "sampling": {name: getattr(sampling, name) for name in NAMED},
        "chats": len(found),
        "turns": options.turns,
        "n_gen": options.n_gen,
        **{name: max(line[name] for line in found) for name in ("in_a_chat", "in_an_answer", "run")},
        "regenerated": options.regenerate,
        "different": len(again),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    print(json.dumps(whole), flush=True)
    with options.out.open("a") as results:
        results.write(json.dumps(whole) + "\n")


if __name__ == "__main__":
    main()
