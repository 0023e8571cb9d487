"""tree.cu of attention on a CPU, by its own launch code: against float64, and a row's bits bit for bit."""

import random

import pytest
import torch
from torch import Tensor

from bough.kernels.attention import PagedContext, cpu, cuda
from bough.kernels.kv_cache.rotation import rotate_back
from tests.kernels.cards import CARDS
from tests.kernels.delta_layer import ancestors_of
from tests.kernels.emulator import PDL, Emulation, emulate, needs_compiler
from tests.kernels.paths import roots
from tests.kernels.pools import filled

__all__ = ["emulate"]
pytestmark = needs_compiler
PAGE = 64
BODIES = {
    **PDL,
    "u32 shared_address": "return (u32)((const u8*)p - shared_memory);",
    "void copy16": "copy_later(to, from, given, 16);",
    "void copy4": "copy_later(to, from, 4, 4);",
    "void end_group": "commit_copies();",
    "void wait_groups": "wait_for_copies(N);",
    "u32 sub2": "return fma_halves(b, 0xbc00bc00u, a);",
    "u32 mul2": "return fma_halves(a, b, 0x80008000u);",
    "u32 permute": "return permuted(a, b, selector);",
    "float power_of_two": "return exp2f(x);",
    "u32 pack": "return STORED == 1 ? two_bfloats(low, high) : two_halves(low, high);",
    "float low_of": "return number<STORED == 1>(x & 0xffff);",
    "float high_of": "return number<STORED == 1>(x >> 16);",
    "void mma": "warp_mma<STORED == 1>(c, a, b0, b1);",
    "int own_number": "return threadIdx.x;",
    "void begin_mma": "",
    "void end_mma": "",
    "void wait_mma": "",
    "void publish": "",
    "void team_barrier": "named_barrier(team + 1, Team::THREADS);",
}


class HostResults(cuda.SplitResults):
    """Merges the partial results on the host, in the order of `_merge_kernel`."""

    def merge(self, gate: Tensor | None, rotation: int = 0, end: Tensor | None = None) -> Tensor:
        rows, heads, dim = self._q.shape
        out = torch.zeros(rows, heads, dim)
        for row in range(rows if end is None else int(end)):
            slots = [*range(int(self.active[row])), cuda.SPLITS, cuda.SPLITS + 1]
            one = slice(row * self._group, (row + 1) * self._group)
            tops, weights, sums = (x[:, slots, one] for x in (self.tops, self.weights, self.sums))
            shares = (tops - tops.amax(1, keepdim=True)).exp2()
            used = shares > 0
            weight = torch.where(used, weights * shares, 0).sum(1)
            total = torch.where(used[..., None], sums * shares[..., None], 0).sum(1)
            out[row] = (total / weight[..., None]).flatten(0, 1)
        if rotation:
            out = rotate_back(out)
        return out if gate is None else out * gate.sigmoid()


def tree(rows: int, seed: int) -> list[int]:
    """Return the parents of a tree with deep paths and siblings."""
    choose = random.Random(seed)
    return [-1, *(choose.choice([row - 1, row - 1, choose.randrange(row)]) for row in range(1, rows))]


@pytest.mark.parametrize(
    ("card", "formats", "lengths", "rows", "group", "window"),
    [
        ("A100", ("f16", "f16"), (330, 61), 9, 2, None),
        ("RTX 3090", ("q8_0", "q5_0"), (130,), 13, 4, 70),
        ("H200", ("tq3_0", "q4_0"), (255, 3), 7, 3, None),
        ("H200", ("bf16", "bf16"), (200,), 12, 4, 100),
    ],
)
def test_attention_of_trees(
    emulate: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    card: str,
    formats: tuple[str, str],
    lengths: tuple[int, ...],
    rows: int,
    group: int,
    window: int | None,
) -> None:
    torch.manual_seed(rows)
    emulate(cuda, CARDS[card], BODIES, cuda._kernel)
    monkeypatch.setattr(cuda, "SplitResults", HostResults)
    batch, kv_heads, pages = len(lengths), 2, -(-(max(lengths) + rows) // PAGE)
    pools = [filled(name, (batch * pages, kv_heads, PAGE), cuda.DIM) for name in formats]
    table, sizes = torch.randperm(batch * pages).view(batch, pages), torch.tensor(lengths)
    q = torch.randn(batch, rows, kv_heads * group, cuda.DIM)
    ancestors = torch.tensor([ancestors_of(tree(rows, seed)) for seed in range(batch)])
    context = PagedContext(*pools, table, sizes, ancestors, window=window)
    found, expected = cuda.paged_attention(q, context), cpu.paged_attention(q.double(), context)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < (3e-2 if "bf16" in formats else 4e-3)
    for item in range(batch):
        one = table[item : item + 1]
        for row, moved, length in roots(pools, table[item], lengths[item], ancestors[item]):
            if row % 3 == 0 or row == rows - 1:
                query = q[item : item + 1, row : row + 1]
                root = PagedContext(*moved, one, length, torch.tensor([[1]]), window=window)
                alone = cuda.paged_attention(query, root)
                assert torch.equal(alone[0, 0], found[item, row]), f"sequence {item}, row {row}"
