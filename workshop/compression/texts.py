"""Texts with planted facts, and questions about them: what compression is measured on.

The haystacks are Python's own: its language reference and its standard library. There are two sets of
templates: layer, weights and hops were chosen on the facts of `CHOSEN_ON`, what is published is measured on
those of `TESTED`.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bough.text.tokenizer import Tokenizer

FAILING = "aggregation"  # no selection can keep what is spread over the whole text
MAX_BLOCK = 1500  # characters of a block of code, between which facts are planted
CHAIN = 3  # lines of a chain

_CITIES = """
Lund Porto Bergen Graz Ghent Split Turku Siena Basel York Brno Vigo Kiel Nantes Derby Trier Oslo Riga Bonn
"""
_PEOPLE = """
Anselm Birgit Corin Dagny Edvard Fenja Gunnar Hedda Ivar Jorun Ketil Linnea Magnus Njal Oddny Ragna
"""
CITIES, PEOPLE = _CITIES.split(), _PEOPLE.split()


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    text: str
    facts: tuple[str, ...]  # lines that have to be kept
    answer: str = ""  # what a right answer says


@dataclass(frozen=True, slots=True)
class Context:
    """A text with planted facts, and questions about them."""

    kind: str  # prose or code
    text: str
    tokens: int
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Lines that lead from a value to a name, over other names."""

    first: str  # with {a} and {value}
    next: str  # with {a} and {b}
    question: str  # with {value}
    names: tuple[str, ...] = ()  # empty: made of letters and digits


@dataclass(frozen=True, slots=True)
class Templates:
    """The words of all tasks: facts, and questions about them."""

    single: tuple[tuple[str, str], ...]  # with {city} and {number}
    multikey: tuple[tuple[str, str], ...]  # with {city} and {number}; several cities have one
    chains: tuple[Chain, ...]
    code_chains: tuple[Chain, ...]
    paraphrases: tuple[tuple[str, str, str], ...]  # fact, question without a word in common, answer
    constants: tuple[str, ...]
    meanings: tuple[tuple[str, str, str], ...]  # a function, a question about what it does, its name


