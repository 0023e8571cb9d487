"""The page in headless Chromium on a real server: with the pair inside the package, and with a key."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from bough.config import DraftConfig, EngineConfig, ServerConfig, SpecConfig
from bough.hub.catalog import named
from bough.session.loading import load_session
from tests.images.files import encoded, quarters
from tests.images.seeing import make_seeing
from tests.server.live import Live, live, scripted

pytest_plugins = ["tests.server.page_browser"]
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tree_server() -> Iterator[Live]:
    """The pair, with a tree in every step: speed on this machine does not matter here."""
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(
        device="cpu", max_ctx=1024, draft=DraftConfig(pair.draft), speculation=SpecConfig(adaptive=False)
    )
    with live(lambda progress: load_session(pair.target, config, progress=progress)) as server:
        yield server


def opened(chromium: Browser, server: Live, **options) -> Page:
    page = chromium.new_context(viewport={"width": 1280, "height": 800}, **options).new_page()
    page.set_default_timeout(60_000)
    page.goto(server.url)
    return page


def choose(page: Page, **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(value)
    page.keyboard.press("Escape")


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_an_answer_with_trees_and_its_plain_repetition(chromium: Browser, tree_server: Live) -> None:
    page = opened(chromium, tree_server)
    choose(page, seed="4", max_tokens="40")
    ask(page, "Write a bubble sort in Python.")
    expect(page.locator("#status")).to_have_text("Done.", timeout=60_000)
    expect(page.locator(".code-block code")).to_contain_text("def bubble_sort")
    assert page.locator("#tree .accepted circle").count() >= 1
    assert page.locator("#tree .rejected circle").count() >= 1
    page.check("#compare")
    expect(page.locator(".verdict")).to_contain_text("Same text", timeout=60_000)
    page.uncheck("#compare")
    choose(page, budget_range="3")
    ask(page, "Write a quicksort in Python.")
    expect(page.locator("#status")).to_have_text("Done.", timeout=60_000)
    nodes = "document.querySelectorAll('#tree .targets circle').length"
    page.wait_for_function(f"() => {nodes} > 1 && {nodes} <= 4")
    page.context.close()


def test_stopping_frees_the_engine(chromium: Browser, tree_server: Live) -> None:
    page = opened(chromium, tree_server)
    choose(page, max_tokens="900", temperature="1.5")
    ask(page, "Write a long story about a dog, a cat, a horse and everything that they did in a year.")
    expect(page.locator(".message.assistant .prose")).not_to_be_empty(timeout=60_000)
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    tree_server.settle()
    page.context.close()


def test_a_key_given_to_the_browser_serves_the_page_and_its_requests(chromium: Browser) -> None:
    with scripted(config=ServerConfig(api_keys=("sesame",))) as server:
        password = {"username": "any", "password": "sesame"}
        page = opened(chromium, server, http_credentials=password)
        ask(page, "hello there")
        expect(page.locator(".message.assistant .prose")).to_contain_text("You said: hello there")
        expect(page.locator("#key-dialog")).to_be_hidden()
        page.context.close()


def test_a_long_message_is_read_while_the_question_is_typed(chromium: Browser, tree_server: Live) -> None:
    page = opened(chromium, tree_server)
    choose(page, seed="4", max_tokens="4")
    text = "The harbour master counts the boats every morning, and nobody knows why. " * 40
    with page.expect_response("**/v1/prefill") as read:
        page.fill("#prompt", text)
    assert read.value.json()["ready_tokens"] == 512
    expect(page.locator("#status")).to_have_text("Read ahead: 512 tokens.")
    with page.expect_response("**/v1/chat/completions") as answered:
        ask(page, f"{text} Who counts?")
    assert '"cached_tokens":512' in answered.value.text()
    # A file that is dropped stands in front of the message.
    drop = """([name, text]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([text], name));
        document.querySelector("#composer").dispatchEvent(
            new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
    }"""
    page.click("#new-chat")
    with page.expect_response("**/v1/prefill") as read:
        page.evaluate(drop, ["notes.txt", text.replace("boats", "gulls")])
    assert read.value.json()["complete"]
    assert page.input_value("#prompt").startswith("notes.txt:\n```\nThe harbour")
    page.fill("#prompt", "")
    page.evaluate(drop, ["image.png", "\0\1"])
    expect(page.locator("#status")).to_have_text("image.png is not a text file.")


def test_a_picture_is_seen(chromium: Browser, tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "seeing")
    config = EngineConfig(device="cpu", max_ctx=1024)
    with live(lambda progress: load_session(model, config, progress=progress)) as server:
        page = opened(chromium, server)
        choose(page, seed="4", max_tokens="12", temperature="0")
        expect(page.locator("#health-dot")).to_have_attribute("data-state", "ready")
        files = [{"name": "a.png", "mimeType": "image/png", "buffer": encoded(quarters(300, 200), "PNG")}]
        with page.expect_response("**/v1/prefill") as read:
            page.locator("#file").set_input_files(files)
        assert read.value.json()["ready_tokens"] >= 70
        with page.expect_response("**/v1/chat/completions") as answered:
            ask(page, "What is it?")
        expect(page.locator("#status")).to_have_text("Done.")
        body = answered.value.text()
        assert int(re.search(r'"cached_tokens":(\d+)', body)[1]) >= 70
        page.reload()
        expect(page.locator(".message.user img")).to_have_count(1)
        assert page.evaluate("document.querySelector('.message.user img').naturalWidth") == 300
        page.context.close()
