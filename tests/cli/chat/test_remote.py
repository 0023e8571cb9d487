"""A chat with servers: what is sent, what is shown, and what is said of servers of another kind."""

import base64
import json
import socket

import pytest

from bough.errors import UsageError
from bough.images.opening import ImageLimits
from bough.session.remote import RemoteSession, ServerFailed, address
from tests.cli.chat_server import ChatServer, echo, thought
from tests.images.files import encoded, quarters
from tests.server.live import scripted


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("BOUGH_API_KEY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for what is on this machine


def test_a_conversation(bough):
    with ChatServer(echo) as server:
        result = bough("chat", "--url", server.url, "--system", "Be kind.", stdin="one two\nthree\n")
    assert (result.exit_code, result.stdout) == (0, "one two \nthree \n")
    assert result.stderr.count("2 tok · ") == 1 and "TTFT" in result.stderr and "prompt 7" in result.stderr
    first, second = server.requests
    assert first == {
        "model": "served-model",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one two"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "user"]


def test_bytes_that_are_no_text(bough):
    with ChatServer(echo) as server:
        result = bough("chat", "--url", server.url, stdin=b"a\xff b\n")
    assert (result.exit_code, result.stdout) == (0, "a\ufffd b \n")


def test_only_a_line_break_ends_a_line(bough):
    said = "a\u2028b\u2029c\x85d ü 😀"
    with ChatServer(lambda _: [said, "."]) as server:
        result = bough("chat", "--url", server.url, stdin="x\n")
    assert (result.exit_code, result.stdout) == (0, f"{said}.\n"), result.stderr


def test_settings_are_sent_under_their_names(bough):
    flags = ["-t", "0.5", "-n", "9", "--seed", "3", "--set", "top_k=4", "--set", r"stop=\n", "--no-think"]
    with ChatServer(echo) as server:
        result = bough("chat", "my-model", "--url", f"{server.url}/v1/", *flags, stdin="/think 80\nhi\n")
    assert result.exit_code == 0, result.stderr
    sent = server.requests[0]
    assert {name: sent[name] for name in ("temperature", "max_tokens", "seed", "top_k", "stop", "model")} == {
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 3,
        "top_k": 4,
        "stop": ["\n"],
        "model": "my-model",
    }
    assert sent["chat_template_kwargs"] == {"enable_thinking": True} and sent["thinking_budget"] == 80


def test_a_server_of_ours_takes_the_draft(bough):
    stats = {"choices": [], "bough": {"stats": {"tok_s": 55.5, "acceptance_length": 4.25}}}
    with ChatServer(lambda _: [thought("hm"), "x", stats], owner="bough") as server:
        result = bough("chat", "--url", server.url, stdin="hi\n/draft off\n/regen\n/stats\n")
    assert result.exit_code == 0 and [each["bough"] for each in server.requests] == [
        {"budget": None},
        {"budget": 0},
    ]
    assert server.requests[0]["seed"] == server.requests[1]["seed"]
    assert "55.5 tok/s" in result.stderr and "accept 4.25/step" in result.stderr and "hm\n" in result.stderr
    assert "the same text · 55.5 tok/s now" in result.stderr and "acceptance length" in result.stdout


def test_a_server_of_others_does_not(bough):
    with ChatServer(echo) as server:
        result = bough("chat", "--url", server.url, stdin="/draft off\n")
        flags = bough("chat", "--url", server.url, "--budget", "4", stdin="")
    assert "/draft needs a Bough server" in result.stderr and result.exit_code == 2
    assert "--url and flags of the draft exclude each other" in flags.stderr


def test_keys(bough, monkeypatch):
    with ChatServer(echo, key="secret") as server:
        without = bough("chat", "--url", server.url, stdin="hi\n")
        given = bough("chat", "--url", server.url, "--api-key", "secret", stdin="hi\n")
        monkeypatch.setenv("BOUGH_API_KEY", "secret")
        listed = bough("chat", "--url", server.url, stdin="hi\n")
    assert without.exit_code == 1 and "says 401: wrong key\nhint: --api-key KEY" in without.stderr
    assert given.stdout == listed.stdout == "hi \n"


def test_no_server(bough):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        result = bough("chat", "--url", f"127.0.0.1:{taken.getsockname()[1]}", stdin="hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no server at 127.0.0.1:")
    assert "hint: bough serve" in result.stderr


@pytest.mark.parametrize("models", ["<html>a page</html>", {"data": 1}, {"models": []}, [1]])
def test_a_server_of_another_kind(models):
    with ChatServer(echo) as server:
        server.models = models
        with pytest.raises(ServerFailed, match="is not what an OpenAI-compatible server answers"):
            RemoteSession.connect(server.url, key=None, model=None)


def test_a_server_that_lists_no_models():
    with ChatServer(echo) as server:
        server.models = None
        with pytest.raises(ServerFailed, match="says 404: not found"):
            RemoteSession.connect(server.url, key=None, model=None)
        assert RemoteSession.connect(server.url, key=None, model="m").name == "m"
        server.models = {"data": []}
        with pytest.raises(ServerFailed, match="lists no model"):
            RemoteSession.connect(server.url, key=None, model=None)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"error": {"message": "out of memory"}}, "the server broke off: out of memory"),
        ({"error": "plain"}, "the server broke off: plain"),
    ],
)
def test_a_reply_that_breaks_off_is_kept(bough, tmp_path, piece, message):
    with ChatServer(lambda _: ["so far ", piece, "never"]) as server:
        path = tmp_path / "talk.json"
        result = bough("chat", "--url", server.url, stdin=f"hi\n/save {path}\n")
    assert result.exit_code == 1 and message in result.stderr and result.stdout == "so far \n"
    saved = json.loads(path.read_text())["messages"]
    assert saved[1] == {"role": "assistant", "content": "so far ", "stopped": True}


