"""Generator of short sums and facts about numbers, in plain words."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

from workshop.training.stories import Problem

UNITS = (
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("meters", "centimeters", 100), ("kilometers", "meters", 1000), ("kilograms", "grams", 1000),
    ("feet", "inches", 12), ("yards", "feet", 3), ("dollars", "cents", 100), ("dozens", "items", 12),
    ("years", "months", 12), ("liters", "milliliters", 1000), ("gallons", "quarts", 4),
)  # fmt: skip
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def drill(rng: random.Random) -> Problem:
    """Return a problem of a random kind."""
    question, solution = rng.choice(DRILLS)(rng)
    return Problem(question, solution, solution.split()[-1].rstrip("."))


Exchange = tuple[str, str]


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(
        (
            f"What is {expression}?",
            f"Calculate {expression}.",
            f"{expression} = ?",
            f"Compute {expression}.",
            f"How much is {expression}?",
        )
    )


def _addition(rng: random.Random) -> Exchange:
    top = rng.choice((20, 100, 1000, 10000))
    numbers = [rng.randint(1, top) for _ in range(rng.choice((2, 2, 2, 3)))]
    expression = " + ".join(map(str, numbers))
    return _ask(rng, expression), f"{expression} = {sum(numbers)}"


def _subtraction(rng: random.Random) -> Exchange:
    top = rng.choice((20, 100, 1000, 10000))
    a, b = sorted((rng.randint(1, top), rng.randint(1, top)), reverse=True)
    return _ask(rng, f"{a} - {b}"), f"{a} - {b} = {a - b}"


def _multiplication(rng: random.Random) -> Exchange:
    a, b = rng.randint(2, 99), rng.randint(2, 12)
    sign = rng.choice(("*", "*", "x", "times"))
    if a <= 12:
        return _ask(rng, f"{a} {sign} {b}"), f"{a} * {b} = {a * b}"
    tens, ones = a // 10 * 10, a % 10
    if ones == 0:
        return _ask(rng, f"{a} {sign} {b}"), f"{a} * {b} = {a * b}"
    steps = f"{a} * {b} = {tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"
    return _ask(rng, f"{a} {sign} {b}"), steps


def _long_multiplication(rng: random.Random) -> Exchange:
    a, b = rng.randint(11, 99), rng.randint(13, 99)
    tens, ones = b // 10 * 10, b % 10
    if ones == 0:
        return _ask(rng, f"{a} * {b}"), f"{a} * {b} = {a * b}"
    steps = f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"
    return _ask(rng, f"{a} * {b}"), steps


def _division(rng: random.Random) -> Exchange:
    b, result = rng.randint(2, 12), rng.randint(2, 99)
    sign = rng.choice(("/", "/", "divided by"))
    return _ask(rng, f"{b * result} {sign} {b}"), f"{b * result} / {b} = {result}"


def _remainder(rng: random.Random) -> Exchange:
    a, b = rng.randint(10, 200), rng.randint(3, 12)
    quotient, rest = divmod(a, b)
    asked = f"What is the remainder when {a} is divided by {b}?"
    return (
        asked,
        f"{b} * {quotient} = {b * quotient} and {a} - {b * quotient} = {rest}, so the remainder is {rest}.",
    )


def _order(rng: random.Random) -> Exchange:
    a, b, c = rng.randint(2, 20), rng.randint(2, 12), rng.randint(2, 12)
    if rng.random() < 0.5:
        return _ask(rng, f"{a} + {b} * {c}"), f"{a} + {b} * {c} = {a} + {b * c} = {a + b * c}"
    return _ask(rng, f"({a} + {b}) * {c}"), f"({a} + {b}) * {c} = {a + b} * {c} = {(a + b) * c}"


def _percent(rng: random.Random) -> Exchange:
    percent, whole = rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80)), 20 * rng.randint(1, 40)
    result = percent * whole // 100
    return (
        rng.choice((f"What is {percent}% of {whole}?", f"Find {percent} percent of {whole}.")),
        f"{percent}% of {whole} is {percent}/100 * {whole} = {result}",
    )


def _what_percent(rng: random.Random) -> Exchange:
    percent, whole = rng.choice((5, 10, 20, 25, 40, 50, 60, 75, 80)), 20 * rng.randint(1, 20)
    part = percent * whole // 100
    return f"What percent of {whole} is {part}?", f"{part} / {whole} * 100 = {percent}, so it is {percent}%."


def _fraction_of(rng: random.Random) -> Exchange:
    bottom = rng.randint(2, 9)
    top, unit = rng.randint(1, bottom - 1), rng.randint(2, 20)
    whole = bottom * unit
    steps = f"{whole} / {bottom} = {unit}, and {top} * {unit} = {top * unit}"
    return f"What is {top}/{bottom} of {whole}?", steps


def _fraction_sum(rng: random.Random) -> Exchange:
    b, d = rng.randint(2, 9), rng.randint(2, 9)
    a, c = rng.randint(1, b), rng.randint(1, d)
    bottom = math.lcm(b, d)
    x, y = a * bottom // b, c * bottom // d
    total = Fraction(x + y, bottom)
    steps = f"{a}/{b} + {c}/{d} = {x}/{bottom} + {y}/{bottom} = {x + y}/{bottom}"
    return _ask(rng, f"{a}/{b} + {c}/{d}"), steps if str(
        total
    ) == f"{x + y}/{bottom}" else f"{steps} = {total}"


def _simplify(rng: random.Random) -> Exchange:
    a, b, k = rng.randint(1, 9), rng.randint(2, 12), rng.randint(2, 9)
    common = math.gcd(a * k, b * k)
    steps = f"Both {a * k} and {b * k} are divisible by {common}, so {a * k}/{b * k} = {Fraction(a, b)}"
    return f"Simplify the fraction {a * k}/{b * k}.", steps


def _unit(rng: random.Random) -> Exchange:
    large, small, k = rng.choice(UNITS)
    n = rng.randint(2, 15)
    if rng.random() < 0.5:
        return f"How many {small} are in {n} {large}?", f"{n} {large} are {n} * {k} = {n * k} {small}."
    return f"Convert {n * k} {small} to {large}.", f"{n * k} {small} are {n * k} / {k} = {n} {large}."


def _clock(rng: random.Random) -> Exchange:
    hour, minute, later = rng.randint(1, 10), 5 * rng.randint(0, 11), 5 * rng.randint(2, 23)
    total = hour * 60 + minute + later
    asked = f"It is {hour}:{minute:02d}. What time will it be in {later} minutes?"
    carried, rest = divmod(minute + later, 60)
    steps = f"{minute} + {later} = {minute + later} minutes"
    if carried:
        steps += f", which is {carried} hour{'s' if carried > 1 else ''} and {rest} minutes"
    return asked, f"{steps}. The time will be {total // 60}:{total % 60:02d}."


def _sequence(rng: random.Random) -> Exchange:
    start, step = rng.randint(1, 30), rng.randint(2, 15)
    if rng.random() < 0.6:
        terms = [start + step * i for i in range(5)]
        why = f"Each number is {step} more than the last, so the next is {terms[3]} + {step} = {terms[4]}."
    else:
        start, step = rng.randint(1, 6), rng.randint(2, 4)
        terms = [start * step**i for i in range(5)]
        why = f"Each number is {step} times the last, so the next is {terms[3]} * {step} = {terms[4]}."
    return f"What comes next: {', '.join(map(str, terms[:4]))}, ...?", why


def _compare(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(1, 1000), 2)
    word = rng.choice(("larger", "smaller"))
    result = max(a, b) if word == "larger" else min(a, b)
    sign = ">" if result == max(a, b) else "<"
    other = a + b - result
    return (
        f"Which number is {word}, {a} or {b}?",
        f"{result} {sign} {other}, so the {word} number is {result}.",
    )


def _rounding(rng: random.Random) -> Exchange:
    unit, n = rng.choice((10, 100)), rng.randint(11, 999)
    low = n // unit * unit
    result = low if n - low < unit / 2 else low + unit
    steps = f"{n} is between {low} and {low + unit} and nearer to {result}, so it rounds to {result}."
    if n - low == unit / 2:
        steps = f"{n} is halfway between {low} and {low + unit}, so it rounds up to {result}."
    return f"Round {n} to the nearest {'ten' if unit == 10 else 'hundred'}.", steps


def _common_divisor(rng: random.Random) -> Exchange:
    k = rng.randint(2, 12)
    a, b = k * rng.randint(1, 9), k * rng.randint(1, 9)
    steps, x, y = [], max(a, b), min(a, b)
    while y:
        steps.append(f"{x} = {x // y} * {y} + {x % y}")
        x, y = y, x % y
    asked = rng.choice(
        (f"What is the greatest common divisor of {a} and {b}?", f"Find the GCD of {a} and {b}.")
    )
    return asked, "\n".join([*steps, f"The greatest common divisor is {x}."])


def _common_multiple(rng: random.Random) -> Exchange:
    a, b = rng.randint(2, 15), rng.randint(2, 15)
    divisor = math.gcd(a, b)
    steps = f"Their greatest common divisor is {divisor}, and {a} * {b} / {divisor} = {math.lcm(a, b)}"
    return f"What is the least common multiple of {a} and {b}?", steps


def _prime(rng: random.Random) -> Exchange:
    n = rng.randint(2, 150)
    divisor = next(i for i in range(2, n + 1) if n % i == 0)
    if divisor == n:
        return f"Is {n} a prime number?", f"Yes, {n} is a prime number, because only 1 and {n} divide it."
    return (
        f"Is {n} a prime number?",
        f"No, {n} is not a prime number, because {n} = {divisor} * {n // divisor}.",
    )


def _factors(rng: random.Random) -> Exchange:
    n = rest = rng.randint(4, 200)
    found, divisor = [], 2
    while rest > 1:
        if rest % divisor:
            divisor += 1
        else:
            found.append(divisor)
            rest //= divisor
    return f"What is the prime factorization of {n}?", f"{n} = {' * '.join(map(str, found))}"


def _average(rng: random.Random) -> Exchange:
    count, mean = rng.randint(3, 5), rng.randint(5, 40)
    numbers = [mean + rng.randint(-4, 4) for _ in range(count - 1)]
    numbers.append(mean * count - sum(numbers))
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    steps = (
        f"The sum is {' + '.join(map(str, numbers))} = {sum(numbers)}, and {sum(numbers)} / {count} = {mean}"
    )
    return f"What is the average of {listed}?", steps


def _equation(rng: random.Random) -> Exchange:
    x, a, b = rng.randint(1, 20), rng.randint(2, 12), rng.randint(1, 40)
    name = rng.choice("xxxnya")
    total = a * x + b
    left = f"{a}{name}"
    steps = f"{left} + {b} = {total}\n{left} = {total} - {b} = {total - b}\n{name} = {total - b} / {a} = {x}"
    return f"Solve for {name}: {left} + {b} = {total}", steps


def _missing(rng: random.Random) -> Exchange:
    a, b = rng.randint(2, 80), rng.randint(2, 80)
    asked = rng.choice((f"{a} + ___ = {a + b}", f"What number must be added to {a} to get {a + b}?"))
    return asked, f"{a + b} - {a} = {b}, so the number is {b}."


def _power(rng: random.Random) -> Exchange:
    base, exponent = rng.randint(2, 12), rng.randint(2, 4)
    spelled = " * ".join([str(base)] * exponent)
    return _ask(rng, f"{base}^{exponent}"), f"{base}^{exponent} = {spelled} = {base**exponent}"


def _root(rng: random.Random) -> Exchange:
    root = rng.randint(2, 25)
    return f"What is the square root of {root * root}?", f"{root} * {root} = {root * root}, so it is {root}."


def _rectangle(rng: random.Random) -> Exchange:
    w, h = rng.randint(2, 30), rng.randint(2, 30)
    if rng.random() < 0.5:
        return f"What is the area of a rectangle with sides {w} and {h}?", f"The area is {w} * {h} = {w * h}"
    steps = f"The perimeter is 2 * ({w} + {h}) = 2 * {w + h} = {2 * (w + h)}"
    return f"What is the perimeter of a rectangle with sides {w} and {h}?", steps


def _parity(rng: random.Random) -> Exchange:
    n = rng.randint(1, 9999)
    word = "odd" if n % 2 else "even"
    return f"Is {n} even or odd?", f"{n} ends in {n % 10}, so it is {word}."


def _words(rng: random.Random) -> Exchange:
    n = rng.randint(0, 99)
    ones, tens = [*ONES.split(), "seventeen", "eighteen", "nineteen"], TENS.split()
    spelled = ones[n] if n < 20 else tens[n // 10 - 2] + (f"-{ones[n % 10]}" if n % 10 else "")
    if rng.random() < 0.5:
        return f"Write {n} in words.", f"{n} is {spelled}."
    return f"Write {spelled} as a number.", f"{spelled.capitalize()} is {n}."


def _ordering(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 200), rng.randint(3, 6))
    down = rng.random() < 0.3
    result = ", ".join(map(str, sorted(numbers, reverse=down)))
    order = "largest to smallest" if down else "smallest to largest"
    return f"Sort these numbers from {order}: {', '.join(map(str, numbers))}", result


def _spoken(rng: random.Random) -> Exchange:
    a, b, k = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 4)
    times = ("", "", "twice", "three times", "four times")[k]
    steps = f"{k} * {a} = {k * a}, and {k * a} + {b} = {k * a + b}"
    return f"What is {b} more than {times} {a}?", steps


def _decimals(rng: random.Random) -> Exchange:
    a, b = rng.randint(11, 999), rng.randint(11, 999)
    x, y, total = (f"{value / 10:.1f}" for value in (a, b, a + b))
    return _ask(rng, f"{x} + {y}"), f"{x} + {y} = {total}"


DRILLS: tuple[Callable[[random.Random], Exchange], ...] = (
    _addition, _addition, _subtraction, _subtraction, _multiplication, _multiplication, _long_multiplication,
    _division, _remainder, _order, _percent, _what_percent, _fraction_of, _fraction_sum, _simplify, _unit,
    _unit, _clock, _sequence, _sequence, _compare, _rounding, _common_divisor, _common_multiple, _prime,
    _factors, _average, _equation, _equation, _missing, _power, _root, _rectangle, _parity, _words,
    _ordering, _spoken, _decimals,
)  # fmt: skip
