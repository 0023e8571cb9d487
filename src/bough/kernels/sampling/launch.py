"""Launches the sampling kernels: how many programs share a row, which scratch memory they use."""

import torch
import triton
from torch import Tensor

from bough.kernels.sampling import triton_kernels as kernel
from bough.kernels.sampling.state import MASKED, SampledRows, SamplingState
from bough.kernels.sampling.workspace import SPLITS, Workspace

# Of a launch, four and eight for each multiprocessor of the largest card: more take longer to return at once.
_PROGRAMS, _NOISE_PROGRAMS = 528, 1056
_SEARCH_BLOCK, _NOISE_BLOCK = 2048, 1024
_CHUNK = 1024


def sample_rows(rows: SampledRows, state: SamplingState, workspace: Workspace) -> Tensor:
    launch, work = _Launch(rows, state, workspace), workspace
    assert rows.ancestors is not None
    launch.adjust(rows.ancestors, work.tokens, masks=True, count=0)
    launch.settle(work.tokens, rows.logits, count=0)
    blocks = -(-launch.vocabulary // _NOISE_BLOCK)
    splits = min(blocks, SPLITS, -(-_NOISE_PROGRAMS // launch.rows))
    kernel.noise_kernel[(launch.rows, splits)](
        rows.logits, work.adjusted, work.partial, work.record, work.arrived, rows.positions,
        rows.owners.slots, state.numbers, state.integers, work.tokens, *launch.shape, SPLITS=SPLITS,
        BLOCK=_NOISE_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return work.tokens[: launch.rows]


def rank_rows(
    rows: SampledRows, count: int, state: SamplingState, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    launch, work = _Launch(rows, state, workspace), workspace
    ids = torch.empty(launch.rows, count, dtype=torch.int64, device=rows.logits.device)
    scores = torch.empty(launch.rows, count, device=rows.logits.device)
    launch.adjust(work.roots, work.tokens, masks=False, count=count)
    launch.settle(ids, scores, count=count)
    kernel.rank_kernel[launch.search_grid](
        rows.logits, work.adjusted, work.record, work.arrived, work.kept, rows.positions, rows.owners.slots,
        state.numbers, state.integers, ids, scores, *launch.shape, COUNT=count, **launch.search_options,
    )  # fmt: skip
    return ids, scores


class _Launch:
    """Shapes that the kernels of one call share."""

    def __init__(self, rows: SampledRows, state: SamplingState, workspace: Workspace):
        logits, owners = rows.logits, rows.owners
        self.rows, self.vocabulary = logits.shape
        assert self.rows <= workspace.rows, f"{self.rows} rows, room for {workspace.rows}"
        assert self.vocabulary == workspace.vocabulary, (
            f"{self.vocabulary} tokens, not {workspace.vocabulary}"
        )
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype}, {logits.stride()}"
        for part in (owners.slots, owners.starts):
            assert part.is_contiguous() and len(part) == self.rows, f"{part.shape}, {self.rows} rows"
        self.sampled, self.state, self.work = rows, state, workspace
        self.shape = (logits.stride(0), self.vocabulary)
        self.grid = (self.rows, workspace.splits)
        self.options = {"BLOCK": workspace.block, "num_warps": 8, "enable_fp_fusion": False}
        block = min(_SEARCH_BLOCK, triton.next_power_of_2(self.vocabulary))
        splits = min(-(-self.vocabulary // block), SPLITS, -(-_PROGRAMS // self.rows))
        self.search_grid = (self.rows, splits)
        self.search_options = self.options | {"BLOCK": block}

    def adjust(self, ancestors: Tensor, out: Tensor, *, masks: bool, count: int) -> None:
        rows, state, work = self.sampled, self.state, self.work
        kernel.adjust_kernel[self.grid](
            rows.logits, work.adjusted, work.partial, work.maxima, work.record, work.arrived, out,
            state.numbers, state.integers, state.prompt, state.counts, state.bias, state.allowed, rows.tokens,
            ancestors, rows.owners.slots, rows.owners.starts, len(rows.tokens), *self.shape,
            state.allowed.shape[1], MASKS=MASKED if masks else 0, COUNT=count, CLASSES=work.classes,
            MAXIMA=work.maxima_size, RANK=work.bound_rank, SPLITS=SPLITS, **self.options,
        )  # fmt: skip

    def settle(self, out: Tensor, scores: Tensor, *, count: int) -> None:
        """Sample (count 0) or rank on the short list; finds the last token kept of rows that stay open."""
        rows, state, work = self.sampled, self.state, self.work
        kernel.shortlist_kernel[self.search_grid](
            rows.logits, work.adjusted, work.partial, work.listed, work.mass, work.count, work.record,
            work.arrived, rows.positions, rows.owners.slots, state.numbers, state.integers, out, scores,
            *self.shape, LIST=work.shortlist, COUNT=count, SPLITS=SPLITS, **self.search_options,
        )  # fmt: skip
        kernel.histogram_kernel[self.search_grid](
            rows.logits, work.adjusted, work.mass, work.count, work.record, work.arrived, rows.owners.slots,
            state.numbers, state.integers, *self.shape, COUNT=count, **self.search_options,
        )  # fmt: skip
        kernel.gather_kernel[self.search_grid](
            rows.logits, work.adjusted, work.record, work.arrived, work.found, rows.owners.slots,
            state.numbers, state.integers, *self.shape, work.capacity, COUNT=count, CHUNK=_CHUNK,
            **self.search_options,
        )  # fmt: skip
