"""Penalties on logits, per row of a tree: a row's ancestors count as generated tokens."""

import torch
from torch import Tensor


def penalised(
    logits: Tensor,
    prompt: Tensor,
    counts: Tensor,
    tokens: Tensor,
    visible: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Return logits [R, V] with the penalties of each row's own path.

    prompt [V] bool: tokens of the prompt; counts [V]: occurrences before the tree's root; tokens [T] and
    visible [R, T]: the row itself and its ancestors. The repetition penalty counts prompt and output,
    presence and frequency the output alone.
    """
    counts = counts.expand_as(logits).clone()
    counts.scatter_add_(1, tokens.expand(len(logits), -1), visible.to(counts.dtype))
    if repetition != 1.0:
        seen = (counts > 0) | prompt
        # A tensor on the device: divided by a number, some devices multiply by its reciprocal.
        divisor = torch.full((), repetition, device=logits.device)
        shrunk = torch.where(logits > 0, logits / divisor, logits * repetition)
        logits = torch.where(seen, shrunk, logits)
    if presence or frequency:
        logits = logits - presence * (counts > 0) - frequency * counts
    return logits
