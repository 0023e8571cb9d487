"""Launches the sampling kernels: how many programs share a row, which scratch memory they use."""

import torch
import triton
from torch import Tensor

from treeflash.kernels.sampling import kernel
from treeflash.kernels.sampling.state import MASKED, DrawState

_SPLITS = 128  # programs that share a row, at most
_PROGRAMS = 1056  # of a launch: eight for each multiprocessor of the largest card
_CHUNK = 1024


class Workspace:
    """Scratch memory of the kernels, for up to `rows` rows."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str, *, capacity: int = 8192):
        assert vocabulary < 2**20, f"{vocabulary} tokens, at most {2**20 - 1}"

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        bins, pool = kernel.BINS.value, kernel.POOL.value
        self.rows, self.vocabulary, self.capacity = rows, vocabulary, capacity
        self.adjusted = make(rows, vocabulary, dtype=torch.float32)
        self.partial, self.perturbed = make(rows, _SPLITS), make(rows, _SPLITS)
        self.mass, self.count = make(rows, bins), make(rows, bins, dtype=torch.int32)
        self.state, self.filled = make(rows, 8), make(rows, 2)
        self.found, self.kept = make(rows, capacity), make(rows, pool)
        self.tokens = make(rows)


def draw_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: DrawState,
    workspace: Workspace,
) -> Tensor:
    """As the package's function of this name."""
    launch = _Launch(logits, state, workspace)
    launch.adjust(tokens, ancestors, masks=True)
    launch.threshold(0)
    work = workspace
    kernel.noise_kernel[launch.grid](
        logits,
        work.adjusted,
        work.partial,
        work.perturbed,
        work.state,
        positions,
        *launch.shape,
        BLOCK=launch.block,
        **launch.options,
    )
    kernel.choose_kernel[(launch.rows,)](
        work.partial,
        work.perturbed,
        work.tokens,
        state.numbers,
        launch.splits,
        SPLITS=_SPLITS,
        num_warps=1,
    )
    return work.tokens[: launch.rows]


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchor: Tensor,
    count: int,
    state: DrawState,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """As the package's function of this name."""
    above = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
    launch = _Launch(logits, state, workspace)
    launch.adjust(anchor, above, masks=False)
    launch.threshold(count)
    launch.gather(count, final=True)
    ids = torch.empty(launch.rows, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(launch.rows, count, device=logits.device)
    work = workspace
    kernel.rank_kernel[(launch.rows,)](
        work.partial,
        work.state,
        work.filled,
        work.kept,
        positions,
        state.numbers,
        state.integers,
        ids,
        scores,
        launch.splits,
        COUNT=count,
        SPLITS=_SPLITS,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return ids, scores


class _Launch:
    """Shapes that the kernels of one call share."""

    def __init__(self, logits: Tensor, state: DrawState, workspace: Workspace):
        self.rows, self.vocabulary = logits.shape
        assert self.rows <= workspace.rows, f"{self.rows} rows, room for {workspace.rows}"
        assert self.vocabulary == workspace.vocabulary, (
            f"{self.vocabulary} tokens, not {workspace.vocabulary}"
        )
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype}, {logits.stride()}"
        self.logits, self.state, self.work = logits, state, workspace
        self.block = min(2048, triton.next_power_of_2(self.vocabulary))
        blocks = -(-self.vocabulary // self.block)
        self.splits = min(blocks, _SPLITS, -(-_PROGRAMS // self.rows))
        self.grid = (self.rows, self.splits)
        self.shape = (state.numbers, state.integers, logits.stride(0), self.vocabulary)
        self.options = {"SPLITS": _SPLITS, "num_warps": 8, "enable_fp_fusion": False}

    def adjust(self, tokens: Tensor, ancestors: Tensor, *, masks: bool) -> None:
        state, work = self.state, self.work
        kernel.adjust_kernel[self.grid](
            self.logits,
            work.adjusted,
            work.partial,
            work.mass,
            work.count,
            work.filled,
            state.numbers,
            state.integers,
            state.prompt,
            state.written,
            state.bias,
            state.allowed,
            tokens,
            ancestors,
            tokens.shape[0],
            self.logits.stride(0),
            self.vocabulary,
            state.allowed.shape[1],
            MASKS=MASKED if masks else 0,
            BLOCK=self.block,
            **self.options,
        )

    def threshold(self, count: int) -> None:
        work = self.work
        kernel.histogram_kernel[self.grid](
            self.logits,
            work.adjusted,
            work.partial,
            work.mass,
            work.count,
            *self.shape,
            COUNT=count,
            BLOCK=self.block,
            **self.options,
        )
        kernel.locate_kernel[(self.rows,)](
            work.mass, work.count, work.state, *self.shape[:2], COUNT=count, num_warps=8
        )
        self.gather(count, final=False)
        kernel.solve_kernel[(self.rows,)](
            self.logits,
            work.adjusted,
            work.partial,
            work.state,
            work.filled,
            work.found,
            *self.shape,
            work.capacity,
            self.splits,
            COUNT=count,
            CHUNK=_CHUNK,
            **self.options,
        )

    def gather(self, count: int, *, final: bool) -> None:
        work = self.work
        found = work.kept if final else work.found
        kernel.gather_kernel[self.grid](
            self.logits,
            work.adjusted,
            work.partial,
            work.state,
            work.filled,
            found,
            *self.shape,
            found.shape[1],
            FINAL=int(final),
            COUNT=count,
            BLOCK=self.block,
            **self.options,
        )
