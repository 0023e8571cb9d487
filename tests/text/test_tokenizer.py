import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import BadGGUF, Cancelled, PromptTooLong, UnsupportedModel, UsageError
from bough.session.prompts import Prompts
from bough.session.requests import TextRequest
from bough.text.grammar import Grammar, GrammarCompiler
from bough.text.template import ChatTemplate
from bough.text.tokenizer import EncodeLimit, Tokenizer
from tests.text.vocabulary import (
    CONTROL,
    KEY,
    TEXTS,
    TRAINED,
    UNUSED,
    USER_DEFINED,
    awkward_text,
    marked_text,
    ranked,
    ranked_ids,
    trained,
)

PRES = ["qwen2", "qwen35", "llama-bpe", "gpt-2", "smollm", "tekken", "llama4"]
TOKENIZERS = {pre: Tokenizer.from_metadata(trained(pre)[0]) for pre in PRES}
ENDOFTEXT, IM_START, IM_END, IM_END_LONG = range(TRAINED, TRAINED + len(CONTROL))
THINK, THINK_END, TOOL_CALL = range(TRAINED + len(CONTROL), TRAINED + len(CONTROL) + len(USER_DEFINED))
PAD = TRAINED + len(CONTROL) + len(USER_DEFINED)


def changed(pre: str = "qwen35", **values) -> dict:
    metadata = trained(pre)[0] | {KEY + name: value for name, value in values.items()}
    return {name: value for name, value in metadata.items() if value is not None}


@pytest.mark.parametrize("pre", PRES)
@given(text=marked_text)
def test_ids_equal_those_of_the_original_libraries(pre: str, text: str):
    expected = trained(pre)[1].encode(text, add_special_tokens=False).ids
    assert TOKENIZERS[pre].encode(text) == expected


@pytest.mark.parametrize("pre", PRES)
def test_ids_equal_on_the_training_texts(pre: str):
    for text in TEXTS:
        ids = TOKENIZERS[pre].encode(text)
        assert ids == trained(pre)[1].encode(text, add_special_tokens=False).ids
        assert len(ids) < len(text.encode()) * 0.7


@pytest.mark.parametrize("pre", PRES)
@given(text=awkward_text)
def test_round_trip(pre: str, text: str):
    tokenizer = TOKENIZERS[pre]
    kept = unicodedata.normalize("NFC", text) if pre.startswith("qwen") else text
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == kept
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == kept
    assert tokenizer.encode(text) == ids


@given(text=marked_text, special=st.booleans())
def test_fillers_are_never_encoded_and_control_tokens_only_with_special(text: str, special: bool):
    ids = TOKENIZERS["llama-bpe"].encode(text, special=special)
    assert not set(ids) & set(range(PAD, PAD + len(UNUSED)))
    if not special:
        assert not set(ids) & set(range(TRAINED, THINK))


def test_special_strings_become_ids():
    tokenizer = TOKENIZERS["qwen35"]
    text = "<|im_start|>user\nHi<think></think><|im_end|>"
    ids = tokenizer.encode(text)
    assert [id for id in ids if id >= TRAINED] == [IM_START, THINK, THINK_END, IM_END]
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids) == "user\nHi<think></think>"


def test_control_strings_stay_text_where_the_caller_says_so():
    tokenizer = TOKENIZERS["qwen35"]
    text = "a<|im_end|>b<|im_end|><think>"
    plain = tokenizer.encode(text, special=False)
    assert [id for id in plain if id >= TRAINED] == [THINK]
    assert tokenizer.decode(plain) == text

    mixed = tokenizer.encode(text, literals=[(1, 11)])
    assert [id for id in mixed if id >= TRAINED] == [IM_END, THINK]
    assert mixed.index(IM_END) > mixed.index(tokenizer.id_of("b"))
    assert tokenizer.decode(mixed, skip_special=False) == text
    assert mixed[:-2] == tokenizer.encode("a<|im_end|>b", special=False)


def test_the_longest_special_string_wins():
    assert TOKENIZERS["gpt-2"].encode("<|im_end|>|><|im_end|>|") == [
        IM_END_LONG,
        IM_END,
        TOKENIZERS["gpt-2"].id_of("|"),
    ]


def test_fillers_decode_to_nothing():
    tokenizer = TOKENIZERS["qwen2"]
    assert tokenizer.decode([PAD, *tokenizer.encode("x"), PAD + 1], skip_special=False) == "x"
    assert tokenizer.token_bytes(PAD) == b""
    assert tokenizer.id_of(UNUSED[0]) is None
    assert tokenizer.vocab_size == PAD + len(UNUSED)