CHOSEN_ON = Templates(
    single=(
        ("The magic number of {city} is {number}.", "What is the magic number of {city}?"),
        (
            "Tram {number} is the only one that stops at the zoo in {city}.",
            "Which tram stops at the zoo in {city}?",
        ),
    ),
    multikey=(
        ("The code of the depot in {city} is {number}.", "What is the code of the depot in {city}?"),
        (
            "The plant in {city} made {number} lamps last year.",
            "How many lamps did the plant in {city} make?",
        ),
    ),
    chains=(
        Chain(
            "VAR {a} = {value}.",
            "VAR {b} = VAR {a}.",
            "Which variables have the value {value}? Follow the assignments.",
        ),
    ),
    code_chains=(
        Chain(
            "{a} = register({value})",
            "{b} = copy_of({a})",
            "Which slots hold what was registered with {value}?",
            ("slot_red", "slot_blue", "slot_pink", "slot_teal", "slot_gold", "slot_grey", "slot_lime"),
        ),
    ),
    paraphrases=(
        (
            "Marta hides her savings under a loose floorboard.",
            "Where does the woman conceal money?",
            "floorboard",
        ),
        (
            "The old physician emigrated to Canada after the war.",
            "To which country did that doctor move?",
            "Canada",
        ),
        (
            "Grandfather's favourite pastime was carving ducks from pine.",
            "What hobby did grandpa enjoy most?",
            "carving",
        ),
        ("The ferry departs at dawn, never later.", "When does that boat leave?", "dawn"),
        (
            "Their eldest daughter studies astronomy in Leiden.",
            "Which subject does his first child learn?",
            "astronomy",
        ),
        (
            "Heavy snow shut the pass until April.",
            "Why could nobody cross those mountains in winter?",
            "snow",
        ),
        (
            "The committee rejected the proposal for its price.",
            "Why did officials refuse that plan?",
            "price",
        ),
        ("Olga repairs bicycles for a living.", "How does she earn her income?", "bicycle"),
        (
            "The manuscript was found inside a hollow oak.",
            "In what place did someone discover that book?",
            "oak",
        ),
        ("His boss dismissed him for sleeping on duty.", "What got this employee fired?", "sleep"),
        (
            "The orchestra tunes to a flute, not an oboe.",
            "Which instrument gives musicians their pitch?",
            "flute",
        ),
        ("Every apartment is heated by a tile stove.", "How do flats stay warm?", "stove"),
    ),
    constants=("RETRY_LIMIT", "CACHE_PAGES", "PORT_OFFSET", "MAX_DEPTH_HINT", "IDLE_SECONDS"),
    meanings=(
        (
            "def fold(rows):\n    out = {}\n    for row in rows:\n"
            "        out.setdefault(row[0], []).append(row[1])\n    return out\n",
            "Which function groups pairs by their first element?",
            "fold",
        ),
        (
            "def tidy(s):\n    return ' '.join(s.split())\n",
            "Which function collapses runs of white space?",
            "tidy",
        ),
        (
            "def spin(a, n):\n    n %= len(a)\n    return a[n:] + a[:n]\n",
            "Which function rotates a list?",
            "spin",
        ),
        (
            "def uniq(xs):\n    return list(dict.fromkeys(xs))\n",
            "Which function drops duplicates and keeps order?",
            "uniq",
        ),
        (
            "def clampit(v, lo, hi):\n    return max(lo, min(v, hi))\n",
            "Which function limits a number to a range?",
            "clampit",
        ),
        (
            "def tails(p, n=10):\n    with open(p) as f:\n        return f.readlines()[-n:]\n",
            "Which function reads a log file's end?",
            "tails",
        ),
        (
            "def pairs(xs):\n    return [(a, b) for i, a in enumerate(xs) for b in xs[i + 1:]]\n",
            "Which function makes every combination of two items?",
            "pairs",
        ),
        (
            "def mirror(w):\n    w = w.lower()\n    return w == w[::-1]\n",
            "Which function tests for palindromes?",
            "mirror",
        ),
        (
            "def tilt(m):\n    return [list(c) for c in zip(*m)]\n",
            "Which function exchanges rows and columns of a matrix?",
            "tilt",
        ),
        (
            "def summit(xs):\n    return max(range(len(xs)), key=xs.__getitem__)\n",
            "Which function finds the position of the largest entry?",
            "summit",
        ),
        (
            "def common(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
            "Which function computes the greatest number that divides both?",
            "common",
        ),
        (
            "def brief(name):\n    return ''.join(part[0].upper() for part in name.split())\n",
            "Which function turns a person into initials?",
            "brief",
        ),
        (
            "def warm(f):\n    return (f - 32) * 5 / 9\n",
            "Which function converts temperatures?",
            "warm",
        ),
        (
            "def veil(s):\n    return '*' * (len(s) - 4) + s[-4:]\n",
            "Which function hides most of a card number?",
            "veil",
        ),
        (
            "def lazy(f):\n    seen = {}\n    def inner(x):\n        if x not in seen:\n"
            "            seen[x] = f(x)\n        return seen[x]\n    return inner\n",
            "Which function remembers earlier results?",
            "lazy",
        ),
        (
            "def sole(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\n",
            "Which function recognises primes?",
            "sole",
        ),
        (
            "def drift(v, k):\n    return [sum(v[i:i + k]) / k for i in range(len(v) - k + 1)]\n",
            "Which function smooths a series of measurements?",
            "drift",
        ),
        (
            "def clock(s):\n    return f'{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}'\n",
            "Which function shows a duration in hours and minutes?",
            "clock",
        ),
        (
            "def rest(d):\n    return d.weekday() >= 5\n",
            "Which function knows Saturdays and Sundays?",
            "rest",
        ),
        (
            "def gap(p, q):\n    return ((p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2) ** 0.5\n",
            "Which function says how far apart two points are?",
            "gap",
        ),
        (
            "def toss(n):\n    return sum(random.randint(1, 6) for _ in range(n))\n",
            "Which function simulates dice?",
            "toss",
        ),
        (
            "def halve(a, x):\n    lo, hi = 0, len(a)\n    while lo < hi:\n        m = (lo + hi) // 2\n"
            "        lo, hi = (m + 1, hi) if a[m] < x else (lo, m)\n    return lo\n",
            "Which function looks for an entry of a sorted array quickly?",
            "halve",
        ),
        (
            "def grow(p, r, n):\n    return p * (1 + r / 100) ** n\n",
            "Which function calculates compound interest?",
            "grow",
        ),
        (
            "def melt(x):\n    return [z for y in x for z in (melt(y) if isinstance(y, list) else [y])]\n",
            "Which function flattens arbitrarily deep lists?",
            "melt",
        ),
    ),
)

