"""The page in headless Chromium: keyboard, names for screen readers, contrast, light and dark."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

pytest_plugins = ["tests.server.page_browser"]
pytestmark = pytest.mark.browser
Open = Callable[..., Page]

CONTROLS = "button|textbox|combobox|slider|spinbutton|radio|switch|checkbox|meter"
# WCAG contrast of a CSS variable against the page's background, both resolved by the browser.
CONTRAST = """(name) => {
  const probe = document.body.appendChild(document.createElement('span'));
  probe.style.color = `var(${name})`;
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const both = [light(getComputedStyle(probe).color), light(getComputedStyle(document.body).backgroundColor)];
  probe.remove();
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}"""


def test_keyboard_and_accessible_names(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#prompt")).to_have_value("one\ntwo")
    page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    assert page.locator("#send").evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    nameless = "[...document.querySelectorAll('button')].filter(b => !(b.ariaLabel || b.textContent.trim()))"
    assert page.evaluate(f"{nameless}.length") == 0
    unlabelled = "[...document.querySelectorAll('input, textarea')].filter(field => !field.labels.length)"
    assert page.evaluate(f"{unlabelled}.length") == 0


def test_the_theme_follows_the_system_until_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    brightness = "() => Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert page.evaluate(brightness) < 64
    page.click("#toggle-theme")
    assert page.evaluate(brightness) > 192
    page.reload()
    assert page.evaluate(brightness) > 192


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(open_page: Open, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    for name in ("--ink", "--soft", "--faint", "--accent", "--warn"):
        assert page.evaluate(CONTRAST, name) >= 4.5, name


@pytest.mark.parametrize("width", [390, 1280])
def test_every_control_has_a_name(open_page: Open, width: int):
    page = open_page(viewport={"width": width, "height": 800})
    for opener in (None, "Settings", "Chats"):
        if opener is not None:
            page.get_by_role("button", name=opener, exact=True).click()
        snapshot = page.locator("body").aria_snapshot()
        controls = re.findall(rf"^\s*- ({CONTROLS})\b(.*)$", snapshot, re.M)
        assert len(controls) > 3
        assert [kind for kind, rest in controls if not rest.strip().startswith('"')] == [], snapshot
        if opener is not None:
            page.keyboard.press("Escape")


def test_deleting_a_chat_is_asked_about(open_page: Open):
    page = open_page()
    page.get_by_role("textbox", name="Message").fill("Keep me")
    page.keyboard.press("Enter")
    expect(page.locator(".messages")).to_contain_text("Keep me")
    page.get_by_role("button", name="Chats", exact=True).click()
    delete = page.get_by_role("button", name="Delete chat: Keep me", exact=True)
    delete.click()
    page.get_by_role("button", name="Really delete chat: Keep me?").blur()
    expect(delete).to_have_text("Delete")
    delete.click()
    page.get_by_role("button", name="Really delete chat: Keep me?").click()
    expect(page.locator("#chat-list")).to_contain_text("No chats yet.")


def test_a_setting_out_of_range_is_said_in_words(open_page: Open):
    page = open_page()
    page.get_by_role("button", name="Settings", exact=True).click()
    field = page.get_by_role("spinbutton", name="Temperature")
    field.fill("7")
    expect(page.get_by_role("alert").filter(has_text="Needs a number from 0 to 2")).to_be_visible()
    field.fill("0.5")
    expect(page.get_by_role("alert").filter(has_text="Needs a number")).to_have_count(0)


def test_the_welcome_says_which_model_it_is_and_a_suggestion_is_sent(open_page: Open):
    page = open_page()
    expect(page.locator("#about-model")).to_contain_text("bough-40m is the small model")
    page.get_by_role("button", name="Why is the sky blue?").click()
    expect(page.locator(".messages")).to_contain_text("Why is the sky blue?")
