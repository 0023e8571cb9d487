"""Chats and regenerated answers by default settings: does the text repeat itself?

    python -m workshop chats --model FILE [--questions plain leading] [--chats 10] [--regenerate 20]
    python -m workshop chats --model FILE --chats 0 --regenerate 0 --right DATA

A chat is eight messages about one subject, answered with the sampling recommended for the model; the seed
of an answer is --seed + 100 * chat + turn. `plain` are ten chats as people have them; `leading` asks the same
eight things about ten subjects, among them to go on, to tell it again and to make it longer, which invites a
model to copy its own answers. A line for each chat: how often the most frequent sentence of prose stands in
it and in one answer, and the longest run of a period of up to 200 tokens. Fails where a sentence stands more
than three times in a chat or a period four times in an answer, or where two answers of /regen are equal.
--right names the right answers of humaneval (with their tests), mbpp, gsm8k and math500 that a small model
could not give: those that, without fences, hold a sentence too often or would be ended as a loop.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bough.bench.suites import load
from bough.cli import view
from bough.cli.chat.backend import LocalBackend
from bough.cli.chat.conversation import ChatSettings, Conversation, Message
from bough.cli.chat.loop import Chat
from bough.config import DraftConfig, EngineConfig
from bough.engine.sampler import SamplingParams
from bough.llm import LLM
from bough.session.repeats import Messages, Repeats
from bough.text.tokenizer import Tokenizer
from workshop.case import RESULTS, case, prompt_lists
from workshop.report import Report

_LISTS = prompt_lists()
QUESTIONS = {
    "plain": _LISTS["plain"],
    "leading": [[turn.format(subject) for turn in _LISTS["turns"]] for subject in _LISTS["subjects"]],
}
NAMED = ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty")
RIGHT = {
    "humaneval": ("prompt", "canonical_solution", "test"),
    "mbpp": ("code",),
    "gsm8k": ("answer",),
    "math500": ("solution",),
}
MOST = 3  # times that a sentence may stand in a chat
PERIODS = 200  # tokens of the longest that is looked for
SHORT = 4  # words: shorter sentences may stand again and again


@case(out=RESULTS / "chats.jsonl", device="auto")
def main(
    report: Report,
    *,
    model: Path,
    questions: Sequence[str] = ("plain", "leading"),
    first: int = 0,
    chats: int = 10,
    regenerate: int = 20,
    again: Sequence[str] = ("Tell me a joke in one sentence.", "Write a very long story about a dragon."),
    n_gen: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    greedy: bool = False,
    right: Path | None = None,
) -> None:
    with LLM(model, device=report.device, threads=threads, progress=False) as llm:
        sampling = SamplingParams() if greedy else llm.session.sampling_for(None)
        report.line(
            model=model.name,
            **{name: getattr(sampling, name) for name in NAMED},
            **report.head("settings"),
        )
        for kind in questions:
            for number, messages in list(enumerate(QUESTIONS[kind]))[first : first + chats]:
                line = one_chat(llm, messages, seed + 100 * number, sampling, n_gen)
                passed = line["in_a_chat"] <= MOST and line["run"] < 4
                report.check(f"chat {number}, {kind} questions", passed, **line)
        for question in again if regenerate else ():
            answers = regenerated(llm, question, regenerate, 60)
            report.check(f"regenerated: {question}", len(set(answers)) == len(answers), answers=answers)
        for suite in RIGHT if right is not None else ():
            items = load(suite, 10_000, data=right)
            texts = ["".join(item.item[part] for part in RIGHT[suite]) for item in items]
            pairs = zip(items, texts, strict=True)
            changed = [item.name for item, text in pairs if not may_say(llm.tokenizer, item.messages, text)]
            report.line(suite=suite, texts=len(texts), changed=changed)


def one_chat(
    llm: LLM, questions: Sequence[str], seed: int, sampling: SamplingParams, n_gen: int | None
) -> dict[str, float | str]:
    """Return how often a sentence stands in the chat and in one answer, and the longest run of a period."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        answers.append(llm.chat(messages, replace(sampling, seed=seed + turn), max_tokens=n_gen))
        messages.append({"role": "assistant", "content": str(answers[-1])})
    sentence, count = most_frequent(answers)
    return {
        "in_a_chat": count,
        "in_an_answer": max(most_frequent([answer])[1] for answer in answers),
        "run": round(max(longest_run(answer.tokens) for answer in answers), 2),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "avoided": sum(answer.stats.avoided_sentences for answer in answers),
        "ended": sum(answer.stats.answer_loops for answer in answers),
        "sentence": sentence,
    }


def may_say(tokenizer: Tokenizer, messages: Messages, text: str) -> bool:
    """Return whether a text can be the answer of a small model's chat."""
    rule = Repeats(tokenizer, messages, MOST, begun=False)
    written = rule.beginning
    for token in tokenizer.encode(text):
        after = rule.after(written, token)
        if after is None or rule.accept(written, token):
            return False
        written = after
    return True


def regenerated(llm: LLM, question: str, count: int, n_gen: int) -> list[str]:
    """Return the answer that a chat gives and those of as many /regen, by seeds from 1 on."""
    config = EngineConfig(draft=None if llm.draft is None else DraftConfig(llm.draft))
    backend = LocalBackend(llm.session, config, name=llm.name)
    settings = ChatSettings({"seed": 1, "max_tokens": n_gen})
    conversation = Conversation(messages=[Message("user", question)])
    chat = Chat(backend, conversation, settings, screen=view.Screen(quiet=True))
    answers = []
    for _ in range(count + 1):
        chat.regenerate()
        answers.append(chat.conversation.messages[-1].content)
    return answers


def sentences(text: str) -> list[str]:
    """Return the sentences of prose; code is left out."""
    prose = re.sub(r"```.*?(```|$)", "\n", text, flags=re.DOTALL)
    parts = re.split(r"(?<=[.!?])\s+|\n+", prose)
    return [part.strip() for part in parts if len(part.split()) >= SHORT]


def most_frequent(texts: Sequence[str]) -> tuple[str, int]:
    """Return the most frequent sentence, and how often it stands there."""
    counts = Counter(sentence for text in texts for sentence in sentences(text))
    return max(counts.items(), key=lambda item: item[1], default=("", 0))


def longest_run(tokens: Sequence[int]) -> float:
    """Return how many times a period of up to PERIODS tokens stands in a row, at most."""
    longest = 1.0
    for period in range(3, min(PERIODS, len(tokens) // 2) + 1):
        equal = 0
        for at in range(period, len(tokens)):
            equal = equal + 1 if tokens[at] == tokens[at - period] else 0
            longest = max(longest, 1 + equal / period)
    return longest
