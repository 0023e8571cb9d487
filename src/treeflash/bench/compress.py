"""What compression keeps: facts planted in long texts, and the rules that choose what to read.

A fact is kept if every line that the question needs is in the compressed prompt, whole. That needs no model
that could answer. The texts are Python's own: its language reference and its standard library.
"""

import ast
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeflash.compress.compressor import Compressor
from treeflash.compress.conversation import Wanted
from treeflash.compress.scorer import Query, Scorer, never
from treeflash.text.tokenizer import Tokenizer

KEEP = (0.3, 0.2, 0.1, 0.05)
PROSE_TASKS = ("single", "multikey", "chain", "paraphrase")
CODE_TASKS = ("code-name", "code-meaning")
MAX_BLOCK = 1500  # characters of a block of code, between which facts are planted
FAILING = "aggregation"  # no selection can keep what is spread over the whole text
CHUNK, HEAD, TAIL, WINDOW, NGRAM, MOST, AROUND = 32, 8, 24, 96, 4, 8, 2  # of PFlash's rule

# A fact and a question about it that share no word.
PARAPHRASES = (
    ("Marta hides her savings under a loose floorboard.", "Where does the woman conceal money?"),
    ("The old physician emigrated to Canada after the war.", "To which country did that doctor move?"),
    ("Grandfather's favourite pastime was carving ducks from pine.", "What hobby did grandpa enjoy most?"),
    ("The ferry departs at dawn, never later.", "When does that boat leave?"),
    ("Their eldest daughter studies astronomy in Leiden.", "Which subject does his first child learn?"),
    ("Heavy snow shut the pass until April.", "Why could nobody cross those mountains in winter?"),
    (
        "The committee rejected the proposal for its price.",
        "Why did officials refuse that plan?",
    ),
    ("Olga repairs bicycles for a living.", "How does she earn her income?"),
    ("The manuscript was found inside a hollow oak.", "In what place did someone discover that book?"),
    ("His boss dismissed him for sleeping on duty.", "What got this employee fired?"),
    ("The orchestra tunes to a flute, not an oboe.", "Which instrument gives musicians their pitch?"),
    ("Every apartment is heated by a tile stove.", "How do flats stay warm?"),
)
MEANINGS = (
    (
        "def fold(rows):\n    out = {}\n    for row in rows:\n"
        "        out.setdefault(row[0], []).append(row[1])\n    return out\n",
        "Which function groups pairs by their first element?",
    ),
    ("def tidy(s):\n    return ' '.join(s.split())\n", "Which function collapses runs of white space?"),
    ("def spin(a, n):\n    n %= len(a)\n    return a[n:] + a[:n]\n", "Which function rotates a list?"),
    (
        "def uniq(xs):\n    return list(dict.fromkeys(xs))\n",
        "Which function drops duplicates and keeps order?",
    ),
    (
        "def clampit(v, lo, hi):\n    return max(lo, min(v, hi))\n",
        "Which function limits a number to a range?",
    ),
    (
        "def tails(p, n=10):\n    with open(p) as f:\n        return f.readlines()[-n:]\n",
        "Which function reads a log file's end?",
    ),
    (
        "def pairs(xs):\n    return [(a, b) for i, a in enumerate(xs) for b in xs[i + 1:]]\n",
        "Which function makes every combination of two items?",
    ),
    ("def mirror(w):\n    w = w.lower()\n    return w == w[::-1]\n", "Which function tests for palindromes?"),
)
CITIES = [
    "Lund",
    "Porto",
    "Bergen",
    "Graz",
    "Ghent",
    "Split",
    "Turku",
    "Siena",
    "Basel",
    "York",
    "Brno",
    "Vigo",
    "Kiel",
    "Nantes",
    "Derby",
    "Trier",
]


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    text: str
    facts: tuple[str, ...]  # lines that have to be kept


@dataclass(frozen=True, slots=True)
class Context:
    """A text with planted facts, and questions about them."""

    kind: str  # prose or code
    text: str
    tokens: int
    questions: tuple[Question, ...]


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


def contexts(count: int, tokens: int, tokenizer: Tokenizer, *, seed: int = 0) -> Iterator[Context]:
    """Yield texts of about `tokens` tokens, of prose and of code in turn."""
    for index in range(count):
        rng = random.Random(f"{seed} {index} {tokens}")
        kind = "prose" if index % 2 == 0 else "code"
        blocks = _prose(rng) if kind == "prose" else _code(rng)
        planted, questions = _plant(rng, kind)
        room = tokens - len(tokenizer.encode("\n\n".join(planted)))
        chosen: list[str] = []
        while room > 0:
            block = next(blocks)
            room -= len(tokenizer.encode(block))
            chosen.append(block)
        for place, fact in enumerate(planted):  # spread over all depths
            depth = (place + rng.random()) / len(planted)
            chosen.insert(1 + int(depth * (len(chosen) - 1)), fact)
        text = "\n\n".join(chosen)
        yield Context(kind, text, len(tokenizer.encode(text)), tuple(questions))


