"""The line below an answer."""

from treeflash.cli import report
from treeflash.engine.stats import RequestStats, StepRecord
from treeflash.session.session import Finished


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


def line(reason="stop", *, plain=False, drafted=True, sampled=True, interrupted=False, **changes) -> str:
    finished = Finished(reason=reason, tokens=[], stats=stats(**changes))
    return report.line(finished, plain=plain, drafted=drafted, sampled=sampled, interrupted=interrupted)


def test_everything():
    assert line() == (
        "312 tok · 118.4 tok/s · TTFT 0.21 s · prompt 4,096 · accept 5.90/step · 14.2 rows/step · "
        "draft 9% · seed 42"
    )
    assert "prompt 4,096 (3,980 cached) · " in line(cached_tokens=3980)
    assert line("length").endswith(" · seed 42 · length limit")


def test_what_does_not_apply_is_left_out():
    assert line(plain=True, sampled=False) == "312 tok · 118.4 tok/s · TTFT 0.21 s · prompt 4,096"
    assert line(drafted=False, sampled=False).endswith(" · accept 5.90/step · 14.2 rows/step")
    assert line("cancelled", _first=None, plain=True, sampled=False, interrupted=True) == (
        "312 tok · prompt 4,096 · interrupted"
    )
    assert report.line(None, plain=True, drafted=False, sampled=True, interrupted=True) == "interrupted"


def test_histogram():
    assert report.statistics(stats())["acceptance_histogram"] == [0, 0, 0, 1, 2, 5, 1, 1]
    assert report.statistics(RequestStats())["acceptance_histogram"] == [0]
    assert report.draft_share(RequestStats()) == 0
