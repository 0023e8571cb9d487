"""Compression over HTTP: the field of every protocol, what usage says, and that agents keep their tools."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from bough.compress.compressor import Compressor
from bough.compress.conversation import Wanted
from bough.compress.words import WordScorer
from bough.config import CompressConfig, EngineConfig
from bough.session.attention_scorer import AttentionScorer
from bough.session.loading import load_session
from bough.text.template import ChatTemplate
from tests.compress.conversations import count, prose
from tests.server.agent_bodies import claude_code, codex, opencode
from tests.server.live import Live, live
from tests.server.test_agent_bodies import HEADERS, PATHS
from tests.text.templates import QWEN35

FACT = "The password of the harbour office is KESTREL-4471."
QUESTION = "What is the password of the harbour office?"
TEXT = f"{prose(random.Random(1), 40)}\n\n{FACT}\n\n{prose(random.Random(2), 40)}"
ASKED = [{"role": "user", "content": f"{TEXT}\n\n{QUESTION}"}]
BODIES = {
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 3},
    "/v1/completions": {"prompt": f"{TEXT}\n\n{QUESTION}", "max_tokens": 3},
    "/v1/responses": {"input": f"{TEXT}\n\n{QUESTION}", "max_output_tokens": 3},
    "/v1/messages": {"messages": ASKED, "max_tokens": 3},
}
OLLAMA = {"messages": ASKED, "stream": False, "options": {"num_predict": 3}}


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Live]:
    config = EngineConfig(device="cpu", max_ctx=8192)
    with live(lambda progress: load_session(tiny_model(context=8192), config, progress=progress)) as found:
        yield found


def post(server: Live, route: str, **options) -> httpx2.Response:
    body = {"model": "m", **BODIES[route], **options}
    return httpx2.post(server.url + route, json=body, timeout=60)


@pytest.mark.parametrize("route", BODIES)
def test_every_protocol_has_it(server: Live, route: str) -> None:
    exact = post(server, route).json()["usage"]
    assert "compression" not in exact and "approximate" not in exact
    usage = post(server, route, compress={"above": 800, "to": 0.25, "query": QUESTION}).json()["usage"]
    found = usage["compression"]
    assert found["kept_tokens"] <= 0.25 * found["sent_tokens"] and found["scorer"] == "words"
    assert {"score_ms", "prefill_ms"} <= found.keys()
    share = 100 * found["kept_tokens"] / found["sent_tokens"]
    assert usage["approximate"] == [f"prompt compressed to {share:.3g}%"]
    sent = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert sent + usage.get("cache_read_input_tokens", 0) == found["sent_tokens"]
    assert post(server, route, compress="off").json()["usage"].keys() == exact.keys()
    whole = post(server, route, compress={"mode": "auto", "above": 800, "query": "Count the words."})
    assert "whole text" in whole.json()["usage"]["compression"]["exact"]


def test_ollamas_protocol_has_it(server: Live) -> None:
    def ask(**options) -> dict:
        return httpx2.post(f"{server.url}/api/chat", json=OLLAMA | options, timeout=60).json()

    exact, found = ask(), ask(compress={"above": 800, "to": 0.25, "query": QUESTION})
    assert not {"compression", "approximate"} & exact.keys()
    assert found["compression"]["kept_tokens"] <= 0.25 * found["compression"]["sent_tokens"]
    assert found["prompt_eval_count"] == found["compression"]["sent_tokens"] and found["approximate"]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("always", "compress.mode"),
        ({"to": 0}, "compress.to"),
        ({"above": "much"}, "compress.above"),
        ({"keep": "this"}, "compress.keep"),
        ({"query": 5}, "compress.query"),
        ({"scorer": "words"}, "compress.scorer"),
    ],
)
def test_other_values_are_refused(server: Live, value, param: str) -> None:
    answer = post(server, "/v1/chat/completions", compress=value)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("agent", [codex, claude_code, opencode], ids=lambda each: each.__name__)
def test_agents_keep_system_prompt_tools_calls_and_last_turns(echo_server: Live, agent) -> None:
    answer = httpx2.post(echo_server.url + PATHS[agent], json=agent(turn=2), headers=HEADERS)
    assert answer.status_code == 200
    request = echo_server.session.seen[-1]
    messages = [dict(message) for message in request.messages]
    result = next(index for index, message in enumerate(messages) if message["role"] == "tool")
    messages[result]["content"] = TEXT
    messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": QUESTION}]
    template = ChatTemplate(QWEN35, controls=["<|im_start|>", "<|im_end|>"])

    def render(turns) -> str:
        return template.render(turns, tools=request.tools).text

    def measure(turns) -> int:
        return count([render(turns)])[0]

    budget = float(measure([*messages[:result], *messages[result + 1 :]]) + 300)
    before = json.dumps([messages, request.tools])
    found = Compressor(WordScorer(), count).compress(messages, Wanted(above=300, to=budget), measure)
    assert found is not None and found.documents and found.report.kept_tokens <= budget
    assert json.dumps([messages, request.tools]) == before
    old, new = render(messages), render(found.messages)
    start = old.index(TEXT)
    assert new[:start] == old[:start] and new.endswith(old[start + len(TEXT) :])
    assert FACT in new and len(new) < len(old) - len(TEXT) // 2


def test_a_model_scores_in_a_thread_of_its_own_and_others_go_on(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More texts are scored than there are threads for the prompts of others."""
    scoring, going, names = threading.Semaphore(0), threading.Event(), []
    score = AttentionScorer.score

    def slow(self, *args):
        names.append(threading.current_thread().name)
        scoring.release()
        assert going.wait(60)
        return score(self, *args)

    monkeypatch.setattr(AttentionScorer, "score", slow)
    compress = CompressConfig("auto", above=800, scorer=tiny_model("qwen3"))
    config = EngineConfig(device="cpu", max_ctx=8192, compress=compress)
    with live(lambda progress: load_session(tiny_model(context=8192), config, progress=progress)) as server:
        route = "/v1/chat/completions"
        long = [threading.Thread(target=post, args=(server, route)) for _ in range(40)]
        for each in long:
            each.start()
        assert scoring.acquire(timeout=60)
        assert post(server, route, messages=[{"role": "user", "content": "Hello"}]).status_code == 200
        going.set()
        for each in long:
            each.join(60)
    # The same conversation is scored once.
    assert len(names) == 1 and names[0].startswith("scored")
