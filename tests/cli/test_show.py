"""`treeflash show` on models of every family."""

import json

import pytest

from treeflash.tools.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(treeflash, tiny_model, family):
    path = tiny_model(family)
    result = treeflash("show", path, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["architecture"] == family and facts["supported"] and facts["problems"] == []
    assert facts["size_bytes"] == path.stat().st_size
    model, memory = facts["model"], facts["memory"]
    assert sum(row["weights"] for row in facts["types"]) == model["parameters"]["total"]
    assert memory[-1]["context"] == model["context_length"] == 4096
    for row in memory:
        assert row["total"] == row["weights"] + row["recurrent"] + row["kv"]
        per_token = 2 * 2 * model["layers"]["attention"] * model["kv_heads"] * model["head_dim"]
        assert row["kv"] == row["context"] * per_token
    assert facts["text"]["thinking"] and facts["text"]["chat_template"]
    assert [stop["token"] for stop in facts["text"]["stop_tokens"]] == ["<|endoftext|>", "<|im_end|>"]
    if family == "qwen35moe":
        assert model["experts"]["count"] == 8
        assert model["parameters"]["active"] < model["parameters"]["total"]


def test_as_a_person_sees_it(treeflash, tiny_model):
    result = treeflash("show", tiny_model("qwen35", mtp=True, width=256, mix="q4_k_m"))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in (
        "tiny random qwen35",
        "8: 2 attention + 6 Gated DeltaNet",
        "4 query heads, 2 KV heads of 32",
        "1 MTP block",
        "present but unused",
        "<|im_end|> (299)",
        "Q4_K",
        "Q6_K",
        "4,096",
    ):
        assert part in text, part


def test_a_file_we_cannot_run_is_still_described(treeflash, tiny_model, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_model("qwen2").read_bytes().replace(b"qwen2", b"bert9"))
    facts = json.loads(treeflash("show", path, "--json").stdout)
    assert not facts["supported"] and facts["model"] is None and facts["types"]
    assert "'bert9'" in facts["problems"][0]
    shown = treeflash("show", path)
    assert shown.exit_code == 0 and "Cannot be run" in shown.stdout and "bert9" in shown.stdout


def test_nothing_is_downloaded(treeflash):
    result = treeflash("show", "someone/Model-GGUF")
    assert result.exit_code == 3
    assert "not in the cache" in result.stderr and "treeflash pull someone/Model-GGUF" in result.stderr


def test_a_model_must_be_named(treeflash, monkeypatch, tiny_model):
    assert treeflash("show").exit_code == 2
    monkeypatch.setenv("DFLASH_TARGET", str(tiny_model()))
    assert treeflash("show").exit_code == 0


def test_drafts_and_recommendations(treeflash, tiny_model, hub):
    unknown = json.loads(treeflash("show", tiny_model(), "--json").stdout)
    assert unknown["card"] is unknown["draft"] is unknown["recommended"] is None
    assert "none known" in treeflash("show", tiny_model()).stdout

    treeflash("pull", "qwen3.6-27b", "--target-only")
    missing = " ".join(treeflash("show", "qwen3.6-27b").stdout.split())
    assert "not on this machine: treeflash pull qwen3.6-27b --draft-only" in missing
    assert "with thinking --temperature 1 --top-p 0.95 --top-k 20" in missing
    assert "without --temperature 0.7 --top-p 0.8 --top-k 20 --presence-penalty 1.5" in missing
    treeflash("pull", "qwen3.6-27b", "--draft-only")
    facts = json.loads(treeflash("show", "unsloth/Qwen3.6-27B-GGUF", "--json").stdout)
    assert facts["card"] == "qwen3.6-27b" and facts["draft"]["name"] == "z-lab/Qwen3.6-27B-DFlash"
    assert facts["draft"]["path"].endswith("model.safetensors")
    assert facts["recommended"]["budget"] == 22 and facts["recommended"]["thinking"] is True
    assert facts["recommended"]["sampling"]["thinking"]["top_k"] == 20
    assert "z-lab/Qwen3.6-27B-DFlash, 41" in treeflash("show", "qwen3.6-27b").stdout