def test_a_server_that_dies(bough):
    def die(_):
        raise OSError

    with ChatServer(die) as server:
        result = bough("chat", "--url", server.url, stdin="hi\n")
    assert result.exit_code == 1 and "ended the reply without saying why" in result.stderr


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h", "http://h/v1"),
        ("https://h/api/v2/", "https://h/api/v2"),
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_addresses(url, found):
    assert address(url) == found


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:x", "http://h?a=b"])
def test_addresses_that_are_none(url):
    with pytest.raises(UsageError, match="needs an address like"):
        address(url)


def test_the_context_is_that_of_the_named_model(bough):
    with ChatServer(echo, owner="bough") as server:
        server.models = {"data": [{"id": "a", "max_model_len": 8192}, {"id": "b", "max_model_len": 512}]}
        result = bough("chat", "--url", server.url, stdin="/model\n/model b\n/model c\n")
    lines = [line for line in result.stderr.splitlines() if " · " in line]
    assert [line.partition(" · http")[0] for line in lines] == [
        "a · context 8,192 tokens", "b · context 512 tokens", "c"
    ]  # fmt: skip


def test_a_conversation_with_another_model_says_so(bough, tmp_path):
    path = tmp_path / "c1.json"
    saved = {
        "model": "other",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    path.write_text(json.dumps(saved))
    with ChatServer(echo) as server:
        result = bough("chat", "--url", server.url, "--load", path, stdin="")
    assert "They were written with other; served-model goes on with them." in result.stderr


def test_a_picture_is_sent_as_a_data_url(bough, tmp_path):
    data = encoded(quarters(), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    with ChatServer(lambda _: ["yes"]) as server:
        result = bough("chat", "--url", server.url, stdin=f"/image {tmp_path}/a.png\nlook\n")
    assert result.exit_code == 0, result.stderr
    image, text = server.requests[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "look"}
    assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_a_server_that_says_it_cannot_see(bough, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(quarters(), "PNG"))
    talk = f"/image {tmp_path}/a.png\n"
    with scripted() as server:
        blind = bough("chat", "--url", server.url, stdin=talk)
    assert blind.exit_code == 2 and "was loaded without its image encoder" in blind.stderr
    with scripted(images=ImageLimits()) as server:
        seeing = bough("chat", "--url", server.url, stdin=f"{talk}look\n")
        assert seeing.exit_code == 0, seeing.stderr
        [message] = server.session.seen[-1].messages
    assert message["content"][0]["image"].data == encoded(quarters(), "PNG")
