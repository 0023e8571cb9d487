"""A target of width 64 trained on ten sentences: predictable text, except for which sentence follows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bough.convert.checkpoint import HFConfig
from bough.convert.convert import write_model
from bough.convert.families import read_sizes
from bough.convert.rules import tensor_rules
from bough.text.tokenizer import Tokenizer
from workshop.tiny import VOCABULARY, vocabulary

SENTENCES = (
    "Ants sing in the rain. ",
    "Bread is one of two. ",
    "Cats and dogs rest here. ",
    "Do not wait for the sun! ",
    "Every other tent is red. ",
    "Four hens ran to the river. ",
    "Give it to the tailor. ",
    "Her hand was on the lid. ",
    "It is so, said the owl. ",
    "Just then a bell rang: ",
)
_LENGTH, _BATCH = 64, 16


class _Weights:
    """A state dict with the interface of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name]

    def where(self, name: str) -> str:
        return name


def make_toy(path: Path, *, steps: int = 100, layers: int = 4) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    entries = vocabulary("qwen2")
    metadata: dict[str, Any] = {key: value for key, value, _ in entries}
    sentences = [Tokenizer.from_metadata(metadata).encode(sentence) for sentence in SENTENCES]
    generator = np.random.default_rng(1)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 6e-3 * min(1.0, (step + 1) / 10) * (1 - step / steps)
        ids = torch.tensor([_text(generator, sentences) for _ in range(_BATCH)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    reached = loss.item()
    assert reached < 0.6, f"the toy target has not learnt its sentences: loss {reached:.2f}"
    weights = _Weights({name: tensor.detach() for name, tensor in model.state_dict().items()})
    sizes = read_sizes(HFConfig(config.to_dict(), "toy"))
    rules = tensor_rules(sizes)
    write_model(path, sizes, weights, name="toy", entries=entries, mix="f32", rules=rules)
    return path


def _text(generator: np.random.Generator, sentences: list[list[int]]) -> list[int]:
    words: list[int] = []
    while len(words) < _LENGTH:
        words += sentences[generator.integers(len(sentences))]
    start = generator.integers(len(words) - _LENGTH + 1)
    return words[start : start + _LENGTH]
