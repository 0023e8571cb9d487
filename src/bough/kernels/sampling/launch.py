"""Launches the sampling kernels: how many programs share a row, which scratch memory they use."""

import torch
import triton
from torch import Tensor

from bough.kernels.sampling import search
from bough.kernels.sampling import triton_kernels as kernel
from bough.kernels.sampling.state import MASKED, RowOwners, SamplingState
from bough.kernels.sampling.workspace import SPLITS, Workspace

# Of a launch, four and eight for each multiprocessor of the largest card: more take longer to return at once.
_PROGRAMS, _NOISE_PROGRAMS = 528, 1056
_SEARCH_BLOCK, _NOISE_BLOCK = 2048, 1024
_CHUNK = 1024


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    owners: RowOwners,
    state: SamplingState,
    workspace: Workspace,
) -> Tensor:
    """Launch the kernels of the package's function of this name."""
    launch, work = _Launch(logits, owners, state, workspace), workspace
    launch.adjust(tokens, ancestors, work.tokens, masks=True, count=0)
    launch.settle(positions, work.tokens, logits, count=0)
    blocks = -(-launch.vocabulary // _NOISE_BLOCK)
    splits = min(blocks, SPLITS, -(-_NOISE_PROGRAMS // launch.rows))
    kernel.noise_kernel[(launch.rows, splits)](
        logits, work.adjusted, work.partial, work.record, work.arrived, positions, owners.slots,
        state.numbers, state.integers, work.tokens, *launch.shape, SPLITS=SPLITS, BLOCK=_NOISE_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return work.tokens[: launch.rows]


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchors: Tensor,
    owners: RowOwners,
    count: int,
    state: SamplingState,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of the package's function of this name."""
    launch, work = _Launch(logits, owners, state, workspace), workspace
    ids = torch.empty(launch.rows, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(launch.rows, count, device=logits.device)
    launch.adjust(anchors, work.roots, work.tokens, masks=False, count=count)
    launch.settle(positions, ids, scores, count=count)
    search.rank_kernel[launch.search_grid](
        logits, work.adjusted, work.record, work.arrived, work.kept, positions, owners.slots, state.numbers,
        state.integers, ids, scores, *launch.shape, COUNT=count, **launch.search_options,
    )  # fmt: skip
    return ids, scores


class _Launch:
    """Shapes that the kernels of one call share."""

    def __init__(self, logits: Tensor, owners: RowOwners, state: SamplingState, workspace: Workspace):
        self.rows, self.vocabulary = logits.shape
        assert self.rows <= workspace.rows, f"{self.rows} rows, room for {workspace.rows}"
        assert self.vocabulary == workspace.vocabulary, (
            f"{self.vocabulary} tokens, not {workspace.vocabulary}"
        )
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype}, {logits.stride()}"
        for part in (owners.slots, owners.starts):
            assert part.is_contiguous() and len(part) == self.rows, f"{part.shape}, {self.rows} rows"
        self.logits, self.owners, self.state, self.work = logits, owners, state, workspace
        self.shape = (logits.stride(0), self.vocabulary)
        self.grid = (self.rows, workspace.splits)
        self.options = {
            "SPLITS": SPLITS,
            "BLOCK": workspace.block,
            "num_warps": 8,
            "enable_fp_fusion": False,
        }
        block = min(_SEARCH_BLOCK, triton.next_power_of_2(self.vocabulary))
        splits = min(-(-self.vocabulary // block), SPLITS, -(-_PROGRAMS // self.rows))
        self.search_grid = (self.rows, splits)
        self.search_options = {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}

    def adjust(self, tokens: Tensor, ancestors: Tensor, out: Tensor, *, masks: bool, count: int) -> None:
        state, work = self.state, self.work
        kernel.adjust_kernel[self.grid](
            self.logits, work.adjusted, work.partial, work.maxima, work.record, work.arrived, out,
            state.numbers, state.integers, state.prompt, state.counts, state.bias, state.allowed, tokens,
            ancestors, self.owners.slots, self.owners.starts, len(tokens), *self.shape,
            state.allowed.shape[1], MASKS=MASKED if masks else 0, COUNT=count, CLASSES=work.classes,
            MAXIMA=work.maxima_size, RANK=work.bound_rank, **self.options,
        )  # fmt: skip

    def settle(self, positions: Tensor, out: Tensor, scores: Tensor, *, count: int) -> None:
        """Sample (count 0) or rank on the short list; finds the last token kept of rows that stay open."""
        state, work = self.state, self.work
        kernel.shortlist_kernel[self.search_grid](
            self.logits, work.adjusted, work.partial, work.listed, work.mass, work.count, work.record,
            work.arrived, positions, self.owners.slots, state.numbers, state.integers, out, scores,
            *self.shape, LIST=work.shortlist, COUNT=count, SPLITS=SPLITS, **self.search_options,
        )  # fmt: skip
        search.histogram_kernel[self.search_grid](
            self.logits, work.adjusted, work.mass, work.count, work.record, work.arrived, self.owners.slots,
            state.numbers, state.integers, *self.shape, COUNT=count, **self.search_options,
        )  # fmt: skip
        search.gather_kernel[self.search_grid](
            self.logits, work.adjusted, work.record, work.arrived, work.found, self.owners.slots,
            state.numbers, state.integers, *self.shape, work.capacity, COUNT=count, CHUNK=_CHUNK,
            **self.search_options,
        )  # fmt: skip
