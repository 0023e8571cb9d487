"""`bough serve --replicas`: what the command says before anything is started."""

import importlib.util

import pytest


def test_without_ray_the_command_says_what_to_install(bough, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else found(name))
    result = bough("serve", "--replicas", "2", "--port", "0")
    assert result.exit_code == 2
    assert "--replicas needs Ray" in result.stderr and "pip install 'bough[ray]'" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "--replicas is 0, needed a number from 1"),
        (["--replicas", "4-2"], "--replicas is 4-2"),
        (["--ray-address", "auto"], "--ray-address needs --replicas"),
    ],
)
def test_options_that_make_no_sense(bough, options, message):
    result = bough("serve", *options, "--port", "0")
    assert result.exit_code == 2 and message in result.stderr


def test_the_configuration_shows_the_replicas(bough):
    result = bough("serve", "--replicas", "1-3", "--print-config")
    assert '"least": 1' in result.stdout and '"most": 3' in result.stdout
