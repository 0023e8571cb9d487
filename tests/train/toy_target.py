"""A target of width 64 that has learnt a dozen phrases: its text is predictable, but for which comes next."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from treeflash.tools.checkpoint import HFConfig
from treeflash.tools.convert import write_model
from treeflash.tools.families import read_sizes
from treeflash.tools.rules import tensor_rules
from treeflash.tools.tiny import VOCABULARY, vocabulary

_PHRASES = 12
_WORDS = 40  # tokens that phrases are made of


def phrases() -> list[list[int]]:
    """Each begins with a token of its own and goes on with shared ones."""
    generator = np.random.default_rng(0)
    return [
        [200 + number, *(generator.integers(1, _WORDS, 5 + number % 6).tolist())] for number in range(_PHRASES)
    ]


def text(generator: np.random.Generator, length: int) -> list[int]:
    known, words = phrases(), []
    while len(words) < length:
        words += known[generator.integers(len(known))]
    return words[:length]


class _Weights:
    """A state dict as the converter reads checkpoints."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name]

    def where(self, name: str) -> str:
        return name


def make_toy(path: Path, *, steps: int = 250) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    generator = np.random.default_rng(1)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        ids = torch.tensor([text(generator, 48) for _ in range(16)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    reached = loss.item()
    assert reached < 0.7, f"the toy target has not learnt its phrases: loss {reached:.2f}"
    weights = _Weights({name: tensor.detach() for name, tensor in model.state_dict().items()})
    sizes = read_sizes(HFConfig(config.to_dict(), "toy"))
    rules = tensor_rules(sizes)
    entries = vocabulary("qwen2")
    write_model(path, sizes, weights, name="toy", entries=entries, mix="f32", rules=rules)
    return path
