"""The events of a sequence: its tokens with their log probabilities, and its end."""

from collections.abc import Callable

from torch import Tensor

from bough.engine.events import Done, Event, Failed, Tokens
from bough.engine.sampler import token_logprobs
from bough.engine.sequence import Sequence
from bough.spec.drafter import Drafter


def token_events(
    drafter: Drafter, sequence: Sequence, tokens: list[int], logits: Callable[[], Tensor], path: list[int]
) -> list[Event]:
    """Return events of the delivered tokens, sampled after the rows `path` of the logits [T, V].

    logits: a view takes a microsecond, and few requests need it.
    """
    events: list[Event] = []
    if tokens:
        logprobs, alternatives = None, sequence.sampling.logprobs
        if alternatives is not None:
            logprobs = token_logprobs(logits()[path[: len(tokens)]], tokens, alternatives)
        events.append(Tokens(tokens, logprobs))
    if sequence.finished:
        events.append(Failed(sequence.error) if sequence.error is not None else done(drafter, sequence))
    return events


def done(drafter: Drafter, sequence: Sequence) -> Done:
    """Return the end of a finished sequence, with what the drafter has to say."""
    assert sequence.reason is not None
    notes = drafter.notes(sequence.slot, sequence.tokens)
    sequence.stats.notes, sequence.stats.shares = notes.warnings, notes.shares
    return Done(sequence.reason, sequence.stats)
