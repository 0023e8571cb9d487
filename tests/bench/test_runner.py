"""Every way of answering is measured once, in a fair order; nothing that was measured is lost or repeated."""

import pytest

from tests.bench.made import Parrot
from treeflash.bench.runner import LineFile, cells, key_of, measure, record
from treeflash.bench.suites import Prompt
from treeflash.errors import UsageError


def prompts(*names: str) -> list[Prompt]:
    return [Prompt("s", name, [{"role": "user", "content": name}]) for name in names]


def test_every_other_prompt_begins_with_the_tree():
    parrot = Parrot()
    list(measure(parrot, cells(prompts("a", "b"), [0, 22], [0.0]), {}))
    assert parrot.asked == [("a", 0, 0.0), ("a", 22, 0.0), ("b", 22, 0.0), ("b", 0, 0.0)]
    assert parrot.forgot == 4


def test_turns_of_a_thread_hear_what_was_answered_before():
    first, second = (
        Prompt("s", name, [{"role": "user", "content": name}], thread="t", continues=name == "two")
        for name in ("one", "two")
    )
    parrot = Parrot()
    lines = list(measure(parrot, cells([first, second], [0, 22], [0.0]), {}))
    assert parrot.heard[:2] == [["one"], ["one", "one!", "two"]]
    assert [key_of(line) for line in lines] == [(n, b, 0.0) for b in (0, 22) for n in ("one", "two")]
    assert parrot.forgot == 2


def test_scores_and_prompts_that_do_not_fit():
    right = Prompt("s", "a", [{"role": "user", "content": "x"}], score=lambda item, text: text == "x!")
    lines = list(measure(Parrot(), cells([right, *prompts("too long", "b")], [None], [0.0]), {}))
    assert [line.get("right") for line in lines] == [True, None, None]
    assert "10 tokens" in lines[1]["skipped"] and "tok_s" not in lines[1]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    file, settings = LineFile(tmp_path / "deep" / "lines.jsonl"), {"n_gen": 3}
    plan = cells(prompts("a", "b", "c"), [0, 22], [0.0])
    found = file.resume(settings)
    record(file, {"settings": settings}, found, measure(Parrot(limit=3), plan, found))
    assert len(found) == 3
    again, parrot = file.resume(settings), Parrot()
    assert again == found
    record(file, {"settings": settings}, again, measure(parrot, plan, dict(again)))
    assert len(parrot.asked) == 3 and len(again) == 6
    assert file.resume(settings) == again
    assert file.resume({"n_gen": 4}) == {}
    assert [len(lines) for _, lines in file.runs()] == [3, 6]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = LineFile(tmp_path / "lines.jsonl")
    record(file, {"settings": 1}, {}, measure(Parrot(), cells(prompts("a"), [0], [0.0]), {}))
    with file.path.open("a") as stream:
        stream.write('{"prompt": "b", "bud')
    assert list(file.resume(1)) == [("a", 0, 0.0)]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("first\nsecond\n")
    with pytest.raises(UsageError, match="line 1, is not JSON"):
        LineFile(tmp_path / "notes.txt").runs()
