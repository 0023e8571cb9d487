"""Prompts to tokens to batches: stored shards, resuming, and the labels of a block."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import ModelFileError, UsageError
from bough.train import draft_data
from bough.train.draft_data import (
    Regeneration,
    TokenData,
    encode_prompt,
    epoch_batches,
    make_batch,
    read_prompts,
    regenerate,
)
from bough.train.draft_target import mask_token
from bough.train.shards import read_shard, shard_files
from workshop import packed_shards
from workshop.packed_shards import pack_shards

QUICK = Regeneration(length=48, max_tokens=12, temperatures=(0.0, 1.0), top_p=1.0, seed=5)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write(tmp_path / "prompts.jsonl", *({"prompt": "the " * (1 + i % 3) + str(i)} for i in range(7)))


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(draft_data, "_SHARD", {"cpu": 3})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"prompts.jsonl:2: not JSON"),
        ("[]", r'prompts.jsonl:2: needed an object with either "messages" or "prompt"'),
        ({"prompt": "a", "messages": []}, r"either"),
        ({"prompt": 3}, r"prompt is 3, needed text"),
        ({"messages": [], "thinking": "yes"}, r"thinking is 'yes', needed true or false"),
    ],
)
def test_an_invalid_prompt_line_is_reported(tmp_path, line, problem):
    with pytest.raises(UsageError, match=problem):
        read_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, line))


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(write(tmp_path / "prompts.jsonl", ""))
    with pytest.raises(UsageError, match="not readable"):
        read_prompts(tmp_path / "absent.jsonl")


def test_messages_are_rendered_without_the_assistant_message(tiny_target):
    message = {"role": "user", "content": "Who is <|im_end|>?"}
    prompt = encode_prompt({"messages": [message]}, tiny_target)
    with_output = encode_prompt({"messages": [message, {"role": "assistant", "content": "Me."}]}, tiny_target)
    assert prompt == with_output
    text = tiny_target.tokenizer.decode(prompt, skip_special=False)
    assert text == "<|im_start|>user\nWho is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    # Text that spells a control token is not encoded as one.
    assert prompt.count(tiny_target.tokenizer.id_of("<|im_end|>")) == 1
    plain = encode_prompt({"messages": [message], "thinking": False}, tiny_target)
    assert tiny_target.tokenizer.decode(plain).endswith("</think>\n\n")


def test_every_prompt_has_an_output_at_every_temperature(tiny_target, prompts, tmp_path, small_shards):
    reports = []
    done = regenerate(
        tiny_target, prompts, tmp_path / "tokens", QUICK, progress=lambda *each: reports.append(each)
    )
    assert done
    assert reports[-1] == (14, 14) and [done for done, _ in reports] == sorted(done for done, _ in reports)
    data = TokenData.load(tmp_path / "tokens", vocabulary=tiny_target.spec.vocab_size, length=48)
    assert sorted(data.prompts.tolist()) == sorted([*range(7)] * 2)
    stop = tiny_target.tokenizer.stop_ids
    for number in range(len(data)):
        text, boundary = data.text(number).tolist(), data.boundaries[number]
        expected = encode_prompt(
            {"prompt": read_prompts(prompts)[data.prompts[number]]["prompt"]}, tiny_target
        )
        assert text[:boundary] == expected
        output = text[boundary:]
        assert len(output) == 12 or output[-1] in stop
        assert not stop & set(output[:-1])
    greedy, sampled = (
        [data.text(n).tolist() for n in range(len(data)) if data.prompts[n] == 0][i] for i in (0, 1)
    )
    assert greedy != sampled


def outputs(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The tokens of each prompt and temperature."""
    found = {}
    for path in shard_files(folder):
        shard = read_shard(path)
        for job, (tokens, _, _) in zip(shard.jobs, shard.texts(), strict=False):
            assert job not in found
            found[job] = tokens.tolist()
    return found


