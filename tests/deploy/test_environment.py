"""What Ray is started with."""

import re

import pytest

from bough.config import set_ray_environment

NAMES = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness")
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """An environment of Ray without a token."""
    found: dict[str, str] = {"HOME": str(tmp_path)}
    monkeypatch.setattr("os.environ", found)
    return found


def test_ray_stays_on_this_machine_and_needs_a_token(variables):
    set_ray_environment()
    assert [variables[name] for name in NAMES] == ["0", "0", "0"]
    assert variables["RAY_AUTH_MODE"] == "token"
    assert re.fullmatch(r"[0-9a-f]{64}", variables["RAY_AUTH_TOKEN"])


@pytest.mark.parametrize("name", TOKEN[1:])
def test_the_user_s_own_settings_stay(variables, name):
    own = {name: "mine", "RAY_AUTH_MODE": "disabled", NAMES[0]: "1"}
    variables |= own
    set_ray_environment()
    assert own.items() <= variables.items()
    assert ("RAY_AUTH_TOKEN" in variables) == (name == "RAY_AUTH_TOKEN")


def test_the_user_s_token_file_is_used(variables, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine")
    set_ray_environment()
    assert "RAY_AUTH_TOKEN" not in variables
