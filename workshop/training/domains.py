"""Random example arguments for the generated programming tasks, by domain."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workshop.training.wordlists import pick, pick_several, words

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class Domain:
    """A kind of argument: its type, its noun, and a random generator of values."""

    hint: str
    # None if sentences use the parameter's name.
    noun: str | None
    draw: Draw


def domain(name: str) -> Domain:
    """Return the named domain; `LOW..HIGH` is an integer, a trailing `+` excludes empty values."""
    interval = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", name)
    if interval:
        low, high = int(interval[1]), int(interval[2])
        return Domain("int", None, lambda rng: rng.randint(low, high))
    found = _DOMAINS[name.rstrip("+")]
    if not name.endswith("+"):
        return found

    def draw(rng: random.Random) -> Any:
        value = found.draw(rng)
        while not value:
            value = found.draw(rng)
        return value

    return Domain(found.hint, found.noun, draw)


def _length(rng: random.Random) -> int:
    return rng.choice((0, 1, 3, 3, 4, 4, 5, 5, 6))


def _ints(low: int, high: int) -> Draw:
    return lambda rng: [rng.randint(low, high) for _ in range(_length(rng))]


def _distinct(rng: random.Random) -> list[int]:
    return rng.sample(range(0, 16), rng.randint(3, 6))


def _words(rng: random.Random) -> list[str]:
    return pick_several(rng, "noun", rng.choice((0, 1, 2, 3, 3, 4, 4)))


def _phrase(rng: random.Random) -> str:
    count = rng.choice((0, 1, 2, 2, 3, 3, 4))
    return " ".join(pick(rng, "small" if rng.random() < 0.4 else "noun") for _ in range(count))


def _mixed_case(rng: random.Random) -> str:
    text = rng.choice((pick(rng, "noun"), _phrase(rng)))
    return "".join(c.upper() if rng.random() < 0.35 else c for c in text)


def _palindromic(rng: random.Random) -> str:
    return pick(rng, "palindrome" if rng.random() < 0.5 else "noun")


def _runs(rng: random.Random) -> str:
    return "".join(rng.choice("abc") * rng.randint(1, 3) for _ in range(rng.randint(1, 4)))


def _anagram(rng: random.Random) -> str:
    word = rng.choice(("listen", "stone", "night", "dusty", "heart", "below", "cat", "save"))
    return word if rng.random() < 0.4 else "".join(rng.sample(word, len(word)))


def _matrix(rng: random.Random, rows: int, columns: int) -> list[list[int]]:
    return [[rng.randint(0, 9) for _ in range(columns)] for _ in range(rows)]


def _symmetric(rng: random.Random) -> list[list[int]]:
    matrix = _matrix(rng, 2, 2)
    if rng.random() < 0.6:
        matrix[1][0] = matrix[0][1]
    return matrix


def _deep(rng: random.Random, depth: int = 0) -> list[Any]:
    return [
        _deep(rng, depth + 1) if depth < 2 and rng.random() < 0.4 else rng.randint(1, 9)
        for _ in range(rng.randint(1, 3))
    ]


def _counts(rng: random.Random) -> dict[str, int]:
    return dict(zip(pick_several(rng, "fruit", rng.randint(1, 3)), rng.sample(range(1, 20), 3), strict=False))


def _records(rng: random.Random) -> list[dict[str, Any]]:
    names = pick_several(rng, "person", rng.choice((0, 1, 2, 2, 2)))
    return [{"name": name, "age": rng.randint(12, 60)} for name in names]


def _pairs(rng: random.Random, names: int) -> list[tuple[str, int]]:
    few = pick_several(rng, "fruit", names)
    return [(rng.choice(few), rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]


def _punctuated(rng: random.Random) -> str:
    words = [pick(rng, "noun") for _ in range(rng.randint(1, 4))]
    words[0] = words[0].capitalize()
    return rng.choice((", ", " ", " ")).join(words) + rng.choice("!?.")


def _counted(rng: random.Random) -> str:
    parts = [f"{rng.randint(1, 60)} {pick(rng, 'noun')}s" for _ in range(rng.randint(0, 3))]
    return " and ".join(parts) or "no numbers here"


def _brackets(rng: random.Random, kinds: str) -> str:
    if rng.random() < 0.35:
        return "".join(rng.choice(kinds) for _ in range(rng.randint(1, 5)))

    def nested(depth: int) -> str:
        if depth == 0:
            return ""
        opening = rng.randrange(len(kinds) // 2) * 2
        inside = kinds[opening] + nested(depth - 1) + kinds[opening + 1]
        return inside + (nested(depth - 1) if rng.random() < 0.3 else "")

    return nested(rng.randint(1, 3))


def _prefixed(rng: random.Random) -> list[str]:
    prefix = rng.choice(("in", "under", "fl", "pre", "con", ""))
    endings = ("side", "stand", "ower", "tract", "sent", "fer", "line", "ow")
    return [prefix + ending for ending in rng.sample(endings, rng.randint(2, 3))]


def _email(rng: random.Random) -> str:
    name, host = pick(rng, "person").lower(), pick(rng, "host")
    return rng.choice((f"{name}@{host}", f"{name}.{host}", f"{name}@localhost", f"@{host}", f"{name}@{host}"))


def _password(rng: random.Random) -> str:
    word = pick(rng, "noun")
    return rng.choice((word, word.capitalize(), word.upper())) + rng.choice(("", "12", "2024", "7", "Go9"))


def _one_missing(rng: random.Random) -> list[int]:
    numbers = list(range(rng.randint(2, 7)))
    numbers.remove(rng.choice(numbers))
    rng.shuffle(numbers)
    return numbers


def _roman(rng: random.Random) -> str:
    tens = ("", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC", "C", "CX")
    ones = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
    return rng.choice(tens) + rng.choice(ones) or "I"


def _sorted_ints(rng: random.Random) -> list[int]:
    return sorted(rng.sample(range(0, 21), _length(rng)))


_INTS, _TEXT, _STRINGS = "a list of integers", "a string", "a list of strings"
_DOMAINS: dict[str, Domain] = {
    "ints": Domain("list[int]", _INTS, _ints(-9, 15)),
    "smallints": Domain(
        "list[int]", _INTS, lambda rng: [rng.randint(-4, 9) for _ in range(rng.randint(0, 4))]
    ),
    "positives": Domain("list[int]", _INTS, _ints(1, 20)),
    "repeats": Domain("list[int]", _INTS, _ints(0, 5)),
    "withzeros": Domain(
        "list[int]", _INTS, lambda rng: [rng.choice((0, 0, rng.randint(1, 9))) for _ in range(_length(rng))]
    ),
    "distinct": Domain("list[int]", _INTS, _distinct),
    "fewints": Domain("list[int]", _INTS, lambda rng: rng.sample(range(1, 9), rng.randint(1, 3))),
    "sortedints": Domain("list[int]", "a sorted list of integers", _sorted_ints),
    "maybesorted": Domain(
        "list[int]", _INTS, lambda rng: _sorted_ints(rng) if rng.random() < 0.5 else _ints(0, 15)(rng)
    ),
    "onemissing": Domain("list[int]", _INTS, _one_missing),
    "listoflists": Domain(
        "list[list[int]]",
        "a list of lists",
        lambda rng: [_ints(0, 9)(rng)[:3] for _ in range(rng.randint(1, 3))],
    ),
    "deeplist": Domain("list", "a nested list", _deep),
    "matrix": Domain(
        "list[list[int]]", "a matrix", lambda rng: _matrix(rng, rng.randint(1, 3), rng.randint(2, 3))
    ),
    "square": Domain("list[list[int]]", "a square matrix", lambda rng: _matrix(rng, 2, 2)),
    "symmetricish": Domain("list[list[int]]", "a square matrix", _symmetric),
    "intervals": Domain(
        "list[list[int]]",
        "a list of intervals",
        lambda rng: [
            [start, start + rng.randint(1, 5)] for start in rng.sample(range(15), rng.randint(1, 3))
        ],
    ),
    "point": Domain("tuple[int, int]", None, lambda rng: (rng.randint(-5, 9), rng.randint(-5, 9))),
    "words": Domain("list[str]", "a list of words", _words),
    "anagramwords": Domain(
        "list[str]",
        "a list of words",
        lambda rng: rng.sample(["tea", "eat", "ate", "tan", "nat", "bat", "tab"], 4),
    ),
    "repeatedwords": Domain(
        "list[str]",
        "a list of words",
        lambda rng: [rng.choice(words("fruit")[:3]) for _ in range(rng.randint(1, 4))],
    ),
    "prefixed": Domain("list[str]", _STRINGS, _prefixed),
    "fruits": Domain("list[str]", _STRINGS, lambda rng: pick_several(rng, "fruit", 3)),
    "counts": Domain("dict[str, int]", "a dictionary", _counts),
    "quantities": Domain("dict[str, int]", "a dictionary", _counts),
    "records": Domain("list[dict]", "a list of dictionaries", _records),
    "pairs": Domain("list[tuple[str, int]]", "a list of pairs", lambda rng: _pairs(rng, 4)),
    "repeatpairs": Domain("list[tuple[str, int]]", "a list of pairs", lambda rng: _pairs(rng, 2)),
    "word": Domain("str", _TEXT, lambda rng: pick(rng, "doubled" if rng.random() < 0.5 else "noun")),
    "subpart": Domain("str", _TEXT, lambda rng: rng.choice(("ln", "ban", "ot", "lt", "ae", "xy", "p"))),
    "shortpart": Domain("str", _TEXT, lambda rng: rng.choice(("a", "aa", "ab", "bb", "c"))),
    "samelength_a": Domain("str", _TEXT, lambda rng: rng.choice(("karma", "house", "brown", "light"))),
    "samelength_b": Domain("str", _TEXT, lambda rng: rng.choice(("karts", "mouse", "crown", "night"))),
    "phrase": Domain("str", _TEXT, _phrase),
    "punctuated": Domain("str", _TEXT, _punctuated),
    "repeatwords": Domain(
        "str", _TEXT, lambda rng: " ".join(rng.choice(words("noun")[:4]) for _ in range(rng.randint(1, 6)))
    ),
    "mixedcase": Domain("str", _TEXT, _mixed_case),
    "palindromic": Domain("str", _TEXT, _palindromic),
    "runs": Domain("str", _TEXT, _runs),
    "encoded": Domain(
        "str",
        _TEXT,
        lambda rng: "".join(f"{rng.choice('abcx')}{rng.randint(1, 5)}" for _ in range(rng.randint(1, 3))),
    ),
    "anagram_a": Domain("str", _TEXT, _anagram),
    "anagram_b": Domain("str", _TEXT, _anagram),
    "pangramish": Domain(
        "str", _TEXT, lambda rng: pick(rng, "pangram") if rng.random() < 0.6 else _phrase(rng)
    ),
    "alnum": Domain(
        "str", _TEXT, lambda rng: "".join(rng.choice("abcdxyz0123456789") for _ in range(rng.randint(0, 8)))
    ),
    "counted": Domain("str", _TEXT, _counted),
    "brackets": Domain("str", _TEXT, lambda rng: _brackets(rng, "()")),
    "manybrackets": Domain("str", _TEXT, lambda rng: _brackets(rng, "()[]{}")),
    "snake": Domain("str", _TEXT, lambda rng: "_".join(pick_several(rng, "noun", rng.randint(1, 3)))),
    "camel": Domain(
        "str",
        _TEXT,
        lambda rng: (
            pick(rng, "noun") + "".join(w.capitalize() for w in pick_several(rng, "noun", rng.randint(0, 2)))
        ),
    ),
    "settings": Domain(
        "str",
        _TEXT,
        lambda rng: ",".join(f"{k}={rng.randint(0, 9)}" for k in rng.sample("abcxyz", rng.randint(1, 3))),
    ),
    "commanumbers": Domain(
        "str", _TEXT, lambda rng: ",".join(str(rng.randint(-9, 40)) for _ in range(rng.randint(1, 5)))
    ),
    "email": Domain("str", _TEXT, _email),
    "goodemail": Domain("str", _TEXT, lambda rng: f"{pick(rng, 'person').lower()}@{pick(rng, 'host')}"),
    "filename": Domain(
        "str",
        _TEXT,
        lambda rng: pick(rng, "noun") + rng.choice((".txt", ".py", ".tar.gz", "", ".png", ".csv")),
    ),
    "digits": Domain("str", _TEXT, lambda rng: str(rng.randint(10**5, 10**8))),
    "password": Domain("str", _TEXT, _password),
    "personname": Domain("str", None, lambda rng: pick(rng, "person")),
    "dna": Domain("str", _TEXT, lambda rng: "".join(rng.choice("ACGT") for _ in range(rng.randint(1, 8)))),
    "binary": Domain("str", _TEXT, lambda rng: f"{rng.randint(0, 70):b}"),
    "roman": Domain("str", _TEXT, _roman),
    "letter": Domain("str", "a letter", lambda rng: rng.choice("aeionrstlb")),
    "fruit": Domain("str", None, lambda rng: pick(rng, "fruit")),
    "operator": Domain("str", None, lambda rng: rng.choice(("+", "-", "*", "//"))),
    "tens": Domain("int", None, lambda rng: rng.randint(-4, 10) * 10),
    "hundreds": Domain("int", None, lambda rng: rng.randint(1, 40) * 100),
    "palnumber": Domain(
        "int",
        None,
        lambda rng: rng.choice((rng.randint(10, 999), rng.choice((7, 121, 1331, 444, 2002, 98789)))),
    ),
    "perfect": Domain("int", None, lambda rng: rng.choice((6, 28, 12, 1, 10, 496, rng.randint(2, 40)))),
    "squareish": Domain("int", None, lambda rng: rng.randint(0, 14) ** 2 + rng.choice((0, 0, 1, 3))),
    "powerish": Domain("int", None, lambda rng: rng.choice((0, 1, 2, 8, 16, 64, 128, rng.randint(3, 90)))),
    "armstrong": Domain("int", None, lambda rng: rng.choice((153, 370, 371, 407, 9474, rng.randint(1, 500)))),
}
