"""The gated delta rule for training: chunked, differentiable, a few large batched matmuls.

One token does, for each value head (its key head is head // (value heads / key heads)):
    S <- exp(g) S;   u = beta (v - k S);   S <- S + k^T u;   o = q S
Inside a chunk of C tokens with running log decay G, D[i, j] = exp(G_i - G_j) for i >= j, and
    T = (I + tril(beta k k^T * D, -1))^-1,   P = (q k^T * D) T,   tail_i = exp(G_last - G_i):
    o = P (beta v) + (exp(G) q - P (beta exp(G) k)) S
    S <- exp(G_last) S - (k^T (tail T) (beta exp(G) k)) S + k^T (tail T) (beta v)
Every factor lies in [0, 1] or is bounded by the keys' overlap, so strong decays underflow and never overflow.
Everything is batched over chunks, sequences and heads; only the last line is a recurrence, with one D x D
matmul per chunk.

Device memory traffic of the forward pass per token and layer with 6 value heads of 128, C = 64, bfloat16:
21 kB for the C x C matrices, 21 kB for the matmuls with v and k, 18 kB for states and outputs; the backward
pass moves about 2.2 times that. The forward arithmetic, 1.4 MFLOP, takes a GPU less time than this traffic.
"""

import torch
from torch import Tensor

CHUNK = 64


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk: int = CHUNK, fused: bool = False
) -> Tensor:
    """Return the outputs [B, T, Hv, D] in v's dtype, starting from a zero state.

    q, k [B, T, Hk, D], normalised, q scaled; v [B, T, Hv, D]; g (log decay, <= 0) and beta [B, T, Hv]. Large
    matmuls run in v's dtype, everything else in at least float32. fused: use the Triton kernels, CUDA only.
    """
    tokens, key_heads, value_heads = q.shape[1], q.shape[2], v.shape[2]
    assert tokens % chunk == 0, f"{tokens} tokens, needed: a multiple of {chunk}"
    repeats, wide = value_heads // key_heads, v.dtype
    exact = torch.promote_types(wide, torch.float32)

    def cut(x: Tensor, dtype: torch.dtype, groups: int) -> Tensor:
        """Reshape [B, T, H, ...] to [chunks, B, Hk, groups, C, ...]; a range of chunks is contiguous."""
        x = x.to(dtype).unflatten(2, (key_heads, groups)).unflatten(1, (-1, chunk))
        return x.permute(1, 0, 3, 4, 2, *range(5, x.ndim)).contiguous()

    q, k = cut(q, exact, 1), cut(k, exact, 1)
    v, beta, total = cut(v, wide, repeats), cut(beta, exact, repeats), cut(g, exact, repeats).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    solve = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    inverse = unit_lower_inverse(solve, fused)
    inner = ((q @ k.mT) * decay) @ inverse
    tail = (total[..., -1:] - total).exp()
    # The state increment's rows above the output's rows: one matmul computes both.
    left = torch.cat([tail[..., None] * inverse, inner], -2)
    pushed, out = ((left * beta[..., None, :]).to(wide) @ v).split(chunk, -2)
    if len(q) == 1:
        return _join(out)
    grown = total.exp()
    keys = k.to(wide).expand(-1, -1, -1, repeats, -1, -1).contiguous()
    # The first chunk starts from a zero state; the last one's final state is not needed.
    scaled = (left[1:] * (beta * grown)[1:, ..., None, :]).to(wide)
    erased, hidden = (scaled @ keys[1:]).split(chunk, -2)
    states = keys[:-1].mT @ pushed[:-1]
    if len(q) > 2:
        erase = keys[1:-1].mT @ erased[:-1]
        states = recurrence(states, erase, grown[1:-1, ..., -1], fused)
    read = (grown[1:, ..., None] * q[1:] - hidden).to(wide)
    return _join(torch.cat([out[:1], out[1:] + read @ states]))


def _join(out: Tensor) -> Tensor:
    """Reshape [chunks, B, Hk, groups, C, D] to [B, T, Hv, D]."""
    return out.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)


def unit_lower_inverse(strict: Tensor, fused: bool) -> Tensor:
    """Return (I + strict)^-1 for strictly lower triangular matrices [..., C, C], C a power of two."""
    return _inverse(strict.flatten(0, -3), fused).view_as(strict)


