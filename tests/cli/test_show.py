"""`bough show` on models of every family."""

import io
import json
import sys

import pytest
import torch

from bough.cli import view
from bough.cli.show import show
from bough.config import EngineConfig
from bough.memory.planner import AUTO_FORMATS, OPT_IN_FORMATS
from bough.session.loading import load_session
from tests.models.test_nvfp4 import scales_of, written
from workshop.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(bough, tiny_model, family):
    path = tiny_model(family)
    result = bough("show", path, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["architecture"] == family and facts["supported"] and facts["problems"] == []
    assert facts["size_bytes"] == path.stat().st_size
    model, memory = facts["model"], facts["memory"]
    assert sum(row["weights"] for row in facts["types"]) == model["parameters"]["total"]
    assert memory[-1]["context"] == model["context_length"] == 4096
    for row in memory:
        for device, size in (("cpu", 4), ("gpu", 2)):
            need = row[device]
            assert need["total"] == need["weights"] + need["recurrent"] + need["kv"]
            values = 2 * model["layers"]["attention"] * model["kv_heads"] * model["head_dim"]
            assert need["kv"] == row["context"] * values * size
    assert facts["text"]["thinking"] and facts["text"]["chat_template"]
    assert [stop["token"] for stop in facts["text"]["stop_tokens"]] == ["<|endoftext|>", "<|im_end|>"]
    if family == "qwen35moe":
        assert model["experts"]["count"] == 8
        assert model["parameters"]["active"] < model["parameters"]["total"]


def test_as_a_person_sees_it(bough, tiny_model):
    result = bough("show", tiny_model("qwen35", mtp=True, width=256, mix="q4_k_m"))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in (
        "tiny random qwen35",
        "8: 2 attention + 6 Gated DeltaNet",
        "4 query heads, 2 KV heads of 32",
        "1 MTP block",
        "used without a draft",
        "<|im_end|> (299)",
        "Q4_K",
        "Q6_K",
        "4,096",
        "2.54 MiB as stored, about 2.54 MiB on a GPU, 2.54 MiB in native CPU code; "
        "15.52 MiB in PyTorch on a CPU (32 bits each)",
        "context on a CPU on a GPU 4,096 6.59 MiB",
    ):
        assert part in text, part


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mtp", [False, True])
def test_memory_is_what_the_engine_plans_and_takes(bough, tiny_model, family, mtp):
    if mtp and not family.startswith("qwen35"):
        mtp = False  # other families have no prediction blocks
    path = tiny_model(family, mtp=True) if mtp else tiny_model(family)
    facts = json.loads(bough("show", path, "--json").stdout)
    assert facts["stored_bytes"] == facts["memory"][0]["gpu"]["weights"] <= path.stat().st_size
    plan = load_session(path, EngineConfig(device="cpu", cpu_backend="torch")).plan
    need = facts["memory"][-1]["cpu"]
    assert plan.expanded and plan.max_ctx == 4096
    taken = (plan.weights, plan.recurrent, plan.kv_per_token * plan.max_ctx)
    assert (need["weights"], need["recurrent"], need["kv"]) == taken


def test_memory_on_a_cpu_is_that_of_native_code(bough, tiny_model):
    path = tiny_model(width=256, mix="q4_k_m")
    need = json.loads(bough("show", path, "--json").stdout)["memory"][0]
    assert need["native"]["weights"] == need["gpu"]["weights"] < need["cpu"]["weights"] / 4
    assert view.amount(need["native"]["total"]) in bough("show", path).stdout


def test_what_fits_on_a_gpu_that_is_not_here(bough, tiny_model):
    path = tiny_model(width=256, mix="q4_k_m")
    facts = json.loads(bough("show", path, "--fit", "--vram-limit", "2g", "--json").stdout)["fit"]
    plan = facts["plan"]
    assert facts["limit_bytes"] == 2 << 30 and facts["problem"] is None and facts["draft"] is None
    assert (plan["keys"], plan["values"], plan["context"]) == ("f16", "f16", 4096)
    assert sum(plan["parts"].values()) == plan["total_bytes"] < 2 << 30
    names = [(pair["keys"], pair["values"]) for pair in facts["pairs"]]
    assert names == [*AUTO_FORMATS, OPT_IN_FORMATS] and all(
        pair["max_context"] == 4096 for pair in facts["pairs"]
    )
    shown = " ".join(bough("show", path, "--fit", "--vram-limit", "2g").stdout.split())
    for part in ("On a GPU with 2.00 GiB", "token embedding", "f16 4,096", "chosen", "q8_0/q5_0", "tq3_0"):
        assert part in shown, part
    own = tiny_model(width=256, mix="q4_k_m", mtp=True)
    options = ["show", own, "--fit", "--vram-limit", "2g", "--json", "--draft"]
    sizes = [json.loads(bough(*options, name).stdout)["fit"]["plan"]["parts"] for name in ("mtp", "lookup")]
    assert sizes[0]["draft"] > 0 and "draft" not in sizes[1]
    small = bough("show", path, "--fit", "--vram-limit", "256MiB")
    assert small.exit_code == 6 and "too large" in small.stdout
    assert "hint: this would fit: a smaller model" in " ".join(small.stdout.split())
    long = bough("show", path, "--fit", "--vram-limit", "2g", "--max-ctx", "8k")
    assert long.exit_code == 2 and "--max-ctx is 8192" in long.stderr and "1 to 4096 tokens" in long.stderr


def test_what_fits_here(bough, tiny_model):
    result = " ".join(bough("show", tiny_model(), "--fit").stdout.split())
    kind, name = ("a GPU", "tok/s") if torch.cuda.is_available() else ("this CPU", "CPU: about")
    assert f"On {kind} with" in result and name in result
    assert bough("show", tiny_model(), "--max-ctx", "1k").exit_code == 2
    assert bough("show", tiny_model(), "--fit", "--vram-limit", "24x").exit_code == 2
    assert bough("show", tiny_model(), "--fit", "--vram-limit", "24g", "--draft", "none").exit_code == 0


@pytest.mark.parametrize("columns", [30, 45, 60, 80])
def test_a_narrow_terminal_loses_nothing(monkeypatch, tiny_model, bough, columns):
    path = tiny_model("qwen35", mtp=True, width=256, mix="q4_k_m")
    wide = bough("show", path).stdout

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    # Without a height, rich takes a dumb terminal to be 80 columns wide.
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "dumb")
    show(model=str(path))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns and "…" not in stream.getvalue()
    tables = wide[wide.index("Weights by type") :]
    narrow = "\n".join(lines)
    narrow = narrow[narrow.index("Weights by type") :].split()
    assert sorted(set(tables.split())) == sorted(set(narrow) | ({"type"} if columns < 55 else set()))


