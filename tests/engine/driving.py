"""Drives an engine step by step as a session does: stops inside a step's tokens, cancels between steps."""

from collections.abc import Callable, Generator

from bough.engine.engine import Engine
from bough.engine.events import Done, Event, Tokens
from bough.engine.sequence import Phase, Request


def drive(
    engine: Engine,
    request: Request,
    *,
    cut: Callable[[list[int]], int | None] = lambda tokens: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Event]:
    """`cut` sees each step's tokens; a number ends the text after so many of them."""
    sequence = engine.add(request)
    try:
        while not sequence.finished:
            if sequence.phase is not Phase.WAITING and cancelled():
                yield engine.cancel(sequence)
                return
            events = [event for _, event in engine.step()]
            for index, event in enumerate(events):
                keep = cut(event.ids) if isinstance(event, Tokens) else None
                if keep is not None:
                    assert isinstance(event, Tokens)
                    done = engine.stop(sequence, keep=keep)
                    events = [*events[:index], Tokens(event.ids[:keep]), done]
                    break
            yield from events
    finally:
        engine.release(sequence)


def run(engine: Engine, request: Request, **options) -> tuple[list[int], Done]:
    """Return the tokens and the end of a request."""
    tokens: list[int] = []
    for event in drive(engine, request, **options):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event
    raise AssertionError("the engine ended without saying so")


def cut_after(count: int) -> tuple[Callable[[list[int]], int | None], list[int]]:
    """Return a `cut` that ends the text after `count` tokens, and the tokens it has seen."""
    seen: list[int] = []

    def cut(new: list[int]) -> int | None:
        seen.extend(new)
        return len(new) - (len(seen) - count) if len(seen) >= count else None

    return cut, seen
