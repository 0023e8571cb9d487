"""Settings in messages become flags wherever they are shown."""

import json
import logging

import pytest

from bough.cli import view
from bough.cli.flags import with_flags
from bough.cli.loading import show_warnings
from bough.cli.serve import LogFormatter
from bough.errors import BoughError, ResourceError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`max_ctx` is 5, needed 8", "--max-ctx is 5, needed 8"),
        ("lower `max_ctx` or use `kv` q8_0", "lower --max-ctx or use --kv q8_0"),
        ("`kv_k=q8_0`, `no_draft=True`", "--kv-k q8_0, --no-draft"),
        (
            "`prefix_cache_dir_size`: `think` and `no_think`",
            "--prefix-cache-dir-size: --think and --no-think",
        ),
        ("name another folder with `output`", "name another folder with -o"),
        ("`mask_token`, `cors_origin`, `fixed`", "--mask-token, --cors-origin, --fixed"),
        ("`bough tune --reset` removes it", "`bough tune --reset` removes it"),
        ("`model`, `no_such_setting`, `Max_ctx`, ``", "`model`, `no_such_setting`, `Max_ctx`, ``"),
        ("max_ctx without quotes", "max_ctx without quotes"),
    ],
)
def test_settings_become_flags(text: str, shown: str) -> None:
    assert with_flags(text) == shown


def test_errors_show_flags(capsys: pytest.CaptureFixture[str]) -> None:
    error = ResourceError("`max_ctx` is 9", "lower `max_ctx`")
    view.failure(error, as_json=False)
    assert capsys.readouterr().err == "error: --max-ctx is 9\nhint: lower --max-ctx\n"
    view.failure(error, as_json=True)
    found = json.loads(capsys.readouterr().out)["error"]
    assert found == {"type": "ResourceError", "message": "--max-ctx is 9", "hint": "lower --max-ctx"}


def test_notes_and_warnings_show_flags(capsys: pytest.CaptureFixture[str]) -> None:
    screen = view.Screen()
    screen.warning("`budget` is small", "raise `budget`")
    screen.note("`chain` is set")
    screen.notice("`seed` is 3")
    lines = ["warning: --budget is small", "hint: raise --budget", "--chain is set", "--seed is 3"]
    assert capsys.readouterr().err.splitlines() == lines


def test_logged_warnings_show_flags(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("bough")
    before = log.handlers
    try:
        show_warnings(view.Screen())
        log.warning("`prefix_cache` is %d MiB", 5)
    finally:
        log.handlers = before
    assert capsys.readouterr().err == "warning: --prefix-cache is 5 MiB\n"
    record = logging.LogRecord("bough", logging.WARNING, "", 0, "`max_queue` is %d", (3,), None)
    assert LogFormatter("%(message)s").format(record) == "--max-queue is 3"


def test_an_error_of_a_command_shows_flags(bough, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BoughError("`device` is missing", "`offline`")

    monkeypatch.setattr("bough.cli.listing.inventory", fail)
    assert bough("list").stderr == "error: --device is missing\nhint: --offline\n"
