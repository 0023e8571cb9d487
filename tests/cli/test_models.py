"""`bough list`, `pull` and `rm` with the real client against a hub on this machine."""

import json
import re

import pytest

from bough.cli import listing
from bough.errors import ModelNotFound
from bough.hub.cache import contents
from tests.gguf_edit import edited
from tests.hub.fake_pairs import DRAFT, TARGET, add_pair, make_draft
from tests.tiny_draft import save_gguf

OTHER = ("unsloth/Qwen3.5-27B-GGUF", "z-lab/Qwen3.5-27B-DFlash")


def here() -> set[str]:
    return {str(each) for each in contents()}


def listed(bough) -> dict:
    result = bough("list", "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_pulling_a_pair(bough, hub):
    result = bough("pull", "qwen3.6-27b")
    assert result.exit_code == 0, result.output
    target, draft = result.stdout.splitlines()
    assert target == f"target  {TARGET}:Q4_K_M  1.72 MiB" and draft.startswith(f"draft   {DRAFT}  4")
    assert [line.split(",")[0] for line in result.stderr.splitlines()] == [
        f"Fetching {TARGET}:Q4_K_M",
        f"Fetching the draft {DRAFT}",
    ]
    assert here() == {f"{TARGET}:Q4_K_M", DRAFT}
    again = bough("pull", "qwen3.6-27b")
    assert again.stdout == result.stdout and again.stderr == "" and len(hub.downloads()) == 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["qwen3.6-27b", "--draft-only"], {DRAFT}),
        (["qwen3.6-27b", "--target-only"], {f"{TARGET}:Q4_K_M"}),
        (["qwen3.6-27b", "--quant", "Q8_0"], {f"{TARGET}:Q8_0", DRAFT}),
        (["qwen3.6-27b:q8_0", "--quant", "Q8_0", "--target-only"], {f"{TARGET}:Q8_0"}),
        ([f"{TARGET}:Q8_0"], {f"{TARGET}:Q8_0", DRAFT}),
        ([TARGET, "--draft-only"], {DRAFT}),
        ([DRAFT], {DRAFT}),
    ],
)
def test_pulling_parts(bough, hub, arguments, wanted):
    result = bough("pull", *arguments)
    assert result.exit_code == 0, result.output
    assert here() == wanted


def test_a_broken_pull_goes_on(bough, hub):
    hub.break_off = [500_000, 0, 0, 0, 0, 0]
    broken = bough("pull", "qwen3.6-27b")
    assert broken.exit_code == 3 and "cannot be reached" in broken.stderr and here() == set()
    assert bough("pull", "qwen3.6-27b").exit_code == 0
    assert [headers["Range"] for headers in hub.downloads()][-2:] == ["bytes=500000-", "bytes=0-"]


def test_models_without_a_known_draft(bough, hub, tiny_model):
    hub.repos["me/Other-GGUF"] = {"other-Q8_0.gguf": tiny_model().read_bytes()}
    result = bough("pull", "me/Other-GGUF")
    assert result.exit_code == 0 and "No draft is listed for me/Other-GGUF" in result.stderr
    only = bough("pull", "me/Other-GGUF", "--draft-only")
    assert only.exit_code == 2 and "no draft is listed for me/Other-GGUF" in only.stderr


def test_a_draft_beside_the_target_is_offered_and_pulled(bough, hub, tiny_model):
    repo, file = "me/Other-GGUF", "dflash-other-Q8_0.gguf"
    hub.repos[repo] = {"other-Q8_0.gguf": tiny_model().read_bytes(), file: b"draft"}
    result = bough("pull", repo)
    assert result.exit_code == 0 and f": hf://{repo}/{file}" in result.stderr
    assert here() == {f"{repo}:Q8_0"} and len(hub.downloads()) == 1
    result = bough("pull", f"hf://{repo}/{file}")
    assert result.exit_code == 0 and result.stdout.startswith("draft ")
    assert len(hub.downloads()) == 2


