"""Fixtures that open the page in Chromium; a plugin of the page's test modules."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.server.page_server import PageServer

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    # Not session-scoped: its event loop would conflict with tests that run their own.
    path = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert path, "no Chromium found: install chromium, or deselect with -m 'not browser'"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page_server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_page(chromium: Browser, page_server: PageServer) -> Iterator[Open]:
    """Open the page; afterwards check that no error was thrown and no other server requested."""
    contexts: list[BrowserContext] = []
    troubles: list[str] = []

    def open_page(**options) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request",
            lambda seen: seen.url.startswith(page_server.url) or troubles.append(f"asked {seen.url}"),
        )
        page.goto(page_server.url)
        expect(page.locator("#model-name")).to_have_text("bough-40m")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles
