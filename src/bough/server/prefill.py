"""Prefill ahead of a request: its beginning in the words of any protocol."""

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from bough.errors import UsageError
from bough.server import anthropic, chat, completions, responses
from bough.server.schemas import ChatBody, CompletionBody, MessagesBody, PrefillBody, ResponsesBody
from bough.server.service import Service
from bough.session.requests import TextRequest

T = TypeVar("T", bound=BaseModel)


def to_request(body: PrefillBody, service: Service, headers: Mapping[str, str]) -> TextRequest:
    """Return the request whose beginning is there, by the protocol that has its fields."""
    fields = body.model_dump(exclude_unset=True) | body.extras
    texts = [name for name in ("messages", "prompt", "input") if fields.get(name) is not None]
    if len(texts) != 1:
        seen = " and ".join(texts) or "none"
        raise UsageError(
            f"one of messages, prompt and input is needed, the body has {seen}", param="messages"
        )
    match texts[0]:
        case "input":
            return responses.to_request(_body(ResponsesBody, fields), service)
        case "prompt":
            return completions.to_requests(_body(CompletionBody, fields), service)[0]
        case _ if "system" in fields or "anthropic-version" in headers:
            return anthropic.to_request(_body(MessagesBody, fields), service)
    return chat.to_requests(_body(ChatBody, fields), service)[0]


def _body(kind: type[T], fields: Mapping[str, Any]) -> T:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors) from error
