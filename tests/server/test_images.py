"""Images in every protocol, from official clients to the session's door, and what is refused there."""

import base64
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import ollama
import openai
import pytest

from bough.images.opening import ImageFile, ImageLimits, image_size, open_image
from tests.images.files import encoded, exif, hostile, png, quarters
from tests.server.conftest import anthropic_client, openai_client
from tests.server.live import Live, scripted

LIMITS = ImageLimits(images=3)
FILES = {
    "png": encoded(quarters(), "PNG"),
    "jpeg": encoded(quarters(), "JPEG", exif=exif(6)),
    "webp": encoded(quarters(), "WEBP"),
}
PNG = FILES["png"]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing() -> Iterator[Live]:
    with scripted(images=LIMITS) as server:
        yield server


@pytest.fixture
def post(seeing: Live) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=seeing.url, timeout=30) as client:
        yield client


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{text64(data)}"


def openai_part(value: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": value} | fields


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def seen(server: Live) -> list[Any]:
    """Return the messages of the last request, with every image as its bytes."""
    return [
        [part.get("text", part["type"] == "image" and part["image"].data) for part in message["content"]]
        if isinstance(message["content"], list)
        else message["content"]
        for message in server.session.seen[-1].messages
    ]


def images_of(server: Live) -> list[ImageFile]:
    contents = [message["content"] for message in server.session.seen[-1].messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part["type"] == "image"]


@pytest.mark.parametrize("kind", FILES)
def test_openai_chat(seeing: Live, kind: str) -> None:
    data = FILES[kind]
    parts = [
        {"type": "text", "text": "a"},
        openai_part({"url": url(data, kind)}),
        {"type": "text", "text": "b"},
    ]
    openai_client(seeing).chat.completions.create(model="m", messages=user(*parts))
    assert seen(seeing) == [["a", data, "b"]]
    [file] = images_of(seeing)
    assert image_size(file.data, LIMITS) == ((32, 48) if kind == "jpeg" else (48, 32))
    assert open_image(file.data, LIMITS).size == image_size(file.data, LIMITS)


@pytest.mark.parametrize("kind", FILES)
def test_openai_responses(seeing: Live, kind: str) -> None:
    data = FILES[kind]
    content = [
        {"type": "input_image", "image_url": url(data, kind), "detail": "auto"},
        {"type": "input_text", "text": "a"},
    ]
    openai_client(seeing).responses.create(model="m", input=[{"role": "user", "content": content}])
    assert [file.data for file in images_of(seeing)] == [data]


def test_openai_responses_in_the_output_of_a_function(seeing: Live) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [
        {"type": "input_text", "text": "here"},
        {"type": "input_image", "image_url": url(PNG), "detail": "low"},
    ]
    openai_client(seeing).responses.create(
        model="m",
        input=[
            {"role": "user", "content": "look"},
            call,
            {"type": "function_call_output", "call_id": "c", "output": output},
        ],
    )
    assert seen(seeing)[-1] == ["here", PNG]
    assert [file.most_tokens for file in images_of(seeing)] == [256]


@pytest.mark.parametrize("kind", FILES)
def test_anthropic(seeing: Live, kind: str) -> None:
    data = FILES[kind]
    source = {"type": "base64", "media_type": f"image/{kind}", "data": text64(data)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "a"}]
    client = anthropic_client(seeing)
    client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert seen(seeing) == [[data, "a"]]


@pytest.mark.parametrize("failed", [False, True])
def test_anthropic_in_the_result_of_a_tool(seeing: Live, failed: bool) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text64(PNG)}}
    reference = {"type": "tool_reference", "tool_name": "x"}
    parts = [{"type": "text", "text": "screen"}, image, reference]
    result = {"type": "tool_result", "tool_use_id": "t", "content": parts, "is_error": failed}
    anthropic_client(seeing).messages.create(
        model="m",
        max_tokens=9,
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
        ],
    )
    before = ["The tool failed:\n"] if failed else []
    assert seen(seeing)[-2:] == [
        [*before, "screen", PNG, '{"type": "tool_reference", "tool_name": "x"}'],
        ["well?"],
    ]


@pytest.mark.parametrize("kind", FILES)
def test_ollama(seeing: Live, kind: str) -> None:
    data = FILES[kind]
    client = ollama.Client(host=seeing.url)
    client.chat(model="m", messages=[{"role": "user", "content": "a", "images": [data, PNG]}])
    assert seen(seeing) == [[data, PNG, "a"]]
    client.generate(model="m", prompt="b", images=[data])
    assert seen(seeing) == [[data, "b"]]


def test_raw_base64_and_strings_as_llama_cpp_and_ollama_take_them(seeing: Live, post: httpx2.Client) -> None:
    broken = "\n".join([text64(PNG)[:40], text64(PNG)[40:]])
    for part in (
        openai_part(url(PNG)),
        openai_part({"url": text64(PNG)}),
        openai_part(broken),
        {"type": "image", "image": url(PNG)},
    ):
        assert post.post(CHAT, json={"messages": user(part)}).status_code == 200
        assert seen(seeing) == [[PNG]]