TESTED = Templates(
    single=(
        (
            "The left-luggage lockers at {city} station open with {number}.",
            "With which number do the lockers at {city} station open?",
        ),
        (
            "In {city} the museum's oldest coin has the inventory number {number}.",
            "Which inventory number has the coin in {city}?",
        ),
        (
            "The bell tower of {city} weighs {number} kilograms.",
            "How heavy is the bell tower of {city}, in kilograms?",
        ),
    ),
    multikey=(
        (
            "The harbour master of {city} answers on extension {number}.",
            "On which extension does the harbour master of {city} answer?",
        ),
        (
            "Room {number} is reserved for the guests from {city}.",
            "Which room is reserved for guests from {city}?",
        ),
    ),
    chains=(
        Chain("SET {a} TO {value}.", "COPY {a} INTO {b}.", "Which registers end up holding {value}?"),
        Chain(
            "Badge {a} opens door {value}.",
            "Badge {b} is a duplicate of badge {a}.",
            "Which badges open door {value}?",
        ),
        Chain(
            "The parcel {value} was brought to {a}.",
            "Whatever {a} receives is passed on to {b}.",
            "Through whose hands does parcel {value} go?",
            tuple(PEOPLE),
        ),
    ),
    code_chains=(
        Chain(
            "{a} = {value}",
            "{b} = {a}",
            "Which names are bound to {value}?",
            (
                "gate_delay",
                "poll_gap",
                "ramp_width",
                "sync_floor",
                "echo_span",
                "drift_cap",
                "seek_base",
                "lane_pitch",
            ),
        ),
        Chain(
            "{a} = Port({value})",
            "{b} = alias({a})",
            "Which objects lead to Port({value})?",
            ("inletA", "inletB", "valveMain", "valveSpare", "pumpLow", "pumpHigh", "drainEast", "drainWest"),
        ),
    ),
    paraphrases=(
        ("The baker's son broke his wrist falling from a ladder.", "How did that boy get injured?", "ladder"),
        ("Wolves killed eleven sheep near the chapel.", "Which predators attacked livestock?", "wolves"),
        ("The bridge collapsed because its bolts had rusted.", "What made that structure fall down?", "rust"),
        ("Irena pays her rent by teaching violin.", "How does she afford housing?", "violin"),
        ("A lightning strike burned the sawmill to ashes.", "What destroyed that timber plant?", "lightning"),
        (
            "The pilot switched careers and became a beekeeper.",
            "What job does this former aviator do today?",
            "bee",
        ),
        ("Thieves entered the jeweller's through the cellar.", "How did burglars get inside?", "cellar"),
        ("The children call their teacher Aunt Plum.", "What nickname do pupils use?", "Plum"),
        (
            "Most villagers drink goat milk for breakfast.",
            "What beverage do locals have in the morning?",
            "goat",
        ),
        (
            "The emperor was buried with his favourite hound.",
            "Which animal lies in that ruler's grave?",
            "hound",
        ),
        ("A shortage of sugar forced the factory to close.", "Why was this plant shut?", "sugar"),
        (
            "The novelist wrote only between midnight and four.",
            "At what hours did this author work?",
            "midnight",
        ),
        ("Their honeymoon was ruined by a volcanic eruption.", "What spoiled that couple's trip?", "volcan"),
        ("The surgeon faints at the sight of spiders.", "What is this doctor afraid of?", "spider"),
        ("Rust-red lichen covers the northern wall.", "What grows on that side of the building?", "lichen"),
        ("The champion trains by pulling a sledge uphill.", "How does this athlete prepare?", "sledge"),
        ("Nobody under twelve may ride the carousel.", "Who is too young for that attraction?", "twelve"),
        (
            "The spy concealed the film in a loaf of bread.",
            "Where did this secret agent hide pictures?",
            "bread",
        ),
        ("Old Tobias lost his hearing in the mine.", "What caused that man to become deaf?", "mine"),
        (
            "The wedding was postponed until the river thawed.",
            "Why did their marriage take place later?",
            "river",
        ),
        ("Salted herring is the island's main export.", "What goods does this place sell abroad?", "herring"),
        (
            "Her violin is strung with spider silk.",
            "What material are that instrument's cords made of?",
            "silk",
        ),
        ("The lawyer bought the castle for a single coin.", "How much did this attorney spend?", "coin"),
        ("Frost cracked the fountain in the square.", "What damaged that well?", "frost"),
    ),
    constants=("SPOOL_QUOTA", "GRACE_TICKS", "HEDGE_FACTOR", "SLAB_BYTES", "PROBE_EVERY", "VENT_RATIO"),
    meanings=(
        (
            "def weave(a, b):\n    return [x for pair in zip(a, b) for x in pair]\n",
            "Which function alternates the elements of two lists?",
            "weave",
        ),
        (
            "def peel(text):\n    return text[1:-1]\n",
            "Which function removes the first and last character?",
            "peel",
        ),
        (
            "def tally(words):\n    out = {}\n    for word in words:\n"
            "        out[word] = out.get(word, 0) + 1\n    return out\n",
            "Which function computes how often each item occurs?",
            "tally",
        ),
        (
            "def slug(t):\n    return t.strip().lower().replace(' ', '-')\n",
            "Which function makes a title fit for a URL?",
            "slug",
        ),
        (
            "def mid(v):\n    v = sorted(v)\n    return v[len(v) // 2]\n",
            "Which function returns the median?",
            "mid",
        ),
        (
            "def dig(tree, path):\n    for key in path:\n        tree = tree[key]\n    return tree\n",
            "Which function looks up a nested value?",
            "dig",
        ),
        (
            "def chop(s, n):\n    return [s[i:i + n] for i in range(0, len(s), n)]\n",
            "Which function splits a sequence into pieces of equal size?",
            "chop",
        ),
        (
            "def leap(y):\n    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)\n",
            "Which function decides whether February has 29 days?",
            "leap",
        ),
        (
            "def wait(f, n):\n    for i in range(n):\n        try:\n            return f()\n"
            "        except OSError:\n            time.sleep(2 ** i)\n",
            "Which function tries an operation again with growing pauses?",
            "wait",
        ),
        (
            "def flip(d):\n    return {v: k for k, v in d.items()}\n",
            "Which function swaps the keys and values of a mapping?",
            "flip",
        ),
        (
            "def area(r):\n    return 3.14159265 * r * r\n",
            "Which function measures the surface of a disc?",
            "area",
        ),
        (
            "def gray(img):\n    return [[sum(px) // 3 for px in row] for row in img]\n",
            "Which function turns a picture black and white?",
            "gray",
        ),
    ),
)


