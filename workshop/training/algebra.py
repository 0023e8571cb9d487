"""Generator of competition-style exercises in LaTeX with a boxed answer."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

from workshop.training.stories import Problem

Exchange = tuple[str, str, str]


def algebra_problem(rng: random.Random) -> Problem:
    """Return a problem of a random kind; the solution ends with the boxed answer."""
    question, solution, answer = rng.choice(KINDS)(rng)
    return Problem(question, solution.replace("BOX", rf"\boxed{{{answer}}}"), answer)


def _number(value: Fraction | int) -> str:
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _term(factor: int, power: str, *, first: bool = False) -> str:
    """Return a term as written in a sum: `3x`, `-x` or `+ 2x^2`."""
    size = "" if abs(factor) == 1 and power else str(abs(factor))
    if first:
        return ("-" if factor < 0 else "") + size + power
    return f" {'-' if factor < 0 else '+'} {size}{power}"


def _nonzero(rng: random.Random, limit: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, limit)


def _linear(rng: random.Random) -> Exchange:
    x, a, b = _nonzero(rng, 12), rng.randint(2, 9), _nonzero(rng, 20)
    right = a * x + b
    verb, value = ("Subtracting", b) if b > 0 else ("Adding", -b)
    side = "from" if b > 0 else "to"
    return (
        rng.choice(
            (
                f"Solve for $x$: ${a}x{_term(b, '')} = {right}$.",
                f"If ${a}x{_term(b, '')} = {right}$, what is $x$?",
            )
        ),
        f"{verb} ${value}$ {side} both sides gives ${a}x = {right - b}$. "
        f"Dividing both sides by ${a}$ gives $x = BOX$.",
        str(x),
    )


def _both_sides(rng: random.Random) -> Exchange:
    x, a, c, b = _nonzero(rng, 9), rng.randint(4, 9), rng.randint(2, 3), _nonzero(rng, 12)
    d = (a - c) * x + b
    return (
        f"Find the value of $x$ such that ${a}x{_term(b, '')} = {c}x{_term(d, '') if d else ''}$.",
        f"Moving the terms with $x$ to the left and the numbers to the right gives "
        f"${a - c}x = {d - b}$, so $x = BOX$." if a - c > 1
        else f"Subtracting ${c}x$ and moving the numbers to the right gives $x = BOX$.",
        str(x),
    )  # fmt: skip


def _quadratic(rng: random.Random) -> Exchange:
    p, q = rng.sample([i for i in range(-9, 10) if i], 2)
    b, c = -(p + q), p * q
    middle = _term(b, "x") if b else ""
    low, high = min(p, q), max(p, q)
    left, right = _term(-low, ""), _term(-high, "")
    return (
        f"What is the larger of the two solutions of $x^2{middle}{_term(c, '')} = 0$?",
        f"The left side factors as $(x{left})(x{right})$, so the solutions are $x = {low}$ and $x = {high}$. "
        f"The larger one is $BOX$.",
        str(high),
    )


def _expand(rng: random.Random) -> Exchange:
    p, q = _nonzero(rng, 9), _nonzero(rng, 9)
    middle = _term(p + q, "x") if p + q else ""
    cross = f"{_term(q, 'x')}{_term(p, 'x')}"
    return (
        f"Expand the product $(x{_term(p, '')})(x{_term(q, '')})$.",
        f"We have $(x{_term(p, '')})(x{_term(q, '')}) = x^2{cross}{_term(p * q, '')} = BOX$.",
        f"x^2{middle}{_term(p * q, '')}",
    )


def _evaluate(rng: random.Random) -> Exchange:
    a, b, c, x = rng.randint(1, 5), _nonzero(rng, 9), _nonzero(rng, 12), _nonzero(rng, 6)
    rule = f"{_term(a, 'x^2', first=True)}{_term(b, 'x')}{_term(c, '')}"
    shown = f"({x})" if x < 0 else str(x)
    factor = "" if a == 1 else rf"{a} \cdot "
    return (
        f"If $f(x) = {rule}$, what is $f({x})$?",
        rf"We have $f({x}) = {factor}{shown}^2{_term(b, '')} \cdot {shown}{_term(c, '')} "
        f"= {a * x * x}{_term(b * x, '')}{_term(c, '')} = BOX$.",
        str(a * x * x + b * x + c),
    )


def _composition(rng: random.Random) -> Exchange:
    a, b, c, x = rng.randint(2, 6), _nonzero(rng, 9), _nonzero(rng, 9), rng.randint(1, 6)
    inner = x + c
    return (
        f"Let $f(x) = {a}x{_term(b, '')}$ and $g(x) = x{_term(c, '')}$. Find $f(g({x}))$.",
        f"First, $g({x}) = {x}{_term(c, '')} = {inner}$. "
        rf"Then $f({inner}) = {a} \cdot {f'({inner})' if inner < 0 else inner}{_term(b, '')} = BOX$.",
        str(a * inner + b),
    )


def _slope(rng: random.Random) -> Exchange:
    x1, y1, dx, dy = rng.randint(-6, 6), rng.randint(-6, 6), rng.randint(1, 8), _nonzero(rng, 9)
    return (
        f"What is the slope of the line through $({x1},{y1})$ and $({x1 + dx},{y1 + dy})$?",
        rf"The slope is $\frac{{{y1 + dy} - {_wrap(y1)}}}{{{x1 + dx} - {_wrap(x1)}}} = "
        rf"\frac{{{dy}}}{{{dx}}}$, which is $BOX$.",
        _number(Fraction(dy, dx)),
    )


def _wrap(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def _midpoint(rng: random.Random) -> Exchange:
    x, y, dx, dy = rng.randint(-6, 6), rng.randint(-6, 6), rng.randint(1, 6), rng.randint(1, 6)
    return (
        f"Find the midpoint of the segment from $({x - dx},{y - dy})$ to $({x + dx},{y + dy})$.",
        rf"The midpoint is $\left(\frac{{{x - dx} + {_wrap(x + dx)}}}{{2}}, "
        rf"\frac{{{y - dy} + {_wrap(y + dy)}}}{{2}}\right) = BOX$.",
        f"({x},{y})",
    )


def _distance(rng: random.Random) -> Exchange:
    a, b, c = rng.choice(((3, 4, 5), (6, 8, 10), (5, 12, 13), (8, 15, 17), (9, 12, 15)))
    x, y = rng.randint(-5, 5), rng.randint(-5, 5)
    return (
        f"What is the distance between the points $({x},{y})$ and $({x + a},{y + b})$?",
        rf"The distance is $\sqrt{{{a}^2 + {b}^2}} = \sqrt{{{a * a + b * b}}} = BOX$.",
        str(c),
    )


def _logarithm(rng: random.Random) -> Exchange:
    base, power = rng.choice(
        ((2, 5), (2, 6), (2, 3), (3, 4), (3, 3), (5, 3), (10, 4), (4, 3), (7, 2), (6, 3))
    )
    sign = rng.choice((1, 1, -1))
    inside = str(base**power) if sign > 0 else rf"\frac{{1}}{{{base**power}}}"
    return (
        rf"Evaluate $\log_{{{base}}} {inside}$.",
        f"Since ${base}^{{{sign * power}}} = {inside}$, the value is $BOX$.",
        str(sign * power),
    )


def _exponents(rng: random.Random) -> Exchange:
    base, a, b = rng.choice("xyza"), rng.randint(2, 9), rng.randint(2, 9)
    return (
        rf"Simplify ${base}^{{{a}}} \cdot {base}^{{{b}}}$.",
        f"The exponents add up: ${a} + {b} = {a + b}$, so the product is $BOX$.",
        f"{base}^{{{a + b}}}",
    )


def _choose(rng: random.Random) -> Exchange:
    n = rng.randint(4, 10)
    k = rng.randint(2, 3)
    top = " \\cdot ".join(str(n - i) for i in range(k))
    bottom = " \\cdot ".join(str(k - i) for i in range(k))
    thing = rng.choice(("students", "books", "toppings", "cards", "players"))
    return (
        f"In how many ways can {k} {thing} be chosen from {n} {thing}?",
        rf"The number of ways is $\binom{{{n}}}{{{k}}} = \frac{{{top}}}{{{bottom}}} = BOX$.",
        str(math.comb(n, k)),
    )


def _arrange(rng: random.Random) -> Exchange:
    n = rng.randint(3, 7)
    product = r" \cdot ".join(str(i) for i in range(n, 0, -1))
    thing = rng.choice(("books on a shelf", "people in a line", "letters in a row", "runners in a race"))
    return (
        f"In how many ways can we arrange {n} different {thing}?",
        f"There are {n} choices for the first place, {n - 1} for the second, and so on, "
        f"so there are ${n}! = {product} = BOX$ ways.",
        str(math.factorial(n)),
    )


def _marbles(rng: random.Random) -> Exchange:
    red, blue, green = (rng.randint(1, 9) for _ in range(3))
    total = red + blue + green
    return (
        f"A bag holds {red} red, {blue} blue and {green} green marbles. One marble is drawn at random. "
        "What is the probability that it is red? Express your answer as a common fraction.",
        f"There are ${red} + {blue} + {green} = {total}$ marbles, and the number of red ones is {red}. "
        "The probability is $BOX$.",
        _number(Fraction(red, total)),
    )


def _series(rng: random.Random) -> Exchange:
    first, step, count = rng.randint(1, 9), rng.randint(1, 6), rng.randint(5, 12)
    last = first + step * (count - 1)
    return (
        f"What is the sum of the first {count} terms of the arithmetic sequence "
        rf"${first}, {first + step}, {first + 2 * step}, \ldots$?",
        rf"The last term is ${first} + {count - 1} \cdot {step} = {last}$. The sum is "
        rf"$\frac{{{count}({first} + {last})}}{{2}} = \frac{{{count * (first + last)}}}{{2}} = BOX$.",
        str(count * (first + last) // 2),
    )


def _modulo(rng: random.Random) -> Exchange:
    a, b, m = rng.randint(20, 99), rng.randint(20, 99), rng.randint(3, 12)
    return (
        rf"What is the remainder when ${a} \cdot {b}$ is divided by ${m}$?",
        rf"We have ${a} \equiv {a % m} \pmod{{{m}}}$ and ${b} \equiv {b % m} \pmod{{{m}}}$, so "
        rf"${a} \cdot {b} \equiv {a % m} \cdot {b % m} = {a % m * (b % m)} \equiv BOX \pmod{{{m}}}$.",
        str(a * b % m),
    )


def _units_digit(rng: random.Random) -> Exchange:
    base, power = rng.choice((2, 3, 7, 8)), rng.randint(5, 60)
    cycle = ", ".join(str(pow(base, i, 10)) for i in range(1, 5))
    rest = power % 4
    place = f"leaves the remainder ${rest}$ when divided by $4$" if rest else "is divisible by $4$"
    return (
        f"What is the units digit of ${base}^{{{power}}}$?",
        f"The units digits of the powers of ${base}$ repeat: ${cycle}$. "
        f"Since ${power}$ {place}, the units digit is $BOX$.",
        str(pow(base, power, 10)),
    )


def _circle(rng: random.Random) -> Exchange:
    r = rng.randint(2, 15)
    return (
        f"What is the area of a circle with diameter ${2 * r}$? Express your answer in terms of $\\pi$.",
        rf"The radius is ${2 * r} / 2 = {r}$, so the area is $\pi \cdot {r}^2 = BOX$.",
        rf"{r * r}\pi",
    )


def _triangle(rng: random.Random) -> Exchange:
    k = rng.randint(1, 4)
    a, b, c = (k * side for side in rng.choice(((3, 4, 5), (5, 12, 13), (8, 15, 17))))
    return (
        f"The legs of a right triangle have lengths ${a}$ and ${b}$. How long is the hypotenuse?",
        rf"By the Pythagorean theorem it is $\sqrt{{{a}^2 + {b}^2}} = \sqrt{{{a * a} + {b * b}}} = "
        rf"\sqrt{{{c * c}}} = BOX$.",
        str(c),
    )


def _radical(rng: random.Random) -> Exchange:
    a, b = rng.randint(2, 9), rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return (
        rf"Simplify $\sqrt{{{a * a * b}}}$.",
        rf"Since ${a * a * b} = {a * a} \cdot {b}$, we get $\sqrt{{{a * a * b}}} = "
        rf"\sqrt{{{a * a}}} \cdot \sqrt{{{b}}} = BOX$.",
        rf"{a}\sqrt{{{b}}}",
    )


def _fractions(rng: random.Random) -> Exchange:
    b, d = rng.randint(2, 9), rng.randint(2, 9)
    a, c = rng.randint(1, 9), rng.randint(1, 9)
    bottom = math.lcm(b, d)
    x, y = a * bottom // b, c * bottom // d
    return (
        rf"Compute $\frac{{{a}}}{{{b}}} + \frac{{{c}}}{{{d}}}$.",
        rf"With denominator ${bottom}$ we get $\frac{{{x}}}{{{bottom}}} + \frac{{{y}}}{{{bottom}}} "
        rf"= \frac{{{x + y}}}{{{bottom}}}$, which is $BOX$.",
        _number(Fraction(x + y, bottom)),
    )


def _system(rng: random.Random) -> Exchange:
    x, y = rng.randint(-9, 12), rng.randint(-9, 12)
    return (
        f"If $x + y = {x + y}$ and $x - y = {x - y}$, what is $xy$?",
        f"Adding the equations gives $2x = {2 * x}$, so $x = {x}$. Then $y = {x + y} - {_wrap(x)} = {y}$. "
        rf"So $xy = {_wrap(x)} \cdot {_wrap(y)} = BOX$.",
        str(x * y),
    )


def _divisors(rng: random.Random) -> Exchange:
    powers = sorted(rng.sample((2, 3, 5, 7), 2))
    exponents = [rng.randint(1, 4), rng.randint(1, 2)]
    n = powers[0] ** exponents[0] * powers[1] ** exponents[1]
    shown = r" \cdot ".join(f"{p}^{e}" if e > 1 else str(p) for p, e in zip(powers, exponents, strict=True))
    e, f = exponents
    return (
        f"How many positive divisors does ${n}$ have?",
        f"We factor ${n} = {shown}$. A divisor has {e + 1} possible exponents of ${powers[0]}$ and {f + 1} "
        rf"of ${powers[1]}$, so there are ${e + 1} \cdot {f + 1} = BOX$ divisors.",
        str((e + 1) * (f + 1)),
    )


def _angles(rng: random.Random) -> Exchange:
    a, b = rng.randint(20, 80), rng.randint(20, 80)
    return (
        rf"Two angles of a triangle measure ${a}^\circ$ and ${b}^\circ$. How many degrees is the third?",
        f"The angles of a triangle add up to $180$ degrees, so the third is $180 - {a} - {b} = BOX$ degrees.",
        str(180 - a - b),
    )


def _ratio(rng: random.Random) -> Exchange:
    a, b, k = rng.randint(2, 7), rng.randint(2, 9), rng.randint(2, 12)
    return (
        rf"If $\frac{{x}}{{{b * k}}} = \frac{{{a}}}{{{b}}}$, what is the value of $x$?",
        rf"Multiplying both sides by ${b * k}$ gives $x = \frac{{{a} \cdot {b * k}}}{{{b}}} = "
        rf"\frac{{{a * b * k}}}{{{b}}} = BOX$.",
        str(a * k),
    )


def _base(rng: random.Random) -> Exchange:
    base, digits = rng.randint(2, 8), [rng.randint(1, 8), *(rng.randint(0, 8) for _ in range(2))]
    digits = [max(1, digits[0] % base), *(digit % base for digit in digits[1:])]
    value = digits[0] * base**2 + digits[1] * base + digits[2]
    written = "".join(map(str, digits))
    return (
        f"Express ${written}_{base}$ in base $10$.",
        rf"We have ${written}_{base} = {digits[0]} \cdot {base}^2 + {digits[1]} \cdot {base} + {digits[2]} = "
        f"{digits[0] * base**2} + {digits[1] * base} + {digits[2]} = BOX$.",
        str(value),
    )


KINDS: tuple[Callable[[random.Random], Exchange], ...] = (
    _linear, _linear, _both_sides, _quadratic, _expand, _evaluate, _evaluate, _composition, _slope, _midpoint,
    _distance, _logarithm, _exponents, _choose, _arrange, _marbles, _series, _modulo, _units_digit, _circle,
    _triangle, _radical, _fractions, _system, _divisors, _angles, _ratio, _base,
)  # fmt: skip
