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
from bough.engine.sampler import SamplingParams
from bough.llm import LLM
from bough.session.repeats import Messages, Repeats
from bough.text.tokenizer import Tokenizer
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
PLAIN = (
    (
        "Write a Python function that says whether a word is a palindrome.", "How do I call it?",
        "What does it return for an empty string?", "Upper and lower case should not matter.",
        "Write a unit test.", "And in JavaScript?", "Which of the two is faster?",
        "Thanks, what should I learn next?",
    ),
    (
        "I have a table orders(id, customer, total, day). How do I get the sum for each customer?",
        "Only those above 100, please.", "How do I sort that?", "What is an index?",
        "Which one helps here?", "How do I see whether it is used?",
        "What is the difference between WHERE and HAVING?", "Give me an exercise on that.",
    ),
    (
        "I committed to the wrong branch. What do I do?", "I have not pushed yet.", "What does reset do?",
        "Can I lose work that way?", "How do I look at older versions of a file?", "What is a rebase?",
        "When should I not use it?", "Write me a short list of commands to remember.",
    ),
    (
        "Tell me a story about a dragon.", "What is the name of the dragon?", "Where does it live?",
        "Who is its best friend?", "What happens to them next?", "Is there a villain?",
        "How does the story end?", "Suggest a title.",
    ),
    (
        "What can I cook with rice, eggs and spinach?", "How long does that take?", "I have no oven.",
        "What can I drink with it?", "And for dessert?", "How many calories is that?",
        "Write a shopping list for four people.", "What can I do with what is left over?",
    ),
    (
        "When did the French Revolution begin?", "Why then?", "Who was king?", "What happened to him?",
        "What is the Bastille?", "Who was Robespierre?", "What came after him?",
        "Which book should I read about it?",
    ),
    (
        "How do I parse a date like 2026-11-19 in Python?", "What if the text is not a date?",
        "How do I get the day of the week?", "How many days are there until New Year?",
        "What about time zones?", "How do I print it in German?", "Can I do it without a library?",
        "What is a Unix timestamp?",
    ),
    (
        "I have a weekend in Rome. What should I see?", "I do not like museums.", "Where do I eat well?",
        "How do I get around?", "What is the weather like in April?", "Which words of Italian do I need?",
        "How much money should I take?", "What do I do if it rains?",
    ),
    (
        "Write an email to my landlord: the heating does not work.", "More polite, please.",
        "Add that I have a baby.", "He answered that he has no time. What do I write?",
        "What are my rights?", "Should I call a lawyer?", "How do I keep warm until then?",
        "What do I write when it is repaired?",
    ),
    (
        "What is ownership in Rust?", "What is a borrow?", "Why does `let a = b; println!(b)` not compile?",
        "How do I fix it?", "What is a lifetime?", "When do I need an Rc?", "How is that in C++?",
        "Is Rust hard to learn?",
    ),
)  # fmt: skip
QUESTIONS = {
    "plain": PLAIN,
    "leading": [[turn.format(subject) for turn in TURNS] for subject in SUBJECTS],
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
    backend = LocalBackend(llm.session, name=llm.name, speculating=True, drafted=bool(llm.draft))
    settings = ChatSettings({"seed": 1, "max_tokens": n_gen})
    conversation = Conversation(messages=[Message("user", question)])
    chat = Chat(backend, conversation, settings, screen=view.Screen(), quiet=True)
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
