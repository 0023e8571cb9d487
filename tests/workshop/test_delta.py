"""The trainable delta rule against a recurrence token by token, and its Triton kernels in the interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from workshop.training.delta import delta_rule, unit_lower_inverse

KERNELS = """
import torch
from workshop.training import delta_kernels
from workshop.training.delta import recurrence, unit_lower_inverse
torch.manual_seed(0)
strict = torch.randn(3, 16, 16).tril(-1)
x, erase, decay = torch.randn(4, 3, 32, 32), 0.1 * torch.randn(3, 3, 32, 32), torch.rand(3, 3)
leaves = [each.requires_grad_() for each in (x, erase, decay)]
weight = torch.randn(4, 3, 32, 32)
results = []
for fused in (False, True):
    y = recurrence(*leaves, fused)
    results.append([unit_lower_inverse(strict, fused), y, *torch.autograd.grad((y * weight).sum(), leaves)])
for plain, fused in zip(*results):
    assert torch.isfinite(fused).all()
    error = (fused - plain).norm() / plain.norm()
    assert error <= 1e-5, float(error)
"""


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    repeats = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    state, outputs = torch.zeros(*v[:, 0].shape, v.shape[-1], dtype=v.dtype), []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, ..., None] * write[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)


def inputs(tokens: int, *, decay: float, spread: float) -> list[Tensor]:
    """spread: distance between keys; small: nearly equal keys, as in repetitive text."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = normalize(random(2, tokens, 2, 16), dim=-1) / 4
    k = normalize(random(2, 1, 2, 16) + spread * random(2, tokens, 2, 16), dim=-1)
    g = -decay * torch.rand(2, tokens, 6, generator=generator, dtype=torch.float64)
    return [q, k, random(2, tokens, 6, 16), g, (2 + random(2, tokens, 6)).sigmoid()]


def differences(dtype: torch.dtype, arguments: list[Tensor], chunk: int) -> list[float]:
    """Relative errors of the output and of the five gradients."""
    results = []
    weight = torch.randn(arguments[2].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for kind, function in ((torch.float64, token_by_token), (dtype, lambda *x: delta_rule(*x, chunk=chunk))):
        leaves = [each.to(kind).requires_grad_() for each in arguments]
        out = function(*leaves)
        gradients = torch.autograd.grad((out * weight.to(kind)).sum(), leaves)
        results.append([each.detach().double() for each in (out, *gradients)])
    return [float((ours - plain).norm() / plain.norm()) for plain, ours in zip(*results, strict=True)]


@pytest.mark.parametrize("decay", [0.01, 8.0])
@pytest.mark.parametrize("spread", [10.0, 0.01])
@pytest.mark.parametrize(("tokens", "chunk"), [(64, 64), (128, 64), (256, 64), (48, 8), (128, 128)])
def test_outputs_and_gradients_equal_the_recurrence(
    tokens: int, chunk: int, decay: float, spread: float
) -> None:
    arguments = inputs(tokens, decay=decay, spread=spread)
    assert max(differences(torch.float64, arguments, chunk)) <= 1e-9
    assert max(differences(torch.float32, arguments, chunk)) <= 1e-4


def test_half_precision_matmuls_lose_no_more_than_their_rounding() -> None:
    """float16 replaces bfloat16, whose matmuls not every CPU has; its unit roundoff is 5e-4."""
    q, k, v, g, beta = inputs(256, decay=0.05, spread=10.0)
    out = delta_rule(q.float(), k.float(), v.half(), g.float(), beta.float())
    exact = token_by_token(q, k, v, g, beta)
    assert out.dtype == torch.float16
    assert float((out.double() - exact).norm() / exact.norm()) <= 2e-3


def test_equal_keys_do_not_break_the_inverse() -> None:
    strict = torch.ones(1, 64, 64).tril(-1)
    inverse = unit_lower_inverse(strict, False)
    expected = torch.eye(64) - torch.ones(63).diag(-1)
    assert torch.equal(inverse[0], expected)


def test_kernels_in_the_interpreter_equal_plain_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNELS], env=environment, check=True, timeout=120)