def contexts(
    count: int, tokens: int, tokenizer: Tokenizer, *, seed: int = 0, templates: Templates = TESTED
) -> Iterator[Context]:
    """Yield texts of about `tokens` tokens, of prose and of code in turn."""
    for index in range(count):
        rng = random.Random(f"{seed} {index} {tokens}")
        kind = "prose" if index % 2 == 0 else "code"
        blocks = _prose(rng) if kind == "prose" else _code(rng)
        questions, others = (_code_facts if kind == "code" else _prose_facts)(rng, templates)
        planted = list(dict.fromkeys([*(fact for each in questions for fact in each.facts), *others]))
        rng.shuffle(planted)
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


def _prose_facts(rng: random.Random, templates: Templates) -> tuple[list[Question], list[str]]:
    """Return questions about facts in prose, and facts like them that nobody asks for."""
    city, *asked = rng.sample(CITIES, 7)
    fact, question = rng.choice(templates.single)
    number = str(rng.randint(10_000, 99_999))
    found = [Question("single", question.format(city=city), (fact.format(city=city, number=number),), number)]
    fact, question = rng.choice(templates.multikey)
    facts = {
        city: (fact.format(city=city, number=number), number)
        for city in asked
        if (number := str(rng.randint(1000, 9999)))
    }
    found += [
        Question("multikey", question.format(city=city), facts[city][:1], facts[city][1])
        for city in asked[:2]
    ]
    chains, other = _chains(rng, templates.chains, most=2)
    found += [
        Question("paraphrase", text, (fact,), answer)
        for fact, text, answer in rng.sample(templates.paraphrases, 2)
    ]
    return found + chains, [*other, *(facts[city][0] for city in asked[2:])]