def test_a_file_we_cannot_run_is_still_described(bough, tiny_model, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_model("qwen2").read_bytes().replace(b"qwen2", b"bert9"))
    facts = json.loads(bough("show", path, "--json").stdout)
    assert not facts["supported"] and facts["model"] is None and facts["types"]
    assert "'bert9'" in facts["problems"][0]
    shown = bough("show", path)
    assert shown.exit_code == 0 and "Cannot be run" in shown.stdout and "bert9" in shown.stdout


def test_nothing_is_downloaded(bough):
    result = bough("show", "someone/Model-GGUF")
    assert result.exit_code == 3
    assert "cannot be reached" in result.stderr and "HF_HUB_OFFLINE=1" in result.stderr


@pytest.mark.parametrize("variable", ["BOUGH_MODEL", "DFLASH_TARGET"])
def test_without_a_name_the_environment_or_the_built_in_model(bough, monkeypatch, tiny_model, variable):
    assert "Bough-40M" in bough("show").stdout
    monkeypatch.setenv(variable, str(tiny_model()))
    assert str(tiny_model()) in bough("show", "--json").stdout


def test_a_model_that_is_not_here_is_shown_from_its_header(bough, hub):
    before = bough("show", "qwen3.6-27b", "--fit", "--vram-limit", "2g", "--json")
    facts = json.loads(before.stdout)["fit"]
    assert before.exit_code == 0 and facts["draft"] == "z-lab/Qwen3.6-27B-DFlash"
    ranges = [headers["Range"] for headers in hub.downloads()]
    assert len(ranges) == 2 and all(each.startswith("bytes=0-") and not each.endswith("-") for each in ranges)
    assert bough("pull", "qwen3.6-27b").exit_code == 0
    after = json.loads(bough("show", "qwen3.6-27b", "--fit", "--vram-limit", "2g", "--json").stdout)["fit"]
    assert facts["plan"] == after["plan"] and facts["plan"]["parts"]["draft"] > 0