def recurrence(x: Tensor, erase: Tensor, decay: Tensor, fused: bool) -> Tensor:
    """Return y with y[0] = x[0], y[i] = x[i] + decay[i-1] y[i-1] - erase[i-1] y[i-1], over the first axis.

    x [N, ..., D, D], erase [N-1, ..., D, D], decay [N-1, ...]; accumulated in at least float32.
    """
    flat = _recurrence(x.flatten(1, -3), erase.flatten(1, -3), decay.flatten(1), False, fused)
    return flat.view_as(x)


@torch.library.custom_op("bough::unit_lower_inverse", mutates_args=())
def _inverse(strict: Tensor, fused: bool) -> Tensor:
    if fused:
        # Triton is installed only on machines with a GPU.
        from workshop.training import delta_kernels

        return delta_kernels.unit_lower_inverse(strict.contiguous())
    # Block substitution with doubling block size. A Neumann series would not do: its terms reach 1e18 for
    # 64 equal keys and cancel.
    size = strict.shape[-1]
    rows = torch.arange(size, device=strict.device)
    inverse = torch.eye(size, dtype=strict.dtype, device=strict.device).expand_as(strict)
    width = 1
    while width < size:
        block = rows // width
        pair = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        corner = torch.where(pair, strict, 0.0)
        inverse = inverse - (inverse @ (corner @ inverse) if width > 1 else corner)
        width *= 2
    return inverse


@_inverse.register_fake
def _(strict: Tensor, fused: bool) -> Tensor:
    return torch.empty_like(strict, memory_format=torch.contiguous_format)


def _inverse_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mT @ grad @ inverse.mT), None


def _inverse_context(ctx, inputs, output: Tensor) -> None:
    ctx.save_for_backward(output)


_inverse.register_autograd(_inverse_backward, setup_context=_inverse_context)


@torch.library.custom_op("bough::delta_recurrence", mutates_args=())
def _recurrence(x: Tensor, erase: Tensor, decay: Tensor, reverse: bool, fused: bool) -> Tensor:
    """Run the recurrence; reverse: y[N-1] = x[N-1], y[i] = x[i] + decay[i] y[i+1] - erase[i]^T y[i+1]."""
    x, erase, decay = x.contiguous(), erase.contiguous(), decay.contiguous()
    if fused:
        from workshop.training import delta_kernels

        return delta_kernels.recurrence(x, erase, decay, reverse=reverse)
    y = torch.empty_like(x)
    order = list(range(len(x)))[:: -1 if reverse else 1]
    carry = x[order[0]].to(decay.dtype)
    y[order[0]] = x[order[0]]
    for at in order[1:]:
        link = at if reverse else at - 1
        matrix = erase[link].to(decay.dtype)
        kept = torch.addcmul(x[at].to(decay.dtype), decay[link][:, None, None], carry)
        carry = torch.baddbmm(kept, matrix.mT if reverse else matrix, carry, alpha=-1)
        y[at] = carry
    return y


@_recurrence.register_fake
def _(x: Tensor, erase: Tensor, decay: Tensor, reverse: bool, fused: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _recurrence_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    erase, decay, y = ctx.saved_tensors
    total = _recurrence(grad, erase, decay, True, ctx.fused)
    later, earlier = total[1:], y[:-1]
    rate = (later.to(decay.dtype) * earlier.to(decay.dtype)).sum((-1, -2))
    return total, -(later @ earlier.mT), rate, None, None


def _recurrence_context(ctx, inputs, output: Tensor) -> None:
    _, erase, decay, _, ctx.fused = inputs
    ctx.save_for_backward(erase, decay, output)


_recurrence.register_autograd(_recurrence_backward, setup_context=_recurrence_context)


def fused_error(device: torch.device) -> float:
    """Return the largest relative error of the Triton kernels' outputs and gradients against plain torch.

    Computed in bfloat16 at the real head size; NaN if any output or gradient is NaN.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens, dim = 5 * CHUNK, 128
    q, k = (torch.nn.functional.normalize(random(2, tokens, 2, dim), dim=-1) for _ in range(2))
    v, g = random(2, tokens, 6, dim).bfloat16(), -random(2, tokens, 6).exp() / 16
    inputs = (q * dim**-0.5, k, v, g, random(2, tokens, 6).sigmoid())
    weight = random(*v.shape)
    results = []
    for fused in (False, True):
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = delta_rule(*leaves, fused=fused)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    pairs = zip(*results, strict=True)
    errors = [(b.detach().float() - a.detach().float()).norm() / a.detach().float().norm() for a, b in pairs]
    return torch.stack(errors).max().item()
