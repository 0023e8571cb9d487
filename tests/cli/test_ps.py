"""`bough ps`, and several models of one server on the command line."""

import json

import httpx2
import pytest

from bough.config import ServerConfig
from bough.server.service import Service
from tests.server.live import scripted


def test_what_a_server_has_in_memory(bough):
    with scripted() as server:
        shown = bough("ps", "--url", server.url)
        (found,) = json.loads(bough("ps", "--url", f"{server.url}/v1", "--json").stdout)["models"]
    assert shown.exit_code == 0 and "bough-test" in shown.stdout and "0 running" in shown.stdout
    assert (found["name"], found["status"], found["address"]) == ("bough-test", "ok", server.url)


def test_how_many_experts_were_on_the_card(bough, monkeypatch):
    use = {"hits": 883, "misses": 117, "hit_rate": 0.883}
    with scripted() as server:
        assert "experts" not in bough("ps", "--url", server.url).stdout
        assert "bough:experts{" not in httpx2.get(f"{server.url}/metrics").text
        monkeypatch.setattr(Service, "facts", lambda service: {"experts": use})
        assert "bough-test: 88.3% of the experts of steps were" in bough("ps", "--url", server.url).stdout
        (found,) = json.loads(bough("ps", "--url", server.url, "--json").stdout)["models"]
        metrics = httpx2.get(f"{server.url}/metrics").text
    assert found["experts"] == use
    assert 'bough:experts{what="hits"} 883.0' in metrics and 'bough:experts{what="misses"} 117.0' in metrics


def test_a_key_is_sent(bough):
    with scripted(config=ServerConfig(api_keys=("secret",))) as server:
        assert bough("ps", "--url", server.url, "--api-key", "secret").exit_code == 0
        refused = bough("ps", "--url", server.url)
    assert refused.exit_code == 1 and "says 401" in refused.stderr and "--api-key KEY" in refused.stderr


def test_no_server(bough, monkeypatch, tmp_path):
    assert "there is no server at 127.0.0.1:1" in bough("ps", "--url", "127.0.0.1:1").stderr
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("bough.cli.ps.ServerConfig", lambda: ServerConfig(port=1))
    nothing = bough("ps")
    assert nothing.exit_code == 0 and "bough serve starts one" in nothing.stdout
    assert "No server answers at http://127.0.0.1:1" in nothing.stdout


@pytest.mark.parametrize("spelling", [("{}", "{}"), ("--model", "{}", "-m", "{}")])
def test_several_models(bough, tiny_model, spelling):
    paths = iter((tiny_model(), tiny_model("qwen3")))
    models = [each if each != "{}" else next(paths) for each in spelling]
    found = json.loads(bough("serve", *models, "--models-max", 2, "--print-config").stdout)
    assert list(found["models"].values()) == [str(tiny_model()), str(tiny_model("qwen3"))]
    assert found["server"]["models_max"] == 2 and found["model"] == str(tiny_model())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--served-model-name", "x"), "--served-model-name is for one model"),
        (("--draft", "d.gguf"), "--draft d.gguf is for one model"),
    ],
)
def test_what_is_of_one_model_alone(bough, tiny_model, flags, said):
    result = bough("serve", tiny_model(), tiny_model("qwen3"), *flags)
    assert result.exit_code == 2 and said in result.stderr


def test_models_of_one_name(bough, tiny_model, tmp_path):
    other = tmp_path / "other" / tiny_model().name
    other.parent.mkdir()
    other.symlink_to(tiny_model())
    found = json.loads(bough("serve", tiny_model(), other, "--print-config").stdout)["models"]
    assert list(found) == [tiny_model().stem, str(other)]
    assert "is given twice" in bough("serve", tiny_model(), tiny_model()).stderr
