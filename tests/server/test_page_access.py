"""The page in headless Chromium: keyboard, names for screen readers, contrast, light and dark."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

pytest_plugins = ["tests.server.page_browser"]
pytestmark = pytest.mark.browser
Open = Callable[..., Page]

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
