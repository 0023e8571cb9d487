"""The built-in prompts are valid, and public ones are read from their published files."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest

from bough.bench import agent, scores, suites
from bough.errors import UsageError


def test_thirty_prompts_of_five_kinds_in_mixed_order():
    prompts = suites.load("builtin", None, data=None)
    kinds = [prompt.item["kind"] for prompt in prompts]
    assert Counter(kinds) == {"code": 7, "arithmetic": 6, "edit": 6, "prose": 6, "json": 5}
    assert len(set(kinds[:5])) == 5
    assert len({prompt.name for prompt in prompts}) == 30
    assert len(suites.load("builtin", 4, data=None)) == 4


def test_an_edit_is_scored_by_what_it_changes():
    edits = [prompt for prompt in suites.load("builtin", None, data=None) if prompt.item["kind"] == "edit"]
    for prompt in edits:
        assert prompt.score is not None
        unchanged = scores.code_of(prompt.messages[0]["content"])
        assert unchanged != prompt.messages[0]["content"]
        # Type hints, names, order and values: the file as it was given does not pass.
        assert not prompt.score(prompt.item, unchanged), prompt.name
    rename = next(prompt for prompt in edits if "`calc`" in prompt.messages[0]["content"])
    given = scores.code_of(rename.messages[0]["content"])
    assert scores.own_tests(rename.item, f"```python\n{given.replace('calc', 'area')}```")


def test_tests_of_code_prompts_can_be_passed():
    answers = [
        "def count_vowels(text): return sum(c in 'aeiou' for c in text.lower())",
        "def is_palindrome(text):\n"
        "    letters = [c for c in text.lower() if c.isalnum()]\n"
        "    return letters == letters[::-1]",
        "def fibonacci(n):\n"
        "    found = [0, 1]\n"
        "    while len(found) < n: found.append(found[-1] + found[-2])\n"
        "    return found[:n]",
        "def flatten(values):\n"
        "    return [x for v in values for x in (flatten(v) if isinstance(v, list) else [v])]",
        "def chunks(values, size): return [values[i:i + size] for i in range(0, len(values), size)]",
        "class Stack(list):\n"
        "    push = list.append\n"
        "    def peek(self): return self[-1]\n"
        "    def is_empty(self): return not self",
        "def merge(first, second):\n"
        "    found, first, second = [], first[:], second[:]\n"
        "    while first and second:\n"
        "        found.append((first if first[0] <= second[0] else second).pop(0))\n"
        "    return found + first + second",
    ]
    prompts = [p for p in suites.load("builtin", None, data=None) if p.item["kind"] == "code"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert scores.own_tests(prompt.item, answer), prompt.name


@pytest.fixture
def folder(tmp_path):
    files = {
        "humaneval/test": [
            {"prompt": f"def f{n}():\n", "entry_point": f"f{n}", "test": ""} for n in range(20)
        ],
        "gsm8k/test": [{"question": "1 + 1?", "answer": "#### 2"}],
        "math500/test": [{"problem": "1 + 1?", "answer": "2"}],
        "mbpp/sanitized": [
            {"task_id": n, "prompt": f"task {n}", "test_list": ["assert f()"]} for n in (2, 11, 510, 511, 700)
        ],
        "mt_bench/question": [{"turns": ["one", "two"], "category": "prose"}],
    }
    for name, items in files.items():
        path = tmp_path / f"{name}.jsonl{'' if name.startswith('mt') else '.gz'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(json.dumps(item) for item in items).encode()
        path.write_bytes(text if name.startswith("mt") else gzip.compress(text))
    return tmp_path


def test_prompts_are_spread_over_the_file(folder):
    prompts = suites.load("humaneval", 5, data=folder)
    assert [prompt.name for prompt in prompts] == [f"humaneval/{n}" for n in (0, 4, 8, 12, 16)]
    assert "def f4" in prompts[1].messages[0]["content"]
    assert len(suites.load("humaneval", 99, data=folder)) == 20
    assert len(suites.load("humaneval", None, data=folder)) == 10


def test_mbpp_keeps_to_its_test_split(folder):
    asked = [prompt.messages[0]["content"] for prompt in suites.load("mbpp", 9, data=folder)]
    assert [text.split("\n")[0] for text in asked] == ["task 11", "task 510"]


def test_the_second_turn_of_mtbench_follows_the_first(folder):
    first, second = suites.load("mtbench", 1, data=folder)
    assert (first.continues, second.continues) == (False, True)
    assert first.thread == second.thread
    assert first.score is None


def test_suites_that_cannot_be_loaded(folder, tmp_path):
    with pytest.raises(UsageError, match="there is no suite 'humanevil'"):
        suites.load("humanevil", 1, data=folder)
    with pytest.raises(UsageError, match=r"has no gsm8k/test\.jsonl"):
        suites.load("gsm8k", 1, data=tmp_path / "empty")
    with pytest.raises(UsageError, match="`offline` forbids"):
        suites.load("gsm8k", 1, data=None, offline=True)


def test_the_agent_s_turns_grow_and_use_its_tools():
    turns = agent.turns()
    names = {tool["function"]["name"] for tool in agent.tools()}
    for before, after in pairwise(turns):
        assert after[: len(before)] == before and after[len(before)]["role"] == "assistant"
    calls = [call["function"] for message in turns[-1] for call in message.get("tool_calls", ())]
    assert len(calls) >= 5 and {call["name"] for call in calls} <= names
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    assert all(turn[-1]["role"] in ("user", "tool") for turn in turns)


def test_a_sweep_puts_filler_of_each_length_before_the_question():
    prompts = suites.load("sweep", 1, data=None, contexts=(0, 400))
    assert [prompt.context for prompt in prompts] == [0, 0, 400, 400]
    lines = prompts[2].messages[0]["content"].splitlines()
    records = [line for line in lines if line.startswith("No. ")]
    assert 900 < len("".join(records)) < 2000 and len(set(records)) == len(records)
    assert prompts[2].messages[0]["content"].endswith(prompts[0].messages[0]["content"])
