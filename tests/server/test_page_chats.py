"""The page in headless Chromium: files, names and export of chats, the context, several models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bough.cli.chat import conversation
from tests.server.page_server import PageServer, Script

pytest_plugins = ["tests.server.page_browser"]
pytestmark = pytest.mark.browser
Open = Callable[..., Page]


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Done.")


def test_a_file_becomes_part_of_the_message(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.fill("#prompt", "What is this?")
    files = [
        {"name": "a.md", "mimeType": "text/markdown", "buffer": b"```\nx\n```\n"},
        {"name": "b.bin", "mimeType": "application/octet-stream", "buffer": b"\0\xff"},
    ]
    page.locator("#file").set_input_files(files)
    expect(page.locator("#status")).to_have_text("b.bin is not a text file.")
    expect(page.locator("#prompt")).to_have_value("a.md:\n````\n```\nx\n```\n````\n\nWhat is this?")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Done.")
    assert page_server.script.bodies[0]["messages"][0]["content"].endswith("What is this?")


def test_a_chat_is_renamed_and_exported(open_page: Open, tmp_path: Path) -> None:
    page = open_page()
    ask(page, "Hello")
    page.click("#open-chats")
    expect(page.locator(".chat-open[aria-current=true]")).to_contain_text("Hello")
    page.get_by_role("button", name="Rename chat: Hello").click()
    page.keyboard.type("Another name")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Rename chat: Hello").click()
    page.keyboard.type("Greeting")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-open")).to_contain_text("Greeting")
    with page.expect_download() as found:
        page.get_by_role("button", name="Export chat: Greeting").click()
    found.value.save_as(tmp_path / "chat.json")
    loaded, _ = conversation.load(tmp_path / "chat.json")
    assert [each.role for each in loaded.messages] == ["user", "assistant"]
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][0]["content"] == "Hello"
    page.keyboard.press("Escape")
    page.reload()
    page.click("#open-chats")
    expect(page.locator(".chat-open")).to_contain_text("Greeting")


def test_chats_stored_under_the_old_name_are_kept(open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.3")
    page.keyboard.press("Escape")
    ask(page, "Hello")
    page.evaluate("""() => {
      for (const [name, text] of Object.entries({ ...localStorage })) {
        localStorage.removeItem(name);
        localStorage.setItem(name.replace("bough.", "treeflash."), text);
      }
    }""")
    page.reload()
    page.click("#open-chats")
    expect(page.locator(".chat-open")).to_contain_text("Hello")
    page.keyboard.press("Escape")
    page.click("#open-settings")
    expect(page.locator("[name=temperature]")).to_have_value("0.3")
    assert page.evaluate("Object.keys(localStorage).every((name) => name.startsWith('bough.'))")


def test_how_much_of_the_context_is_used(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#context")).to_be_hidden()
    ask(page, "Hello")
    expect(page.locator("#context-text")).to_have_text("112 of 8,192 tokens")
    page.reload()
    expect(page.locator("#context-text")).to_have_text("112 of 8,192 tokens")
    page.click("#new-chat")
    expect(page.locator("#context")).to_be_hidden()


def test_one_of_several_models(page_server: PageServer, open_page: Open) -> None:
    page_server.script.models = ("bough-40m", "other")
    page = open_page()
    page.get_by_role("combobox", name="Model").select_option("other")
    expect(page.locator("#about-model")).to_have_text("The model is other.")
    ask(page, "Hello")
    assert page_server.script.bodies[0]["model"] == "other"
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("other")


def test_empty_fields_show_what_they_mean_and_done_is_in_sight(open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.7")
    expect(page.locator("[name=top_k]")).to_have_attribute("placeholder", "40")
    expect(page.get_by_role("button", name="Done")).to_be_in_viewport()


def test_every_sampling_setting_reaches_the_request(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    given = {"top_k": "5", "min_p": "0.1", "repetition_penalty": "1.2", "presence_penalty": "-0.5"}
    for name, value in given.items():
        page.fill(f"[name={name}]", value)
    page.keyboard.press("Escape")
    ask(page, "Hello")
    assert {name: page_server.script.bodies[0][name] for name in given} == {
        name: float(value) for name, value in given.items()
    }


def test_a_stopped_answer_has_statistics(page_server: PageServer, open_page: Open) -> None:
    page_server.script = Script(answer="word " * 400, step_s=0.05)
    page = open_page()
    page.fill("#prompt", "Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".prose")).to_contain_text("word word")
    page.click("#stop")
    expect(page.locator(".stats")).to_contain_text("tokens a second")


@pytest.mark.parametrize("width", [390, 1360])
@pytest.mark.parametrize("title", ["Hi", "Tell me a joke in one sentence.", "abc " * 32 + "ab", "x" * 130])
def test_every_button_of_a_chat_is_on_the_screen(open_page: Open, width: int, title: str) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    ask(page, title)
    page.click("#open-chats")
    sizes = page.evaluate("""() => {
      const dialog = document.querySelector("#chats-dialog");
      const rights = [...dialog.querySelectorAll("button")].map((each) => each.getBoundingClientRect().right);
      return [dialog.scrollWidth, dialog.clientWidth, Math.max(...rights)];
    }""")
    assert sizes[0] == sizes[1] and sizes[2] <= width
    page.get_by_role("button", name=f"Delete chat: {title[:20]}").click()
    expect(page.get_by_role("button", name="Really delete chat")).to_be_in_viewport(ratio=1)


def test_another_answer_has_another_seed_and_text(page_server: PageServer, open_page: Open) -> None:
    page_server.script.answers = ["One.", "One.", "Two.", "Two.", "Three.", "Four.", "Five."]
    page = open_page()
    ask(page, "Hello")
    prose, note = page.locator(".message.assistant .prose"), page.locator(".message.assistant .note")
    expect(page.locator("#status")).to_have_text("Done.")
    expect(note).to_have_count(0)
    for text, temperature in (("Two.", "1"), ("Three.", "1.3"), ("Four.", "1")):
        page.click("[data-action=regenerate]")
        expect(prose).to_have_text(text)
        expect(note).to_have_text(
            f"Sampled at temperature {temperature}, as the recommended sampling gave the same text."
        )
    ask(page, "Bye")
    expect(prose.last).to_have_text("Five.")
    *bodies, last = page_server.script.bodies
    assert [body.get("temperature") for body in bodies] == [None, None, 1, 1, 1.3, 1]
    assert "temperature" not in last
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert all(body["messages"] == [{"role": "user", "content": "Hello"}] for body in bodies)


def test_a_temperature_or_a_seed_of_the_user_stays(page_server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.click("#open-settings")
    page.fill("[name=seed]", "7")
    page.fill("[name=temperature]", "0.5")
    page.keyboard.press("Escape")
    ask(page, "Hello")
    for _ in range(2):
        with page.expect_response("**/v1/chat/completions"):
            page.click("[data-action=regenerate]")
        expect(page.locator(".message.assistant .note")).to_have_text(
            "The same text, although by another seed: a higher temperature gives others."
        )
        expect(page.locator(".message.assistant .stats")).to_be_visible()
    bodies = page_server.script.bodies
    assert [(body["seed"], body["temperature"]) for body in bodies] == [(7, 0.5), (8, 0.5), (9, 0.5)]


def test_a_model_without_a_draft_says_so_and_leaves_its_room_to_the_chat(
    page_server: PageServer, open_page: Open
) -> None:
    page_server.script.proposes = "lookup"
    page = open_page()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#about-trees")).to_be_hidden()
    page.click("#toggle-panel")
    expect(page.locator("#panel-about")).to_contain_text("This model has no draft.")
    page.reload()
    expect(page.locator("#panel")).to_be_visible()
