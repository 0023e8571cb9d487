"""Tokenizer files of a Hugging Face folder as GGUF metadata: tokens, merges, special ids, chat template.

Supports byte-level BPE only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bough.convert.checkpoint import HFConfig, read_json, read_optional_json
from bough.convert.families import Entry
from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.writer import ValueType
from bough.text.tokenizer import TokenType

NORMAL, CONTROL = int(TokenType.NORMAL), int(TokenType.CONTROL)
USER_DEFINED, UNUSED = int(TokenType.USER_DEFINED), int(TokenType.UNUSED)
_LETTERS = r"|[^\r\n\p{L}\p{N}]?"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Pre-tokeniser regexes with llama.cpp's names for them.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [f"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?", f"{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"]
PRE_TOKENISERS = {
    _CONTRACTIONS + _LETTERS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES: "qwen2",
    _CONTRACTIONS + _LETTERS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES: "qwen35",
    _CONTRACTIONS + _LETTERS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES: "llama-bpe",
    "".join(_CASED)[1:] + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES: "llama4",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
}


def read_vocabulary(folder: Path, config: HFConfig, generation: dict[str, Any], *, size: int) -> list[Entry]:
    """Return the tokenizer.* entries for a model whose embedding has `size` rows."""
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()
        ]
        seen = f"has {others[0]} but no tokenizer.json" if others else "has no tokenizer.json"
        raise ModelFileError(f"{folder} {seen}, needed: a byte-level BPE tokenizer in tokenizer.json")
    tokenizer = read_json(path)
    settings = read_optional_json(folder / "tokenizer_config.json")
    tokens, types = _tokens(path, tokenizer, size)
    entries: list[Entry] = [
        ("tokenizer.ggml.model", "gpt2", None),
        ("tokenizer.ggml.pre", pre_tokeniser(path, tokenizer), None),
        ("tokenizer.ggml.tokens", tokens, ValueType.STRING),
        ("tokenizer.ggml.token_type", types, ValueType.INT32),
        ("tokenizer.ggml.merges", _merges(path, tokenizer), ValueType.STRING),
    ]
    ids = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    special = _special_ids(config, settings, generation, ids=ids, size=size)
    entries += [(f"tokenizer.ggml.{key}", value, None) for key, value in special.items()]
    add_bos = _adds_bos(tokenizer, settings, special.get("bos_token_id"), ids)
    if add_bos is not None:
        entries.append(("tokenizer.ggml.add_bos_token", add_bos, None))
    stops = generation.get("eos_token_id")
    if isinstance(stops, list) and all(isinstance(stop, int) and 0 <= stop < size for stop in stops):
        entries.append(("tokenizer.ggml.eos_token_ids", stops, ValueType.UINT32))
    template = _chat_template(folder, settings)
    if template is not None:
        entries.append(("tokenizer.chat_template", template, None))
    return entries


def pre_tokeniser(path: Path, tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for tokenizer.json's pre-tokeniser."""
    steps = list(_steps(tokenizer.get("pre_tokenizer")))
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" not in kinds:
        raise UnsupportedModel(
            f"{path}: pre_tokenizer has the steps {kinds}, needed: ByteLevel, alone or after a Split"
        )
    byte_level = steps[kinds.index("ByteLevel")]
    single = kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits")
    if single and byte_level.get("use_regex", True) and not byte_level.get("add_prefix_space", True):
        return "smollm"
    if kinds == ["ByteLevel"] and byte_level.get("use_regex", True):
        return "gpt-2"
    if kinds != ["Split", "ByteLevel"] or byte_level.get("use_regex", True):
        raise UnsupportedModel(f"{path}: pre_tokenizer has the steps {kinds}, needed: Split, ByteLevel")
    pattern = steps[0].get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    name = PRE_TOKENISERS.get(str(regex))
    if name is None or steps[0].get("behavior") != "Isolated" or steps[0].get("invert"):
        raise UnsupportedModel(
            f"{path}: pre_tokenizer splits by {json.dumps(pattern)} ({steps[0].get('behavior')}), "
            f"needed: the regex of {', '.join(sorted(PRE_TOKENISERS.values()))}"
        )
    return name


def _steps(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return
    nested = pre_tokenizer.get("pretokenizers")
    if pre_tokenizer.get("type") == "Sequence" and isinstance(nested, list):
        for step in nested:
            yield from _steps(step)
    else:
        yield pre_tokenizer


def _tokens(path: Path, tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        kind = model.get("type") if isinstance(model, dict) else None
        raise UnsupportedModel(f"{path}: the model is {kind}, needed: byte-level BPE")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise ModelFileError(f"{path}: model.vocab is absent, needed: tokens with their ids")
    tokens: list[str | None] = [None] * size
    types = [UNUSED] * size
    for token, index in vocabulary.items():
        _check_id(path, token, index, size)
        tokens[index], types[index] = token, NORMAL
    for added in _objects(tokenizer.get("added_tokens")):
        token, index = _check_id(path, added.get("content"), added.get("id"), size)
        tokens[index] = token
        # Fill-in-the-middle tokens are not marked special in Qwen's files, but must not be printed.
        special = added.get("special") or (token.startswith("<|") and token.endswith("|>"))
        types[index] = CONTROL if special else USER_DEFINED
    return [f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)], types


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (entry for entry in value if isinstance(entry, dict))


def _check_id(path: Path, token: Any, index: Any, size: int) -> tuple[str, int]:
    if isinstance(token, str) and isinstance(index, int) and 0 <= index < size:
        return token, index
    raise ModelFileError(
        f"{path}: token {token!r} has id {index}, needed: 0 to {size - 1}, the embedding's rows"
    )


def _merges(path: Path, tokenizer: dict[str, Any]) -> list[str]:
    merges = []
    for merge in tokenizer["model"].get("merges") or ():
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(x, str) and x for x in pair):
            raise ModelFileError(f"{path}: merge {merge!r}, needed: two tokens")
        if " " in pair[0] + pair[1]:
            raise ModelFileError(f"{path}: merge {merge!r} has a space in it, needed: byte-level tokens")
        merges.append(f"{pair[0]} {pair[1]}")
    return merges


def _special_ids(
    config: HFConfig,
    settings: dict[str, Any],
    generation: dict[str, Any],
    *,
    ids: dict[str, int],
    size: int,
) -> dict[str, int]:
    """Return special token ids by GGUF key, from tokenizer_config.json or else from the configurations."""
    special = {}
    for kind, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "padding_token_id")):
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = ids.get(token) if isinstance(token, str) else None
        for source in (generation if kind == "eos" else {}, config.values):
            if index is None:
                index = source.get(f"{kind}_token_id")
                index = index[0] if isinstance(index, list) and index else index
        if isinstance(index, int) and 0 <= index < size:
            special[key] = index
    return special


def _adds_bos(
    tokenizer: dict[str, Any], settings: dict[str, Any], bos: int | None, ids: dict[str, int]
) -> bool | None:
    """Return whether prompts begin with the bos token; None if the files do not say."""
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    post = tokenizer.get("post_processor")
    for step in _objects(post.get("processors", [post]) if isinstance(post, dict) else None):
        pieces = list(_objects(step.get("single")))
        if step.get("type") == "TemplateProcessing" and pieces:
            first = pieces[0].get("SpecialToken")
            return bos is not None and isinstance(first, dict) and ids.get(str(first.get("id"))) == bos
    return None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in _objects(template)}
        template = named.get("default")
    return template if isinstance(template, str) else None
