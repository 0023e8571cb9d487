"""Trains the small target's vocabulary and writes it as Hugging Face files.

    python -m workshop training.tokenizer --corpus workshop/training/work/text.jsonl.xz
    python -m workshop training.tokenizer --model TARGET.gguf    extracts a target's vocabulary

Byte-level BPE, NFC, the word pattern of Qwen3.5, 16,384 entries; the special tokens have the last ids.
"""

import hashlib
import itertools
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from bough.gguf.reader import GGUFFile
from workshop.case import case
from workshop.report import Report
from workshop.training import corpus, python_code
from workshop.training.documents import (
    CONTROL_TOKENS,
    END_OF_TEXT,
    MASK_TOKEN,
    SPECIAL_TOKENS,
    TURN_END,
    USER_TOKENS,
    Dialogue,
    Document,
    spells_special,
)
from workshop.training.mathematics import mathematics_dialogue
from workshop.training.task_documents import task_dialogue, task_source

VOCABULARY = 16_384
WORK = Path(__file__).parent / "work"
# llama.cpp's `qwen35`; the converter recognises exactly this text.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Megabytes of each part in the sample: the shares of the training mix, with the small texts in full.
SAMPLE = {
    "task_dialogues": 6.0, "task_sources": 2.0, "code_io": 4.0, "mbpp": 0.2, "library": 6.0,
    "library_plain": 2.0, "library_completions": 2.0, "library_dialogues": 1.0, "mathematics": 3.0,
    "gsm8k": 1.5, "math": 0.5, "worked": 5.0,
    "topical": 4.0, "chatter": 0.1, "wordnet": 2.0, "tldr": 3.0, "manual": 2.0, "manual_dialogues": 1.0,
    "novels": 6.0, "prose": 1.5,
}  # fmt: skip
SAMPLED_FILES = 3000

log = logging.getLogger("tokenizer")


def chat_template() -> str:
    """Return Qwen's ChatML template; a think block opens only if the request enables thinking."""
    return (Path(__file__).parent / "templates" / "chat_template.jinja").read_text(encoding="utf-8")


def train(texts: Iterator[str], size: int = VOCABULARY) -> Tokenizer:
    """Train a tokenizer of exactly `size` entries."""
    tokenizer = _around(BPE())
    trainer = BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _add_special(tokenizer)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(
            f"the sample gives {tokenizer.get_vocab_size()} tokens, needed: {size}; give more text"
        )
    return tokenizer


def from_model(path: Path) -> Tokenizer:
    """Return the tokenizer of a target that was trained by these scripts."""
    with GGUFFile.open(path) as file:
        tokens = file.require("tokenizer.ggml.tokens", list)
        merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges", list)]
    words, special = tokens[: -len(SPECIAL_TOKENS)], tokens[-len(SPECIAL_TOKENS) :]
    if tuple(special) != SPECIAL_TOKENS:
        raise SystemExit(f"{path}: the last tokens are {special}, needed: {list(SPECIAL_TOKENS)}")
    tokenizer = _around(BPE({word: id for id, word in enumerate(words)}, merges))
    _add_special(tokenizer)
    return tokenizer


def _around(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_TOKENS])
    tokenizer.add_special_tokens([AddedToken(MASK_TOKEN, special=True)])


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in USER_TOKENS,
        }
        for token in SPECIAL_TOKENS
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def sample(corpus_file: Path, seed: int, *, scale: float = 1.0) -> dict[str, list[str]]:
    """Yield texts of every part of the mix, up to its share."""
    rng = random.Random(seed)
    records = corpus.label(corpus.read_records(corpus_file))
    rng.shuffle(records)
    files = python_code.source_files()
    files = rng.sample(files, min(SAMPLED_FILES, len(files)))
    sources = (text for path in files if (text := python_code.read_source(path)) is not None)
    streams = itertools.chain(
        (item for part, record in records for item in corpus.items(part, record, rng)),
        (item for text in sources for item in python_code.items(text, rng)),
    )
    chosen: dict[str, list[str]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)

    def wanted(part: str) -> bool:
        return sizes[part] < SAMPLE.get(part, 0) * 1e6 * scale

    def take(part: str, item: Document | Dialogue) -> None:
        text = item.text() if isinstance(item, Dialogue) else item.text
        if isinstance(item, Dialogue) or not spells_special(text):
            chosen[part].append(text)
            sizes[part] += len(text.encode())

    for item in streams:
        part = item.kind if isinstance(item, Dialogue) else item.part
        if wanted(part):
            take(part, item)
    generators = {
        "task_dialogues": task_dialogue,
        "task_sources": task_source,
        "mathematics": mathematics_dialogue,
    }
    for part, make in generators.items():
        while wanted(part):
            take(part, make(rng))
    return chosen


def pieces(texts: list[str]) -> Iterator[str]:
    """Yield the texts between special tokens, which take no part in merges."""
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\0")
        yield from filter(None, text.split("\0"))


@case()
def main(
    report: Report,
    *,
    corpus: Annotated[Path, "the gathered text"] = WORK / "text.jsonl.xz",
    work: Path = WORK,
    seed: int = 1,
    model: Annotated[Path | None, "GGUF file whose vocabulary to extract, instead of training"] = None,
) -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    if model is not None:
        save(from_model(model), work)
        return
    texts = sample(corpus, seed)
    tokenizer = train(itertools.chain.from_iterable(map(pieces, texts.values())))
    save(tokenizer, work)
    density = {}
    for part, part_texts in sorted(texts.items()):
        some = part_texts[:400]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(some))
        density[part] = round(sum(len(each.encode()) for each in some) / tokens, 3)
        log.info(f"{part:18} {density[part]:.2f} bytes a token")
    record = {
        "seed": seed,
        "entries": VOCABULARY,
        "special": {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS},
        "corpus_sha256": hashlib.sha256(corpus.read_bytes()).hexdigest(),
        "sample_bytes": {part: sum(len(each.encode()) for each in some) for part, some in texts.items()},
        "bytes_per_token": density,
        "sha256": hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest(),
    }
    (work / "tokenizer_record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
