"""The measures of repeated text in workshop/chats.py."""

from tests.session.test_repeats import SAID, chat, tokenizer
from workshop import chats


def test_a_period_is_counted_as_often_as_it_stands_in_a_row() -> None:
    assert chats.longest_run([1, 2, 3] * 4) == 4
    assert chats.longest_run([9, *[1, 2, 3, 4] * 3, 9]) == 3
    assert chats.longest_run(list(range(50))) == 1


def test_sentences_of_prose_are_counted_and_code_is_not() -> None:
    text = (
        "The fox ran to the den. The fox ran to the den.\n```\nx = a + b + c\nx = a + b + c\n```\nYes. Yes."
    )
    assert chats.most_frequent([text]) == ("The fox ran to the den.", 2)
    assert chats.most_frequent([text, "The fox ran to the den."])[1] == 3
    assert chats.most_frequent(["Yes."]) == ("", 0)


def test_a_right_answer_that_a_chat_cannot_give() -> None:
    assert chats.may_say(tokenizer(), [], SAID) and not chats.may_say(tokenizer(), chat(*[SAID] * 3), SAID)
    assert not chats.may_say(tokenizer(), [], f"{SAID}\n" * 9)
