"""Prompts to tokens to batches: what is kept, what is made again, and what a block is trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeflash.errors import ModelFileError, UsageError
from treeflash.train import draft_data
from treeflash.train.draft_data import (
    Regeneration,
    TokenData,
    encode_prompt,
    epoch_batches,
    make_batch,
    read_prompts,
    regenerate,
)
from treeflash.train.draft_target import mask_token

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


def contents(folder: Path) -> dict[str, dict[str, list[int]]]:
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found[path.name] = {name: file[name].tolist() for name in file.files}
    return found


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
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, problem):
    with pytest.raises(UsageError, match=problem):
        read_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, line))


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(write(tmp_path / "prompts.jsonl", ""))
    with pytest.raises(UsageError, match="not readable"):
        read_prompts(tmp_path / "absent.jsonl")


def test_messages_go_through_the_chat_template_without_their_answer(tiny_target):
    question = {"role": "user", "content": "Who is <|im_end|>?"}
    asked = encode_prompt({"messages": [question]}, tiny_target)
    answered = encode_prompt({"messages": [question, {"role": "assistant", "content": "Me."}]}, tiny_target)
    assert asked == answered
    text = tiny_target.tokenizer.decode(asked, skip_special=False)
    assert text == "<|im_start|>user\nWho is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    # What the message spells like a control token is not one.
    assert asked.count(tiny_target.tokenizer.id_of("<|im_end|>")) == 1
    plain = encode_prompt({"messages": [question], "thinking": False}, tiny_target)
    assert tiny_target.tokenizer.decode(plain).endswith("</think>\n\n")


def test_every_prompt_is_answered_at_every_temperature(tiny_target, prompts, tmp_path, small_shards):
    heard = []
    done = regenerate(
        tiny_target, prompts, tmp_path / "tokens", QUICK, progress=lambda *each: heard.append(each)
    )
    assert done
    assert heard[-1] == (14, 14) and [done for done, _ in heard] == sorted(done for done, _ in heard)
    data = TokenData.load(tmp_path / "tokens", vocabulary=tiny_target.spec.vocab_size, length=48)
    assert sorted(data.prompts.tolist()) == sorted([*range(7)] * 2)
    stop = tiny_target.tokenizer.stop_ids
    for number in range(len(data)):
        text, boundary = data.text(number).tolist(), data.boundaries[number]
        expected = encode_prompt(
            {"prompt": read_prompts(prompts)[data.prompts[number]]["prompt"]}, tiny_target
        )
        assert text[:boundary] == expected
        answer = text[boundary:]
        assert len(answer) == 12 or answer[-1] in stop
        assert not stop & set(answer[:-1])
    greedy, drawn = (
        [data.text(n).tolist() for n in range(len(data)) if data.prompts[n] == 0][i] for i in (0, 1)
    )
    assert greedy != drawn


def test_shards_that_are_there_are_kept(tiny_target, prompts, tmp_path, small_shards):
    folder = tmp_path / "tokens"
    regenerate(tiny_target, prompts, folder, QUICK)
    made = contents(folder)
    assert len(made) == 6
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npz")}
    (folder / "tokens-00002.npz").unlink()
    regenerate(tiny_target, prompts, folder, QUICK)
    assert contents(folder) == made
    again = {path.name for path in folder.glob("*.npz") if path.stat().st_mtime_ns != times[path.name]}
    assert again == {"tokens-00002.npz"}


def test_an_interruption_loses_one_shard(tiny_target, prompts, tmp_path, small_shards):
    folder, answers = tmp_path / "tokens", []
    done = regenerate(
        tiny_target,
        prompts,
        folder,
        QUICK,
        progress=lambda *each: answers.append(each),
        cancelled=lambda: len(answers) >= 5,
    )
    assert not done
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "tokens-00000.npz"]
    kept = contents(folder)
    assert regenerate(tiny_target, prompts, folder, QUICK)
    assert contents(folder).items() >= kept.items() and len(contents(folder)) == 6


def test_processes_share_the_shards(tiny_target, prompts, tmp_path, small_shards):
    regenerate(tiny_target, prompts, tmp_path / "whole", QUICK)
    for rank in range(2):
        regenerate(tiny_target, prompts, tmp_path / "shared", QUICK, rank=rank, ranks=2)
        assert len(contents(tmp_path / "shared")) == 3 * (rank + 1)
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


def test_a_folder_made_in_another_way_is_not_mixed_with(tiny_target, prompts, tmp_path):
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
    assert "--seq" in error.value.hint


def test_answers_end_where_they_begin_to_go_in_circles():
    circle = list(range(15))
    assert draft_data._finished([99, *circle * 5], 1000, 7) == [99, *circle, *circle, *circle[:12]]
    assert draft_data._finished([*circle, *circle], 1000, 7) == [*circle, *circle, 7]
    assert draft_data._finished(circle, 15, 7) == circle
    assert draft_data._finished(circle, 20, None) == circle


def damaged(path: Path, **changes: object) -> None:
    arrays = {"tokens": [1, 2, 3, 4, 5], "lengths": [5], "boundaries": [2], "prompts": [0]}
    np.savez(path, **{name: np.array(value) for name, value in (arrays | changes).items()})


def test_files_of_tokens_are_checked(tmp_path):
    path = tmp_path / "tokens-00000.npz"
    damaged(path)
    assert TokenData.load(path, vocabulary=6, length=9).text(0).tolist() == [1, 2, 3, 4, 5]
    assert TokenData.load(tmp_path, vocabulary=6, length=4).text(0).tolist() == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="token 5, the target's vocabulary has ids 0 to 4"):
        TokenData.load(path, vocabulary=5, length=9)
    with pytest.raises(UsageError, match="no text with an answer within 3 tokens"):
        TokenData.load(path, vocabulary=6, length=3)
    damaged(path, lengths=[4])
    with pytest.raises(ModelFileError, match="do not belong together"):
        TokenData.load(path, vocabulary=6, length=9)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFileError, match=r"tokens-00000\.npz: not a readable file"):
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
def test_a_block_is_labelled_with_what_follows_its_anchor(shapes, anchors, block, seed):
    data = data_of([border + answer for border, answer in shapes], [border for border, _ in shapes])
    batch = make_batch(data, range(len(shapes)), anchors=anchors, block=block, seed=seed)
    assert batch.real == data.lengths.sum() and batch.tokens.shape[1] % 64 == 0
    for row, (border, answer) in enumerate(shapes):
        text = data.text(row).tolist()
        places = batch.anchors[row].tolist()
        assert places == sorted(places)
        used = [place for place, valid in zip(places, batch.valid[row].tolist(), strict=True) if valid[0]]
        assert len(used) == len(set(used)) == min(anchors, answer - 1, len(places))
        assert len(places) >= min(anchors, answer - 1)
        for place, labels, valid in zip(places, batch.labels[row], batch.valid[row], strict=True):
            assert border <= place <= len(text) - 2
            if valid[0]:
                assert labels[valid].tolist() == text[place + 1 : place + block]


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
    train, apart = data.split(2)
    assert sorted([*train, *apart]) == list(range(12))
    held = set(data.prompts[apart].tolist())
    assert len(held) == 2 and not held & set(data.prompts[train].tolist())


def test_the_mask_is_a_token_that_no_text_has(tiny_target):
    assert mask_token(tiny_target) == tiny_target.metadata["tokenizer.ggml.tokens"].index("[PAD302]")
    assert mask_token(tiny_target, 7) == 7
    with pytest.raises(UsageError, match="--mask-token is 320, needed a row of the embedding, 0 to 319"):
        mask_token(tiny_target, 320)