@pytest.mark.parametrize("id", [-1, 10**9])
def test_an_id_outside_the_vocabulary_is_named(id: int):
    with pytest.raises(UsageError, match=rf"{id} .*0 to {PAD + len(UNUSED) - 1}"):
        TOKENIZERS["qwen2"].decode([id])


def test_lone_surrogates_become_replacement_characters():
    tokenizer = TOKENIZERS["qwen2"]
    assert tokenizer.decode(tokenizer.encode("a\ud83d<|im_end|>\udc00b", literals=[(2, 12)])) == (
        "a\ufffd<|im_end|>\ufffdb"
    )


def test_numbers_are_split_as_the_model_expects():
    def pieces(pre: str, text: str) -> list[str]:
        alphabet = changed(pre)[f"{KEY}tokens"][:256]
        metadata = changed(pre, merges=["1 2", "12 3", "123 4"], token_type=[1] * 259)
        metadata[f"{KEY}tokens"] = [*alphabet, "12", "123", "1234"]
        del metadata[f"{KEY}eos_token_id"], metadata[f"{KEY}padding_token_id"]
        tokenizer = Tokenizer.from_metadata(metadata)
        return [tokenizer.decode([id]) for id in tokenizer.encode(text)]

    assert pieces("qwen2", "1234") == pieces("qwen35", "1234") == ["1", "2", "3", "4"]
    assert pieces("llama-bpe", "1234") == pieces("llama3", "1234") == ["123", "4"]
    assert pieces("gpt-2", "1234") == ["1234"]


def test_llama_takes_a_word_of_the_vocabulary_whole():
    tokens = [*changed()[f"{KEY}tokens"][:256], "hello"]
    values = {
        "tokens": tokens,
        "token_type": [1] * 257,
        "merges": [],
        "eos_token_id": 0,
        "padding_token_id": 0,
    }
    assert Tokenizer.from_metadata(changed("llama-bpe", **values)).encode("hello") == [256]
    assert len(Tokenizer.from_metadata(changed("gpt-2", **values)).encode("hello")) == 5


def test_combining_marks_belong_to_words_in_qwen35_only():
    text = "क्षत्रिय"
    pieces = {pre: trained(pre)[1].pre_tokenizer.pre_tokenize_str(text) for pre in ("qwen2", "qwen35")}
    assert len(pieces["qwen35"]) == 1 < len(pieces["qwen2"])


def test_stop_set_holds_every_end_token():
    assert TOKENIZERS["qwen35"].stop_ids == {ENDOFTEXT, IM_END}
    assert TOKENIZERS["qwen35"].eos_id == IM_END
    assert TOKENIZERS["qwen35"].pad_id == ENDOFTEXT
    more = Tokenizer.from_metadata(changed(eot_token_id=5, eom_token_id=np.uint32(6), eos_token_ids=[7, 8]))
    assert more.stop_ids == {5, 6, 7, 8, ENDOFTEXT, IM_END}
    types = list(trained("qwen35")[0][f"{KEY}token_type"])
    types[ENDOFTEXT] = 4
    assert Tokenizer.from_metadata(changed(token_type=types)).stop_ids == {IM_END}
    assert Tokenizer.from_metadata(changed(eos_token_id=None)).eos_id is None


@pytest.mark.parametrize("type", [3, 4])
def test_tokens_that_end_a_completion_of_code(type: int):
    tokens, types = list(changed()[f"{KEY}tokens"]), list(changed()[f"{KEY}token_type"])
    tokens[PAD : PAD + 2], types[PAD : PAD + 2] = ["<|file_sep|>", "<|fim_pad|>"], [type, type]
    stops = Tokenizer.from_metadata(changed(tokens=tokens, token_type=types)).stop_ids
    assert stops == {ENDOFTEXT, IM_END, PAD, PAD + 1}


def test_a_vocabulary_made_from_text_may_lack_rare_bytes():
    """As SmolLM2's, which lacks six control characters and two bytes of empty planes."""
    tokens, merges = list(changed("smollm")[f"{KEY}tokens"]), changed("smollm")[f"{KEY}merges"]
    for symbol in "ñòĄĆēĔĖĝ":
        id = tokens.index(symbol)
        tokens[id] = f"[no {id}]"
        assert not any(symbol in merge for merge in merges)
    tokenizer = Tokenizer.from_metadata(changed("smollm", tokens=tokens))
    whole = TOKENIZERS["smollm"]
    assert tokenizer.encode("a\x04b in 2025") == whole.encode("a") + whole.encode("b in 2025")


