"""The page at `/` in headless Chromium, against scripted answers; run with `pytest -m browser`."""

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.server.page_server import DEFAULT_ANSWER, PAGE, PageServer, Script

pytest_plugins = ["tests.server.page_browser"]
Open = Callable[..., Page]
browser_only = pytest.mark.browser

LONG = "\n\n".join(f"Paragraph {number} says little, but it says it at some length." for number in range(40))
SPOKEN = DEFAULT_ANSWER.replace("**", "")


def ask(page: Page, text: str = "Why trees?") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, text: str = SPOKEN) -> None:
    expect(page.locator(".message.assistant .prose").last).to_have_text(text)
    expect(page.locator("#send")).to_be_visible()


@browser_only
def test_an_answer_streams_with_its_trees(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(answer=LONG, step_s=0.01)
    page = open_page()
    ask(page)
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#tree .accepted circle").first).to_be_visible()
    expect(page.locator("#status")).to_have_text("Writing…")
    assert page.locator(".message.assistant").get_attribute("aria-busy") == "true"
    expect(page.locator("#status")).to_have_text("Done.", timeout=20_000)
    expect(page.locator(".stats")).to_contain_text("142 tokens a second")
    expect(page.locator("#speed-now")).to_have_text("142")
    assert page.locator("#strip [role=option]").count() >= 4
    assert page.locator("#speed-chart path.line").count() == 1
    body = page_server.script.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Why trees?"}]
    assert body["bough"] == {"trees": True}
    assert isinstance(body["seed"], int)
    assert "temperature" not in body and "chat_template_kwargs" not in body


@browser_only
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_keeps_the_text_and_frees_the_server(
    page_server: PageServer, open_page: Open, how: str
) -> None:
    page_server.script = Script(answer=LONG, step_s=0.05)
    page = open_page()
    ask(page)
    expect(page.locator(".prose")).to_contain_text("Paragraph 0 says")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .foot")).to_contain_text("Stopped.")
    assert page_server.script.vanished.wait(5)
    assert "Paragraph 39" not in page.locator(".prose").inner_text()
    page_server.script = Script()
    ask(page, "And now?")
    answered(page)
    roles = [message["role"] for message in page_server.script.bodies[0]["messages"]]
    assert roles == ["user", "assistant", "user"]


@browser_only
def test_settings_reach_the_request_and_survive_a_reload(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.7")
    page.fill("[name=top_p]", "0.9")
    page.fill("[name=max_tokens]", "300")
    page.fill("[name=seed]", "7")
    page.locator("[name=budget_range]").fill("5")
    page.get_by_text("Off", exact=True).click()
    page.keyboard.press("Escape")
    page.reload()
    ask(page)
    answered(page)
    body = page_server.script.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.7, 0.9, 300, 7)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["bough"] == {"trees": True, "budget": 5}
    expect(page.locator("#tree .targets circle")).to_have_count(6)
    page.click("#open-settings")
    expect(page.locator("#budget-value")).to_have_text("5")
    page.click("#reset-settings")
    expect(page.locator("#budget-value")).to_have_text("automatic")
    expect(page.locator("[name=temperature]")).to_have_value("")


@browser_only
def test_an_invalid_number_is_not_sent(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.5")
    page.fill("[name=temperature]", "9")
    page.keyboard.press("Escape")
    ask(page)
    answered(page)
    assert page_server.script.bodies[0]["temperature"] == 0.5


@browser_only
def test_the_readout_and_older_trees(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(answer=LONG, step_s=0.001)
    page = open_page()
    ask(page)
    expect(page.locator("#status")).to_have_text("Done.", timeout=20_000)
    page.wait_for_timeout(1200)  # the last tree is rendered up to a second later, even below the pointer
    page.locator("#tree .targets circle").last.hover()
    expect(page.locator("#readout")).to_contain_text("was rejected")
    page.locator("#tree .targets circle").first.hover()
    expect(page.locator("#readout")).to_contain_text("was committed by the step before")
    page.mouse.move(5, 5)
    number = int(page.locator("#strip [role=option]").last.get_attribute("data-number") or 0)
    page.focus("#strip")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#readout")).to_contain_text(f"Step {number - 1}:")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text(f"Step {number}:")


@browser_only
def test_plain_decoding_repeats_the_answer(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    ask(page)
    answered(page)
    page.check("#compare")
    verdict = page.locator(".verdict")
    expect(verdict).to_have_text(f"3.4 times as fast. Same text, all {len(DEFAULT_ANSWER)} characters.")
    tree, plain = page_server.script.bodies
    assert plain["bough"] == {"trees": True, "budget": 0}
    assert {**plain, "bough": None} == {**tree, "bough": None}
    page_server.script = Script(plain_answer="A **tree** of roots.")
    ask(page, "Once more")
    expect(verdict).to_contain_text("The texts diverge at character 15.")


@browser_only
def test_a_stopped_answer_is_compared_up_to_its_length(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(answer=LONG, step_s=0.03)
    page = open_page()
    ask(page)
    expect(page.locator(".prose")).to_contain_text("Paragraph 1")
    page.keyboard.press("Escape")
    page.check("#compare")
    expect(page.locator(".verdict.same")).to_contain_text("Same text", timeout=20_000)


@browser_only
def test_an_unreachable_server_loses_no_text(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    ask(page, "Precious words")
    expect(page.get_by_role("alert")).to_contain_text("The server does not respond.")
    page.fill("#prompt", "half a thou")
    page.reload()
    expect(page.locator(".bubble")).to_have_text("Precious words")
    expect(page.locator("#prompt")).to_have_value("half a thou")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    answered(page)
    assert page_server.script.bodies[0]["messages"][-1]["content"] == "Precious words"
    page.route("**/health", lambda route: route.abort("connectionrefused"))
    page.reload()
    expect(page.locator("#model-name")).to_have_text("Server not reachable")


@browser_only
def test_the_key_is_prompted_for_and_stored(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(key="open sesame")
    page = open_page()
    ask(page)
    for attempt in ("wrong", "open sesame"):
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-input", attempt)
        page.keyboard.press("Enter")
    answered(page)
    page.reload()
    page_server.script.answers = ["Another."]
    page.get_by_role("button", name="Regenerate").click()
    answered(page, "Another.")
    assert len(page_server.script.bodies) == 2


@browser_only
def test_a_cancelled_key_prompt_keeps_the_message(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(key="open sesame")
    page = open_page()
    ask(page, "Kept words")
    page.click("#key-cancel")
    expect(page.get_by_role("alert")).to_contain_text("key is missing or wrong")
    expect(page.locator(".bubble")).to_have_text("Kept words")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


@browser_only
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (Script(busy=1), "The server has too many requests. Trying again in 1 s."),
        (Script(loading=3), "The model is loading: layer 12 of 64."),
        (Script(comments=("queued behind 2",)), "Waiting: 2 requests are ahead."),
        (Script(comments=("prompt 512/2048",)), "Reading the prompt: 512 of 2,048 tokens."),
    ],
    ids=["busy", "loading", "queued", "prefill"],
)
def test_waiting_is_shown_and_ends_by_itself(
    page_server: PageServer, open_page: Open, script: Script, sentence: str
) -> None:
    page = open_page()
    page_server.script = script
    ask(page)
    expect(page.locator("#status")).to_have_text(sentence)
    answered(page)


@browser_only
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (Script(answer=LONG, break_after=5), "The connection was lost. The text received so far is kept."),
        (Script(answer=LONG, error_after=5), "The engine ran out of memory."),
    ],
    ids=["cut", "error event"],
)
def test_a_failure_midway_keeps_the_text(
    page_server: PageServer, open_page: Open, script: Script, sentence: str
) -> None:
    page_server.script = script
    page = open_page()
    ask(page)
    expect(page.get_by_role("alert")).to_have_text(sentence)
    expect(page.locator(".prose")).to_contain_text("Paragraph 0")


@browser_only
def test_the_server_s_error_message_is_shown(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(refuse="the prompt has 9000 tokens, the context holds 8192")
    page = open_page()
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The prompt has 9000 tokens, the context holds 8192.")
    page_server.script = Script()
    ask(page, "Shorter")
    answered(page)
    roles = [message["role"] for message in page_server.script.bodies[0]["messages"]]
    assert roles == ["user", "user"]


@browser_only
def test_leaving_a_chat_midway_saves_it_and_a_new_message_ends_a_repetition(
    page_server: PageServer, open_page: Open
) -> None:
    page_server.script = Script(answer=LONG, step_s=0.05)
    page = open_page()
    ask(page, "Long one")
    expect(page.locator(".prose")).to_contain_text("Paragraph 0")
    page.click("#new-chat")
    expect(page.locator("#send")).to_be_visible()
    assert page_server.script.vanished.wait(5)
    page.click("#open-chats")
    page.locator(".chat-open", has_text="Long one").click()
    expect(page.locator(".prose")).to_contain_text("Paragraph 0")
    expect(page.locator(".message.assistant .foot")).to_contain_text("Stopped.")
    page_server.script = Script(answer=LONG, step_s=0.01)
    ask(page, "Again")
    expect(page.locator("#status")).to_have_text("Done.", timeout=20_000)
    page.check("#compare")
    expect(page.locator(".verdict")).to_contain_text("Repeating without trees")
    ask(page, "Next")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#status")).to_have_text("Writing…")
    expect(page.locator("#stop")).to_be_visible()


@browser_only
def test_reasoning_is_folded_and_never_sent_back(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(reasoning="First I wonder.", finish="length")
    page = open_page()
    ask(page)
    answered(page)
    expect(page.locator(".thought summary")).to_have_text("Thought")
    expect(page.locator(".thought-text")).to_be_hidden()
    expect(page.locator(".message.assistant .foot")).to_contain_text("Cut at the length limit")
    page.locator(".thought summary").click()
    expect(page.locator(".thought-text")).to_have_text("First I wonder.")
    ask(page, "Go on")
    expect(page.locator(".message.assistant")).to_have_count(2)
    answered(page)
    assert "wonder" not in json.dumps(page_server.script.bodies[1])


@browser_only
def test_editing_and_regenerating(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    ask(page, "First")
    answered(page)
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit", exact=True).click()
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("First")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_label("Edit message").fill("Second")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text("Second")
    answered(page)
    page_server.script.answers = ["Another."]
    page.get_by_role("button", name="Regenerate").click()
    answered(page, "Another.")
    asked = [[message["content"] for message in body["messages"]] for body in page_server.script.bodies]
    assert asked == [["First"], ["Second"], ["Second"]]
    assert len({body["seed"] for body in page_server.script.bodies}) == 3


@browser_only
def test_chats_are_stored_and_new_ones_start_empty(open_page: Open) -> None:
    page = open_page()
    ask(page, "Remember me")
    answered(page)
    page.reload()
    answered(page)
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#open-chats")
    page.locator(".chat-open", has_text="Remember me").click()
    answered(page)
    page.click("#open-chats")
    page.get_by_role("button", name="Delete chat: Remember me").click()
    page.get_by_role("button", name="Really delete chat: Remember me?").click()
    expect(page.locator("#chat-list")).to_have_text("No chats yet.")
    expect(page.locator(".message")).to_have_count(0)


@browser_only
def test_the_page_fits_on_a_phone(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(answer="```python\n" + "x = 1 + " * 60 + "1\n```\n\n" + "word" * 60)
    page = open_page(viewport={"width": 360, "height": 700}, has_touch=True)
    expect(page.locator("#panel")).to_be_hidden()
    ask(page)
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.getElementById('scroll').scrollWidth") <= 360
    page.click("#toggle-panel")
    expect(page.locator("#tree svg")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()


@browser_only
def test_code_is_copied_unchanged(page_server: PageServer, open_page: Open) -> None:
    source = 'def f(x):\n    return "<b>" if x else None  # why'
    page_server.script = Script(answer=f"```python\n{source}\n```")
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page)
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == source


def test_the_page_is_small_and_self_contained() -> None:
    files = [path for path in PAGE.iterdir() if path.is_file()]
    assert {"index.html", "app.js", "style.css"} <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) < 400, path.name
        assert not re.findall(r"(?:src|href)=[\"'](?:https?:)?//", text), path.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
            path.name
        )