def test_detail(seeing: Live, post: httpx2.Client) -> None:
    parts = [openai_part({"url": url(PNG), "detail": detail}) for detail in ("low", "auto", "high")]
    assert post.post(CHAT, json={"messages": user(*parts)}).status_code == 200
    assert [file.most_tokens for file in images_of(seeing)] == [256, None, None]


def test_several_images_in_several_messages_keep_their_order(seeing: Live, post: httpx2.Client) -> None:
    first, second = encoded(quarters(64, 64), "PNG"), encoded(quarters(96, 64), "PNG")
    messages = [
        *user({"type": "text", "text": "a"}, openai_part(url(first)), openai_part(url(second))),
        {"role": "assistant", "content": "yes"},
        *user(openai_part(url(PNG)), {"type": "text", "text": "b"}),
    ]
    assert post.post(CHAT, json={"messages": messages}).status_code == 200
    assert seen(seeing) == [["a", first, second], "yes", [PNG, "b"]]


def test_results_of_tools_in_a_chat(seeing: Live, post: httpx2.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "a"}, openai_part(url(PNG))],
        },
    ]
    assert post.post(CHAT, json={"messages": messages}).status_code == 200
    assert seen(seeing)[-1] == ["a", PNG]


def test_base64_of_any_length(seeing: Live, post: httpx2.Client) -> None:
    """It is decoded in slices of a MiB, and checked as a whole."""
    for size in (786_431, 786_432, 786_433, 2_000_000):
        data = PNG + bytes(size - len(PNG))
        assert post.post(CHAT, json={"messages": user(openai_part(url(data)))}).status_code == 200
        assert seen(seeing) == [[data]]
    for broken in (text64(data)[:-1], f"{text64(b'a')}{text64(data)}", f"{text64(data)}AAAA"):
        answer = post.post(CHAT, json={"messages": user(openai_part(broken))})
        assert answer.status_code == 400 and "not valid base64" in answer.json()["error"]["message"]


def test_choices_of_one_prompt_share_its_images(seeing: Live, post: httpx2.Client) -> None:
    body = {"messages": user(openai_part(url(PNG))), "n": 3, "temperature": 1}
    assert len(post.post(CHAT, json=body).json()["choices"]) == 3
    last = seeing.session.seen[-3:]
    assert all(request.messages is last[0].messages for request in last)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages/count_tokens", {"messages": user({"type": "text", "text": "a"})}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "a"}]}, "input_tokens"),
    ],
)
def test_tokens_are_counted_of_requests_with_images(
    post: httpx2.Client, path: str, body: dict[str, Any], name: str
) -> None:
    """Only the header is needed: this file has few of its pixels."""
    header = url(png(600, 600))
    without = post.post(path, json=body).json()[name]
    if "input" in body:
        body = {
            "input": user({"type": "input_image", "image_url": header}, {"type": "input_text", "text": "a"})
        }
    else:
        source = {"type": "base64", "media_type": "image/png", "data": header.partition(",")[2]}
        body = {"messages": user({"type": "image", "source": source}, {"type": "text", "text": "a"})}
    answer = post.post(path, json=body)
    assert answer.status_code == 200 and answer.json()[name] > without


def test_tokenize_and_templates(post: httpx2.Client) -> None:
    messages = user(openai_part(url(PNG)))
    assert post.post("/tokenize", json={"messages": messages}).status_code == 200
    prompt = post.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt.count("<|image_pad|>") == 1


