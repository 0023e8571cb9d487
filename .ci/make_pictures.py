"""Makes the screenshots of the page in docs/images: a real server, the small pair, Chromium from the path.

python .ci/make_pictures.py      on an idle machine: the pictures show its speed
"""

import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from bough.config import DraftConfig, EngineConfig, ServerConfig
from bough.hub.catalog import named
from bough.session.loading import load_session
from tests.server.live import live

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MODEL = "bough-40m"
PROMPT = "Write a bubble sort in Python."
PHONE = {"width": 390, "height": 644}
DESK = {"width": 1360, "height": 860}


def answered(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("Done.", timeout=60_000)


def ask(page: Page, url: str, *, compare: bool) -> None:
    page.goto(url)
    expect(page.locator("#model-name")).to_have_text(MODEL)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    answered(page)
    if compare:
        page.check("#compare", force=True)
        expect(page.locator("#versus")).to_contain_text("Same text", timeout=60_000)
        answered(page)
    time.sleep(0.5)  # the charts' last frame


def desk(browser: Browser, url: str, scheme: str) -> None:
    context = browser.new_context(viewport=DESK, color_scheme=scheme)
    page = context.new_page()
    ask(page, url, compare=True)
    page.screenshot(path=IMAGES / f"page-{scheme}.png")
    context.close()


def phone(browser: Browser, url: str) -> None:
    """The chat and the trees over it, side by side."""
    context = browser.new_context(viewport=PHONE, device_scale_factor=2, color_scheme="light")
    page = context.new_page()
    ask(page, url, compare=False)
    chat = page.screenshot()
    page.click("#toggle-panel")
    time.sleep(0.5)
    panel = page.screenshot()
    context.close()
    size = {"width": 2 * PHONE["width"] + 20, "height": PHONE["height"]}
    both = browser.new_context(viewport=size, device_scale_factor=2).new_page()
    both.goto("about:blank")
    both.evaluate(
        """async (pictures) => {
            document.body.style = "margin: 0; display: flex; gap: 20px; background: #dcd9d2";
            for (const bytes of pictures) {
                const image = new Image(390);
                image.src = URL.createObjectURL(new Blob([new Uint8Array(bytes)], {type: "image/png"}));
                document.body.append(image);
                await image.decode();
            }
        }""",
        [list(chat), list(panel)],
    )
    both.screenshot(path=IMAGES / "page-phone.png")


def main() -> int:
    model = named(MODEL)
    assert model is not None and model[0].pair is not None
    pair = model[0].pair
    config = EngineConfig(device="cpu", cpu_backend="torch", max_ctx=8192, draft=DraftConfig(pair.draft))
    with (
        live(
            lambda progress: load_session(pair.target, config, progress=progress),
            ServerConfig(model_name=MODEL),
        ) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        warm = browser.new_page()
        ask(warm, server.url, compare=True)  # costs and caches of a first answer
        for scheme in ("light", "dark"):
            desk(browser, server.url, scheme)
        phone(browser, server.url)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
