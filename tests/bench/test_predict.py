"""Predicted steps of other cards, and the page that a user of one shares."""

from pathlib import Path

import pytest

from bough.bench import predict, share
from bough.bench.predict import (
    CARDS,
    DENSE,
    EXPERTS,
    READABLE,
    SHARES,
    MeasuredModel,
    card_named,
    lines,
    step_ms,
)
from bough.config import EngineConfig, SpecConfig
from bough.errors import UsageError
from bough.session.loading import load_session


@pytest.mark.parametrize("like", [DENSE, EXPERTS])
def test_the_measured_card_is_predicted_as_it_was_measured(like: MeasuredModel) -> None:
    for rows, share_of_bandwidth in like.shares.items():
        moved = 1e9 * like.gigabytes[rows]
        time = step_ms(moved, rows, CARDS["H200"] * 1e9 * READABLE, layers=like.layers, like=like)
        measured = 1000 * moved / 4347e9 / share_of_bandwidth
        assert time.low == pytest.approx(measured) and time.high == pytest.approx(measured)


def test_a_slower_card_is_between_the_two_models() -> None:
    bandwidth, moved = CARDS["RTX 3090"] * 1e9 * READABLE, 1e9 * DENSE.gigabytes[1]
    time = step_ms(moved, 1, bandwidth, layers=64)
    floor = 1000 * moved / bandwidth
    assert floor < time.low < time.high == pytest.approx(floor / SHARES[1])
    # A model of few bytes is bound by the rest, which is that of its layers.
    small = [step_ms(1e7, 1, bandwidth, layers=layers).high for layers in (16, 64)]
    assert small[1] > 3 * small[0] > 0.5


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
    assert head[0] == "rows" and [row[0] for row in rows] == ["1", "8", "16", "24", "32"]
    assert rows[0][3] and not rows[0][4] and rows[1][4]


def test_a_step_of_few_rows_reads_few_experts(tiny_model) -> None:
    found = predict.predict(tiny_model("qwen35moe"), EngineConfig(), "4090")["sizes"]
    moved = [row["bytes"] for row in found]
    assert moved == sorted(moved) and moved[0] < moved[1] < found[0]["bytes"] * 4
    dense = predict.predict(tiny_model("qwen3"), EngineConfig(), "4090")["sizes"]
    assert len({row["bytes"] for row in dense}) == 1


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
