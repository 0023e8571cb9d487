"""Images in messages, in the forms of every protocol: data URLs, base64 text, and URLs that were fetched."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from bough.errors import UsageError
from bough.images.opening import ImageFile, ImageLimits, image_size

KINDS = ("image", "image_url", "input_image")
_SLICE = 1 << 20  # characters; a multiple of 4
LOW_TOKENS = 256  # of an image with the detail `low`
Messages = Sequence[Mapping[str, Any]]


def with_images(
    messages: Messages, limits: ImageLimits | None, fetched: Mapping[str, bytes] | None = None
) -> Messages:
    """Return the messages with every image an `ImageFile` whose header was held against the limits.

    limits: None: the model cannot see. fetched: the bytes of remote URLs.
    """
    for index, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        if isinstance(message, Mapping) and message.get("images"):
            raise UsageError(
                f"messages[{index}].images is set, which only Ollama's routes have",
                'write images into the content: {"type": "image_url", "image_url": {"url": "data:..."}}',
                param=f"messages[{index}].images",
            )
    places = list(_places(messages))
    if not places:
        return messages
    if limits is None:
        where = _where(messages, *places[0])
        raise UsageError(
            f"{where} is an image, and the model was loaded without its image encoder",
            "its file, whose name has mmproj in it, lies beside the model's or is given as `mmproj`",
            param=where,
        )
    if len(places) > limits.images:
        raise UsageError(
            f"the request has {len(places)} images; at most {limits.images} are read",
            "leave out those of earlier messages",
            param="messages",
        )
    changed = list(messages)
    for index, at in places:
        part = changed[index]["content"][at]
        file = _image_file(part, _where(messages, index, at), limits, fetched or {})
        image_size(file.data, limits, where=file.where)
        if part.get("image") is not file:
            parts = list(changed[index]["content"])
            parts[at] = {"type": "image", "image": file}
            changed[index] = {**changed[index], "content": parts}
    same = all(old is new for old, new in zip(messages, changed, strict=True))
    return messages if same else changed


def has_images(messages: Messages | None) -> bool:
    return messages is not None and next(_places(messages), None) is not None


def remote_urls(messages: Messages) -> dict[str, str]:
    """Return the URLs of images that somebody would have to fetch, and where each is named."""
    values = [(_value(messages[index]["content"][at]), (index, at)) for index, at in _places(messages)]
    return {
        value: _where(messages, *place)
        for value, place in values
        if isinstance(value, str) and _is_remote(value)
    }


def refuse_fetching(url: str, where: str) -> NoReturn:
    scheme = url.partition(":")[0]
    raise UsageError(
        f"{where} is a URL with {scheme}:, which is not fetched",
        "send the image itself, in base64: data:image/png;base64,...",
        param=where,
    )


def with_data_urls(messages: Messages) -> list[Mapping[str, Any]]:
    """Return the messages with every `ImageFile` as OpenAI's protocol sends it."""
    changed = list(messages)
    for index, at in _places(messages):
        parts = list(changed[index]["content"])
        if isinstance(file := parts[at].get("image"), ImageFile):
            parts[at] = {"type": "image_url", "image_url": {"url": data_url(file)}}
            changed[index] = {**changed[index], "content": parts}
    return changed


def data_url(file: ImageFile) -> str:
    """Return the image with its kind, as text."""
    kinds = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif"}
    return f"data:image/{kinds.get(file.data[:4], 'jpeg')};base64,{base64.b64encode(file.data).decode()}"


def _places(messages: Messages) -> Iterator[tuple[int, int]]:
    """Yield the index of a message and that of its part for each image; nobody has checked the messages."""
    for index, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for at, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if isinstance(part, Mapping) and part.get("type") in KINDS:
                yield index, at


def _where(messages: Messages, index: int, at: int) -> str:
    value = _value(messages[index]["content"][at])
    return value.where if isinstance(value, ImageFile) else f"messages[{index}].content[{at}]"


def _image_file(
    part: Mapping[str, Any], where: str, limits: ImageLimits, fetched: Mapping[str, bytes]
) -> ImageFile:
    value = _value(part)
    if isinstance(value, ImageFile):
        return value
    if not isinstance(value, str):
        stored = "file_id" in part or "file_id" in (part.get("source") or ())
        reason = "names a stored file; the server stores none" if stored else "has no image"
        raise UsageError(f"{where} {reason}", "send the image itself, in base64", param=where)
    inner = part.get("image_url")
    detail = (inner if isinstance(inner, Mapping) else part).get("detail")
    most = LOW_TOKENS if detail == "low" else None
    data = fetched[value] if value in fetched else _decoded(value, where, limits)
    return ImageFile(data, most, where)


def _value(part: Mapping[str, Any]) -> Any:
    """Return what holds the image: a URL, base64 text or an `ImageFile`; None where there is nothing."""
    value = part.get("image_url", part.get("image"))
    if isinstance(value, Mapping):  # OpenAI's chat
        return value.get("url")
    source = part.get("source")
    if value is None and isinstance(source, Mapping):  # Anthropic's
        return source.get("data") if source.get("type") == "base64" else source.get("url")
    return value


def _is_remote(value: str) -> bool:
    return "://" in value[:20]


def _decoded(value: str, where: str, limits: ImageLimits) -> bytes:
    if _is_remote(value):
        refuse_fetching(value, where)
    text = value
    if value[:5].lower() == "data:":
        head, _, text = value.partition(",")
        if not head.lower().endswith(";base64"):
            raise UsageError(f"{where} is a data URL without base64", param=where)
    if len(text) * 3 // 4 > limits.bytes + 3:
        raise UsageError(
            f"{where} has {len(text) * 3 // 4} bytes; at most {limits.bytes} are read", param=where
        )
    if any(space in text for space in "\n\r\t "):  # some clients break lines
        text = "".join(text.split())
    try:
        if "=" in text[:-2]:
            raise ValueError("padding before its end")
        # In slices: the whole would hold the GIL for a tenth of a second.
        slices = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
        return b"".join(binascii.a2b_base64(each, strict_mode=True) for each in slices)
    except ValueError as error:
        raise UsageError(f"{where} is not valid base64: {error}", param=where) from error