def test_a_damaged_target_is_fetched_once(bough, hub, tiny_model):
    hub.repos["me/Other-GGUF"] = {"other-Q8_0.gguf": tiny_model().read_bytes()}
    hub.spoil = True
    result = bough("pull", "me/Other-GGUF")
    assert result.exit_code == 3 and "arrived damaged" in result.stderr
    assert len(hub.downloads()) == 1
    hub.failing = 500
    hub.requests.clear()
    assert bough("pull", "me/Other-GGUF").exit_code == 3
    assert len([path for _, path, _ in hub.requests if path.startswith("/api/")]) == 1


def test_a_draft_that_no_card_knows(bough, hub, tiny_model, tmp_path):
    folder = make_draft(tiny_model(), tmp_path / "own")
    hub.repos["me/Own-DFlash"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = bough("pull", "me/Own-DFlash")
    assert result.exit_code == 0 and result.stdout.startswith("draft   me/Own-DFlash  ")
    assert [row["cards"] for row in listed(bough)["drafts"]] == [[]]
    assert bough("rm", "me/Own-DFlash", "--yes").exit_code == 0 and here() == set()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["qwen3.6-27b", "--draft-only", "--target-only"], 2, "exclude each other"),
        (["qwen3.6-27b", "--draft-only", "--quant", "Q8_0"], 2, "--quant is of the target"),
        (["qwen3.6-27b:Q8_0", "--quant", "Q4_K_M"], 2, "name different files"),
        (["qwen3.6-27b", "--quant", "Q2_K"], 3, f"{TARGET} has no Q2_K; it has"),
        (["qwen3.5-0.8b", "--draft-only"], 2, "no draft is listed for qwen3.5-0.8b"),
        (["qwen3.6-72b"], 3, "did you mean qwen3.6-27b"),
        (["me/nothing"], 3, "me/nothing was not found"),
        (["me/plain"], 3, "me/plain holds no GGUF file"),
        ([__file__], 2, "is on this machine already"),
    ],
)
def test_what_cannot_be_pulled(bough, hub, arguments, code, message):
    hub.repos["me/plain"] = {"config.json": b'{"architectures": ["X"]}', "model.safetensors": b"x"}
    result = bough("pull", *arguments)
    assert result.exit_code == code and message in result.stderr
    assert not hub.downloads()


def test_a_gated_draft(bough, hub):
    hub.gated.add(DRAFT)
    result = bough("pull", "qwen3.6-27b")
    assert result.exit_code == 3 and result.stdout.startswith("target  ")
    assert f"error: {DRAFT} is gated" in result.stderr and f"{hub.endpoint}/{DRAFT}" in result.stderr
    assert "HF_TOKEN" in result.stderr and here() == {f"{TARGET}:Q4_K_M"}


def test_a_model_that_is_slow_on_a_cpu_is_not_suggested(bough, hub, monkeypatch):
    monkeypatch.setattr(listing, "_memory", lambda: ("CPU", 64 << 30))
    speeds = {row["name"]: row["tok_s"][0] for row in listed(bough)["available"]}
    assert speeds["qwen3.6-27b"] < 3 < speeds["qwen3.6-35b-a3b"]
    assert listing.suggestion() == "qwen3.6-35b-a3b"
    monkeypatch.setattr(listing, "_memory", lambda: ("a card", 24 << 30))
    assert listing.suggestion() in ("qwen3.5-35b-a3b", "qwen3.6-35b-a3b", "qwen3.5-27b", "qwen3.6-27b")
    monkeypatch.setattr(listing, "_memory", lambda: ("CPU", 1 << 30))
    assert listing.suggestion() is None


