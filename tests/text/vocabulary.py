"""Small vocabularies trained here, as GGUF metadata and as the tokenizer others would build from them."""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

KEY = "tokenizer.ggml."
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]
UNUSED = ["[PAD507]", "[PAD508]"]
TRAINED = 500
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's what they'll do, we've seen it 1234 times in 2025!",
    "def add(left, right):\n    return left + right\n\n\nclass Thing:\r\n\tpass\r\n  \t x = 12345 + 678",
    "Größe, naïve café, Ωμέγα, Привет мир, नमस्ते दुनिया, สวัสดีชาวโลก, 한국어, 日本語のテキスト, שלום עולם",
    "🙂🙃 👩‍👩‍👧‍👦 e\u0301 a\u0308 \u1112\u1161\u11ab ½ Ⅷ ٣٤٥ ... !!! --> <|> <think </thing> '''",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Mistral's tokenizer.json has it.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Llama 4's has it, and GPT-4o's.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def trained(pre: str) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """GGUF metadata with the word rule `pre`, and the tokenizer it should equal."""
    pupil = _tokenizer(pre, {}, [])
    pupil.model = BPE()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=TRAINED, initial_alphabet=alphabet, show_progress=False)
    pupil.train_from_iterator(TEXTS, trainer)
    model = json.loads(pupil.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    expected = _tokenizer(pre, model["vocab"], merges)
    expected.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    expected.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED])
    vocabulary = expected.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__) + UNUSED
    types = [1] * TRAINED + [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [5] * len(UNUSED)
    assert tokens[TRAINED:] == [*CONTROL, *USER_DEFINED, *UNUSED]
    metadata = {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": pre,
        f"{KEY}tokens": tokens,
        f"{KEY}token_type": types,
        f"{KEY}merges": [" ".join(merge) for merge in merges],
        f"{KEY}eos_token_id": vocabulary["<|im_end|>"],
        f"{KEY}padding_token_id": vocabulary["<|endoftext|>"],
    }
    return metadata, expected


def _tokenizer(pre: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    match pre:
        case "qwen2":
            return Qwen2Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
        case "qwen35":
            return Qwen3_5Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    whole_words = pre in ("llama-bpe", "tekken")
    tokenizer = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=whole_words))
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        pattern = {"tekken": TEKKEN, "llama4": O200K}.get(pre, LLAMA3)
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    return tokenizer


@cache
def ranked() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: characters and merged words with scores, and bytes."""
    pupil = tokenizers.Tokenizer(BPE())
    # Spaces begin words, so no token has one behind another character.
    pupil.pre_tokenizer = pre_tokenizers.Metaspace()
    pupil.train_from_iterator(TEXTS, BpeTrainer(vocab_size=TRAINED, show_progress=False))
    vocabulary = pupil.get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    merged = [word for word in words if len(word) > 1] + ["▁▁", "▁▁▁", "▁▁▁▁", "lll", "ll"]
    letters = [word for word in words if len(word) == 1]
    words = list(dict.fromkeys([*merged, *letters]))
    control, bytes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *bytes, *words, "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [0.0]
    # As Llama 2's, whose runs of spaces come last and have the same score.
    scores = [-1e9 if set(token) == {"▁"} else score for token, score in zip(tokens, scores, strict=True)]
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": tokens,
        f"{KEY}scores": scores,
        f"{KEY}token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [4],
    }


def ranked_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """Encode a text without special tokens as SentencePiece does, in the plainest way."""
    tokens, scores = metadata[f"{KEY}tokens"], metadata[f"{KEY}scores"]
    ids = {token: id for id, token in enumerate(tokens) if metadata[f"{KEY}token_type"][id] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(ids.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        known = [(-scores[id], at) for id, at in pairs if id is not None]
        if not known:
            break
        _, at = min(known)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    by_parts = ([ids[part]] if part in ids else [3 + byte for byte in part.encode()] for part in parts)
    return [id for part in by_parts for id in part]


# Code points that are missing in Python's Unicode tables may combine in newer ones.
plain_text = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=60)
awkward = st.sampled_from(
    [
        "\r\n",
        "\x00",
        "  ",
        "\t\n ",
        "e\u0301",
        "\u0301",
        "👩‍👩‍👧‍👦",
        "नि",
        "12345",
        "'LL",
        "ﬁ",
        "\ufeff",
        "한",
        "가\u11a8",
    ]
)
awkward_text = (
    st.lists(st.one_of(plain_text, awkward), max_size=8)
    .map("".join)
    .filter(lambda text: not any(token in text for token in (*CONTROL, *USER_DEFINED)))
)
special = st.sampled_from([*CONTROL, *USER_DEFINED, *UNUSED, "<|im_", "end|>", "|>"])
marked_text = st.lists(st.one_of(plain_text, awkward, special), max_size=10).map("".join)
