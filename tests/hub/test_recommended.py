"""Sampling of requests that do not say: the card's, else the file's, else the family's publisher's."""

from dataclasses import replace
from typing import Any

import pytest

from bough.hub.catalog import Sampling, named
from bough.hub.recommended import NOTHING_KNOWN, recommended


def metadata(architecture: str, **more: Any) -> dict[str, Any]:
    return {"general.architecture": architecture, **more}


def test_the_card_comes_first_and_says_when_a_model_thinks() -> None:
    found = named("qwen3-4b")
    assert found is not None
    advice = recommended(found[0], metadata("qwen3", **{"general.sampling.temp": 0.1}))
    assert advice.source == "the card qwen3-4b" and advice.thinks
    assert advice.sampling(None) == advice.sampling(True) == Sampling(0.6, top_p=0.95, top_k=20)
    assert advice.sampling(False) == Sampling(0.7, top_p=0.8, top_k=20)


def test_a_file_with_a_temperature_is_taken_as_it_is_without_values_that_make_no_sense() -> None:
    stated = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 7.0,
        "general.sampling.min_p": "much",
    }
    advice = recommended(None, metadata("qwen2", **stated))
    assert advice.sampling(None) == Sampling(0.6, top_k=20) and advice.source == "the model's file"
    greedy = recommended(None, metadata("llama", **{"general.sampling.temp": 0.0}))
    assert greedy.sampling(None) == Sampling(0.0)


@pytest.mark.parametrize(
    ("facts", "plain"),
    [
        (metadata("qwen2", **{"qwen2.embedding_length": 896}), (0.7, 0.8, 20, 1.1)),
        (metadata("qwen2", **{"qwen2.embedding_length": 3584}), (0.7, 0.8, 20, 1.05)),
        (metadata("qwen3"), (0.7, 0.8, 20, 1.0)),
        (metadata("qwen3moe"), (0.7, 0.8, 20, 1.0)),
        (metadata("llama", **{"tokenizer.ggml.pre": "llama-bpe"}), (0.6, 0.9, 0, 1.0)),
        (metadata("llama", **{"tokenizer.ggml.pre": "smollm"}), (0.7, 0.95, 0, 1.0)),
        (metadata("gemma3"), (0.7, 0.95, 0, 1.0)),
        ({}, (0.7, 0.95, 0, 1.0)),
    ],
)
def test_without_either_the_family_decides(facts: dict[str, Any], plain: tuple[float, ...]) -> None:
    values = recommended(None, facts).sampling(None)
    assert (values.temperature, values.top_p, values.top_k, values.repetition_penalty) == plain


@pytest.mark.parametrize(("width", "most"), [(896, 3), (2047, 3), (2048, 0), ("wide", 0), (None, 0)])
@pytest.mark.parametrize("stated", [{}, {"general.sampling.temp": 0.6}])
def test_chats_with_a_small_model_say_a_sentence_three_times(
    width: Any, most: int, stated: dict[str, float]
) -> None:
    facts = metadata("qwen3", **{"qwen3.embedding_length": width}, **stated)
    assert recommended(None, facts).sentences == most and NOTHING_KNOWN.sentences == 0


def test_a_file_without_a_temperature_changes_what_it_names() -> None:
    advice = recommended(None, metadata("qwen3", **{"general.sampling.top_k": 7}))
    assert advice.sampling(False) == Sampling(0.7, top_p=0.8, top_k=7)


def test_a_template_that_thinks_has_the_values_for_thinking() -> None:
    template = {"tokenizer.chat_template": "{{ '<think>' }}"}
    advice = recommended(None, metadata("qwen35", **template))
    assert advice.thinks and advice.sampling(None).temperature == 1.0
    assert replace(advice, thinks=False).sampling(None).temperature == 0.7
    assert not NOTHING_KNOWN.thinks
