"""Conversations and settings, and what becomes of them in files."""

import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.cli.chat import conversation as saved
from bough.cli.chat.conversation import ChatSettings, Conversation, Message
from bough.errors import UsageError
from bough.images.opening import ImageFile
from tests.images.files import encoded, quarters

TURNS = st.builds(
    Message,
    st.sampled_from(("user", "assistant")),
    st.text(st.characters(codec="utf-8")),
    stopped=st.booleans(),
)


@given(
    conversation=st.builds(Conversation, st.none() | st.text("ab\n"), st.lists(TURNS, max_size=4)),
    temperature=st.floats(0, 100),
    seed=st.integers(0, 2**64 - 1),
    budget=st.none() | st.integers(0, 63),
)
def test_what_is_saved_is_loaded(tmp_path_factory, conversation, temperature, seed, budget):
    path = tmp_path_factory.mktemp("chat") / "talk.json"
    settings = ChatSettings({"temperature": temperature, "seed": seed}, ["\n\n"], True, 100, "low", budget)
    saved.save(path, conversation, settings, model="a model")
    assert saved.load(path) == (conversation, settings)
    saved.save(path, Conversation(), ChatSettings(), model="a model")
    assert saved.load(path) == (Conversation(), ChatSettings())


def test_files_of_others_are_not_written_over(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{"notes": 1}')
    with pytest.raises(UsageError, match="is not a saved conversation"):
        saved.save(path, Conversation(), ChatSettings(), model="")
    assert path.read_text() == '{"notes": 1}'
    with pytest.raises(UsageError, match="is a folder"):
        saved.save(tmp_path, Conversation(), ChatSettings(), model="")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        saved.save(tmp_path / "none" / "x.json", Conversation(), ChatSettings(), model="")
    assert [each.name for each in tmp_path.iterdir()] == ["notes.json"]


def test_a_saved_file_is_its_owners(tmp_path):
    path = tmp_path / "talk.json"
    saved.save(path, Conversation(), ChatSettings(), model="")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON: Expecting value in line 1, column 1"),
        ('{"messages": [', "is not JSON: Expecting value in line 1, column 15"),
        ("7", "it has no list of messages"),
        ('{"messages": {}}', "it has no list of messages"),
        ('{"messages": [1]}', r"is damaged: messages\[0\].role is 1; needs user or assistant"),
        ('{"messages": [{"role": "tool"}]}', r"messages\[0\].role is 'tool'"),
        ('{"messages": [{"role": "user", "content": 1}]}', r"messages\[0\].content is 1; needs a text"),
        ('{"messages": [], "system": 1}', "system is 1; needs a text"),
        ('{"messages": [], "settings": {"top_p": 3}}', "top_p is '3'; needs a number from 1e-06 to 1"),
        ('{"messages": [], "settings": {"stop": "x"}}', "stop is 'x'; needs a list"),
        ('{"messages": [], "settings": {"draft_budget": 99}}', "draft_budget is 99; needs a whole number"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON text"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "talk.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message):
        saved.load(path)


def test_messages_of_other_programs(tmp_path):
    path = tmp_path / "talk.json"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "x"}]
    for content in (turns, {"messages": turns, "temperature": 1}):
        path.write_text(json.dumps(content))
        assert saved.load(path) == (Conversation("s", [Message("user", "q")]), ChatSettings())
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        saved.load(tmp_path / "none.json")


def test_settings():
    settings = ChatSettings()
    settings.set("temperature", "0.5")
    settings.set("stop", r"\n\n")
    settings.set("stop", "END")
    assert settings.values == {"temperature": 0.5} and settings.stop == ["\n\n", "END"]
    assert settings.shown("temperature") == "0.5" and settings.shown("top_k") == "default"
    settings.set("temperature", "default")
    settings.set("stop", "default")
    assert settings == ChatSettings()
    for name, value in [
        ("heat", "1"),
        ("top_k", "1.5"),
        ("top_p", "0"),
        ("temperature", "nan"),
        ("seed", "-1"),
    ]:
        with pytest.raises(UsageError):
            settings.set(name, value)
    assert settings == ChatSettings()


def test_turns():
    conversation = Conversation("s", [Message("user", "a"), Message("assistant", "b", "thought")])
    assert conversation.request() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert conversation.take_reply() == Message("assistant", "b", "thought")
    assert conversation.take_reply() is None
    assert conversation.undo() == "a" and conversation.undo() is None


def test_pictures_are_saved_and_loaded(tmp_path):
    path = tmp_path / "talk.json"
    images = tuple(ImageFile(encoded(quarters(), form)) for form in ("PNG", "JPEG", "WEBP", "GIF"))
    conversation = Conversation(None, [Message("user", "look", images=images), Message("assistant", "yes")])
    saved.save(path, conversation, ChatSettings(), model="a model")
    assert saved.load(path)[0] == conversation
    urls = [part["image_url"]["url"] for part in json.loads(path.read_text())["messages"][0]["content"][:-1]]
    assert [url.partition(";")[0] for url in urls] == [
        f"data:image/{kind}" for kind in ("png", "jpeg", "webp", "gif")
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}], "is not fetched"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "needs a text and images"),
        ([{"type": "text"}], "needs a text and images"),
        ([5], "needs a text"),
    ],
)
def test_parts_that_are_no_picture(tmp_path, content, message):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": content}]))
    with pytest.raises(UsageError, match=message):
        saved.load(path)
