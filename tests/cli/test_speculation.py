"""`bough run` with drafts: which one is taken, and that the text never changes."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bough.cli.speculation import NO_DRAFT, OWN_BLOCK
from bough.hub import catalog
from tests.gguf_edit import edited
from tests.hub.fake_pairs import DRAFT, TARGET, make_draft

CARD = """\
name = "tiny"
title = "Tiny"
target = "me/Tiny-GGUF:Q8_0"
draft = "{draft}"
[match]
names = ["tiny random qwen35"]
architecture = "qwen35"
width = 64
layers = 8
[settings]
budget = 3
thinking = false
[sampling]
thinking = {{ temperature = 1.0, top_p = 0.95, top_k = 20, presence_penalty = 0.0 }}
plain = {{ temperature = 0.7, top_p = 0.8, top_k = 20, presence_penalty = 0.0 }}
"""


@pytest.fixture(scope="module")
def draft(tiny_model, tmp_path_factory) -> Path:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = tmp_path_factory.mktemp("drafts") / "tiny-dflash"
    return make_draft(
        tiny_model(), folder, nested=True, layer_types=layers, sliding_window=16, use_sliding_window=True
    )


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model()


@pytest.fixture
def card(monkeypatch, tmp_path) -> catalog.ModelCard:
    """The catalogue lists the tiny model and its draft."""
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "tiny.toml").write_text(CARD.format(draft=DRAFT))
    monkeypatch.setattr(catalog, "FOLDER", folder)
    return catalog.cards()[0]


@pytest.fixture
def answer(bough, model):
    def ask(*flags: object, **options):
        result = bough("run", model, "hello hello hello", "-n", 30, "--json", *flags, **options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return ask


@pytest.mark.parametrize("sampling", [[], ["-t", "0.9", "--seed", "5", "--presence-penalty", "0.5"]])
def test_the_text_is_the_same_with_everything(answer, draft, sampling):
    plain = answer("--no-draft", *sampling)
    assert plain["draft"] is None and plain["stats"]["rows_per_step"] == 1.0
    assert plain["stats"]["acceptance_histogram"] == [29] and plain["stats"]["steps"] == 29
    for flags in (
        [],
        ["--chain"],
        ["--budget", "1"],
        ["--draft", draft],
        ["--draft", draft, "--chain"],
        ["--draft", draft, "--budget", "63"],
        ["--draft", draft / "model.safetensors", "--draft-quant", "q8_0"],
        ["--draft", draft, "--draft-quant", "none"],
    ):
        found = answer(*flags, *sampling)
        assert found["tokens"] == plain["tokens"], flags
        assert found["draft"] == (str(flags[1]) if "--draft" in flags else None)
        stats = found["stats"]
        assert sum(stats["acceptance_histogram"]) == stats["steps"]
        assert (stats["draft_s"] > 0) and stats["rows_per_step"] >= 1


def test_a_draft_shows_in_the_line_and_its_budget_counts(bough, model, draft, answer):
    result = bough("run", model, "hello", "-n", 12, "--no-think", "--draft", draft)
    (line,) = result.stderr.splitlines()
    assert "accept " in line and line.endswith("/step · length limit")
    plain = bough("run", model, "hello", "-n", 12, "--no-think", "--draft", "none").stderr.splitlines()
    assert len(plain) == 1 and "accept" not in plain[0] and "rows" not in plain[0] and "draft" not in plain[0]
    assert answer("--draft", draft, "--budget", 5)["stats"]["rows_per_step"] <= 6


def test_without_a_known_draft_one_quiet_line_once(bough, model):
    ask = ("run", model, "hello", "-n", 3, "--no-think")
    assert bough(*ask, "--json").stderr == ""
    told = [bough(*ask).stderr.splitlines()[1:] for _ in range(2)]
    assert told == [[NO_DRAFT], []] and "`bough train` makes one" in NO_DRAFT


def test_the_models_own_mtp_block(bough, tiny_model, model, draft, monkeypatch):
    path, line = tiny_model(mtp=True), "No draft: the MTP block in the model's own file proposes tokens."

    def run(*flags):
        result = bough("run", path, "hello hello hello", "-n", 12, *flags)
        assert result.exit_code == 0, result.output
        return result

    found = run()
    assert found.stderr.splitlines()[0] == line and NO_DRAFT not in found.stderr
    assert run("--draft", "mtp").stderr.splitlines()[0] == line
    for flags in (["--draft", "lookup"], ["--draft", "none"], ["--draft", draft]):
        other = run(*flags)
        assert other.stdout == found.stdout and line not in other.stderr
    both = run("--draft", f"{draft},mtp")
    assert both.stdout == found.stdout and line not in both.stderr
    refused = bough("run", model, "hello", "--draft", f"{draft},mtp")
    assert refused.exit_code == 2 and ",mtp: qwen35.gguf has no MTP block" in refused.stderr.replace(
        "\n", " "
    )
    for name in ("none,mtp", "lookup,mtp"):
        assert "beside a draft only" in bough("run", path, "hello", "--draft", name).stderr
    monkeypatch.setenv("DFLASH_DRAFT", "lookup")
    assert line not in run().stderr and line in run("--draft", "auto").stderr
    monkeypatch.delenv("DFLASH_DRAFT")
    missing = bough("run", model, "hi", "--draft", "mtp")
    assert missing.exit_code == 2 and "--draft mtp: qwen35.gguf has no MTP block" in missing.stderr
    quant = bough("run", path, "hi", "--draft", "mtp", "--draft-quant", "q8_0")
    assert quant.exit_code == 2 and "--draft-quant and --draft mtp exclude each other" in quant.stderr


def test_a_draft_beside_several_models_is_offered(bough, model, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("m.gguf", "n.gguf"):
        (folder / name).write_bytes(model.read_bytes())
    beside = folder / "dflash-m-Q8_0.gguf"
    beside.write_bytes(b"x")
    result = bough("run", folder / "m.gguf", "hello", "-n", 3)
    assert result.exit_code == 0 and f"--draft {beside}" in result.stderr.replace("\n", " ")


def test_a_pair_in_a_folder_runs_as_a_pair(bough, tmp_path, monkeypatch):
    """What `grow` writes: target.gguf and draft.gguf, by the folder's name or the target's."""
    folder = tmp_path / "pair"
    folder.mkdir()
    pair = catalog.named("bough-40m")[0].pair
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)  # no card finds a draft for it
    for source in (pair.target, pair.draft):
        (folder / source.name).write_bytes(source.read_bytes())
    texts = []
    for name in (folder, folder / "target.gguf"):
        result = bough("run", name, "def f(n):", "-n", 8, "--greedy", "--json")
        answer = json.loads(result.stdout)
        assert answer["draft"] == str(folder / "draft.gguf"), result.output
        texts.append(answer["text"])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "draft.gguf").write_bytes(b"x")
    missing = bough("run", alone, "x")
    assert texts[0] == texts[1] and missing.exit_code == 3 and "holds only a draft" in missing.stderr
    shown = json.loads(bough("show", folder, "--json").stdout)
    assert shown["draft"]["path"] == str(folder / "draft.gguf")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chain", "--no-draft"], "--chain and --no-draft exclude each other"),
        (["--draft", "x", "--no-draft"], "--draft x and --no-draft exclude each other"),
        (["--draft", "none", "--budget", "3"], "--budget and --draft none exclude each other"),
        (["--no-draft", "--draft-quant", "q8_0"], "--draft-quant and --no-draft exclude"),
        (["--draft-quant", "q8_0"], "--draft-quant needs a draft, and none is listed for qwen35.gguf"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--logit-bias", "3:4"], "--logit-bias is '3:4', needed a token's number and a value"),
        (["--logit-bias", "3=1", "--logit-bias", "3=2"], "--logit-bias names token 3 twice"),
        (["--logit-bias", "320=1"], "logit_bias has token 320, the vocabulary has ids 0 to 319"),
        (["--draft", "qwen3.5-2b"], "no draft is listed for qwen3.5-2b"),
    ],
)
def test_what_contradicts_itself(bough, model, flags, message):
    result = bough("run", model, "hi", *flags)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and message in result.stderr


@pytest.mark.parametrize("flags", [["--budget", "0"], ["--budget", "64"]])
def test_limits(bough, model, flags):
    result = bough("run", model, "hi", *flags)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and flags[0] in result.stderr
    assert "Input should" not in result.stderr


def test_a_draft_that_is_missing_or_of_another_target(bough, tiny_model, draft, tmp_path):
    missing = bough("run", tiny_model(), "hi", "--draft", tmp_path / "none")
    assert missing.exit_code == 3 and "no such file" in missing.stderr
    other = tiny_model("qwen35", width=128)
    result = bough("run", other, "hi", "--draft", draft)
    assert result.exit_code == 4
    assert "hidden_size is 64, needed the target's width, 128" in result.stderr
    assert "--draft none" in result.stderr


def test_the_environment_names_a_draft(answer, monkeypatch, draft, bough, model):
    monkeypatch.setenv("DFLASH_DRAFT", str(draft))
    assert answer()["draft"] == str(draft)
    assert answer("--no-draft")["draft"] is None
    assert answer("--draft", draft / "model.safetensors")["draft"].endswith("model.safetensors")
    monkeypatch.setenv("DFLASH_DRAFT", "none")
    assert answer()["stats"]["rows_per_step"] == 1
    result = bough("run", model, "hi", "--chain")
    assert result.exit_code == 2 and "--chain and BOUGH_DRAFT=none exclude each other" in result.stderr


def test_a_listed_draft_that_is_not_here(bough, model, card):
    result = bough("run", model, "hello", "-n", 4, "--no-think")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[:2] == [
        "warning: the draft of Tiny is not on this machine, answers come slower without it",
        "hint: bough pull tiny --draft-only",
    ]
    assert len(result.stderr.splitlines()) in (3, 4) and "accept" in result.stderr
    assert bough("run", model, "hello", "-n", 4, "--no-think", "-q").stderr == ""
    assert "warning" not in bough("run", model, "hello", "-n", 4, "--no-think", "--no-draft").stderr
    assert "warning" in bough("run", model, "hello", "-n", 4, "--no-think", "--draft-quant", "q8_0").stderr


def test_a_fine_tune_has_the_draft_of_its_base_or_its_own_block(bough, hub, tiny_model, card, tmp_path):
    assert bough("pull", "tiny", "--draft-only").exit_code == 0
    keys = {"general.name": "Other", "general.base_model.0.repo_url": "https://hub/me/Tiny-random-qwen35"}
    plain = edited(tiny_model(), tmp_path / "other.gguf", keys=keys)
    own = edited(tiny_model(mtp=True), tmp_path / "own.gguf", keys=keys)
    ask = ("hello", "-n", 4, "--no-think")
    result = bough("run", plain, *ask, "--json")
    assert DRAFT.replace("/", "--") in json.loads(result.stdout)["draft"]
    assert "other.gguf is made from Tiny and has its draft" in result.stderr.replace("\n", " ")
    assert "made from" not in bough("run", plain, *ask, "--draft", "tiny").stderr
    found = bough("run", own, *ask)
    assert found.stderr.splitlines()[0] == OWN_BLOCK and "made from" not in found.stderr


def test_a_pair_that_comes_with_the_package(bough, model, draft, card, monkeypatch, tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    text = "\n".join(line for line in CARD.splitlines() if not line.startswith(("target", "draft")))
    pair = f'[pair]\ntarget = "{model}"\ndraft = "{draft / "model.safetensors"}"\n'
    (folder / "tiny.toml").write_text(text.format() + "\n" + pair)
    monkeypatch.setattr(catalog, "FOLDER", folder)
    for name in ("tiny", model):
        result = bough("run", name, "hello", "-n", 4, "--no-think", "--json")
        found = json.loads(result.stdout)
        assert found["model"] == str(model) and found["draft"] == str(draft / "model.safetensors")
    assert "comes with bough" in bough("show", "tiny").stdout
    assert bough("pull", "tiny").exit_code == bough("rm", "tiny", "-y").exit_code == 2


def test_a_file_finds_its_draft_in_the_cache(bough, hub, model, card):
    pulled = bough("pull", "tiny", "--draft-only")
    assert pulled.exit_code == 0 and pulled.stdout.startswith(f"draft   {DRAFT}  ")
    asked = len(hub.requests)
    result = bough("run", model, "hello", "-n", 8, "--no-think", "--json")
    found = json.loads(result.stdout)
    assert DRAFT.replace("/", "--") in found["draft"] and found["draft"].endswith("model.safetensors")
    assert found["stats"]["rows_per_step"] <= 4  # the card's budget
    assert len(hub.requests) == asked and result.stderr == ""


def test_the_first_run_of_a_name_fetches_both(bough, hub):
    first = bough("run", "qwen3.6-27b", "hello", "-n", 4, "--no-think")
    assert first.exit_code == 0
    lines = first.stderr.splitlines()
    assert lines[0].startswith(f"Fetching {TARGET}:Q4_K_M, 1.72 MiB")
    assert lines[1].startswith(f"Fetching its draft {DRAFT}, 4")
    assert "accept" in lines[2] and len(lines) == 3
    asked = len(hub.requests)
    second = bough("run", "qwen3.6-27b", "hello", "-n", 4, "--no-think")
    assert second.stdout == first.stdout and len(second.stderr.splitlines()) == 1
    assert len(hub.requests) == asked


def test_a_repository_brings_its_draft_too_but_only_the_first_time(bough, hub, tmp_path):
    hub.gated.add(DRAFT)
    first = bough("run", f"{TARGET}:q8_0", "hello", "-n", 4, "--no-think")
    assert first.exit_code == 0
    lines = first.stderr.splitlines()
    assert lines[1].startswith(f"warning: the draft was not fetched, answers come slower: {DRAFT} is gated")
    assert lines[2].startswith(f"hint: accept it at {hub.endpoint}/{DRAFT} and then set HF_TOKEN")
    assert lines[2].endswith("; then: bough pull qwen3.6-27b --draft-only")
    hub.gated.clear()
    second = bough("run", f"{TARGET}:q8_0", "hello", "-n", 4, "--no-think")
    assert second.stderr.startswith("warning: the draft of Qwen3.6 27B is not on this machine")
    assert second.stdout == first.stdout
    named = bough("run", f"{TARGET}:q8_0", "hello", "-n", 4, "--no-think", "--draft", DRAFT)
    assert named.stderr.startswith(f"Fetching the draft {DRAFT}, 4") and named.stdout == first.stdout


def test_a_draft_that_never_hits_is_named(bough, model, draft, tmp_path):
    hopeless = tmp_path / "hopeless"
    hopeless.mkdir()
    (hopeless / "config.json").write_bytes((draft / "config.json").read_bytes())
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] *= 0  # to it every token is as likely as any other, but for the bias
    save_file(tensors, hopeless / "model.safetensors")
    flags = ["--draft", hopeless, "--chain", "--budget", 2, "--logit-bias", "318=3"]  # a filler token
    assert bough("run", model, "hello", "-n", 4, "--no-think", *flags).exit_code == 0
    costs = tmp_path / "cache/bough/step-costs.json"
    (entry,) = (book := json.loads(costs.read_text())).values()
    entry["step"]["1"] = 1e6  # plain steps seem so slow that the draft is called every time
    costs.write_text(json.dumps(book))
    result = bough("run", model, "hello", "-n", 250, "--no-think", *flags)
    assert result.exit_code == 0
    line, note = result.stderr.splitlines()
    assert "accept 1.00/step" in line
    assert "draft calls accepted" in note and "the draft of another model" in note


def test_penalties_and_bias_reach_the_sampler(answer):
    plain = answer()["tokens"]
    assert answer("--logit-bias", f"{plain[0]}=-inf")["tokens"][0] != plain[0]
    assert set(answer("--logit-bias", "7=1e6", "--logit-bias", "9=-1")["tokens"]) == {7}
    often = answer("--logit-bias", "7=6", "--logit-bias", "8=6")["tokens"]
    for flag, value in (
        ("--repetition-penalty", 50),
        ("--presence-penalty", 90),
        ("--frequency-penalty", 90),
    ):
        fewer = answer("--logit-bias", "7=6", "--logit-bias", "8=6", flag, value)["tokens"]
        assert len(set(fewer)) > len(set(often)), flag


def test_logprobs(answer):
    found = answer("--logprobs", 2, "--no-think")
    assert [each["id"] for each in found["logprobs"]] == found["tokens"]
    assert "".join(each["token"] for each in found["logprobs"]) == found["text"]
    for each in found["logprobs"]:
        assert each["top"][0] == {key: each[key] for key in ("token", "id", "logprob")}  # greedy
        assert 0 > each["top"][0]["logprob"] >= each["top"][1]["logprob"] and len(each["top"]) == 2
    assert [each["top"] for each in answer("--logprobs", 0)["logprobs"]] == [[]] * 30
    assert "logprobs" not in answer()


def test_costs_are_kept(answer, tmp_path, draft):
    answer("--draft", draft)
    book = json.loads((tmp_path / "cache/bough/step-costs.json").read_text())
    (key,) = book
    assert "qwen35.gguf" in key and str(draft) in key