def test_bos_only_where_the_file_or_its_family_has_it():
    def bos(pre: str, **values) -> int | None:
        return Tokenizer.from_metadata(changed(pre, bos_token_id=3, **values)).bos_id

    assert bos("qwen35") is None
    assert bos("qwen35", add_bos_token=False) is None
    assert bos("qwen35", add_bos_token=True) == 3
    assert bos("llama-bpe") == 3
    assert bos("llama-bpe", add_bos_token=False) is None


def test_numpy_arrays_and_tuples_are_read():
    metadata = changed()
    metadata[f"{KEY}token_type"] = np.array(metadata[f"{KEY}token_type"], dtype=np.int32)
    metadata[f"{KEY}tokens"] = tuple(metadata[f"{KEY}tokens"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode(TEXTS[0]) == TOKENIZERS["qwen35"].encode(TEXTS[0])


def test_raw_bytes_of_tokens():
    tokens, types = list(changed()[f"{KEY}tokens"]), list(changed()[f"{KEY}token_type"])
    tokens[PAD], types[PAD] = "<0xE2>", 6
    tokens[PAD + 1], types[PAD + 1] = "日本", 1
    tokenizer = Tokenizer.from_metadata(changed(tokens=tokens, token_type=types))
    assert tokenizer.token_bytes(PAD) == b"\xe2"
    assert tokenizer.token_bytes(PAD + 1) == "日本".encode()
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>"
    assert sorted(tokenizer.token_bytes(id) for id in range(256)) == [bytes([byte]) for byte in range(256)]


def test_only_fillers_may_repeat():
    tokens, types = list(changed()[f"{KEY}tokens"]), list(changed()[f"{KEY}token_type"])
    tokens[PAD] = tokens[PAD + 1] = tokens[300]
    tokenizer = Tokenizer.from_metadata(changed(tokens=tokens, token_type=types))
    assert tokenizer.encode(TEXTS[0]) == TOKENIZERS["qwen35"].encode(TEXTS[0])
    tokens[PAD] = ""
    types[PAD] = 3
    assert Tokenizer.from_metadata(changed(tokens=tokens, token_type=types)).decode([PAD]) == ""


TOKENS = trained("qwen35")[0][f"{KEY}tokens"]
TYPES = trained("qwen35")[0][f"{KEY}token_type"]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model": "t5"}, UnsupportedModel, "tokenizer.ggml.model is 't5'; supported are 'gpt2'"),
        ({"model": "llama"}, BadGGUF, "key tokenizer.ggml.scores is missing"),
        ({"model": None}, BadGGUF, "key tokenizer.ggml.model is missing"),
        (
            {"pre": "viking"},
            UnsupportedModel,
            "tokenizer.ggml.pre is 'viking'; supported are .*qwen2, qwen35",
        ),
        ({"pre": 3}, UnsupportedModel, "tokenizer.ggml.pre is 3"),
        ({"pre": None}, BadGGUF, "key tokenizer.ggml.pre is missing"),
        ({"tokens": None}, BadGGUF, "tokens is missing"),
        ({"token_type": None}, BadGGUF, "token_type is missing"),
        ({"merges": None}, BadGGUF, "merges is missing"),
        ({"tokens": "abc"}, BadGGUF, "tokens is of type str; needs an array"),
        ({"tokens": [*TOKENS[:-1], 5]}, BadGGUF, "tokens holds values that are not strings"),
        ({"token_type": TYPES[:-1]}, BadGGUF, "token_type has 508 entries; needs 509"),
        ({"token_type": [*TYPES[:-1], 9]}, BadGGUF, "token_type is 9 for token 508; needs 1 to 6"),
        ({"token_type": [*TYPES[:-1], "1"]}, BadGGUF, "token_type holds values that are not integers"),
        ({"tokens": ["!!!!", *TOKENS[1:]]}, BadGGUF, "lacks 1 of the 209 symbols .*'!'"),
        ({"tokens": [*TOKENS[:400], "<think>", *TOKENS[401:]]}, BadGGUF, "'<think>' as both 400 and 504"),
        ({"merges": ["a b c"]}, BadGGUF, "merges has 'a b c' at index 0; needs 'LEFT RIGHT'"),
        ({"merges": ["t h", "ab"]}, BadGGUF, "merges has 'ab .*' at index 1"),
        ({"merges": ["z q"]}, BadGGUF, "merges has 'z q' at index 0"),
        ({"eos_token_id": 509}, BadGGUF, "eos_token_id is 509; needs a token id from 0 to 508"),
        ({"eos_token_id": -1}, BadGGUF, "eos_token_id is -1"),
        ({"eot_token_id": "x"}, BadGGUF, "eot_token_id is 'x'"),
        ({"padding_token_id": 1.5}, BadGGUF, "padding_token_id is 1.5"),
        ({"eos_token_ids": [1, 5000]}, BadGGUF, "eos_token_ids is 5000"),
        ({"eos_token_ids": 4}, BadGGUF, "eos_token_ids is of type int; needs an array"),
    ],
)
def test_bad_metadata_is_named(values: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message) as caught:
        Tokenizer.from_metadata(changed(**values), source="file.gguf")
    assert str(caught.value).startswith("file.gguf: ")


