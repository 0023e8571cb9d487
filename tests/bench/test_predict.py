"""Predicted steps of other cards, and the page that a user of one shares."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.bench import predict, share
from bough.bench.predict import (
    CARDS,
    FAST_MMA,
    MATRICES,
    READABLE,
    ROWS,
    Reads,
    StepModel,
    card_named,
    lines,
    reads_of,
)
from bough.bench.tuning import LAYERS_27B
from bough.config import EngineConfig, SpecConfig
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from tests.memory.test_documented import planned

LINES = Path(__file__).parents[2] / "benchmarks" / "results"
TOLERANCE = 0.15


def measured(name: str, commit: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (LINES / name).read_text().splitlines()]
    return [row for row in rows if row.get("commit") == commit]


def forward_ms(reads: Reads, rows: int) -> float:
    """Return what a forward pass takes on an H200 where rows choose experts as a tree's do."""
    return sum(part.low for part in StepModel(CARDS["H200"]).parts(reads, rows).values())


def test_steps_of_a_27b_are_predicted_as_measured(tmp_path: Path) -> None:
    (line,) = measured("step.jsonl", "6372736")
    with planned("qwen3.6-27b", tmp_path, draft=True) as (file, config, _):
        reads = reads_of(file, config)
    for size in line["sizes"]:
        assert forward_ms(reads, size["rows"]) == pytest.approx(size["verify_ms"], rel=TOLERANCE)
        draft = StepModel(CARDS["H200"]).draft(reads)
        assert draft.low == pytest.approx(size["draft_ms"], rel=TOLERANCE)


def test_steps_of_a_sparse_model_are_predicted_as_measured(tmp_path: Path) -> None:
    lines = [row for row in measured("moe.jsonl", "92630cb") if row.get("what") == "floor"]
    with planned("qwen3.6-35b-a3b", tmp_path, draft=False) as (file, config, _):
        reads = reads_of(file, config)
    assert [row["rows"] for row in lines] == [1, 8, 24]
    for row in lines:
        assert forward_ms(reads, row["rows"]) == pytest.approx(row["forward_ms"], rel=TOLERANCE)


def test_steps_of_a_small_model_are_predicted_as_measured(tiny_model) -> None:
    with GGUFFile.open(tiny_model("qwen2")) as file:
        spec = ModelSpec.from_gguf(file)
    spec = replace(spec, layers=("attention",) * 24, width=896, heads=14, head_dim=64, feed_forward=4864)
    (row,) = (row for row in measured("step.jsonl", "fc1ccaf") if "coder" in row.get("model", ""))
    reads = Reads(spec, matrices=297_699_636, head=144_643_072, routed=0)  # Qwen2.5-Coder-0.5B, Q4_K_M
    for size in row["sizes"]:
        assert forward_ms(reads, size["rows"]) == pytest.approx(size["verify_ms"], rel=TOLERANCE)


@pytest.mark.parametrize("repeats", [1, 5])
def test_matmuls_of_other_cards_are_predicted_as_acted(repeats: int, tiny_model) -> None:
    """An H200 acting as sm_86, with each mma as often as it is named."""
    lines = [row for row in measured("cards.jsonl", "7c9e965") if row["note"] == "blocks of 256 rows"]
    acting = StepModel(replace(CARDS["H200"], hopper=False, mma=FAST_MMA // repeats))
    with GGUFFile.open(tiny_model("qwen3")) as file:
        spec = replace(ModelSpec.from_gguf(file), layers=("attention",) * 2, width=5120)
    checked = 0
    for row in lines:
        if row["repeats"] == repeats and row["rows"] in ROWS:
            reads = Reads(spec, matrices=round(row["ms"] * row["tb_s"] * 1e9), head=0, routed=0)
            time = acting.parts(reads, row["rows"])["matmuls"]
            assert time.low == pytest.approx(row["ms"], rel=TOLERANCE)
            checked += 1
    assert checked == 3 and len(LAYERS_27B) == MATRICES * len(spec.layers)


def test_what_bounds_a_card(tmp_path: Path) -> None:
    with planned("qwen3.6-27b", tmp_path, draft=False) as (file, config, _):
        reads = reads_of(file, config)
    bounds = {
        card: [StepModel(CARDS[card]).bound(rows) for rows in ROWS] for card in ("RTX 3090", "RTX 4090")
    }
    assert bounds == {"RTX 3090": ["memory"] * 3 + ["the kernel"], "RTX 4090": ["memory"] * 4}
    for card, figures in CARDS.items():
        floor = reads.matrices / (figures.bandwidth * READABLE * 1e6)
        for rows in ROWS:
            time = StepModel(figures).parts(reads, rows)["matmuls"]
            assert floor < time.low <= time.high < 2.5 * floor, (card, rows)


def test_names_of_cards() -> None:
    assert {card_named(name) for name in ("3090", "rtx3090", "NVIDIA RTX 3090", "RTX-3090")} == {"RTX 3090"}
    assert card_named("a100 80gb") == "A100 80GB"
    for name in ("", "80", "GTX 1080"):
        with pytest.raises(UsageError, match="needed: one of RTX 3080, RTX 3090"):
            card_named(name)


def test_a_prediction_reads_headers_only(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.gguf.reader.GGUFFile.raw", lambda *_: pytest.fail("weights were read"))
    found = predict.predict(tiny_model(), EngineConfig(), "5090")
    head, *rows = lines(found)
    assert head[0] == "rows" and [row[0] for row in rows] == ["1", "8", "16", "24"]
    assert rows[0][4] and not rows[0][5] and rows[1][5]


def test_a_step_of_few_rows_reads_few_experts(tiny_model) -> None:
    def moved(architecture: str) -> list[float]:
        with GGUFFile.open(tiny_model(architecture)) as file:
            reads = reads_of(file, EngineConfig())
        return [reads.experts(rows).high for rows in ROWS]

    sparse = moved("qwen35moe")
    assert sparse == sorted(sparse) and 0 < sparse[0] < sparse[1] < sparse[0] * 8
    assert moved("qwen3") == [0.0] * 4


def test_the_page_has_what_an_issue_needs(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PROMPTS", share.PROMPTS[:1])
    monkeypatch.setattr("bough.bench.step._EXACT_SIZES", (1, 8))
    config = EngineConfig(device="cpu", max_ctx=512, speculation=SpecConfig(budget=7, adaptive=False))
    session = load_session(tiny_model(), config)
    result = share.measure(session, repeats=1, tokens=6) | {"model": "tiny.gguf"}
    share.save(result, tmp_path / "share.md")
    page = (tmp_path / "share.md").read_text()
    assert result["card"] is None and "no GPU was found or chosen" in page
    assert "| read bandwidth |" in page and "| 8 |" in page and "2 of 2 with trees are identical" in page
    assert all(each["same"] for each in result["texts"])
