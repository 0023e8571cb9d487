"""Matmuls of prompts in int8 on a GPU against their reference, and what a session says of them."""

import pytest
import torch
from torch import Tensor

from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import int8, pack, pack_rows, packed, unpack, with_int8
from tests.gpu.card import needs_cuda_kernels
from tests.gpu.inputs import DEVICE, TUNED_TYPES, spread_rows
from tests.gpu.numerics import relative_error
from tests.gpu.texts import embedded_pair, generate, load_session

pytestmark = pytest.mark.gpu


def expected(x: Tensor, weight: Tensor) -> Tensor:
    """Return x times a matrix in the arithmetic of int8 prefill."""
    rows = pack_rows(x)
    floats = (rows.data.float() * rows.scale[:, None])[:, : weight.shape[1]]
    out = torch.empty(len(x), len(weight), device=x.device)
    return int8.matmul(int8.quantise(floats), int8.quantise(weight), out)


@pytest.mark.parametrize("type", TUNED_TYPES, ids=lambda type: type.name)
def test_int8_matmul(type: QuantType) -> None:
    """Odd numbers of rows, an output within a wider one, the last rows of the matrix in 16 bits."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    weight = with_int8(pack(quantise(torch.randn(700, 2560), type).to(DEVICE), type), 700)
    x = spread_rows(333, 2560, generator)
    out = torch.full((333, 710), float("nan"), device=DEVICE)
    packed.packed_matmuls(pack_rows(x), [weight], out[:, :700])
    again = packed.packed_matmuls(pack_rows(x[:130]), [weight])
    exact = x.double() @ unpack(weight).double().T
    # The kernel decodes weights to 16 bits before it rounds them.
    assert relative_error(out[:, :640], expected(x, unpack(weight)[:640])) < 5e-3
    for row in range(0, 333, 37):
        assert relative_error(out[row, :640], exact[row, :640]) < 0.2  # outliers coarsen their groups
        assert relative_error(out[row, 640:700], exact[row, 640:]) < 1e-3
    assert bool(out[:, 700:].isnan().all())
    assert torch.equal(again[:, :640], out[:130, :640]), "a row depends on the others"


@needs_cuda_kernels
def test_a_session_in_int8() -> None:
    """Long prompts are read in int8, said so; the text is much the same."""
    prompt = "def add(a, b):\n    return a + b\n" * 12
    exact, rounded = (
        load_session(*embedded_pair(), graphs=False, prefill=prefill) for prefill in ("exact", "int8")
    )
    assert exact.engine.approximate == () and rounded.engine.approximate == ("prefill in int8",)
    answers = [generate(session, prompt) for session in (exact, rounded)]
    assert answers[1].stats.approximate == ("prefill in int8",)
    assert answers[0].stats.prompt_tokens == answers[1].stats.prompt_tokens > 128