SEPARATED = st.lists(
    st.sampled_from(
        ["a", "Hello", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", "'s", "1", "é", "e\u0301", "語", "\u00a0"]
    )
    | awkward_text,
    max_size=40,
).map("".join)


@pytest.mark.parametrize("pre", PRES)
@given(text=SEPARATED)
def test_encoding_in_pieces_does_not_change_the_ids(pre: str, text: str):
    whole = TOKENIZERS[pre].encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bough.text.tokenizer.PIECE", 3)
        assert TOKENIZERS[pre].encode(text, limit=EncodeLimit(10**6)) == whole


@pytest.mark.parametrize("pre", PRES)
def test_a_text_that_cannot_fit_is_refused_by_its_bytes(pre: str):
    tokenizer = TOKENIZERS[pre]
    room = 100 * tokenizer.longest_token
    assert tokenizer.encode("a" * room, limit=EncodeLimit(100, stops_at_tokens=False))
    with pytest.raises(PromptTooLong, match="at least 101 tokens, the context holds 100"):
        tokenizer.encode("a" * (room + 1), limit=EncodeLimit(100))
    # Composition may shorten a text to a third.
    assert tokenizer.encode("e\u0301" * room, limit=EncodeLimit(100, stops_at_tokens=False))


def test_encoding_stops_when_it_is_too_long_or_cancelled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bough.text.tokenizer.PIECE", 100)
    tokenizer = TOKENIZERS["qwen35"]
    with pytest.raises(PromptTooLong, match="at least") as caught:
        tokenizer.encode("x y " * 10_000, limit=EncodeLimit(5_000))
    assert caught.value.tokens < 5_200
    asked: list[bool] = []
    limit = EncodeLimit(10**6, lambda: len(asked) == 3 or asked.append(True) is not None)
    with pytest.raises(Cancelled):
        tokenizer.encode("x y " * 10_000, limit=limit)
    assert len(asked) == 3


def test_texts_that_were_counted_are_encoded_once(monkeypatch: pytest.MonkeyPatch):
    tokenizer, texts, calls = TOKENIZERS["qwen35"], ["Hello there", "", " \ud800 x\n"], []
    expected, encodings = tokenizer.encode_all(texts), tokenizer._encodings
    monkeypatch.setattr(tokenizer, "_encodings", lambda texts: calls.append(texts) or encodings(texts))
    assert tokenizer.count_all(texts) == [len(ids) for ids in expected]
    assert tokenizer.encode_all(list(texts)) == expected and len(calls) == 1
    assert tokenizer.encode_all(texts) == expected and len(calls) == 2  # nothing is kept for longer
    tokenizer.count_all(["other"])
    assert tokenizer.encode_all(texts) == expected and len(calls) == 4


def test_tokenizers_that_encode_alike():
    first, second = (Tokenizer.from_metadata(changed()) for _ in range(2))
    assert first.encodes_like(second)
    merges = changed()[f"{KEY}merges"]
    assert not first.encodes_like(Tokenizer.from_metadata(changed(merges=merges[:-1])))
    assert not first.encodes_like(Tokenizer.from_metadata(changed(pre="gpt-2")))


RANKED = Tokenizer.from_metadata(ranked())
ranked_text = st.lists(awkward_text | st.sampled_from(["l", "ll", " ", "   ", "▁", "the ", "_"]), max_size=12)


@given(text=ranked_text.map("".join))
def test_ranked_merges_encode_as_sentencepiece(text: str):
    ids = RANKED.encode(text, special=False)
    assert ids == ranked_ids(text, ranked())
    assert RANKED.decode(ids) == text.replace("▁", " ")
    assert RANKED.count_all([text]) == [len(ids)] and RANKED.encode_all([text]) == [ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bough.text.tokenizer.PIECE", 3)
        assert RANKED.encode(text, special=False) == ids


@pytest.mark.parametrize("run", [" ", "l", "- ", "語", "\x00"])
def test_runs_of_equal_characters(run: str):
    for length in range(1, 50):
        assert RANKED.encode(run * length) == ranked_ids(run * length, ranked())


@given(lengths=st.sets(st.integers(2, 20), min_size=1))
def test_runs_whose_tokens_have_equal_scores_grow_from_the_left(lengths: set[int]):
    names = ["▁", "a", *("▁" * length for length in sorted(lengths, key=hash))]
    tokens = [*ranked()[f"{KEY}tokens"][:259], *names]
    types = [*ranked()[f"{KEY}token_type"][:259], *[1] * len(names)]
    values = {"tokens": tokens, "token_type": types, "scores": [-1.0] * len(tokens)}
    metadata = ranked() | {KEY + name: value for name, value in values.items()}
    tokenizer = Tokenizer.from_metadata(metadata)
    for length in range(40):
        assert tokenizer.encode("a" + " " * length) == ranked_ids("a" + " " * length, metadata)


def test_a_text_begins_with_a_space_also_after_special_tokens():
    the = RANKED.encode("the")
    assert RANKED.encode("<s>the</s><tool>the") == [1, *the, 2, RANKED.id_of("<tool>"), *the]
    assert RANKED.decode([1, *the, 2, *the], skip_special=False) == "<s>the</s>the"
    assert RANKED.decode([*the, *the]) == "the the"
    assert RANKED.encode(" the</s>the", begins=False) == [*the, 2, *the]
    assert RANKED.encode("the", begins=False) != the
    assert RANKED.stream().push(the) == " the"  # what is generated may continue a text
    assert (RANKED.bos_id, RANKED.eos_id, RANKED.stop_ids) == (1, 2, {2})
    without = Tokenizer.from_metadata(ranked() | {f"{KEY}add_space_prefix": False})
    assert without.encode(" the") == the and without.decode(without.encode(" the</s>the")) == " thethe"
    assert not without.encodes_like(RANKED)


def test_a_vocabulary_with_tokens_of_several_words_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    tokens = [*ranked()[f"{KEY}tokens"], "o▁", "o▁w"]
    scores, types = [*ranked()[f"{KEY}scores"], 1.0, 2.0], [*ranked()[f"{KEY}token_type"], 1, 1]
    metadata = ranked() | {f"{KEY}tokens": tokens, f"{KEY}scores": scores, f"{KEY}token_type": types}
    monkeypatch.setattr("bough.text.tokenizer.PIECE", 3)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("two words, to what") == ranked_ids("two words, to what", metadata)
    assert len(tokens) - 1 in tokenizer.encode("two words, to what")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 entries; needs"),
        ({"scores": ["0"] * len(ranked()[f"{KEY}tokens"])}, "numbers, one a token"),
        ({"tokens": ["<unk>", "<s>", "</s>", "<0>", *ranked()[f"{KEY}tokens"][4:]]}, "lacks 1 of .* <0x00>"),
        ({"tokens": [*ranked()[f"{KEY}tokens"][:-2], "Ж▁Ж", "<tool>"]}, "but not each of its characters"),
        ({"scores": [0.0] * len(ranked()[f"{KEY}tokens"])}, "with the same score; needs a rank"),
    ],
)
def test_bad_sentencepiece_metadata_is_named(values: dict, message: str):
    with pytest.raises(BadGGUF, match=message):
        Tokenizer.from_metadata(ranked() | {KEY + name: value for name, value in values.items()})


def test_grammars_over_a_sentencepiece_vocabulary():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = GrammarCompiler(RANKED).compile(Grammar("json_schema", schema))
    for id in RANKED.encode('{"a": 12}', begins=False):
        assert matcher.mask()[id // 32] >> (id % 32) & 1, RANKED.token_bytes(id)
        assert matcher.advance(id)
    assert matcher.may_end


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ bos_token + messages[0].content }}", None]
)
def test_a_chat_begins_with_one_bos(template: str | None):
    metadata = ranked() | {f"{KEY}bos_token_id": 1, "tokenizer.chat_template": template}
    prompts = Prompts(
        RANKED, ChatTemplate.from_metadata({k: v for k, v in metadata.items() if v is not None})
    )
    ids = prompts.encode(TextRequest(messages=[{"role": "user", "content": "the"}])).ids
    assert ids[0] == 1 and ids.count(1) == 1
