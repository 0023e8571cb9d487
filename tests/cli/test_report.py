"""The line below an answer."""

from bough.cli import report
from bough.engine.stats import RequestStats, StepRecord
from bough.session.session import Finished


def stats(**changes) -> RequestStats:
    values = {
        "prompt_tokens": 4096,
        "generated_tokens": 312,
        "seed": 42,
        "draft_s": 0.9,
        "verify_s": 8.0,
        "commit_s": 1.1,
        "_start": 0.0,
        "_first": 0.21,
        "_last": 0.21 + 311 / 118.4,
    }
    found = RequestStats(**(values | changes))
    for accepted in (4, 4, 6, 7, 3, 5, 5, 5, 5, 5):
        found.step_done(StepRecord(14, accepted + 1, 0.0), committed=accepted + 1)
    found.verified_rows += 2
    return found


def line(reason="stop", *, plain=False, sampled=True, interrupted=False, **changes) -> str:
    finished = Finished(reason=reason, tokens=[], stats=stats(**changes))
    return report.line(finished, plain=plain, sampled=sampled, interrupted=interrupted)


def test_everything():
    assert line() == ("312 tok · 118 tok/s · TTFT 0.21 s · prompt 4,096 · accept 5.90/step · seed 42")
    assert "prompt 4,096 (3,980 cached)\naccept" in line(cached_tokens=3980)
    assert line("length").endswith(" · seed 42\nlength limit")


def test_no_line_is_wider_than_eighty_columns():
    longest = line("length", cached_tokens=123_456, prompt_tokens=234_567, seed=2**64 - 1, interrupted=True)
    assert len(longest.splitlines()) == 2 and max(map(len, longest.splitlines())) <= 80
    assert not any(part.startswith("·") or part.endswith("·") for part in longest.splitlines())


def test_one_line_for_programs_that_read_it():
    finished = Finished(reason="length", tokens=[], stats=stats(seed=2**64 - 1))
    text = report.line(finished, plain=False, sampled=True, interrupted=True, width=None)
    assert text.endswith(" · length limit · interrupted") and "\n" not in text and len(text) > 80


def test_what_does_not_apply_is_left_out():
    assert line(plain=True, sampled=False) == "312 tok · 118 tok/s · TTFT 0.21 s · prompt 4,096"
    assert line(sampled=False).endswith(" · accept 5.90/step")
    assert line("cancelled", _first=None, plain=True, sampled=False, interrupted=True) == (
        "312 tok · prompt 4,096 · interrupted"
    )
    assert report.line(None, plain=True, sampled=True, interrupted=True) == "interrupted"


def test_tokens_that_were_all_spent_on_reasoning():
    def spent(text="", reason="length", limit=256, switch=True, raisable=True, **changes) -> str:
        values = {"generated_tokens": 256, "reasoning_tokens": 256} | changes
        finished = Finished(reason=reason, tokens=[], stats=stats(**values))
        return report.spent_on_reasoning(finished, text, limit=limit, switch=switch, raisable=raisable)

    assert spent() == (
        "all 256 tokens were spent on reasoning: -n 4000 allows more, --no-think answers at once"
    )
    assert spent(switch=False).endswith(": -n 4000 allows more")
    full = "all 256 tokens that the context had left were spent on reasoning"
    assert spent(limit=None) == f"{full}: a larger --max-ctx allows more, --no-think answers at once"
    assert spent(limit=300, raisable=False) == f"{full}: --no-think answers at once"
    assert spent(limit=None, raisable=False, switch=False) == full
    assert spent("an answer") == spent(reason="stop") == spent(reasoning_tokens=0) == ""


def test_histogram():
    assert report.statistics(stats())["acceptance_histogram"] == [0, 0, 0, 1, 2, 5, 1, 1]
    assert report.statistics(RequestStats())["acceptance_histogram"] == [0]
