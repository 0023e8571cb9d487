"""Costs and gradients against torch's cross entropy, and the kernels in Triton's interpreter against both."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from bough.train.cross_entropy import label_costs, to_gradients

KERNELS = """
import torch
from bough.train import cross_entropy, cross_entropy_kernels as kernels

for tokens, dtype in ((5000, torch.float32), (8192, torch.float16), (33, torch.float32)):
    generator = torch.Generator().manual_seed(tokens)
    logits = (torch.randn(5, tokens, generator=generator) * 6).to(dtype)
    logits[1, 7] = logits[1, 20] = logits[1].max() + 1  # of equal ones the first is the best
    labels = torch.randint(tokens, (5,), generator=generator)
    labels[0], labels[1], labels[2] = logits[0].argmax(), 7, tokens - 1
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0])
    expected = cross_entropy.label_costs(logits, labels)
    cost, right, total = kernels.label_costs(logits, labels)
    assert torch.allclose(cost, expected.cost, atol=1e-4), (cost, expected.cost)
    assert right.tolist() == expected.right.tolist() and right[:2].all()
    assert torch.allclose(total, expected.total, atol=1e-5)
    ours, theirs = logits.clone(), logits.clone()
    kernels.to_gradients(ours, labels, total, weights)
    cross_entropy.to_gradients(theirs, labels, expected.total, weights)
    assert torch.allclose(ours.float(), theirs.float(), atol=1e-3 if dtype == torch.float16 else 1e-6)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_costs_and_gradients_are_those_of_cross_entropy(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(9, 300, generator=generator) * 5).to(dtype).requires_grad_()
    labels = torch.randint(300, (9,), generator=generator)
    weights = torch.rand(9, generator=generator)
    expected = cross_entropy(logits.float(), labels, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    values = logits.detach().clone()
    costs = label_costs(values, labels)
    assert torch.allclose(costs.cost, expected.detach(), atol=1e-5)
    assert torch.equal(costs.right, values.argmax(-1) == labels)
    to_gradients(values, labels, costs.total, weights)
    assert torch.allclose(values.float(), gradient.float(), atol=1e-6)


def test_kernels_in_the_interpreter_equal_plain_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNELS], env=environment, check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_on_a_gpu_equal_plain_torch(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(700, 49_152, generator=generator) * 4).to(dtype)
    labels = torch.randint(49_152, (700,), generator=generator)
    labels[:300] = logits[:300].argmax(-1)
    weights = torch.rand(700, generator=generator) * 8
    values = logits.cuda()
    costs, expected = label_costs(values, labels.cuda()), label_costs(logits, labels)
    assert torch.allclose(costs.cost.cpu(), expected.cost, atol=1e-4)
    assert torch.equal(costs.right.cpu(), expected.right)
    to_gradients(values, labels.cuda(), costs.total, weights.cuda())
    to_gradients(logits, labels, expected.total, weights)
    assert torch.allclose(values.cpu().float(), logits.float(), atol=8e-3 if dtype == torch.float16 else 2e-4)
