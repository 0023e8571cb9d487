"""Pictures on the page: added, shown, removed, sent, kept; in a real browser."""

import base64
import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.images.files import encoded, quarters
from tests.server.page_browser import Open
from tests.server.page_server import PageServer

pytestmark = pytest.mark.browser
pytest_plugins = ("tests.server.page_browser",)

PNG = encoded(quarters(), "PNG")
JPEG = encoded(quarters(3000, 2000), "JPEG")
DATA = re.compile("data:image/([a-z]+);base64,(.*)")


def add(page: Page, *files: bytes) -> None:
    kinds = ["png" if data.startswith(b"\x89PNG") else "jpeg" for data in files]
    page.locator("#file").set_input_files(
        [
            {"name": f"{at}.{kind}", "mimeType": f"image/{kind}", "buffer": data}
            for at, (kind, data) in enumerate(zip(kinds, files, strict=True))
        ]
    )


def sent(server: PageServer, page: Page, text: str) -> list[object]:
    """Send a message; return the contents of the request's messages, pictures as kind and bytes."""
    count = len(server.script.bodies)
    page.locator("#prompt").fill(text)
    page.locator("#send").click()
    expect(page.locator("#status")).to_have_text("Done.")
    assert len(server.script.bodies) == count + 1
    contents: list[object] = []
    for message in server.script.bodies[-1]["messages"]:
        parts = message["content"]
        if isinstance(parts, list):
            parts = [part.get("text") or DATA.fullmatch(part["image_url"]["url"]) for part in parts]
            parts = [
                part if isinstance(part, str) else (part[1], base64.b64decode(part[2])) for part in parts
            ]
        contents.append(parts)
    return contents


@pytest.mark.parametrize("width", [390, 1360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_shown_removed_and_sent(
    open_page: Open, page_server: PageServer, width: int, scheme: str
) -> None:
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    add(page, PNG, JPEG, PNG)
    pending = page.locator("#pictures figure")
    expect(pending).to_have_count(3)
    for index in range(3):
        box = pending.nth(index).bounding_box()
        assert box is not None and box["width"] < 90 and box["x"] >= 0 and box["x"] + box["width"] <= width
    page.get_by_role("button", name="Remove 0.png").click()
    expect(pending).to_have_count(2)
    [content] = sent(page_server, page, "What is it?")
    (kind, small), (other, data), text = content
    # What is larger than the server keeps is made smaller, the rest is sent as it is.
    assert (kind, other, data, text) == ("jpeg", "png", PNG, "What is it?") and len(small) < len(JPEG) * 4
    expect(pending).to_have_count(0)
    expect(page.locator(".message.user img")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for image in page.locator(".message.user img").all():
        box = image.bounding_box()
        assert box is not None and box["height"] <= 160 and box["width"] <= 0.85 * width
        assert image.evaluate("image => image.naturalWidth") > 0


def test_pictures_stay_in_later_turns_and_after_a_reload(open_page: Open, page_server: PageServer) -> None:
    page = open_page()
    add(page, PNG)
    sent(page_server, page, "first")
    assert sent(page_server, page, "second")[0] == [("png", PNG), "first"]
    page.reload()
    expect(page.locator(".message.user img")).to_have_count(1)
    assert sent(page_server, page, "third")[0] == [("png", PNG), "first"]
    page.get_by_role("button", name="New chat").click()
    assert sent(page_server, page, "alone") == ["alone"]


def test_a_picture_alone_is_a_message(open_page: Open, page_server: PageServer) -> None:
    page = open_page()
    add(page, PNG)
    expect(page.locator("#pictures figure")).to_have_count(1)
    assert sent(page_server, page, "") == [[("png", PNG)]]
    page.get_by_role("button", name="Chats").click()
    expect(page.locator(".chat-open span")).to_have_text("Picture")


def test_an_edited_message_keeps_its_pictures(open_page: Open, page_server: PageServer) -> None:
    page = open_page()
    add(page, PNG)
    sent(page_server, page, "before")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("after")
    page.locator(".edit").get_by_role("button", name="Send").click()
    expect(page.locator(".bubble")).to_have_text("after")
    expect(page.locator("#status")).to_have_text("Done.")
    assert len(page_server.script.bodies[-1]["messages"][0]["content"]) == 2


TRANSFER = """([name, data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "pasted.png", { type: kind }));
  const options = { bubbles: true, cancelable: true };
  const target = name === "drop" ? document.querySelector("#messages") : document.querySelector("#prompt");
  const event = name === "drop"
    ? new DragEvent("drop", { ...options, dataTransfer: transfer })
    : new ClipboardEvent("paste", { ...options, clipboardData: transfer });
  target.dispatchEvent(event);
  return event.defaultPrevented;
}"""


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_paste_and_drop(open_page: Open, page_server: PageServer, way: str) -> None:
    page = open_page()
    assert page.evaluate(TRANSFER, [way, base64.b64encode(PNG).decode(), "image/png"])
    expect(page.locator("#pictures figure")).to_have_count(1)
    assert sent(page_server, page, "this") == [[("png", PNG), "this"]]


def test_pasted_text_stays_text(open_page: Open) -> None:
    page = open_page()
    prevented = page.evaluate(
        """() => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", "words");
          const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData });
          document.querySelector("#prompt").dispatchEvent(event);
          return event.defaultPrevented;
        }"""
    )
    assert not prevented


def test_broken_pictures_and_text_files(open_page: Open) -> None:
    page = open_page()
    add(page, b"\x89PNG not really")
    expect(page.locator("#status")).to_have_text("0.png is not a picture that this browser can show.")
    files = [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"}]
    page.locator("#file").set_input_files(files)
    expect(page.locator("#prompt")).to_have_value("notes.txt:\n```\nhello\n```\n\n")
    expect(page.locator("#pictures figure")).to_have_count(0)


def test_a_model_that_cannot_see(open_page: Open, page_server: PageServer) -> None:
    page_server.script.sees = False
    page = open_page()
    add(page, PNG)
    expect(page.locator("#status")).to_contain_text("loaded without its image encoder")
    expect(page.locator("#pictures figure")).to_have_count(0)


def test_a_picture_is_read_while_the_question_is_typed(open_page: Open, page_server: PageServer) -> None:
    page = open_page()
    add(page, PNG)
    expect(page.locator("#status")).to_have_text("Read ahead: 70 tokens.")
    [body] = page_server.script.read_ahead
    assert [part["type"] for part in body["messages"][-1]["content"]] == ["image_url"]


def test_an_exported_chat_has_its_pictures(open_page: Open, page_server: PageServer) -> None:
    page = open_page()
    add(page, PNG)
    sent(page_server, page, "look")
    page.get_by_role("button", name="Chats").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    chat = json.loads(download.value.path().read_text())
    assert DATA.fullmatch(chat["messages"][0]["content"][0]["image_url"]["url"])
