"""The layers' CUDA C++ kernels compile for every card on the list, and fit."""

import pytest

from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.delta_rule.cpu import saved_states
from bough.kernels.norm_rope import cuda as rows_cuda
from bough.kernels.runtime.nvrtc import compile_cubin
from bough.kernels.tree import MAX_ROWS
from tests.kernels.cards import CARDS


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_cuda_kernels(arch: str) -> None:
    overlap = int(arch in ("sm_90", "sm_120"))
    for dim in (16, 64, 128) if arch != "sm_90" else (32, 128, 256):
        macros = {"D": dim, "OVERLAP": overlap}
        assert compile_cubin(delta_cuda.source(), defines=macros, arch=arch, cached=False)
    for half, sequences in ((False, 1), (True, 1), (True, 4), (True, 16)):
        macros = conv_cuda.defines(half, conv_cuda.warps_of(sequences), bool(overlap))
        assert compile_cubin(conv_cuda.source(), defines=macros, arch=arch, cached=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_cuda_rows(arch: str) -> None:
    """The 27B's rows and odd ones."""
    overlap = arch in ("sm_90", "sm_120")
    sizes = [(rows_cuda.NORM, 5120), (rows_cuda.NORM, 100), (rows_cuda.SILU, 17408), (rows_cuda.SILU, 1028)]
    shapes = [rows_cuda.shape_of(kind, width) for kind, width in sizes]
    shapes += [rows_cuda.shape_of(rows_cuda.GATED, 6 * dim, dim) for dim in (32, 128)]
    for shape in shapes:
        cubin = compile_cubin(rows_cuda.source(), defines=shape.defines(overlap), arch=arch, cached=False)
        assert cubin, shape


def test_rows_are_cut_into_blocks_that_hold_whole_heads() -> None:
    for kind in (rows_cuda.NORM, rows_cuda.SILU, rows_cuda.GATED):
        for head in (4, 8, 32, 128):
            for heads in (1, 3, 48, 136):
                width = heads * head
                shape = rows_cuda.shape_of(kind, width, head)
                parts = -(-width // 256) * 64 // shape.cluster
                assert shape.cluster >= 1 and parts % (head // 4) == 0
                assert shape.threads % 32 == 0 and 32 <= shape.threads <= 1024
    assert rows_cuda.shape_of(rows_cuda.SILU, 17408).cluster == 8


@pytest.mark.parametrize("card", CARDS)
def test_the_cuda_delta_rule_fits_every_card(card: str) -> None:
    """With every number of rows, and with a warp for each scheduler of an SM."""
    for dim in (16, 32, 64, 128):
        for saved in range(saved_states(MAX_ROWS) + 1):
            for groups, units in ((16, 48), (64, 48), (2, 3 * dim // 8)):
                warps = delta_cuda.warps_of(CARDS[card], dim, saved, groups=groups, units=units)
                assert delta_cuda.shared_bytes(dim, warps, saved) <= CARDS[card].shared_per_block
                assert warps >= 4 or groups * units < 8 * CARDS[card].processors


def test_the_cuda_delta_rule_gives_each_sm_of_an_h200_six_warps_of_a_27b() -> None:
    assert [delta_cuda.warps_of(CARDS["H200"], 128, n, groups=16, units=48) for n in range(5)] == [6] * 5