def _code_facts(rng: random.Random, templates: Templates) -> tuple[list[Question], list[str]]:
    names = rng.sample(templates.constants, 4)
    values = [str(rng.randint(100, 999)) for _ in names]
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    found = [
        Question("code-name", f"What is the value of {name}?", (line,), value)
        for name, line, value in list(zip(names, lines, values, strict=True))[:2]
    ]
    found += [
        Question("code-meaning", text, (fact.strip(),), name)
        for fact, text, name in rng.sample(templates.meanings, 3)
    ]
    chains, other = _chains(rng, templates.code_chains, most=1)
    return found + chains, [*other, *lines[2:]]


def _chains(rng: random.Random, templates: Sequence[Chain], *, most: int) -> tuple[list[Question], list[str]]:
    """Return a question about each of some chains, and the beginning of one more that nobody asks for."""
    chosen = rng.sample(templates, min(most, len(templates)))
    found = [_chain(rng, each) for each in chosen]
    distractor = _chain(rng, chosen[0], taken=found[0]).facts[:2] if chosen else ()
    return found, list(distractor)


def _chain(rng: random.Random, chain: Chain, *, taken: Question | None = None) -> Question:
    free = [name for name in chain.names if taken is None or not any(name in fact for fact in taken.facts)]
    names = (
        rng.sample(free, CHAIN)
        if free
        else [
            f"{rng.choice('ABCDEFGH')}{rng.choice('JKLMNPQR')}{number}"
            for number in rng.sample(range(10, 100), CHAIN)
        ]
    )
    value = str(rng.randint(10_000, 99_999))
    lines = [chain.first.format(a=names[0], value=value)]
    lines += [chain.next.format(a=a, b=b) for a, b in pairwise(names)]
    return Question("chain", chain.question.format(value=value), tuple(lines), names[-1])


def aggregation(tokens: int, tokenizer: Tokenizer, *, seed: int = 0) -> Context:
    """Return the task that must fail: which word is said most often, in a text of such sentences."""
    rng = random.Random(seed)
    most = rng.choice(CITIES)
    words = [*CITIES, *[most] * 8]
    lines: list[str] = []
    while len(tokenizer.encode("\n\n".join(lines))) < tokens:
        lines += [f"The traveller then went to {rng.choice(words)}." for _ in range(20)]
    text = "\n\n".join(lines)
    question = Question(FAILING, "Which town did the traveller visit most often?", (text,), most)
    return Context("prose", text, len(tokenizer.encode(text)), (question,))
