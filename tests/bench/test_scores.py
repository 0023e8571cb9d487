"""Scoring of answers, and the limits on executed code."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.bench import scores


@pytest.mark.parametrize(
    ("program", "good"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("def broken(:", False),
        ("raise SystemExit(3)", False),
        ("x = bytearray(2 << 30)", False),
        ("with open('file', 'w') as file: file.write('x')", False),
    ],
)
def test_programs_and_their_limits(program, good):
    assert scores.passes(program) is good


def test_a_program_that_never_ends(monkeypatch):
    monkeypatch.setattr(scores, "SECONDS", 1)
    start = time.perf_counter()
    assert not scores.passes("while True: pass")
    assert not scores.passes("import time; time.sleep(60)")
    assert time.perf_counter() - start < 20


def test_a_program_runs_in_an_empty_folder_and_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    here = str(Path.cwd())
    assert scores.passes(f"import os; assert os.getcwd() != {here!r} and 'SECRET' not in os.environ")


def test_humaneval_accepts_a_whole_function_after_the_prompts_head():
    item = {
        "prompt": "import math\n\n\ndef half(x):\n    '''Half of x.'''\n",
        "entry_point": "half",
        "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    }
    right = "Here it is:\n```python\ndef half(x):\n    return math.floor(x) / 2\n```\nIt halves."
    assert scores.humaneval(item, right)
    assert not scores.humaneval(item, right.replace("/ 2", "/ 3"))
    assert not scores.humaneval(item, "I do not know.")


def test_mbpp_runs_all_tests():
    item = {"test_list": ["assert twice(1) == 2", "assert twice(3) == 6"]}
    assert scores.mbpp(item, "def twice(x): return 2 * x")
    assert not scores.mbpp(item, "def twice(x): return 2")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is 1,234 in all.", True),
        ("First 7, so 1234.00", True),
        ("1234 - no, 1235", False),
        ("none", False),
    ],
)
def test_the_last_number_counts(answer, right):
    assert scores.gsm8k({"answer": "6 * 2 = 12\n#### 1,234"}, answer) is right


def test_formulas_are_compared_without_typesetting():
    item = {"answer": r"\left( 3, \frac{\pi}{2} \right)"}
    assert scores.math500(item, r"So \boxed{1}, or rather $\boxed{(3, \dfrac{\pi}{2})}$.")
    assert not scores.math500(item, r"\boxed{(3, \pi)}")
    assert not scores.math500(item, r"(3, \frac{\pi}{2})")


@given(st.recursive(st.text("ab"), lambda inner: inner.map(lambda text: f"x{{{text}}}"), max_leaves=5))
def test_boxes_may_contain_braces(formula):
    assert scores.boxed(f"so \\boxed{{{formula}}} it is }}") == formula


def test_json_needs_exactly_the_keys():
    item = {"keys": ["a", "b"]}
    assert scores.json_keys(item, '```json\n{"a": 1, "b": []}\n```')
    assert not scores.json_keys(item, '{"a": 1}')
    assert not scores.json_keys(item, '["a", "b"]')
    assert not scores.json_keys(item, "a and b")
