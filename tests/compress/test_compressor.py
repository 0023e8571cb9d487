"""The budget is strict, what is never touched stays byte for byte, and choices are the same twice."""

import copy
import random
import re

import pytest

from bough.compress.compressor import NOTE, Compressor
from bough.compress.conversation import CHARACTERS, MIN_TOKENS, Wanted
from bough.compress.words import WordScorer
from tests.compress import conversations
from tests.compress.conversations import count, measure

FACT = "The password of the harbour office is KESTREL-4471."


def compressor(scorer=None) -> Compressor:
    return Compressor(scorer or WordScorer(), count)


def wanted(rng: random.Random) -> Wanted:
    to = rng.choice([0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 300.0, 800.0])
    return Wanted(mode=rng.choice(["auto", "on"]), above=400, to=to)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 1000), marks=pytest.mark.slow)])
def test_the_budget_is_held_in_1000_conversations_and_the_rest_is_untouched(seeds: range) -> None:
    shortened = exact = 0
    for seed in seeds:
        rng = random.Random(seed)
        messages = conversations.conversation(rng)
        original = copy.deepcopy(messages)
        asked = wanted(rng)
        found = compressor().compress(messages, asked, measure)
        assert messages == original
        if found is None:
            assert measure(messages) <= asked.above
            continue
        report = found.report
        assert report.kept_tokens == measure(found.messages)
        if found.documents:
            shortened += 1
            assert report.kept_tokens <= asked.budget(report.sent_tokens), seed
        else:
            exact += 1
            assert report.reason and list(found.messages) == original and report.exact
        check_untouched(original, found.messages)
        again = compressor().compress(copy.deepcopy(messages), asked, measure)
        assert again is not None and list(again.messages) == list(found.messages)
    assert shortened > 0.3 * len(seeds) and exact > 0.02 * len(seeds)


def check_untouched(original, read) -> None:
    last = max(index for index, message in enumerate(original) if message["role"] == "user")
    assert len(read) == len(original)
    for index, (before, after) in enumerate(zip(original, read, strict=True)):
        assert {**before, "content": None} == {**after, "content": None}
        if before["role"] not in ("user", "tool") or (
            index >= len(original) - 2 and before["role"] == "tool"
        ):
            assert after == before
        if index == last and isinstance(before["content"], str):
            asked = re.search(r"^What about the .*\?", before["content"], re.MULTILINE)
            assert asked is not None and asked[0] in after["content"]


def ending(rng: random.Random, characters: int) -> list[dict]:
    """Return the last messages of a conversation: one or two long ones, below a size in all."""
    text = f"{document(rng)[: characters - 100]}\n\n{conversations.question(rng)}"
    parts = [{"type": "text", "text": part} for part in (text[:1500], text[1500:])]
    call = {"id": "1", "function": {"name": "read", "arguments": {"path": "a"}}}
    asked = {"role": "user", "content": conversations.question(rng)}
    answer, result = {"role": "assistant", "content": "Yes."}, {"role": "tool", "tool_call_id": "1"}
    return rng.choice(
        [
            [{"role": "user", "content": text}],
            [{"role": "user", "content": parts}],
            [{"role": "user", "content": text}, answer],
            [{"role": "user", "content": text}, asked],
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {**result, "content": text}],
            [
                {"role": "user", "content": text},
                {**answer, "tool_calls": [call]},
                {**result, "content": text},
            ],
        ]
    )


def test_the_last_messages_are_byte_for_byte_what_was_sent_unless_they_are_long() -> None:
    """The last two, and the last of the user, up to half of `above`; also when the conversation goes on."""
    shortened = medium = 0
    for seed in range(60):
        rng = random.Random(seed)
        above = rng.choice([1000, 2000, 3000])
        most = above // 2 * CHARACTERS
        messages = [*conversations.conversation(rng), {"role": "assistant", "content": "Yes."}]
        messages += [{"role": "user", "content": document(rng)}, {"role": "assistant", "content": "I see."}]
        asked, made = Wanted(mode="on", above=above, to=rng.choice([0.3, 0.5, 0.7])), compressor()
        for _ in range(2):
            tail = ending(rng, rng.randint(MIN_TOKENS * CHARACTERS, most))
            messages = [*messages, *tail]
            found = made.compress(messages, asked, measure)
            if found is None:
                continue
            shortened += bool(found.documents)
            users = [index for index, message in enumerate(messages) if message["role"] == "user"]
            for index in {users[-1], len(messages) - 2, len(messages) - 1}:
                size = len(text_of(messages[index]))
                medium += MIN_TOKENS * CHARACTERS <= size <= most and bool(found.documents)
                if size <= most:
                    # What was left out before and is needed now stands in front of a later question.
                    assert text_of(found.messages[index]).endswith(text_of(messages[index])), (seed, index)
                    assert (messages[index] == found.messages[index]) or NOTE in text_of(
                        found.messages[index]
                    )
    assert shortened > 100 and medium > 100, (shortened, medium)


def text_of(message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def document(rng: random.Random, fact: str = FACT, sentences: int = 300) -> str:
    parts = conversations.prose(rng, sentences).split("\n\n")
    parts.insert(len(parts) // 3, fact)
    return "\n\n".join(parts)


def asking(question: str, text: str | None = None) -> list[dict]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text or document(random.Random(1))},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": question},
    ]


