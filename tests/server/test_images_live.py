"""Images from official clients to the text of a model that sees: one picture, one text, in every protocol."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import ollama
import pytest
from PIL import Image

from bough import LLM, SamplingParams
from bough.config import EngineConfig
from bough.server.run import line
from bough.session.loading import load_session
from tests.images.files import encoded, exif, hostile
from tests.images.seeing import make_seeing
from tests.server.conftest import anthropic_client, openai_client
from tests.server.live import Live, live

QUESTION, LENGTH = "What is it?", 12


def noise(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


PICTURE, OTHER = noise(330, 250, 1), noise(330, 250, 2)
TURNED = PICTURE.transpose(Image.Transpose.ROTATE_270)
FILES = {
    "png": encoded(PICTURE, "PNG"),
    "jpeg": encoded(PICTURE, "JPEG", exif=exif(6), quality=90),
    "webp": encoded(PICTURE, "WEBP", lossless=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    config = EngineConfig(device="cpu", max_ctx=1024)
    with live(lambda progress: load_session(model, config, progress=progress)) as server:
        yield server


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def body(*files: bytes, **fields: object) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url(data)}} for data in files]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return {"model": "m", "messages": messages, "max_tokens": LENGTH, "temperature": 0} | fields


def by_chat(server: Live, *files: bytes, **fields: object) -> tuple[str, int]:
    """Return the text and the tokens of the prompt."""
    answer = openai_client(server).chat.completions.create(**body(*files, **fields))
    message = answer.choices[0].message
    text = (getattr(message, "reasoning_content", None) or "") + (message.content or "")
    return text, answer.usage.prompt_tokens


def by_responses(server: Live, data: bytes) -> tuple[str, int]:
    content = [{"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": QUESTION}]
    answer = openai_client(server).responses.create(
        model="m", input=[{"role": "user", "content": content}], max_output_tokens=LENGTH, temperature=0
    )
    texts = [part.text for item in answer.output for part in item.content or ()]
    return "".join(texts), answer.usage.input_tokens


def by_messages(server: Live, data: bytes) -> tuple[str, int]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    client = anthropic_client(server)
    answer = client.messages.create(
        model="m", max_tokens=LENGTH, messages=messages, extra_body={"temperature": 0}
    )
    texts = [block.text if block.type == "text" else block.thinking for block in answer.content]
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="m", messages=messages).input_tokens == used
    return "".join(texts), used


def by_ollama(server: Live, data: bytes) -> tuple[str, int]:
    message = {"role": "user", "content": QUESTION, "images": [data]}
    options = {"temperature": 0, "num_predict": LENGTH}
    answer = ollama.Client(host=server.url).chat(model="m", messages=[message], options=options)
    return (answer.message.thinking or "") + (answer.message.content or ""), answer.prompt_eval_count


PROTOCOLS = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "ollama": by_ollama,
}


@pytest.fixture(scope="module")
def texts(server: Live) -> dict[str, tuple[str, int]]:
    return {kind: by_chat(server, data) for kind, data in FILES.items()}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_gives_one_text(
    server: Live, texts: dict[str, tuple[str, int]], protocol: str, kind: str
) -> None:
    assert PROTOCOLS[protocol](server, FILES[kind]) == texts[kind]


def test_the_text_depends_on_the_picture(server: Live, texts: dict[str, tuple[str, int]]) -> None:
    other, tokens = by_chat(server, encoded(OTHER, "PNG"))
    assert other != texts["png"][0] and tokens == texts["png"][1]
    assert by_chat(server, FILES["png"]) == texts["png"] == texts["webp"]


def test_exif_turns_the_picture(server: Live) -> None:
    """The same pixels, turned by EXIF data or before they were stored, are one picture."""
    assert by_chat(server, encoded(PICTURE, "PNG", exif=exif(6))) == by_chat(server, encoded(TURNED, "PNG"))
    assert by_chat(server, encoded(TURNED, "PNG"))[0] != by_chat(server, FILES["png"])[0]


def test_trees_and_plain_decoding_give_one_text(server: Live, texts: dict[str, tuple[str, int]]) -> None:
    plain = by_chat(server, FILES["png"], extra_body={"bough": {"budget": 0}})
    assert plain == texts["png"]


def test_images_are_counted_apart(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(server.worker, "_notify", lambda job, result: lines.append(line(job, result)))
    fresh = body(encoded(noise(200, 200, 9), "PNG"), encoded(noise(256, 256, 10), "PNG"))
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        first, again = (http.post("/v1/chat/completions", json=fresh).json()["usage"] for _ in range(2))
        page = http.get("/metrics").text
    images = first["images"]
    assert images["count"] == images["encoded"] == 2 and images["tokens"] == 128 and images["encode_ms"] > 0
    assert again["images"]["encoded"] == 0 and again["prompt_tokens"] == first["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0
    assert len(lines) == 2 and all("2 images of 128 tokens" in each for each in lines)
    for name in ('images_total{what="encoded"}', 'spec_decode_after_images_total{what="steps"}'):
        [value] = re.findall(f"^bough:{re.escape(name)} (.*)$", page, re.MULTILINE)
        assert float(value) >= 2


def test_detail_low_takes_fewer_tokens(server: Live) -> None:
    large = encoded(noise(900, 800, 3), "PNG")
    request = body(large)
    full = openai_client(server).chat.completions.create(**request).usage.prompt_tokens
    request["messages"][0]["content"][0]["image_url"]["detail"] = "low"
    low = openai_client(server).chat.completions.create(**request).usage.prompt_tokens
    assert full - low == 28 * 25 - 16 * 15


def test_images_beside_the_content_are_refused_by_name(server: Live) -> None:
    image = base64.b64encode(encoded(noise(64, 64, 1), "PNG")).decode()
    messages = [{"role": "user", "content": "What is it?", "images": [image]}]
    body = {"model": "m", "max_tokens": 4, "messages": messages}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].images"


def test_the_routes_announce_it(server: Live) -> None:
    with httpx2.Client(base_url=server.url) as http:
        assert http.get("/props").json()["modalities"] == {"vision": True, "audio": False}
        [entry] = http.get("/v1/models").json()["data"]
        assert entry["architecture"]["input_modalities"] == ["text", "image"]
        assert "vision" in http.post("/api/show", json={"model": "m"}).json()["capabilities"]


def test_hostile_files_are_refused_and_the_server_goes_on(
    server: Live, texts: dict[str, tuple[str, int]]
) -> None:
    files = hostile()
    assert len(files) >= 40
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        for name, (data, words) in files.items():
            answer = http.post("/v1/chat/completions", json=body(data))
            assert answer.status_code == 400, name
            message = answer.json()["error"]["message"]
            assert words in message and message.startswith("messages[0].content[0] "), name
    assert by_chat(server, FILES["png"]) == texts["png"]


def test_an_image_longer_than_the_context(server: Live) -> None:
    data = encoded(Image.new("RGB", (1200, 1100)), "PNG")
    with httpx2.Client(base_url=server.url) as http:
        error = http.post("/v1/chat/completions", json=body(data)).json()["error"]
    assert error["code"] == "context_length_exceeded" and "the context holds 1024" in error["message"]


def test_from_python(model: Path, server: Live, texts: dict[str, tuple[str, int]], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FILES["png"])
    sampling = SamplingParams(max_tokens=LENGTH)
    with LLM(model, device="cpu", max_ctx=1024, draft=None) as llm:
        answers = [
            llm.chat(QUESTION, sampling, images=[image]) for image in (path, str(path), FILES["png"], PICTURE)
        ]
        parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": QUESTION}]
        answers.append(llm.chat([{"role": "user", "content": parts}], sampling))
    assert {answer.reasoning + answer for answer in answers} == {texts["png"][0]}
