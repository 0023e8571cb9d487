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


def test_show_names_the_encoder(bough, model: Path, tmp_path: Path) -> None:
    shown = bough("show", model)
    assert shown.exit_code == 0 and "mmproj-F32.gguf" in shown.stdout
    facts = json.loads(bough("show", model, "--json").stdout)["images"]
    encoder = model.parent / "mmproj-F32.gguf"
    assert facts == {"encoder": str(encoder), "size_bytes": encoder.stat().st_size}
    (tmp_path / "alone.gguf").write_bytes(model.read_bytes())
    assert "which is not beside it" in bough("show", tmp_path / "alone.gguf").stdout


def test_the_encoder_is_pulled_with_its_model(bough, hub, model: Path, tmp_path: Path) -> None:
    repo, encoder = "me/Seer-GGUF", "mmproj-F32.gguf"
    hub.repos[repo] = {f"seer-{quant}.gguf": model.read_bytes() for quant in ("Q8_0", "F16")}
    hub.repos[repo][encoder] = (model.parent / encoder).read_bytes()
    repo = f"{repo}:Q8_0"
    pulled = bough("pull", repo)
    assert pulled.exit_code == 0 and f"images  {encoder}  366.50 KiB" in pulled.stdout
    (tmp_path / "a.png").write_bytes(encoded(quarters(300, 200), "PNG"))
    answer = bough("run", repo, "-p", "What is it?", "-f", tmp_path / "a.png", *SHORT, "--json")
    assert answer.exit_code == 0 and json.loads(answer.stdout)["stats"]["images"]["count"] == 1
    assert bough("rm", repo, "--yes").exit_code == 0 and not list(tmp_path.rglob(encoder))
    blind = bough("run", repo, "-p", "Hello", "--no-images", *SHORT)
    assert blind.exit_code == 0 and not list(tmp_path.rglob(encoder))
    assert bough("pull", repo).exit_code == 0
    other = repo.replace("Q8_0", "F16")
    assert bough("pull", other).exit_code == 0
    assert "image encoder" not in bough("rm", repo, "--yes").stdout and list(tmp_path.rglob(encoder))
    assert "image encoder" in bough("rm", other, "--yes").stdout and not list(tmp_path.rglob(encoder))
