"""Prompts for drafts of real models: reproducible, of all kinds, and none of a benchmark."""

import gzip
import json
import lzma

import pytest

from workshop.training import prompts
from workshop.training.overlap import BENCHMARKS

QUESTION = "Ann has 3 red apples and 4 green pears in one basket. How many pieces of fruit are in it?"
TAKEN = "A farmer sells nine brown eggs each day for two dollars and buys feed for seven. What is left?"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    records = [{"t": "The owl slept all day in the tree. " * 20}]
    for question in (QUESTION, TAKEN):
        records.append({"m": [["user", question], ["assistant", "3 + 4 = <<3+4=7>>7\n#### 7"]]})
    records.append({"m": [["user", "Tell me about owls."], ["assistant", "They sleep all day."]]})
    with lzma.open(tmp_path / "text.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    for name in BENCHMARKS:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(gzip.compress(json.dumps({"question": TAKEN}).encode()))
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / "mt_bench/question.jsonl").write_text(json.dumps({"turns": ["Be brief.", TAKEN]}))

    def run(name: str, *more: str):
        arguments = [
            "--corpus",
            tmp_path / "text.jsonl.xz",
            "--benchmarks",
            tmp_path,
            "--output",
            tmp_path / name,
        ]
        assert prompts.main.run("training.prompts", [*map(str, arguments), "--count", "120", *more]) == 0
        facts, raw = json.loads(capsys.readouterr().out), (tmp_path / name).read_bytes()
        text = lzma.decompress(raw).decode() if name.endswith(".xz") else raw.decode()
        return facts, [json.loads(line) for line in text.splitlines()]

    return run


def test_prompts_are_reproducible_and_none_is_of_a_benchmark(run):
    facts, lines = run("one.jsonl.xz")
    again, same = run("two.jsonl")
    assert lines == same and facts["sha256"] == again["sha256"] and facts["bytes"] < again["bytes"]
    _, other = run("three.jsonl", "--seed", "1")
    assert other != lines
    assert facts["prompts"] == len(lines) == sum(facts["kinds"].values())
    assert facts["kinds"].keys() >= {"code", "completion", "heads", "story", "writing", "coding", "reading"}
    asked = [line["messages"][-1]["content"] for line in lines]
    assert len(set(asked)) == len(asked) and QUESTION in asked
    assert TAKEN not in asked and facts["dropped"]["overlap"] >= 1
    assert all(line["messages"][-1]["role"] == "user" for line in lines)
    assert not any(
        "{" in text
        for line in lines
        if line["kind"] in prompts.INSTRUCT
        for text in [line["messages"][-1]["content"]]
    )
