"""Every case is measured once, in alternating order; no result is lost or repeated."""

import pytest

from bough.bench.runner import ResultFile, cases, key_of, measure, record
from bough.bench.suites import SuitePrompt
from bough.errors import UsageError
from tests.bench.made import Parrot


def prompts(*names: str) -> list[SuitePrompt]:
    return [SuitePrompt("s", name, [{"role": "user", "content": name}]) for name in names]


def test_the_order_of_budgets_alternates():
    parrot = Parrot()
    list(measure(parrot, cases(prompts("a", "b"), [0, 22], [0.0]), {}))
    assert parrot.requests == [("a", 0, 0.0), ("a", 22, 0.0), ("b", 22, 0.0), ("b", 0, 0.0)]
    assert parrot.cleared == 4


def test_turns_of_a_thread_include_earlier_outputs():
    first, second = (
        SuitePrompt("s", name, [{"role": "user", "content": name}], thread="t", continues=name == "two")
        for name in ("one", "two")
    )
    parrot = Parrot()
    lines = list(measure(parrot, cases([first, second], [0, 22], [0.0]), {}))
    assert parrot.messages[:2] == [["one"], ["one", "one!", "two"]]
    assert [key_of(line) for line in lines] == [(n, b, 0.0) for b in (0, 22) for n in ("one", "two")]
    assert parrot.cleared == 2


def test_scores_and_prompts_that_do_not_fit():
    right = SuitePrompt("s", "a", [{"role": "user", "content": "x"}], score=lambda item, text: text == "x!")
    lines = list(measure(Parrot(), cases([right, *prompts("too long", "b")], [None], [0.0]), {}))
    assert [line.get("right") for line in lines] == [True, None, None]
    assert "10 tokens" in lines[1]["skipped"] and "tok_s" not in lines[1]


def test_an_interrupted_run_is_resumed(tmp_path):
    file, settings = ResultFile(tmp_path / "deep" / "lines.jsonl"), {"n_gen": 3}
    plan = cases(prompts("a", "b", "c"), [0, 22], [0.0])
    found = file.resume(settings)
    record(file, {"settings": settings}, found, measure(Parrot(limit=3), plan, found))
    assert len(found) == 3
    again, parrot = file.resume(settings), Parrot()
    assert again == found
    record(file, {"settings": settings}, again, measure(parrot, plan, dict(again)))
    assert len(parrot.requests) == 3 and len(again) == 6
    assert file.resume(settings) == again
    assert file.resume({"n_gen": 4}) == {}
    assert [len(lines) for _, lines in file.runs()] == [3, 6]


def test_an_incomplete_line_is_ignored(tmp_path):
    file = ResultFile(tmp_path / "lines.jsonl")
    record(file, {"settings": 1}, {}, measure(Parrot(), cases(prompts("a"), [0], [0.0]), {}))
    with file.path.open("a") as stream:
        stream.write('{"prompt": "b", "bud')
    assert list(file.resume(1)) == [("a", 0, 0.0)]
    # It is gone when the next run begins, or that would be the last one that can be resumed.
    record(file, {"settings": 1}, file.resume(1), iter(()))
    assert list(file.resume(1)) == [("a", 0, 0.0)] and len(file.runs()) == 2


def test_a_whole_line_without_its_end_stays(tmp_path):
    file = ResultFile(tmp_path / "lines.jsonl")
    record(file, {"settings": 1}, {}, measure(Parrot(), cases(prompts("a", "b"), [0], [0.0]), {}))
    file.path.write_bytes(file.path.read_bytes().rstrip(b"\n"))
    file.begin({"settings": 2})
    assert list(file.resume(1)) == [("a", 0, 0.0), ("b", 0, 0.0)] and len(file.runs()) == 2


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("first\nsecond\n")
    with pytest.raises(UsageError, match="line 1, is not JSON"):
        ResultFile(tmp_path / "notes.txt").runs()
