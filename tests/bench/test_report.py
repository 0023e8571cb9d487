"""Summaries of results, and changes against noise."""

import random

import pytest

from bough.bench import measure, report
from bough.bench.suites import SuitePrompt
from bough.engine.stats import StepRecord
from tests.bench.made import a_head, a_line


def pair(name: str, plain: float, tree: float, **values) -> list[dict]:
    return [a_line(name, 0, tok_s=plain), a_line(name, 22, tok_s=tree, **values)]


def test_a_suite_s_row():
    lines = [*pair("builtin/0", 50, 100), *pair("builtin/1", 40, 120, text="no", right=False)]
    [row] = report.rows(lines)
    assert row["speedup"]["mean"] == 2.5 and row["speedup"]["n"] == 2
    assert row["plain_tok_s"]["mean"] == 45 and row["tok_s"]["mean"] == 110
    assert row["identical"]["mean"] == 0.5 and row["score"]["mean"] == 0.5
    assert row["draft_ms"]["mean"] == pytest.approx(10) and row["verify_ms"]["mean"] == pytest.approx(20)
    assert report.overall(lines) is None


def test_overall_row_and_skipped_prompts():
    lines = [*pair("builtin/0", 50, 100), *pair("gsm8k/0", 50, 50)]
    lines.append(
        {"suite": "gsm8k", "prompt": "gsm8k/1", "budget": 22, "temperature": 0.0, "skipped": "too long"}
    )
    total = report.overall(lines)
    assert total is not None and total["speedup"]["mean"] == 1.5 and total["prompts"] == 2
    assert report.summary(a_head(), lines)["skipped"] == 1


def test_a_foreign_server_has_no_step_statistics():
    hidden = dict.fromkeys(("acceptance_length", "loops", "steps", "rows_per_step", "draft_s", "memory"))
    hidden |= dict.fromkeys(("verify_s", "rest_s", "accepted_by_position"))
    lines = [a_line("builtin/0", None, steps_by_rows={}, **hidden)]
    [row] = report.rows(lines)
    assert row["speedup"] is None and row["tok_s"]["mean"] == 100 and row["identical"] is None
    page = report.markdown(a_head(), lines)
    assert "| builtin | 1 | – | 100.0 | – | – | – | 100% |" in page


def test_ttft_counts_the_request_with_fewer_cached_tokens():
    plain, tree = pair("builtin/0", 50, 100, cached_tokens=8, ttft_s=0.01)
    [row] = report.rows([plain, tree])
    assert row["ttft_s"]["mean"] == plain["ttft_s"]


def test_a_run_of_plain_decoding_alone():
    [row] = report.rows([a_line("builtin/0", 0)])
    assert row["budget"] == 0 and row["tok_s"]["mean"] == 50 and row["speedup"] is None


def test_the_page_has_command_machine_and_bandwidth_bound():
    page = report.markdown(a_head(), pair("builtin/0", 50, 100))
    assert "`bough bench`" in page and "a machine" in page
    assert "10.00 ms" in page and "100.0 tok/s" in page


def test_a_busy_machine_is_reported():
    lines = pair("builtin/0", 50, 100)
    assert "busy" not in report.markdown(a_head() | {"load": 0.9, "cpus": 2}, lines)
    assert "load 5.5 on 2 CPUs" in report.markdown(a_head() | {"load": 5.5, "cpus": 2}, lines)


def documents(change: float, jitter: float, count: int = 12) -> tuple[dict, dict]:
    draw = random.Random(1)
    sides: tuple[list, list] = ([], [])
    for index in range(count):
        speed = 20.0 + 10 * index
        for side, factor in zip(sides, (1.0, 1.0 + change), strict=True):
            noisy = speed * factor * (1 + draw.uniform(-jitter, jitter))
            side += pair(f"builtin/{index}", 10.0, noisy)
    old, new = (report.document(a_head(), side) for side in sides)
    return old, new


@pytest.mark.parametrize(
    ("change", "jitter", "seen"),
    [(0.1, 0.02, True), (0.0, 0.05, False), (-0.2, 0.05, True), (0.005, 0.0, False)],
)
def test_changes_beyond_noise(change, jitter, seen):
    found = {row[1]: row for row in report.compare(*documents(change, jitter))}
    assert found["tree tok/s"][5] is seen
    assert found["plain tok/s"][5] is False and found["acceptance length"][5] is False


def test_two_prompts_are_too_few():
    assert not any(row[5] for row in report.compare(*documents(0.5, 0.0, count=2)))


def test_changed_settings_are_listed():
    old, new = report.document(a_head(), []), report.document(a_head(n_gen=32), [])
    assert report.differences(old, new) == ["n_gen was 64, is 32"]


def test_a_loop_starts_at_an_ngrams_third_occurrence():
    assert measure.loop_start(list(range(100))) is None
    assert measure.loop_start([*range(40), *[7, 8, 9] * 10]) == 40 + 12 + 6


def test_tokens_of_a_loop_are_not_counted():
    steps = [StepRecord(5, tokens, 0.003) for tokens in (2, 4, 5, 5)]
    assert [measure._acceptance(steps, loop) for loop in (7, 99, 1)] == [3, 4, 0]
    assert measure._by_rows(steps) == {"5": [4, 12.0]}


def test_a_score_says_how_many_answers_were_cut():
    lines = [a_line(f"builtin/{index}", finish="length" if index < 3 else "stop") for index in range(10)]
    lines += [a_line("prose/0", finish="length", right=None)]
    page = report.markdown(a_head(), lines)
    assert "| 100%, 3 of 10 cut |" in page and "**3 of 10 scored answers were cut**" in page
    assert report.cut_short(lines[3:]) == "" and "cut" not in report.markdown(a_head(), lines[3:])
    assert "at most 256 tokens, 640 where answers are scored" in report.markdown(a_head(n_gen=None), lines)


def test_answers_with_a_score_have_room():
    prompts = [SuitePrompt("a", "", [], score=score) for score in (None, lambda item, answer: True)]
    assert [measure.BenchSettings().limit(prompt) for prompt in prompts] == [256, 640]
    assert [measure.BenchSettings(n_gen=9).limit(prompt) for prompt in prompts] == [9, 9]


def test_acceptance_beside_what_is_published():
    """Of the card's draft; a draft that does not fit has far less, and is named."""
    head, lines = a_head(), pair("humaneval/0", 50, 100)
    assert report.published(head, lines)[1] == [] and report.mismatch(head) == ""
    head["settings"] |= {"model": "qwen3.6-27b", "draft": "model.safetensors"}
    source, table = report.published(head, lines)
    assert "RTX 5090" in source and table == [["humaneval", "4.00", "7.12", "56%"]]
    page = report.markdown(head | {"draft_problem": "mask_token_id is 1, 2 fits"}, lines)
    assert "| humaneval | 4.00 | 7.12 | 56% |" in page
    assert "**The draft does not fit**: mask_token_id is 1, 2 fits." in page