def test_listing(bough, hub, tiny_model, tmp_path):
    empty = listed(bough)
    assert empty["models"] == empty["drafts"] == [] and len(empty["available"]) >= 9
    small = next(row for row in empty["available"] if row["name"] == "qwen3.5-0.8b")
    assert small["target"] == "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M" and small["draft"] is None

    add_pair(hub, tiny_model(), tmp_path / "more", repos=OTHER)
    hub.repos["me/Odd-GGUF"] = {
        "odd-Q8_0.gguf": tiny_model("qwen2").read_bytes().replace(b"qwen2", b"bert9"),
        "bad-Q4_0.gguf": b"no GGUF",
        "fine-Q6_K.gguf": tiny_model("llama").read_bytes(),
    }
    for arguments in (
        ["qwen3.6-27b"],
        ["qwen3.5-27b", "--target-only"],
        *([f"me/Odd-GGUF:{quant}"] for quant in ("Q8_0", "Q4_0", "Q6_K")),
    ):
        assert bough("pull", *arguments).exit_code == 0
    found = listed(bough)
    models = {row["name"]: row for row in found["models"]}
    assert set(models) == {f"{TARGET}:Q4_K_M", f"{OTHER[0]}:Q4_K_M", "me/Odd-GGUF:Q6_K"}
    assert models[f"{TARGET}:Q4_K_M"]["draft"] == {"repo": DRAFT, "present": True}
    assert models[f"{OTHER[0]}:Q4_K_M"]["draft"] == {"repo": OTHER[1], "present": False}
    odd = models["me/Odd-GGUF:Q6_K"]
    assert odd["draft"] is None and odd["card"] is None and odd["architecture"] == "llama"
    assert odd["size_bytes"] == tiny_model("llama").stat().st_size and odd["quant"] == "Q6_K"
    assert [row["name"] for row in found["drafts"]] == [DRAFT]
    assert found["drafts"][0]["cards"] == ["qwen3.6-27b"] and found["others"] == 2
    names = [row["name"] for row in found["available"]]
    assert "qwen3.6-27b" not in names and "qwen3.5-27b" not in names and "qwen3.5-9b" in names

    shown = " ".join(bough("list").stdout.split())
    assert re.search(rf"{TARGET}:Q4_K_M qwen3.6-27b 1.72 MiB yes [\d., ]+{DRAFT}", shown), shown
    assert "missing: bough pull qwen3.5-27b --draft-only" in shown
    assert "me/Odd-GGUF:Q6_K – " in shown and " none" in shown
    assert "Not here yet (bough pull NAME" in shown and "qwen3.5-9b 5.5 GB " in shown
    assert "2 other GGUF files there cannot be run." in shown


def test_small_models_that_suit_a_target(bough, hub, tiny_model, tmp_path):
    small, large = tiny_model("qwen3"), tiny_model("qwen3", width=128, layers=6)
    tokens = [f"{n}" for n in range(320)]
    other = edited(small, tmp_path / "other.gguf", keys={"tokenizer.ggml.tokens": tokens})
    for name, path in (("Small", small), ("Large", large), ("Other", other)):
        hub.repos[f"me/{name}-GGUF"] = {f"{name.lower()}-q4_k_m.gguf": path.read_bytes()}
        assert bough("pull", f"me/{name}-GGUF", "--target-only").exit_code == 0
    found = {row["name"]: row["small_models"] for row in listed(bough)["models"]}
    small_name = "me/Small-GGUF:Q4_K_M"
    assert found == {small_name: [], "me/Large-GGUF:Q4_K_M": [small_name], "me/Other-GGUF:Q4_K_M": []}
    assert f"none; on a CPU --draft {small_name}" in " ".join(bough("list").stdout.split())
    assert json.loads(bough("show", "me/Large-GGUF", "--json").stdout)["small_models"] == [small_name]
    shown = " ".join(bough("show", "me/Large-GGUF").stdout.split())
    assert f"--draft {small_name}" in shown and "`bough train` makes for the model is faster" in shown
    answer = bough("run", "me/Large-GGUF", "hello", "--draft", small_name, "--n-gen", "4", "--device", "cpu")
    assert answer.exit_code == 0