def test_existing_shards_are_kept(tiny_target, prompts, tmp_path, small_shards):
    folder = tmp_path / "tokens"
    regenerate(tiny_target, prompts, folder, QUICK)
    made, files = outputs(folder), shard_files(folder)
    assert len(made) == 14 and len(files) == 5
    times = {path.name: path.stat().st_mtime_ns for path in files}
    (folder / "tokens-00002.npz").unlink()
    regenerate(tiny_target, prompts, folder, QUICK)
    assert outputs(folder) == made
    again = {path.name for path in shard_files(folder) if path.stat().st_mtime_ns != times[path.name]}
    assert again == {"tokens-00002.npz"}


def test_an_interruption_loses_nothing_that_is_finished(tiny_target, prompts, tmp_path, small_shards):
    folder, seen = tmp_path / "tokens", []
    done = regenerate(
        tiny_target,
        prompts,
        folder,
        QUICK,
        progress=lambda *each: seen.append(each),
        cancelled=lambda: len(seen) >= 5,
    )
    assert not done
    kept = outputs(folder)
    assert len(kept) == 5
    assert regenerate(tiny_target, prompts, folder, QUICK)
    whole = outputs(folder)
    assert whole.items() >= kept.items() and len(whole) == 14
    regenerate(tiny_target, prompts, tmp_path / "other", QUICK)
    assert outputs(tmp_path / "other") == whole


def test_a_limit_of_time_keeps_what_there_is(tiny_target, prompts, tmp_path):
    folder = tmp_path / "tokens"
    assert regenerate(tiny_target, prompts, folder, replace(QUICK, minutes=0.0))
    assert len(outputs(folder)) == 1
    assert regenerate(tiny_target, prompts, folder, QUICK) and len(outputs(folder)) == 14


def test_ranks_share_the_prompts(tiny_target, prompts, tmp_path, small_shards):
    regenerate(tiny_target, prompts, tmp_path / "whole", QUICK)
    for rank, count in enumerate((8, 14)):
        regenerate(tiny_target, prompts, tmp_path / "shared", QUICK, rank=rank, ranks=2)
        assert len(outputs(tmp_path / "shared")) == count
    assert outputs(tmp_path / "shared") == outputs(tmp_path / "whole")


def test_packed_shards_are_the_shards(tiny_target, prompts, tmp_path, small_shards, monkeypatch):
    folder, packed = tmp_path / "tokens", tmp_path / "packed"
    regenerate(tiny_target, prompts, folder, QUICK)
    monkeypatch.setattr(packed_shards, "PACKED_TOKENS", 200)
    files = pack_shards(folder, packed)
    assert len(files) == 2 and all(path.name.endswith(".npz.xz") for path in files)
    assert outputs(packed) == outputs(folder)
    write(packed / "index.json", (folder / "index.json").read_text())
    assert regenerate(tiny_target, prompts, packed, QUICK) and shard_files(packed) == files


def test_a_folder_made_with_other_settings_is_refused(tiny_target, prompts, tmp_path):
    folder = tmp_path / "tokens"
    one = Regeneration(length=48, max_tokens=4, temperatures=(0.0,))
    regenerate(tiny_target, prompts, folder, one)
    with pytest.raises(UsageError, match="made with max_tokens 4, now it is 5"):
        regenerate(tiny_target, prompts, folder, Regeneration(length=48, max_tokens=5, temperatures=(0.0,)))
    write(prompts, {"prompt": "other"})
    with pytest.raises(UsageError, match="prompts_sha256"):
        regenerate(tiny_target, prompts, folder, one)


def test_prompts_that_leave_no_room_are_refused(tiny_target, prompts, tmp_path):
    with pytest.raises(UsageError, match="no prompt leaves room") as error:
        regenerate(tiny_target, prompts, tmp_path / "tokens", Regeneration(length=4))
    assert "`seq`" in error.value.hint


def test_outputs_are_cut_where_they_loop():
    loop = list(range(15))
    assert draft_data._finished([99, *loop * 5], 7) == [99, *loop, *loop, *loop[:12]]
    assert draft_data._finished([*loop, *loop], 7) == [*loop, *loop, 7]
    assert draft_data._finished(loop, None) == loop


def damaged(path: Path, **changes: object) -> None:
    arrays = {"tokens": [1, 2, 3, 4, 5], "lengths": [5], "boundaries": [2], "prompts": [0]}
    np.savez(path, **{name: np.array(value) for name, value in (arrays | changes).items()})


