"""Split-K partial sums that the next kernel adds up, and chains of kernels that overlap by PDL."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.norm_rope import cuda as norm_cuda
from bough.kernels.quant_matmul import (
    PackedWeight,
    PartialSums,
    cuda,
    max_rows,
    pack,
    pack_rows,
    packed_matmul,
    partial_matmul,
)
from tests.gpu.card import needs_cuda_kernels
from tests.gpu.inputs import DEVICE, EPS, FEED_FORWARD, TUNED_TYPES, WIDTH
from tests.gpu.numerics import assert_same_bits, captured, nan_filled_memory

pytestmark = [pytest.mark.gpu, needs_cuda_kernels, pytest.mark.usefixtures("inference_mode")]

Q = QuantType
SHAPES = ((5120, 6144), (5120, FEED_FORWARD), (2 * FEED_FORWARD, 5120), (300, 512), (128, 5120))
LAYERS, REPLAYS = 6, 50


def random_weight(type: QuantType, rows: int, columns: int, seed: int = 6) -> PackedWeight:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return pack(random_rows(type, rows, columns, generator), type)


@pytest.mark.parametrize("type", TUNED_TYPES, ids=lambda type: type.name)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_partial_sums_add_up_to_the_matmul(type: QuantType, rows: int, columns: int) -> None:
    """The sums, and norms and activations that add them up, have the bits of separate kernels."""
    weight = random_weight(type, rows, columns)
    for count in counts_for(weight):
        x = pack_rows(torch.randn(count, columns, device=DEVICE))
        with nan_filled_memory():
            expected = packed_matmul(x, weight)
            sums = partial_matmul(x, weight)
        reduced = sums.reduced()
        assert_same_bits(reduced, expected, f"{count} rows")
        if rows == WIDTH:
            residual, scale = torch.randn(1, count, rows, device=DEVICE), torch.randn(rows, device=DEVICE)
            fused, separate = (
                norm_cuda.add_rms_norm(residual, add, scale, EPS) for add in (sums, reduced[None])
            )
            assert_same_bits(fused[0], separate[0], f"{count} rows, residual")
            found, wanted = fused[1], separate[1]
        elif rows == 2 * FEED_FORWARD:
            found = norm_cuda.silu_mul(*sums.split([FEED_FORWARD, FEED_FORWARD]))
            wanted = norm_cuda.silu_mul(*reduced[None].chunk(2, -1))
        else:
            continue
        assert_same_bits(found.data[:, :count], wanted.data[:, :count], f"{count} rows, packed")
        assert_same_bits(found.scale, wanted.scale, f"{count} rows, scales")


def counts_for(*weights: PackedWeight) -> list[int]:
    """Return numbers of rows; a card with little shared memory takes the larger ones in parts."""
    most = min(max_rows(weight.layout, DEVICE) for weight in weights)
    return [count for count in (1, 8, 24, 61) if count <= most]


class Chain:
    """Norms, matmuls with and without partial sums, and activations in the order of a step.

    Each kernel starts before the previous one has ended; tensors are freed and allocated again on the way.
    """

    def __init__(self, rows: int, inner: int = 6144):
        self.x = torch.randn(1, rows, WIDTH, device=DEVICE)
        self.weight, self.inner = torch.rand(WIDTH, device=DEVICE) + 0.5, inner
        self.layers = [
            (
                [
                    random_weight(type, n, WIDTH, seed=layer)
                    for type, n in ((Q.Q5_K, inner), (Q.Q4_K, inner), (Q.Q8_0, 96))
                ],
                random_weight(Q.Q5_K, WIDTH, inner, seed=layer),
                random_weight(Q.Q4_K, 2 * inner, WIDTH, seed=layer),
                random_weight(Q.Q6_K, WIDTH, inner, seed=layer),
            )
            for layer in range(LAYERS)
        ]

    def run(self, between: Callable[[], None] = lambda: None) -> Tensor:
        """Call `between` after each launch."""
        x, add = self.x, None
        for projections, output, up_gate, down in self.layers:
            x, h = norm_cuda.add_rms_norm(x, add, self.weight, EPS)
            between()
            sizes = [weight.rows for weight in projections]
            wide = torch.empty(h.rows, sum(sizes), device=DEVICE)
            cuda.matmuls(h, projections, wide.split(sizes, 1))
            between()
            gate, up, _ = wide[None].split(sizes, -1)
            heads = gate.contiguous().unflatten(-1, (-1, 128))
            h = norm_cuda.gated_rms_norm(heads, up, self.weight[:128], EPS)
            between()
            add = cuda.partial_matmul(h, output)
            between()
            x, h = norm_cuda.add_rms_norm(x, add, self.weight, EPS)
            between()
            sums = cuda.partial_matmul(h, up_gate)
            between()
            h = norm_cuda.silu_mul(*sums.split([self.inner, self.inner]))
            between()
            add = cuda.partial_matmul(h, down)
            between()
        assert isinstance(add, PartialSums)
        return norm_cuda.add_rms_norm(x, add, self.weight, EPS)[0]


@pytest.mark.parametrize("rows", [1, 8, 24, 61])
def test_overlapping_kernels_give_the_bits_of_synchronised_ones(rows: int) -> None:
    chain = Chain(rows)
    if rows not in counts_for(*(each for layer in chain.layers for each in (*layer[0], *layer[1:]))):
        pytest.skip("this card takes them in parts")
    inputs, expected = [torch.randn_like(chain.x) for _ in range(3)], []
    for x in inputs:
        chain.x.copy_(x)
        expected.append(chain.run(torch.cuda.synchronize).clone())
    assert all(bool(out.isfinite().all()) for out in expected)
    for x, out in zip(inputs, expected, strict=True):
        chain.x.copy_(x)
        assert_same_bits(chain.run(), out, "eager")
    graph, found = captured(chain.run)
    for replay in range(REPLAYS):
        chain.x.copy_(inputs[replay % 3])
        graph.replay()
        assert_same_bits(found, expected[replay % 3], f"replay {replay}")
