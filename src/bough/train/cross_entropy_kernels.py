"""Triton kernels of the cross entropy; the functions of cross_entropy.py on a CPU are their reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _cost_kernel(logits, labels, cost, right, total, tokens, BLOCK: tl.constexpr):
    """One row a program: every lane keeps its own largest logit and sum of exponentials until the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * tokens
    lanes = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < tokens, other=-1e30).to(tl.float32)
        higher = tl.maximum(peak, x)
        sums = sums * tl.exp(peak - higher) + tl.exp(x - higher)
        place = tl.where(x > peak, start + lanes, place)
        peak = higher
    top = tl.max(peak, 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(peak - top), 0))
    best = tl.min(tl.where(peak == top, place, tokens), 0)
    label = tl.load(labels + row)
    tl.store(cost + row, log_sum - tl.load(logits + label).to(tl.float32))
    tl.store(right + row, (best == label).to(tl.int8))
    tl.store(total + row, log_sum)


@triton.jit
def _gradient_kernel(logits, labels, total, weights, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = logits + row * tokens + columns, columns < tokens
    gradient = tl.exp(tl.load(at, mask=inside, other=0.0).to(tl.float32) - tl.load(total + row))
    gradient = gradient - (columns == tl.load(labels + row)).to(tl.float32)
    tl.store(at, (gradient * tl.load(weights + row)).to(logits.dtype.element_ty), mask=inside)


def label_costs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous(), (logits.stride(), labels.stride())
    cost, total = (torch.empty(rows, device=logits.device) for _ in range(2))
    right = torch.empty(rows, dtype=torch.int8, device=logits.device)
    _cost_kernel[(rows,)](logits, labels, cost, right, total, tokens, BLOCK=_BLOCK, num_warps=8)
    return cost, right.bool(), total


def to_gradients(logits: Tensor, labels: Tensor, total: Tensor, weights: Tensor) -> None:
    rows, tokens = logits.shape
    assert logits.is_contiguous() and weights.is_contiguous(), (logits.stride(), weights.stride())
    grid = (rows, triton.cdiv(tokens, _BLOCK))
    _gradient_kernel[grid](logits, labels, total, weights, tokens, BLOCK=_BLOCK, num_warps=8)
