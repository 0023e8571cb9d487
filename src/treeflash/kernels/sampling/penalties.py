"""Penalties and biases on logits, per row of a tree: what a row has behind it includes its ancestors."""

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
    """logits [R, V] with the penalties of what each row has seen.

    prompt [V] bool: tokens of the prompt; counts [V]: tokens written before the tree's root; tokens [T] and
    visible [R, T]: the tree's rows that stand at or above each row. Repetition looks at prompt and answer,
    presence and frequency at the answer alone.
    """
    written = counts.expand_as(logits).clone()
    written.scatter_add_(1, tokens.expand(len(logits), -1), visible.to(written.dtype))
    if repetition != 1.0:
        seen = (written > 0) | prompt
        # A tensor on the device: divided by a number, some devices multiply by its reciprocal.
        divisor = torch.full((), repetition, device=logits.device)
        shrunk = torch.where(logits > 0, logits / divisor, logits * repetition)
        logits = torch.where(seen, shrunk, logits)
    if presence or frequency:
        logits = logits - presence * (written > 0) - frequency * written
    return logits