def test_the_quantisations_of_a_repository(bough, hub):
    files = {f"m-{quant}.gguf": b"x" * size for quant, size in (("Q8_0", 9), ("Q4_K_M", 5))}
    hub.repos["me/M-GGUF"] = files | {"m-Q2_K-00001-of-00002.gguf": b"half", "README.md": b"text"}
    found = json.loads(bough("list", "me/M-GGUF", "--json").stdout)["models"]
    assert [(row["name"], row["size_bytes"]) for row in found] == [
        ("me/M-GGUF:Q4_K_M", 5),
        ("me/M-GGUF:Q8_0", 9),
    ]
    shown = bough("list", "qwen3.6-27b")
    assert f"{TARGET}:Q4_K_M" in shown.stdout and " yes" in shown.stdout and "fits: with" in shown.stdout
    assert "is here already" in bough("list", "bough-40m").stderr
    assert bough("list", "me/Nothing").exit_code == 3


def test_a_gguf_draft_is_listed_as_one(bough, hub, tiny_model, tmp_path):
    path = save_gguf(tmp_path / "draft.gguf", {}, {})
    hub.repos["me/Draft-GGUF"] = {"draft-Q8_0.gguf": path.read_bytes()}
    assert bough("pull", "me/Draft-GGUF").exit_code == 0
    found = listed(bough)
    assert [row["name"] for row in found["drafts"]] == ["me/Draft-GGUF:Q8_0"] and not found["models"]


def test_removing_a_pair(bough, hub):
    bough("pull", "qwen3.6-27b")
    declined = bough("rm", "qwen3.6-27b", stdin="n\n")
    assert declined.exit_code == 1 and "Nothing was removed." in declined.stdout
    silent = bough("rm", "qwen3.6-27b")
    assert silent.exit_code == 1 and "Traceback" not in silent.output and len(here()) == 2
    result = bough("rm", "qwen3.6-27b", stdin="y\n")
    assert result.exit_code == 0 and here() == set()
    shown = " ".join(result.stdout.split())
    assert f"{TARGET}:Q4_K_M 1.72 MiB" in shown and DRAFT in shown
    assert "Frees 2.1" in shown and "Removed, 2.1" in shown and "MiB freed." in shown
    gone = bough("rm", "qwen3.6-27b", "--yes")
    assert gone.exit_code == 3 and "not in the Hugging Face cache" in gone.stderr
    assert "bough list" in gone.stderr


def test_a_draft_that_is_still_used_stays(bough, hub):
    bough("pull", "qwen3.6-27b")
    bough("pull", "qwen3.6-27b", "--quant", "Q8_0")
    first = bough("rm", "qwen3.6-27b", "-y")
    assert first.exit_code == 0 and here() == {f"{TARGET}:Q8_0", DRAFT}
    assert f"{DRAFT}: {TARGET}:Q8_0 uses it" in " ".join(first.stdout.split())
    assert bough("rm", "qwen3.6-27b", "-y").exit_code == 0 and here() == set()


def test_removing_one_of_a_pair(bough, hub):
    bough("pull", "qwen3.6-27b")
    assert bough("rm", DRAFT, "-y").exit_code == 0 and here() == {f"{TARGET}:Q4_K_M"}
    bough("pull", "qwen3.6-27b")
    assert bough("rm", f"{TARGET}:q4_k_m", "-y").exit_code == 0 and here() == {DRAFT}
    assert bough("rm", "qwen3.6-27b", "-y").exit_code == 0 and here() == set()


def test_what_cannot_be_removed(bough, hub):
    own = bough("rm", __file__, "-y")
    assert own.exit_code == 2 and "is not in the Hugging Face cache" in own.stderr
    part = bough("rm", "bough-40m", "-y")
    assert part.exit_code == 2 and "is a part of bough" in part.stderr and "hand" not in part.stderr
    bough("pull", "qwen3.6-27b")
    wrong = bough("rm", "qwen3.6-27b:Q2_K", "-y")
    assert wrong.exit_code == ModelNotFound.exit_code and "has no Q2_K; it has Q4_K_M" in wrong.stderr
    assert len(here()) == 2


def test_what_is_left_of_a_download_can_be_removed(bough, hub, tmp_path):
    hub.break_off = [500_000, 0, 0, 0, 0, 0]
    assert bough("pull", "qwen3.6-27b").exit_code == 3
    result = bough("rm", "qwen3.6-27b", "-y")
    assert result.exit_code == 0 and "unfinished download" in result.stdout
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
