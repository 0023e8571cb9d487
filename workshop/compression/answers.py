"""What a model answers from compressed prompts, beside what it answers from the full ones."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bough.compress.conversation import Message
from bough.engine.sampler import SamplingParams
from bough.session.events import Finished, Text
from bough.session.requests import CompressOptions, TextRequest
from bough.session.session import Session
from workshop.compression.texts import Context, Question

MAX_TOKENS = 40
SHORTLY = "Answer in one short sentence."


@dataclass(frozen=True, slots=True)
class Answered:
    """One question: whether its facts were kept, and which answers were right."""

    task: str
    kept: bool
    full: bool
    compressed: bool


def answers(session: Session, contexts: Iterable[Context], keep: float) -> Iterator[Answered]:
    """Yield both answers to every question; right is a greedy answer that says what was asked for."""
    for context in contexts:
        for question in context.questions:
            full, _ = _say(session, context, question, CompressOptions("off"))
            compressed, read = _say(session, context, question, CompressOptions("on", above=1, to=keep))
            kept = all(fact in read for fact in question.facts)
            right = [question.answer.lower() in text.lower() for text in (full, compressed)]
            yield Answered(question.task, kept, *right)


def _say(
    session: Session, context: Context, question: Question, compress: CompressOptions
) -> tuple[str, str]:
    """Return the answer, and the text as it was read."""
    parts = [context.text, f"{question.text} {SHORTLY}"]
    request = TextRequest(
        messages=[{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}],
        max_tokens=MAX_TOKENS,
        sampling=SamplingParams(temperature=0, seed=1),
        thinking=False,
        compress=compress,
    )
    request = session.prepare(request)
    assert request.encoded is not None
    said = [event for event in session.generate(request) if isinstance(event, Text | Finished)]
    found = request.encoded.compressed
    read: Sequence[Message] = found.messages if found is not None else request.messages or ()
    return "".join(event.text for event in said if isinstance(event, Text)), read[0]["content"][0]["text"]


def table(found: Sequence[Answered]) -> list[dict[str, Any]]:
    """Return a row for each task and one for all."""
    rows = []
    for task in [*sorted({each.task for each in found}), "all"]:
        of = [each for each in found if task in (each.task, "all")]
        both = Counter((each.full, each.compressed) for each in of)
        rows.append(
            {
                "task": task,
                "questions": len(of),
                "kept": sum(each.kept for each in of),
                "full_right": both[True, True] + both[True, False],
                "compressed_right": both[True, True] + both[False, True],
                "both_right": both[True, True],
            }
        )
    return rows
