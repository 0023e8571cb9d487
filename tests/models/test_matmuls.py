"""The matmuls of a model's layers, from its header alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import has_layout
from bough.models.matmuls import layer_matmuls
from bough.models.spec import ModelSpec

PAIR = Path(__file__).parents[2] / "src/bough/pair/target.gguf"


def test_the_embedded_target_has_a_delta_layer_and_an_attention_layer() -> None:
    with GGUFFile.open(PAIR) as file:
        found, spec = layer_matmuls(file), ModelSpec.from_gguf(file)
    assert spec.delta is not None
    assert [columns for _, columns in found] == [
        spec.width, spec.delta.inner, spec.width, spec.feed_forward,
        spec.width, spec.heads * spec.head_dim, spec.width, spec.feed_forward,
    ]  # fmt: skip
    rows = [sum(rows for _, rows in matrices) for matrices, _ in found]
    delta_in = spec.delta.channels + spec.delta.inner + 2 * spec.delta.value_heads
    query, values = 2 * spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    feed = [2 * spec.feed_forward, spec.width]
    assert rows == [delta_in, spec.width, *feed, query + values, spec.width, *feed]
    # Joined where neighbours have one type.
    assert [type for type, _ in found[0][0]] == [QuantType.Q5_K, QuantType.Q4_K, QuantType.Q8_0]


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe", "qwen3moe", "qwen2", "llama"])
def test_every_family_has_products_that_can_be_timed(family: str, tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model(family)) as file:
        found = layer_matmuls(file)
    assert found and all(
        rows > 0 and columns > 0 and (has_layout(type) or type == QuantType.F16)
        for matrices, columns in found
        for type, rows in matrices
    )