def test_token_files_are_checked(tmp_path):
    path = tmp_path / "tokens-00000.npz"
    damaged(path)
    assert TokenData.load(path, vocabulary=6, length=9).text(0).tolist() == [1, 2, 3, 4, 5]
    assert TokenData.load(tmp_path, vocabulary=6, length=4).text(0).tolist() == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="token 5, the target's vocabulary has ids 0 to 4"):
        TokenData.load(path, vocabulary=5, length=9)
    with pytest.raises(UsageError, match="no text with an output within 3 tokens"):
        TokenData.load(path, vocabulary=6, length=3)
    damaged(path, lengths=[4])
    with pytest.raises(ModelFileError, match="are inconsistent"):
        TokenData.load(path, vocabulary=6, length=9)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFileError, match=r"tokens-00000\.npz: not a readable token file"):
        TokenData.load(path, vocabulary=6, length=9)
    with pytest.raises(UsageError, match="holds no tokens"):
        TokenData.load(tmp_path / "absent", vocabulary=6, length=9)


def data_of(lengths: list[int], boundaries: list[int], prompts: list[int] | None = None) -> TokenData:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    numbers = np.arange(len(lengths)) if prompts is None else np.array(prompts)
    return TokenData(np.arange(starts[-1], dtype=np.int32), starts, np.array(boundaries), numbers)


texts = st.lists(st.tuples(st.integers(1, 30), st.integers(2, 70)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(1, 40), st.integers(2, 16), st.integers(0, 2**31))
def test_labels_are_the_tokens_after_the_anchor(shapes, anchors, block, seed):
    data = data_of([border + output for border, output in shapes], [border for border, _ in shapes])
    batch = make_batch(data, range(len(shapes)), anchors=anchors, block=block, seed=seed)
    assert batch.real == data.lengths.sum() and batch.tokens.shape[1] % 64 == 0
    for row, (border, output) in enumerate(shapes):
        text = data.text(row).tolist()
        positions = batch.anchors[row].tolist()
        assert positions == sorted(positions)
        used = [
            position for position, valid in zip(positions, batch.valid[row].tolist(), strict=True) if valid[0]
        ]
        assert len(used) == len(set(used)) == min(anchors, output - 1, len(positions))
        assert len(positions) >= min(anchors, output - 1)
        for position, labels, valid in zip(positions, batch.labels[row], batch.valid[row], strict=True):
            assert border <= position <= len(text) - 2
            if valid[0]:
                assert labels[valid].tolist() == text[position + 1 : position + block]


@given(st.integers(1, 90), st.integers(1, 8), st.integers(0, 99))
def test_an_epoch_has_every_text_once(count, batch, seed):
    lengths = np.random.default_rng(seed).integers(1, 50, 100)
    numbers = np.arange(5, 5 + count)
    batches = epoch_batches(lengths, numbers, batch=batch, seed=seed)
    assert all(len(each) == batch for each in batches)
    flat = np.concatenate(batches).tolist()
    if count >= batch:
        assert len(flat) == len(set(flat)) == count // batch * batch and set(flat) <= set(numbers.tolist())
    same = epoch_batches(lengths, numbers, batch=batch, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(batches, same, strict=True))


def test_texts_of_one_prompt_are_held_out_together():
    data = data_of([9] * 12, [3] * 12, [0, 1, 2, 3, 4, 5] * 2)
    train, held_out = data.split(2)
    assert sorted([*train, *held_out]) == list(range(12))
    held = set(data.prompts[held_out].tolist())
    assert len(held) == 2 and not held & set(data.prompts[train].tolist())


def test_the_mask_is_an_unused_token(tiny_target):
    assert mask_token(tiny_target) == tiny_target.metadata["tokenizer.ggml.tokens"].index("[PAD302]")
    assert mask_token(tiny_target, 7) == 7
    with pytest.raises(UsageError, match="`mask_token` is 320, needed a row of the embedding, 0 to 319"):
        mask_token(tiny_target, 320)
