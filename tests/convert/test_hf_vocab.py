"""Tokenizer files as metadata, compared with what the tokenizers library makes of the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from bough.convert.checkpoint import HFConfig
from bough.convert.hf_vocab import CONTROL, NORMAL, UNUSED, USER_DEFINED, read_vocabulary
from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.writer import ValueType
from tests.convert.hf_models import CHAT_TEMPLATE, build_tokenizer, save_tokenizer

PRES = ("qwen2", "qwen35", "llama-bpe", "gpt-2")
SIZE = 300


def read(
    folder: Path, *, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> dict[str, Any]:
    entries = read_vocabulary(folder, HFConfig(config or {}, "config.json"), generation or {}, size=SIZE)
    return {key.removeprefix("tokenizer.").removeprefix("ggml."): value for key, value, _ in entries}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("pre", PRES)
def test_tokens_types_and_merges(pre: str, tmp_path: Path):
    save_tokenizer(pre, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = read(tmp_path)
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    assert found["tokens"][:count] == [tokenizer.id_to_token(i) for i in range(count)]
    assert found["tokens"][count:] == [f"[PAD{i}]" for i in range(count, SIZE)]
    expected = [NORMAL] * (count - 5) + [CONTROL] * 3 + [USER_DEFINED] * 2 + [UNUSED] * (SIZE - count)
    assert found["token_type"] == expected
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert len(found["merges"]) == len(model["merges"]) == 30
    assert [merge.split(" ") for merge in found["merges"]] == [list(merge) for merge in model["merges"]]
    assert found["pre"] == pre
    assert found["model"] == "gpt2"
    assert found["chat_template"] == CHAT_TEMPLATE


def test_kinds_are_llama_cpps(tmp_path: Path):
    save_tokenizer("qwen35", tmp_path)
    kinds = {key: kind for key, _, kind in read_vocabulary(tmp_path, HFConfig({}, ""), {}, size=SIZE)}
    assert kinds["tokenizer.ggml.token_type"] is ValueType.INT32
    assert kinds["tokenizer.ggml.tokens"] is kinds["tokenizer.ggml.merges"] is ValueType.STRING


def test_merges_of_the_older_format(tmp_path: Path):
    save_tokenizer("qwen2", tmp_path)
    new = read(tmp_path)["merges"]
    file = tmp_path / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    edit(file, model={**model, "merges": [" ".join(pair) for pair in model["merges"]]})
    assert read(tmp_path)["merges"] == new


def test_special_ids(tmp_path: Path):
    save_tokenizer("qwen35", tmp_path)
    found = read(tmp_path, generation={"eos_token_id": [288, 286]})
    assert found["eos_token_id"] == found["tokens"].index("<|im_end|>") == 288
    assert found["padding_token_id"] == found["tokens"].index("<|endoftext|>") == 286
    assert found["eos_token_ids"] == [288, 286]
    assert found["add_bos_token"] is False
    assert "bos_token_id" not in found


def test_special_ids_fall_back_to_the_configurations(tmp_path: Path):
    save_tokenizer("qwen35", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    found = read(
        tmp_path, config={"bos_token_id": 286, "eos_token_id": 287}, generation={"eos_token_id": 288}
    )
    assert (found["bos_token_id"], found["eos_token_id"]) == (286, 288)
    assert "padding_token_id" not in found and "eos_token_ids" not in found
    assert "add_bos_token" not in found


def test_a_bos_that_the_post_processor_adds(tmp_path: Path):
    save_tokenizer("llama-bpe", tmp_path)
    edit(
        tmp_path / "tokenizer.json",
        post_processor={
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel"},
                {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                },
            ],
        },
    )
    settings = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = read(tmp_path)
    assert found["add_bos_token"] is True and found["bos_token_id"] == 286


def test_smollm_cuts_digits_out_first(tmp_path: Path):
    tokenizer = build_tokenizer("qwen2")
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path)["pre"] == "smollm"


def test_templates_in_the_tokenizer_configuration(tmp_path: Path):
    save_tokenizer("qwen2", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert "chat_template" not in read(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template="one")
    assert read(tmp_path)["chat_template"] == "one"
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    edit(tmp_path / "tokenizer_config.json", chat_template=several)
    assert read(tmp_path)["chat_template"] == "three"


def test_tokens_that_look_special_are_control(tmp_path: Path):
    tokenizer = build_tokenizer("qwen2")
    tokenizer.add_tokens(["<|fim_prefix|>", "<tool_call>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = read(tmp_path)
    by_token = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert (by_token["<|fim_prefix|>"], by_token["<tool_call>"]) == (CONTROL, USER_DEFINED)


def test_an_unknown_regex_is_named(tmp_path: Path):
    save_tokenizer("qwen2", tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(r"|\\p{N}|", r"|\\p{N}{1,7}|"))
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path)
    assert r"\\p{N}{1,7}" in caught.value.message
    assert "needed: the regex of gpt-2, llama-bpe, llama4, qwen2, qwen35" in caught.value.message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre_tokenizer": None}, UnsupportedModel, "needed: ByteLevel, alone or after a Split"),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}],
                }
            },
            UnsupportedModel,
            r"the steps \['Digits', 'ByteLevel'\]",
        ),
        (
            {"model": {"type": "Unigram", "vocab": []}},
            UnsupportedModel,
            "the model is Unigram, needed: byte-level BPE",
        ),
        ({"model": {"type": "BPE"}}, ModelFileError, "model.vocab is absent"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 300}}},
            ModelFileError,
            "token 'a' has id 300, needed: 0 to 299",
        ),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, ModelFileError, "token 'x' has id -1"),
        ({"added_tokens": [{"id": 3}]}, ModelFileError, "token None has id 3"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}},
            ModelFileError,
            "merge 'a b c', needed: two tokens",
        ),
    ],
)
def test_odd_files_are_refused(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path):
    save_tokenizer("qwen2", tmp_path)
    edit(tmp_path / "tokenizer.json", **change)
    with pytest.raises(error, match=message):
        read(tmp_path)


@pytest.mark.parametrize("other", ["tokenizer.model", None])
def test_a_folder_without_tokenizer_json(other: str | None, tmp_path: Path):
    if other:
        (tmp_path / other).touch()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json, needed: a byte-level BPE"):
        read(tmp_path)
