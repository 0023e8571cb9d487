"""Numbered sums: extraction from solutions, and variants of a problem with other numbers."""

import random
import re

import pytest

from workshop.training import stories
from workshop.training.steps import as_steps, variants, with_other_numbers

QUESTION = "A box of 48 inches by 100 inches costs $1,200. Tom buys 15. He pays half now. How much is that?"
SOLUTION = "15 boxes cost 15 x $1,200 = $18,000.\nHalf of it is $18000/2=$9,000 dollars.\n#### 9,000"


def test_sums_are_found_among_words_and_units() -> None:
    assert as_steps(QUESTION, SOLUTION) == (
        "Step 1: 15 * 1200 = 18000\nStep 2: 18000 / 2 = 9000\nThe answer is 9000."
    )
    area = "First the area: 48 inches * 100 inches = 4800 square inches\n#### 4800"
    assert as_steps(QUESTION, area) == "Step 1: 48 * 100 = 4800\nThe answer is 4800."
    nested = "That makes (48 + 100) * 2 = 296 and 100 / 8 = 12.5.\n#### 12.5"
    assert (
        as_steps(QUESTION, nested)
        == "Step 1: (48 + 100) * 2 = 296\nStep 2: 100 / 8 = 12.5\nThe answer is 12.5."
    )


@pytest.mark.parametrize(
    "solution",
    [
        "48 + 100 = 149\n#### 149",  # wrong
        "48 + 100 = 148\n#### 150",  # does not lead to the answer
        "77 + 100 = 177\n#### 177",  # a number from nowhere
        "No sums at all.\n#### 5",
        "48 + 100 = 148",
        "5 / 0 = 3\n#### 3",
        "((48 + 100 = 148\n#### x",
    ],
)
def test_inconsistent_solutions_are_rejected(solution: str) -> None:
    assert as_steps(QUESTION, solution) is None


def test_variants_keep_the_text_and_stay_correct() -> None:
    found = list(variants(QUESTION, SOLUTION, random.Random(1)))
    assert len({question for question, _ in found}) > 5
    for question, steps in found:
        assert re.sub(r"[\d,]+", "N", question) == re.sub(r"[\d,]+", "N", QUESTION)
        price, count = (int(n) for n in re.search(r"costs \$(\d+).*buys (\d+)", question).groups())
        assert price % 100 == 0
        assert steps.endswith(f"The answer is {price * count // 2}.")


def test_generated_stories_all_have_steps() -> None:
    rng, without = random.Random(2), 0
    for _ in range(500):
        problem = stories.story_problem(rng)
        steps = as_steps(problem.question, problem.solution)
        without += steps is None
        if steps is not None:
            assert steps.endswith(f"The answer is {problem.answer}.")
            for left, right in re.findall(r": (.*) = (.*)", steps):
                assert eval(left) == float(right)
    assert without < 25


def test_fractions_and_small_numbers_stay() -> None:
    text = "Half of 3 cats, 1/20 of them, 20% and 0.25 miles"
    assert with_other_numbers(text, random.Random(3)) == text