def test_a_catalogue_name_without_the_hub(bough):
    """What comes with the package: the shapes, what fits and about how fast on cards of that size."""
    facts = json.loads(bough("show", "qwen3.6-27b", "--fit", "--vram-limit", "23.69GiB", "--json").stdout)
    assert facts["problems"] == [] and facts["path"] == "not on this machine: bough pull qwen3.6-27b"
    assert [row["card"] for row in facts["fit"]["speeds"]] == ["RTX 3090", "RTX 3090 Ti", "RTX 4090", "L4"]
    for row in facts["fit"]["speeds"]:
        assert row["plain"][0] <= row["plain"][1] < row["tree"][0] <= row["tree"][1]
    shown = bough("show", "qwen3.6-27b", "--fit", "--vram-limit", "23.69GiB").stdout
    assert "RTX 3090: about 37 to 42 tok/s, 100 to 126 with the draft at 4 tokens a step" in shown
    assert "Cannot be run" not in bough("show", "qwen3.6-27b").stdout
    sparse = bough("show", "qwen3.6-35b-a3b", "--fit", "--vram-limit", "24g").stdout
    assert "RTX 3090: about 150 to 156 tok/s, 142 to 194 with the draft" in sparse


def test_what_fits_is_said_of_types_whose_speed_is_not_known(bough, tiny_model, tmp_path):
    source = tiny_model("qwen3", width=128)
    path = written(source, tmp_path / "x.gguf", floats=False, scales=scales_of(source))
    facts = json.loads(bough("show", path, "--fit", "--vram-limit", "23.69GiB", "--json").stdout)
    assert facts["problems"] == [] and facts["fit"]["plan"] is not None and facts["fit"]["speeds"] == []
    shown = bough("show", path, "--fit", "--vram-limit", "23.69GiB")
    assert shown.exit_code == 0 and "held as F16" in shown.stdout and "predicted" not in shown.stdout


def test_another_quantisation_cannot_be_shown_without_the_hub(bough):
    result = bough("show", "qwen3.6-27b:Q8_0")
    assert result.exit_code == 3 and "cannot be reached" in result.stderr


def test_drafts_and_recommendations(bough, tiny_model, hub):
    unknown = json.loads(bough("show", tiny_model(), "--json").stdout)
    assert unknown["card"] is unknown["draft"] is None
    assert unknown["recommended"]["source"] == "the model's file"
    shown = " ".join(bough("show", tiny_model()).stdout.split())
    assert "none listed" in shown and "sampling --temperature 0 as recommended by the model's file" in shown

    bough("pull", "qwen3.6-27b", "--target-only")
    missing = " ".join(bough("show", "qwen3.6-27b").stdout.split())
    assert "not on this machine: bough pull qwen3.6-27b --draft-only" in missing
    assert "sampling --temperature 1 --top-p 0.95 --top-k 20 with thinking" in missing
    assert "--temperature 0.7 --top-p 0.8 --top-k 20 --presence-penalty 1.5 without" in missing
    assert "as recommended by the card qwen3.6-27b; --greedy:" in missing
    rule = "in chats answers that loop are ended, no sentence is said more than 3 times; --no-break-loops"
    assert rule in shown and rule in missing and unknown["recommended"]["sentences"] == 3
    bough("pull", "qwen3.6-27b", "--draft-only")
    facts = json.loads(bough("show", "unsloth/Qwen3.6-27B-GGUF", "--json").stdout)
    assert facts["card"] == "qwen3.6-27b" and facts["draft"]["name"] == "z-lab/Qwen3.6-27B-DFlash"
    assert facts["draft"]["path"].endswith("model.safetensors")
    assert facts["recommended"]["budget"] == 22 and facts["recommended"]["thinking"] is True
    assert facts["recommended"]["sampling"]["thinking"]["top_k"] == 20
    assert "z-lab/Qwen3.6-27B-DFlash, 41" in bough("show", "qwen3.6-27b").stdout