BAD = {
    "no base64": (openai_part(url(PNG)[:-3]), "not valid base64"),
    "other characters": (openai_part({"url": "data:image/png;base64,????"}), "not valid base64"),
    "percent encoding": (openai_part({"url": "data:image/png,%89PNG"}), "a data URL without base64"),
    "nothing": (openai_part({}), "has no image"),
    "null": (openai_part(None), "has no image"),
    "number": (openai_part({"url": 5}), "has no image"),
    "empty": (openai_part(""), "has 0 bytes"),
    "file id": ({"type": "input_image", "file_id": "file-1"}, "names a stored file"),
    "stored source": ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "names a stored file"),
    "http": (openai_part("http://127.0.0.1:1/a.png"), "http:, which is not fetched; send the image itself"),
    "https": (openai_part({"url": "https://example.com/a.png?key=s3cret"}), "in base64: data:image/png"),
    "source URL": ({"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}, "not fetched"),
    "file": (openai_part("file:///etc/passwd"), "file:, which is not fetched"),
    "text": (openai_part({"url": url(b"hello")}), "no JPEG, PNG, WebP or GIF"),
    "bomb": (openai_part({"url": url(png(60_000, 60_000))}), "60000 x 60000 pixels; at most 50,000,000"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_part(seeing: Live, post: httpx2.Client, name: str, caplog: Any) -> None:
    part, words = BAD[name]
    before = len(seeing.session.seen)
    with caplog.at_level(logging.WARNING):
        answer = post.post(CHAT, json={"messages": user({"type": "text", "text": "see"}, part)})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert error["param"] == "messages[0].content[1]"
    assert error["message"].startswith("messages[0].content[1] ")
    assert "s3cret" not in error["message"] + caplog.text
    assert len(seeing.session.seen) == before


def test_hostile_files_whose_header_says_so_never_reach_the_session(
    seeing: Live, post: httpx2.Client
) -> None:
    sizes = [name for name in hostile() if "bomb" in name or name.startswith("too ")]
    before = len(seeing.session.seen)
    for name in sizes:
        answer = post.post(CHAT, json={"messages": user(openai_part(url(hostile()[name][0])))})
        assert answer.status_code == 400 and "pixels" in answer.json()["error"]["message"]
    assert len(seeing.session.seen) == before


def test_too_many_images(post: httpx2.Client) -> None:
    answer = post.post(CHAT, json={"messages": user(*[openai_part(url(PNG))] * 4)})
    assert answer.status_code == 400
    assert "the request has 4 images; at most 3 are read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_of_other_roles(post: httpx2.Client, role: str) -> None:
    messages = [{"role": role, "content": [openai_part(url(PNG))]}, {"role": "user", "content": "a"}]
    answer = post.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert "is an image in a message of the role" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"raw": True}, {"suffix": "b"}])
def test_raw_prompts_of_ollama_take_no_images(post: httpx2.Client, fields: dict[str, Any]) -> None:
    answer = post.post("/api/generate", json={"prompt": "a", "images": [text64(PNG)]} | fields)
    assert answer.status_code == 400 and "images need a chat template" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "field"), [("/completion", "image_data"), ("/v1/completions", "images"), (CHAT, "images")]
)
def test_images_where_none_are_read_are_refused(post: httpx2.Client, path: str, field: str) -> None:
    body = {"prompt": "a"} if path != CHAT else {"messages": [{"role": "user", "content": "a"}]}
    answer = post.post(path, json=body | {field: [text64(PNG)]})
    assert answer.status_code == 400 and f"{field} is set" in answer.json()["error"]["message"]


def test_bytes_of_images_are_not_logged(post: httpx2.Client, caplog: Any) -> None:
    secret = text64(b"secret" * 1000)
    with caplog.at_level(logging.DEBUG):
        answers = [
            post.post(CHAT, json={"messages": user(openai_part(url(b"secret" * 1000)))}),
            post.post(CHAT, json={"messages": [url(b"secret" * 1000)]}),
            post.post("/api/generate", json={"prompt": "a", "images": secret}),
            post.post("/api/chat", json={"messages": [{"role": "user", "content": "a", "images": secret}]}),
            post.post("/api/generate", json={"prompt": "a", "images": [secret], "raw": True}),
        ]
    assert all(answer.status_code == 400 for answer in answers)
    assert secret[:20] not in caplog.text + "".join(answer.text for answer in answers)


def test_refusals_of_ollama_s_routes_are_logged_with_their_reason(caplog: Any) -> None:
    with scripted() as server, caplog.at_level(logging.WARNING):
        httpx2.post(f"{server.url}/api/generate", json={"prompt": "a", "images": text64(PNG)})
    assert "POST /api/generate · 400 · images is of type str; needs a list" in caplog.text


def test_without_an_encoder_every_protocol_says_so(http: httpx2.Client, echo_server: Live) -> None:
    anthropic_part = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": text64(PNG)},
    }
    bodies = {
        CHAT: {"messages": user(openai_part(url(PNG)))},
        "/v1/responses": {"input": user({"type": "input_image", "image_url": url(PNG)})},
        "/v1/messages": {"messages": user(anthropic_part), "max_tokens": 9},
        "/api/chat": {"messages": [{"role": "user", "content": "a", "images": [text64(PNG)]}]},
        "/api/generate": {"prompt": "a", "images": [text64(PNG)]},
    }
    for path, body in bodies.items():
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "loaded without its image encoder" in answer.text and "mmproj" in answer.text


def test_typed_errors_of_official_clients(seeing: Live) -> None:
    part = openai_part({"url": url(b"hello")})
    with pytest.raises(openai.BadRequestError, match="no JPEG, PNG, WebP or GIF"):
        openai_client(seeing).chat.completions.create(model="m", messages=user(part))
    source = {"type": "base64", "media_type": "image/png", "data": text64(b"hello")}
    with pytest.raises(anthropic.BadRequestError, match="no JPEG, PNG, WebP or GIF"):
        anthropic_client(seeing).messages.create(
            model="m", max_tokens=9, messages=user({"type": "image", "source": source})
        )
    with pytest.raises(ollama.ResponseError, match="no JPEG, PNG, WebP or GIF"):
        ollama.Client(host=seeing.url).generate(model="m", prompt="a", images=[b"hello"])
