"""Over turns: what was read stays, a later question gets what it needs, half a text is all of it."""

import random
from typing import Any

import pytest

from bough.compress.compressor import NOTE, Compressor
from bough.compress.conversation import Wanted
from bough.compress.words import WordScorer
from tests.compress import conversations
from tests.compress.conversations import count, measure

WANTED = Wanted(above=400, to=0.2)
FACTS = [
    "The password of the harbour office is KESTREL-4471.",
    "The lighthouse keeper was called Amundsen.",
    "Bread costs nineteen crowns on Tuesdays.",
]
QUESTIONS = [
    "What is the password of the harbour office?",
    "What was the lighthouse keeper called?",
    "What does bread cost on Tuesdays?",
]


def text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def with_facts(rng: random.Random, sentences: int = 200) -> str:
    parts = conversations.prose(rng, sentences).split("\n\n")
    for fact in FACTS:
        parts.insert(rng.randint(1, len(parts) - 1), fact)
    return "\n\n".join(parts)


def test_later_questions_get_what_was_left_out() -> None:
    compressor = Compressor(WordScorer(), count)
    messages = [{"role": "user", "content": f"{with_facts(random.Random(1))}\n\n{QUESTIONS[0]}"}]
    first = compressor.compress(messages, WANTED, measure)
    assert first is not None and FACTS[0] in text(first.messages[0]["content"])
    assert FACTS[1] not in text(first.messages[0]["content"])
    messages += [{"role": "assistant", "content": "KESTREL-4471"}, {"role": "user", "content": QUESTIONS[1]}]
    second = compressor.compress(messages, WANTED, measure)
    assert second is not None and second.messages[0] == first.messages[0]
    assert second.messages[2]["content"].startswith(f"{NOTE}\n") and FACTS[1] in second.messages[2]["content"]
    assert second.messages[2]["content"].endswith(f"\n\n{QUESTIONS[1]}")
    messages += [{"role": "assistant", "content": "Amundsen"}, {"role": "user", "content": "Thank you!"}]
    third = compressor.compress(messages, WANTED, measure)
    assert third is not None and list(third.messages[:4]) == [*second.messages, messages[3]]
    assert third.messages[4]["content"] == "Thank you!"
    # The same document in another conversation is chosen from anew.
    other = [{"role": "user", "content": messages[0]["content"].replace(QUESTIONS[0], QUESTIONS[2])}]
    anew = compressor.compress(other, WANTED, measure)
    assert anew is not None and FACTS[2] in anew.messages[0]["content"]


def test_what_is_said_beside_an_image_stays_whole() -> None:
    document = with_facts(random.Random(1))
    asked = {"role": "user", "content": f"{document}\n\n{QUESTIONS[0]}"}
    seen = {
        "role": "user",
        "content": [{"type": "image", "image": b"", "text": ""}, {"type": "text", "text": document}],
    }
    alone = Compressor(WordScorer(), count).compress([asked], WANTED, measure)
    assert alone is not None and alone.messages[0] != asked
    compressor = Compressor(WordScorer(), count)
    only = compressor.compress([seen], WANTED, measure)
    assert only is not None and only.messages == [seen] and "no document" in only.report.reason
    both = compressor.compress([seen, {"role": "assistant", "content": "I see."}, asked], WANTED, measure)
    assert both is not None and both.messages[0] == seen and both.messages[2] != asked


def test_a_text_of_which_half_was_added_is_read_whole_from_then_on() -> None:
    compressor = Compressor(WordScorer(), count)
    rng = random.Random(2)
    document = with_facts(rng, 60)
    messages = [{"role": "user", "content": document}, {"role": "assistant", "content": "Yes."}]
    for words in range(0, 27, 3):
        asked = " ".join(conversations.WORDS[words : words + 3])
        messages.append({"role": "user", "content": f"What about the {asked}?"})
        found = compressor.compress(messages, Wanted(above=400, to=0.4), measure)
        assert found is not None
        messages.append({"role": "assistant", "content": "Well."})
    assert found.messages[0]["content"] == document and found.documents[0, None].whole
    assert found.documents[0, None].runs() == [(True, document)]


def test_a_later_question_about_everything_reads_everything() -> None:
    compressor = Compressor(WordScorer(), count)
    document = with_facts(random.Random(3))
    messages = [{"role": "user", "content": document}, {"role": "assistant", "content": "Yes."}]
    messages.append({"role": "user", "content": QUESTIONS[0]})
    assert compressor.compress(messages, WANTED, measure) is not None
    messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Summarise the text."}]
    found = compressor.compress(messages, WANTED, measure)
    assert found is not None and found.messages[0]["content"] == document


def test_every_question_finds_its_fact_in_random_conversations() -> None:
    appended = 0
    for seed in range(40):
        rng = random.Random(seed)
        compressor = Compressor(WordScorer(), count)
        wanted = Wanted(above=400, to=rng.choice([0.1, 0.2, 0.3]))
        messages = [{"role": "user", "content": with_facts(rng, rng.randint(60, 200))}]
        read: list[Any] = []
        for asked in rng.sample(range(len(FACTS)), len(FACTS)):
            messages = [*messages, {"role": "assistant", "content": "Well."}]
            messages.append({"role": "user", "content": QUESTIONS[asked]})
            found = compressor.compress(messages, wanted, measure)
            assert found is not None and list(found.messages[: len(read)]) == read, seed
            read = list(found.messages)
            assert any(FACTS[asked] in text(message["content"]) for message in read), (seed, asked)
            appended += NOTE in text(read[-1]["content"])
    assert appended > 40


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 200), marks=pytest.mark.slow)])
def test_200_random_conversations_keep_their_prefix(seeds: range) -> None:
    shared = grown = 0
    for seed in seeds:
        rng = random.Random(seed)
        messages = conversations.conversation(rng)
        compressor = Compressor(WordScorer(), count)
        wanted = Wanted(mode="on", above=400, to=rng.choice([0.1, 0.2, 0.4]))
        before = compressor.compress(messages, wanted, measure)
        for _ in range(rng.randint(1, 4)):
            length = len(messages)
            messages = [*messages, {"role": "assistant", "content": conversations.prose(rng, 3)}]
            last = rng.choice(
                [conversations.question(rng), QUESTIONS[0], "Go on.", conversations.document(rng)]
            )
            messages.append({"role": "user", "content": last})
            found = compressor.compress(messages, wanted, measure)
            if before is not None and found is not None:
                opened = {place for place, each in found.documents.items() if each.whole}
                opened -= {place for place, each in before.documents.items() if each.whole}
                if not opened:
                    shared += 1
                    assert list(found.messages[:length]) == list(before.messages), seed
                # An answer is never touched, and a question stands at the end of its message.
                assert found.messages[length] == messages[length]
                ends = text(found.messages[-1]["content"])
                assert ends.endswith(last) or (-1 + len(messages), None) in found.documents
                grown += NOTE in ends
                again = compressor.compress(messages, wanted, measure)
                assert again is not None and list(again.messages) == list(found.messages)
            before = found
    assert shared > 0.5 * len(seeds) and grown > 0.1 * len(seeds)
