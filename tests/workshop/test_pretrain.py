"""Pretraining at toy size: rows of the streams, a run from text to an answering engine, pause and resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bough.config import EngineConfig
from bough.convert.convert import convert
from bough.session.loading import load_session
from bough.session.session import Text, TextRequest
from tests.convert.hf_models import save_tokenizer
from workshop.training import pretrain
from workshop.training.target import TargetConfig

SHAPE = TargetConfig(
    width=64, layers=4, inner=128, heads=2, head_dim=32, value_heads=4, delta_dim=16, context=512
)
OPTIONS = pretrain.Options(seq=64, chunk=16, batch_tokens=512, lr=1e-2, compile=False, triton=False)
SENTENCE = "the quick brown fox jumps over the lazy dog and then the other dog, too"
CODE = "def add(left, right):\n    return left + right\n"
QUESTION, ANSWER = "isn't it?", "the lazy dog"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return the files of stages 1 and 2: two parts, masked instructions, held-out text, a tokenizer."""
    save_tokenizer("qwen35", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    def store(name: str, values: list[int], dtype: type = np.uint16) -> None:
        np.array(values, dtype).tofile(tmp_path / name)

    (tmp_path / "parts").mkdir()
    parts = {}
    for name, text, weight in (("english", SENTENCE, 0.75), ("code", CODE, 0.25)):
        tokens = ids(text + "<|endoftext|>") * 100
        store(f"parts/{name}.bin", tokens)
        parts[name] = {"file": f"parts/{name}.bin", "tokens": len(tokens), "weight": weight}
    (tmp_path / "prepare.json").write_text(json.dumps({"parts": parts}))
    store("heldout.bin", ids(f"{SENTENCE}<|endoftext|>{CODE}<|endoftext|>") * 10)
    asked = ids(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    answered = ids(f"{ANSWER}<|im_end|>\n")
    end = ids("<|endoftext|>")
    store("instruct.bin", (asked + answered + end) * 50)
    store("instruct.mask", ([0] * len(asked) + [1] * len(answered) + [0]) * 50, np.uint8)
    return tmp_path


def test_rows_lie_in_their_parts_by_weight_and_start_where_asked(work: Path) -> None:
    from workshop.training import streams

    end = streams.document_end(work)
    parts = streams.read_parts(work)
    cut = streams.Streams(parts, seq=64, document_end=end, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows, mask = cut.sample(400, generator, aligned=0.0)
    assert rows.shape == (400, 65) and mask.shape == (400, 64) and bool(mask.all())
    texts = [part.tokens.astype(np.int64).tobytes() for part in parts]
    found = [[row.numpy().tobytes() in text for text in texts] for row in rows]
    assert all(any(places) for places in found)
    assert 250 <= sum(places[0] for places in found) <= 350
    firsts = {part.tokens[0] for part in parts}
    assert {int(row[0]) for row in rows} > firsts
    rows, _ = cut.sample(100, generator, aligned=1.0)
    assert {int(row[0]) for row in rows} == firsts


def test_masks_belong_to_the_labels(work: Path) -> None:
    from workshop.training import streams

    part = streams.read_instructions(work)
    cut = streams.Streams([part], seq=64, document_end=streams.document_end(work), device=torch.device("cpu"))
    rows, mask = cut.sample(20, torch.Generator().manual_seed(0), aligned=1.0)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    for row, kept in zip(rows, mask, strict=True):
        learnt = tokenizer.decode(row[1:][kept > 0].tolist(), skip_special_tokens=False)
        assert learnt.startswith(f"{ANSWER}<|im_end|>") and QUESTION not in learnt


def test_from_text_to_an_engine_that_answers(work: Path) -> None:
    pretrain.run_stage(replace(OPTIONS, work=work, minutes=0.7, instruct_share=0.4), SHAPE)
    record = json.loads((work / "pretrain.json").read_text())
    # The held-out text takes turns between two documents that follow themselves in training: the turns cost.
    assert record["held_out_loss"]["general"] < 1.0 < np.log(SHAPE.vocabulary) / 4
    last = json.loads((work / "log.jsonl").read_text().splitlines()[-1])
    assert last["phase"] == "instruct" and last["loss"] < 1.0 and last["minutes"] <= 0.7
    convert(work / "Bough-40M", work / "target.gguf", mix="f32")
    session = load_session(work / "target.gguf", EngineConfig(max_ctx=256, device="cpu"))

    def says(**request: Any) -> str:
        events = session.generate(TextRequest(max_tokens=40, **request))
        return "".join(event.text for event in events if isinstance(event, Text))

    assert says(prompt="the quick brown").startswith(SENTENCE.removeprefix("the quick brown"))
    assert says(messages=[{"role": "user", "content": QUESTION}]) == ANSWER


def test_a_run_continues_from_a_file(work: Path) -> None:
    pretrain.run_stage(replace(OPTIONS, work=work, minutes=0.15, instruct_share=0.1), SHAPE)
    first = json.loads((work / "pretrain.json").read_text())["held_out_loss"]["end"]
    convert(work / "Bough-40M", work / "target.gguf", mix="q8_0")
    longer = replace(OPTIONS, work=work, minutes=0.1, lr=3e-4, continue_from=work / "target.gguf")
    pretrain.run_stage(longer, SHAPE)
    record = json.loads((work / "pretrain.json").read_text())
    assert record["held_out_loss"]["start"] == pytest.approx(first, abs=0.05)
    assert record["held_out_loss"]["general"] < first + 0.1 and record["steps"] > 0


def test_a_resumed_run_goes_on_where_it_stopped(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = replace(OPTIONS, work=work, minutes=0.1)
    pretrain.run_stage(replace(common, pause_after=0.04), SHAPE)
    assert "continue with --resume" in capsys.readouterr().out and not (work / "Bough-40M").exists()
    counts = torch.load(work / "checkpoint.pt", weights_only=True)["counts"]
    fresh = pretrain.Pretraining(common, SHAPE)
    with pytest.raises(SystemExit, match="another shape"):
        fresh.restore(work / "checkpoint.pt")
    pretrain.run_stage(replace(common, resume=True), SHAPE)
    output = capsys.readouterr().out
    assert f"resumed at step {counts[0]}" in output
    steps = [json.loads(line)["step"] for line in (work / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] > counts[0] > 0
    assert (work / "Bough-40M" / "model.safetensors").exists()


def test_the_learning_rate_rises_stays_and_falls() -> None:
    assert [pretrain.rate(share) for share in (0.02, 0.3, 0.6)] == [1.0, 1.0, 1.0]
    assert 0 < pretrain.rate(0.0) < pretrain.rate(0.01) < 1
    assert pretrain.rate(0.8) == pytest.approx(0.5) and pretrain.rate(1.0) == 0.0
