"""What compression keeps of facts planted in long texts, by our rule and others.

A fact is kept if every line that the question needs is in the compressed prompt, whole. That needs no model
that could answer.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bough.compress.compressor import Compressor
from bough.compress.conversation import Wanted
from bough.compress.scorer import Query, Scorer, never
from bough.text.tokenizer import Tokenizer
from workshop.compression.texts import Context, Question

KEEP = (0.3, 0.2, 0.15, 0.1, 0.05)  # 0.15 is the default
DEPTHS = 10
CHUNK, HEAD, TAIL, WINDOW, NGRAM, MOST, AROUND = 32, 8, 24, 96, 4, 8, 2  # of PFlash's rule


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule did for one question at one ratio."""

    context: str
    tokens: int
    task: str
    rule: str
    keep: float
    kept: bool
    read: float  # the share of the prompt that is read
    seconds: float
    depth: int  # of its first fact in the text, in tenths


class RandomScorer:
    """The baseline that chooses at random; the same numbers for the same text."""

    name = "random"
    any_thread = True

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        rng = random.Random("".join(units)[:1000])
        return [rng.random() for _ in units]


def measure(
    context: Context,
    scorers: Sequence[Scorer],
    tokenizer: Tokenizer,
    *,
    keep: Sequence[float] = KEEP,
    chunks: Scorer | None = None,
) -> Iterator[Outcome]:
    """Yield what every rule keeps of a context; `chunks`: the scorer in PFlash's rule, if any."""
    # All questions of one rule at one ratio together: a scorer then reads the text once for them.
    for scorer in scorers:
        compressor = Compressor(scorer, tokenizer.count_all)
        for ratio in keep:
            for question in context.questions:
                yield _ours(context, question, compressor, tokenizer, ratio)
    for question in context.questions:
        for ratio in keep:
            yield _head_and_tail(context, question, tokenizer, ratio)
    scores = {} if chunks is None else _chunk_scores(context, tokenizer, chunks)
    for question, found in scores.items():
        for ratio in keep:
            yield _pflash(context, question, tokenizer, ratio, found)


def _outcome(
    context: Context, question: Question, rule: str, keep: float, text: str, read: float, began: float
) -> Outcome:
    kept = all(fact in text for fact in question.facts)
    seconds = time.perf_counter() - began
    depth = DEPTHS * context.text.find(question.facts[0]) // len(context.text)
    return Outcome(context.kind, context.tokens, question.task, rule, keep, kept, read, seconds, depth)


def _ours(
    context: Context, question: Question, compressor: Compressor, tokenizer: Tokenizer, keep: float
) -> Outcome:
    parts = [{"type": "text", "text": context.text}, {"type": "text", "text": question.text}]

    def size(messages: Sequence) -> int:
        return sum(len(tokenizer.encode(part["text"])) for part in messages[0]["content"])

    began = time.perf_counter()
    found = compressor.compress(
        [{"role": "user", "content": parts}], Wanted(mode="on", above=1, to=keep), size
    )
    assert found is not None
    # Where nothing can be chosen the prompt is read exactly; counted as what it is, a whole prompt.
    text = found.messages[0]["content"][0]["text"]
    read = found.report.kept_tokens / found.report.sent_tokens
    if found.report.exact:
        text = ""
    return _outcome(context, question, compressor.scorer.name, keep, text, read, began)


def _head_and_tail(context: Context, question: Question, tokenizer: Tokenizer, keep: float) -> Outcome:
    began = time.perf_counter()
    side = int(keep * len(context.text) / 2)
    text = f"{context.text[:side]}\n{context.text[-side:]}"
    return _outcome(context, question, "head + tail", keep, text, keep, began)


def _chunk_scores(
    context: Context, tokenizer: Tokenizer, scorer: Scorer
) -> dict[Question, tuple[list[float], float]]:
    """Return the scores of fixed chunks for each question, and the seconds that they took."""
    found = {}
    texts = _chunks(tokenizer.encode(f"{context.text}\n\n"), tokenizer)
    for question in context.questions:
        began = time.perf_counter()
        found[question] = scorer.score(texts, [Query(question.text)]), time.perf_counter() - began
    return found


def _chunks(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(ids[start : start + CHUNK]) for start in range(0, len(ids), CHUNK)]


def _pflash(
    context: Context,
    question: Question,
    tokenizer: Tokenizer,
    keep: float,
    scored: tuple[list[float], float],
) -> Outcome:
    """Luce's rule: fixed chunks of the whole prompt, head and tail forced, n-grams of the end as anchors."""
    began = time.perf_counter() - scored[1]
    ids = tokenizer.encode(f"{context.text}\n\n{question.text}")
    pieces = texts = _chunks(ids, tokenizer)
    scores = [*scored[0], *[0.0] * len(pieces)][: len(pieces)]
    budget = max(1, int(keep * len(pieces)))
    head, tail = (min(most, budget // 4) for most in (HEAD, TAIL))
    chosen = {*range(head), *range(max(0, len(pieces) - max(1, tail)), len(pieces))}
    forced = chosen | _anchors(ids, len(pieces))
    for index in sorted(range(len(pieces)), key=lambda index: (-scores[index], index)):
        if len(chosen) >= budget:
            break
        chosen.add(index)
    chosen |= forced
    runs = "".join(texts[index] if index in chosen else "\x00" for index in range(len(texts)))
    return _outcome(context, question, "PFlash's rule", keep, runs, len(chosen) / len(pieces), began)


def _anchors(ids: Sequence[int], count: int) -> set[int]:
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - NGRAM + 1):
        places.setdefault(tuple(ids[start : start + NGRAM]), []).append(start)
    found: set[int] = set()
    for start in range(max(0, len(ids) - WINDOW), len(ids) - NGRAM + 1):
        where = places[tuple(ids[start : start + NGRAM])]
        if len(where) <= MOST:
            found |= {at // CHUNK + side for at in where for side in range(-AROUND, AROUND + 1)}
    return {index for index in found if 0 <= index < count}
