"""The sampling recommended for a model: by its card, else by its file, else by its family's publisher."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bough.hub.catalog import ModelCard, Sampling

# Our name of a value, the file's below general.sampling, and what makes sense.
_KEYS = (
    ("temperature", "temp", 0.0, 100.0),
    ("top_k", "top_k", 0, math.inf),
    ("top_p", "top_p", math.ulp(0.0), 1.0),
    ("min_p", "min_p", 0.0, 1.0),
    ("repetition_penalty", "penalty_repeat", 0.01, 100.0),
)
# Below this width Qwen2.5's models come with a stronger penalty: those up to 1.5B.
_SMALL = 2048
# Such a model gives an answer again and again: how often a sentence may stand in those of a chat.
_SENTENCES = 3
_UNKNOWN = Sampling(0.7, top_p=0.95)
# With and without reasoning, as in the generation_config.json of the publisher's models.
_FAMILIES: Mapping[str, tuple[Sampling, Sampling]] = {
    "qwen2": (
        Sampling(0.6, top_p=0.95),  # QwQ, DeepSeek-R1-Distill
        Sampling(0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    ),
    "qwen3": (Sampling(0.6, top_p=0.95, top_k=20), Sampling(0.7, top_p=0.8, top_k=20)),
    "qwen35": (
        Sampling(1.0, top_p=0.95, top_k=20, presence_penalty=1.5),
        Sampling(0.7, top_p=0.8, top_k=20, presence_penalty=1.5),
    ),
    "muse-glimmer": (Sampling(1.0, top_p=0.95, top_k=64), Sampling(1.0, top_p=0.95, top_k=64)),
    "llama 3": (Sampling(0.6, top_p=0.95), Sampling(0.6, top_p=0.9)),
}
_ALIASES = {"qwen3moe": "qwen3", "qwen35moe": "qwen35"}


@dataclass(frozen=True, slots=True)
class Recommended:
    thinking: Sampling
    plain: Sampling
    source: str  # who recommends them
    thinks: bool  # whether the model reasons by default
    effort: str = ""  # of reasoning; empty: the template's default
    sentences: int = 0  # how often one may stand in the answers of a chat; 0: any number

    def sampling(self, thinking: bool | None) -> Sampling:
        """Return the values with or without reasoning; None: as the model does by default."""
        return self.thinking if (self.thinks if thinking is None else thinking) else self.plain


def recommended(card: ModelCard | None, metadata: Mapping[str, Any]) -> Recommended:
    """Return what is recommended for a model with this card and this file."""
    width = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
    small = isinstance(width, int) and width < _SMALL
    return replace(_values(card, metadata, small=small), sentences=_SENTENCES if small else 0)


def _values(card: ModelCard | None, metadata: Mapping[str, Any], *, small: bool) -> Recommended:
    reasons = "<think>" in str(metadata.get("tokenizer.chat_template") or "")
    thinks = reasons if card is None else card.thinking
    if card is not None and card.sampling:
        thinking, plain = card.sampling["thinking"], card.sampling["plain"]
        return Recommended(thinking, plain, f"the card {card.name}", thinks, card.effort)
    stated = of_file(metadata)
    if "temperature" in stated:
        alone = Sampling(**stated)
        return Recommended(alone, alone, "the model's file", thinks)
    family = _family(metadata)
    thinking, plain = _FAMILIES.get(family, (_UNKNOWN, _UNKNOWN))
    if family == "qwen2" and small:
        plain = replace(plain, repetition_penalty=1.1)
    source = f"the publisher of {family}" if family in _FAMILIES else "bough, as nothing is known"
    return Recommended(replace(thinking, **stated), replace(plain, **stated), source, thinks)


def of_file(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling that a file's metadata names, without values that make no sense."""
    stated: dict[str, Any] = {}
    for name, key, low, high in _KEYS:
        value = metadata.get(f"general.sampling.{key}")
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if value is not None and low <= float(value) <= high:
                stated[name] = int(value) if name == "top_k" else float(value)
    return stated


def _family(metadata: Mapping[str, Any]) -> str:
    architecture = str(metadata.get("general.architecture", ""))
    if architecture == "llama":  # of many publishers: only Meta's since version 3 have this vocabulary
        return "llama 3" if metadata.get("tokenizer.ggml.pre") == "llama-bpe" else ""
    return _ALIASES.get(architecture, architecture)


NOTHING_KNOWN = recommended(None, {})