def _prose(rng: random.Random) -> Iterator[str]:
    from pydoc_data.topics import topics

    names = sorted(topics)
    while True:
        yield from (block.strip("\n") for block in topics[rng.choice(names)].split("\n\n") if block.strip())


def _code(rng: random.Random) -> Iterator[str]:
    files = sorted(Path(ast.__file__).parent.glob("[a-z]*.py"))
    while True:
        source = rng.choice(files).read_text(encoding="utf-8", errors="replace")
        blocks = [block.strip("\n") for block in source.split("\n\n\n")]
        yield from (block for block in blocks if block and len(block) < MAX_BLOCK)


def _plant(rng: random.Random, kind: str) -> tuple[list[str], list[Question]]:
    """Return facts to plant, in the order of a shuffle, and questions about them."""
    questions = _code_questions(rng) if kind == "code" else _prose_questions(rng)
    others = _distractors(rng, kind)
    planted = [fact for question in questions if question.task != "multikey" for fact in question.facts]
    planted += others
    planted += [question.facts[0] for question in questions if question.task == "multikey"]
    planted = list(dict.fromkeys(planted))
    rng.shuffle(planted)
    return planted, questions


def _prose_questions(rng: random.Random) -> list[Question]:
    city, *depots = rng.sample(CITIES, 3)
    number = rng.randint(10_000, 99_999)
    names = [f"{rng.choice('ABCDEFGH')}{rng.choice('JKLMNPQR')}{rng.randint(10, 99)}" for _ in range(3)]
    value = rng.randint(10_000, 99_999)
    chain = (
        f"VAR {names[0]} = {value}.",
        f"VAR {names[1]} = VAR {names[0]}.",
        f"VAR {names[2]} = VAR {names[1]}.",
    )
    found = [
        Question(
            "single", f"What is the magic number of {city}?", (f"The magic number of {city} is {number}.",)
        ),
        Question("chain", f"Which variables have the value {value}? Follow the assignments.", chain),
    ]
    found += [
        Question("multikey", f"What is the code of the depot in {depot}?", (_depot(depot, rng),))
        for depot in depots
    ]
    found += [Question("paraphrase", asked, (fact,)) for fact, asked in rng.sample(PARAPHRASES, 2)]
    return found


def _code_questions(rng: random.Random) -> list[Question]:
    names = rng.sample(["RETRY_LIMIT", "CACHE_PAGES", "PORT_OFFSET", "MAX_DEPTH_HINT", "IDLE_SECONDS"], 2)
    found = [
        Question("code-name", f"What is the value of {name}?", (f"{name} = {rng.randint(100, 999)}",))
        for name in names
    ]
    meanings = rng.sample(MEANINGS, 3)
    return found + [Question("code-meaning", asked, (fact.strip(),)) for fact, asked in meanings]


def _depot(name: str, rng: random.Random) -> str:
    return f"The code of the depot in {name} is {rng.randint(1000, 9999)}."


def _distractors(rng: random.Random, kind: str) -> list[str]:
    if kind == "code":
        return [f"{name} = {rng.randint(100, 999)}" for name in ("RETRY_DELAY", "CACHE_BYTES")]
    first, second = (f"X{rng.choice('STUVWZ')}{rng.randint(10, 99)}" for _ in range(2))
    chain = [f"VAR {first} = {rng.randint(10_000, 99_999)}.", f"VAR {second} = VAR {first}."]
    return [*chain, *(_depot(city, rng) for city in rng.sample(["Oslo", "Riga", "Bonn", "Cork", "Nice"], 4))]


def aggregation(tokens: int, tokenizer: Tokenizer, *, seed: int = 0) -> Context:
    """Return the task that must fail: which word is said most often, in a text of such sentences."""
    rng = random.Random(seed)
    words = [*CITIES, *["Oslo"] * 8]
    lines: list[str] = []
    while len(tokenizer.encode("\n\n".join(lines))) < tokens:
        lines += [f"The traveller then went to {rng.choice(words)}." for _ in range(20)]
    text = "\n\n".join(lines)
    question = Question(FAILING, "Which town did the traveller visit most often?", (text,))
    return Context("prose", text, len(tokenizer.encode(text)), (question,))


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
        compressor = Compressor(scorer, lambda texts: [len(ids) for ids in tokenizer.encode_all(texts)])
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
    return Outcome(context.kind, context.tokens, question.task, rule, keep, kept, read, seconds)


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
