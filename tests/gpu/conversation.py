"""A conversation with a long first message, and its second turn with the prefix in each tier of the cache."""

import struct
from collections.abc import Callable
from pathlib import Path

import torch

from bough.session.events import Finished
from bough.session.session import Session
from bough.state.sequences import PAGE
from tests.gpu.texts import GREEDY_WITH_LOGPROBS, Messages, generate

_RULE = "You are a careful assistant who writes short answers. "
SYSTEM = {"role": "system", "content": _RULE * 40}
# Longer than a sixteenth of the largest prefill chunk: else its end is no chunk boundary and nothing is
# cached.
HELLO = [{"role": "system", "content": _RULE * 120}, {"role": "user", "content": "Hello"}]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def evict_to_host(session: Session) -> None:
    """Evict every cached page from the pool, as a prompt that needs the whole pool does."""
    states = session.engine.states
    with torch.inference_mode():
        slot = states.open()
        session.engine.prefixes.reserve(slot, states.buffers.page_table.shape[1] * PAGE)
        states.close(slot)


def document(session: Session, tokens: int) -> str:
    lines: list[str] = []
    while len(session.tokenizer.encode("\n".join(lines))) < tokens:
        lines += [
            f"{n}: the {n * 7919 % 1009}th value is {n * n % 977}, then {n % 31}."
            for n in range(len(lines), len(lines) + 200)
        ]
    return session.tokenizer.decode(session.tokenizer.encode("\n".join(lines))[:tokens])


def second_turns(
    session: Session,
    folder: Path,
    tokens: int,
    while_cached: Callable[[Session, Messages], None] = lambda session, messages: None,
) -> dict[str, Finished]:
    """Run the second turn of a long conversation with its prefix in every tier of the cache.

    `while_cached` is called with the second turn's messages while its prefix is in the pool.
    """
    asked = [SYSTEM, user(document(session, tokens))]
    generate(session, [user("Hello")])  # compiles
    first = generate(session, asked)
    messages = [*asked, assistant(session.tokenizer.decode(first.tokens)), user("Why?")]
    turns = {"first": first, "pool": generate(session, messages)}
    # The client sends the answer back changed, as templates that drop reasoning do: the prompt is cached.
    turns["rewritten"] = generate(session, [*asked, assistant("Because."), user("Why?")])
    while_cached(session, messages)
    evict_to_host(session)
    turns["host"] = generate(session, messages)
    session.engine.prefixes.clear()
    turns["disk"] = generate(session, messages)
    session.engine.prefixes.clear()
    for file in folder.iterdir():
        file.unlink()
    turns["none"] = generate(session, messages, sampling=GREEDY_WITH_LOGPROBS)
    session.engine.prefixes.clear()  # once everything is written
    return turns


def raise_context_length(file: Path, context: int) -> None:
    """Write a larger context length to a GGUF header: the small pair was trained on short texts."""
    with file.open("r+b") as stream:
        start = stream.read(1 << 16)
        key = start.index(b".context_length") + len(b".context_length")
        kind, value = struct.unpack_from("<II", start, key)
        assert kind == 4, kind  # UINT32
        if value < context:
            stream.seek(key + 4)
            stream.write(struct.pack("<I", context))
