"""Random logits, trees and requests of the sampling kernels, for tests and timing scripts."""

import random

import torch
from torch import Tensor

from bough.kernels.sampling import SamplingState
from tests.gpu.inputs import DEVICE

VOCABULARY = 248_320
FILTERS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-p high": {"temperature": 1.0, "top_p": 0.9999},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-k large": {"temperature": 1.0, "top_k": 5000, "top_p": 0.5},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "hot": {"temperature": 50.0, "top_p": 0.3},
}
FILTERS["everything"] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
FILTERS["everything"] |= {"repetition": 1.1, "presence": 0.4, "frequency": 0.3}
KINDS = ("normal", "flat", "model", "ties", "equal", "holes")


def random_logits(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(rows, vocabulary, device=DEVICE, generator=generator)
    match kind:
        case "flat":
            return noise
        case "model":  # a bulk far below, a few tokens above it
            return noise * 2.2 + 14 * (torch.rand_like(noise) < 30 / vocabulary)
        case "ties":
            return (noise * 3).bfloat16().float()
        case "equal":
            return torch.full_like(noise, 1.5)
        case "holes":
            return torch.where(torch.rand_like(noise) < 0.5, -torch.inf, noise * 3)
        case _:
            return noise * 3


def set_request(state: SamplingState, options: dict, generator: torch.Generator) -> None:
    """Write a request's sampling parameters; with a repetition penalty a bias, a mask and a prompt, too."""
    vocabulary = state.bias.shape[1]

    def some(n: int) -> Tensor:
        return torch.randint(vocabulary, (n,), device=DEVICE, generator=generator)

    more = {}
    if "repetition" in options:
        biased = some(20).unique()
        bias = torch.linspace(-5, 5, len(biased), device=DEVICE)
        more = {"prompt": some(50), "biased": biased, "bias": bias, "masked": True}
        state.allowed.random_(-(2**31), 2**31 - 1, generator=generator)
    state.begin(**options, seed=2**63 + 12345, **more)
    state.counts[0, some(60)] += 2


def random_tree(rows: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the tokens [R] and the ancestors [R] of a random tree."""
    tokens = torch.randint(vocabulary, (rows,), device=DEVICE, generator=generator)
    ancestors = [1]
    for row in range(1, rows):
        ancestors.append(ancestors[random.randrange(row)] | 1 << row)
    signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]
    return tokens, torch.tensor(signed, device=DEVICE)
