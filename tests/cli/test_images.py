"""Pictures of the command line: `run -f` and `/image`, by a model that sees."""

import json
from pathlib import Path

import pytest

from tests.images.files import encoded, quarters
from tests.images.seeing import make_seeing

SHORT = ("-n", 12, "-t", 0, "--max-ctx", 1024, "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


def test_pictures_of_run(bough, model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.jpg"
    first.write_bytes(encoded(quarters(300, 200), "PNG"))
    second.write_bytes(encoded(quarters(200, 300), "JPEG"))

    def told(*words: object) -> dict:
        result = bough("run", model, *words, *SHORT, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    ask = ("-p", "What is it?")
    one, two, other = told(*ask, "-f", first), told(*ask, "-f", first, "-f", second), told(*ask, "-f", second)
    assert len({tuple(each["tokens"]) for each in (one, two, other)}) == 3
    assert told(*ask, "-f", first, "--no-draft")["tokens"] == one["tokens"]
    blind = bough("run", model, *ask, "-f", first, "--no-images", *SHORT)
    assert blind.exit_code == 2 and "loaded without its image encoder" in blind.stderr


def test_a_picture_in_a_chat(bough, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(quarters(300, 200), "PNG"))
    talk = f"/image {tmp_path}/a.png\nWhat is it?\n/save {tmp_path}/talk.json\n"
    result = bough("chat", model, *SHORT, stdin=talk)
    assert result.exit_code == 0, result.stderr
    asked, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [part["type"] for part in asked["content"]] == ["image_url", "text"]
    again = bough("chat", model, *SHORT, "--load", tmp_path / "talk.json", stdin="/regen\n")
    assert again.exit_code == 0 and again.stdout.strip() == answer["content"].strip()