def test_a_fact_is_kept_and_gaps_say_what_was_left_out() -> None:
    found = compressor().compress(
        asking("What is the password of the harbour office?"), Wanted(above=400), measure
    )
    assert found is not None
    text = found.messages[1]["content"]
    assert FACT in text and " sentences left out ...]\n" in text
    assert found.report.approximate.startswith("prompt compressed to 1")
    assert found.report.scorer == "words" and found.report.score_s > 0


def test_off_is_off_and_short_prompts_are_read_as_they_are() -> None:
    messages = asking("What is the password?")
    assert compressor().compress(messages, Wanted(mode="off", above=1), measure) is None
    assert compressor().compress(messages, Wanted(above=1_000_000), measure) is None


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("Summarise the document.", "whole text"),
        ("How many captains are there?", "whole text"),
        ("Xyzzy plugh frobnicate?", "nothing in the text"),
    ],
)
def test_the_prompt_is_read_exactly_and_it_is_said_why(question: str, reason: str) -> None:
    messages = asking(question)
    found = compressor().compress(messages, Wanted(above=400), measure)
    assert found is not None and reason in found.report.reason and list(found.messages) == messages
    assert found.report.exact and not found.report.approximate


def test_a_request_can_ask_for_it_nevertheless() -> None:
    messages = asking("How many captains are there?")
    found = compressor().compress(messages, Wanted(mode="on", above=400), measure)
    assert found is not None and not found.report.exact


def test_a_budget_below_what_is_always_kept_reads_exactly() -> None:
    found = compressor().compress(asking("Where is the harbour?"), Wanted(above=400, to=10.0), measure)
    assert found is not None and "the budget is 10" in found.report.reason


class Failing:
    name = "failing"
    any_thread = True

    def score(self, units, queries, cancelled=None):
        return [float("inf")] * len(units)


def test_a_scorer_that_fails_leaves_the_prompt_exact() -> None:
    messages = asking("What is the password?")
    found = compressor(Failing()).compress(messages, Wanted(above=400), measure)
    assert found is not None and found.report.exact and "no score" in found.report.reason
    assert list(found.messages) == messages


def test_what_the_caller_names_is_kept() -> None:
    messages = asking("What about the copper market?")
    kept = compressor().compress(messages, Wanted(above=400, keep=("KESTREL-4471",)), measure)
    assert kept is not None and FACT in kept.messages[1]["content"]
    whole = compressor().compress(messages, Wanted(above=400, keep=(1,)), measure)
    assert whole is not None and whole.report.exact and "no document" in whole.report.reason


def test_the_question_may_be_given_apart_from_the_text() -> None:
    messages = [{"role": "user", "content": document(random.Random(2), sentences=400)}]
    found = compressor().compress(
        messages, Wanted(above=400, query="Which password has the harbour office?"), measure
    )
    assert found is not None and FACT in found.messages[0]["content"]


def test_the_question_may_stand_before_its_document() -> None:
    text = f"What is the password of the harbour office?\n\n{document(random.Random(3), sentences=400)}"
    found = compressor().compress([{"role": "user", "content": text}], Wanted(above=400), measure)
    assert found is not None and not found.report.exact
    assert FACT in found.messages[0]["content"] and found.messages[0]["content"].startswith(
        "What is the password"
    )


def test_continue_means_the_question_before() -> None:
    messages = [
        *asking("What is the password of the harbour office?"),
        {"role": "assistant", "content": "Let me see."},
    ]
    messages.append({"role": "user", "content": "continue"})
    found = compressor().compress(messages, Wanted(above=400), measure)
    assert found is not None and FACT in found.messages[1]["content"]


def test_instructions_inside_a_document_are_kept() -> None:
    text = f"Answer only in French.\n\n{document(random.Random(4))}"
    found = compressor().compress(
        asking("What is the password of the harbour office?", text), Wanted(above=400), measure
    )
    assert found is not None and "Answer only in French." in found.messages[1]["content"]


def test_tool_results_are_shortened_and_calls_are_not() -> None:
    call = {"id": "1", "function": {"name": "read", "arguments": {"path": "harbour.txt"}}}
    messages = [
        {"role": "user", "content": "What is the password of the harbour office?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": document(random.Random(5))},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "empty"},
    ]
    found = compressor().compress(messages, Wanted(above=400), measure)
    assert found is not None and FACT in found.messages[2]["content"]
    assert len(found.messages[2]["content"]) < len(messages[2]["content"]) / 3
    assert [found.messages[index] for index in (0, 1, 3, 4)] == [messages[index] for index in (0, 1, 3, 4)]


def test_a_choice_that_is_too_long_is_made_again_with_less() -> None:
    """A text may have more tokens than its units. A little less room may lead to the same choice."""
    rest = "of the harbour and of all that is in it, boats and ropes and nets and fish, " * 3
    lines = "\n".join(f"row {index:04} has the value {index * 7919 % 1000:03} {rest}" for index in range(100))
    messages = [
        {"role": "user", "content": lines},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Which row of the harbour has the value 791?"},
    ]
    for more in range(0, 90):

        def longer(read, more=more) -> int:
            return measure(read) + more * (list(read) != messages)

        found = compressor().compress(messages, Wanted(mode="on", above=400, to=432.0), longer)
        assert found is not None and found.documents, (more, found)
        assert 216 < longer(found.messages) <= 432
