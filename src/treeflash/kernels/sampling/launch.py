"""Launches the sampling kernels: how many programs share a row, which scratch memory they use."""

import math

import torch
import triton
from torch import Tensor

from treeflash.kernels.sampling import filters, search
from treeflash.kernels.sampling import triton_kernels as kernel
from treeflash.kernels.sampling.state import MASKED, SamplingState

_SPLITS = 256  # programs that share a row, at most
# Of a launch, four and eight for each multiprocessor of the largest card: more take longer to return at once.
_PROGRAMS, _NOISE_PROGRAMS = 528, 1056
_BLOCK, _SEARCH_BLOCK, _NOISE_BLOCK = 4096, 2048, 1024
_CHUNK = 1024
_TREE = 64


class Workspace:
    """Scratch memory of the kernels, for up to `rows` rows."""

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        device: torch.device | str,
        *,
        capacity: int = 8192,
        shortlist: int = 1024,
    ):
        assert vocabulary < 2**20, f"{vocabulary} tokens, at most {2**20 - 1}"

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        bins, pool = filters.BINS.value, filters.POOL.value
        self.rows, self.vocabulary, self.capacity, self.shortlist = rows, vocabulary, capacity, shortlist
        self.block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        self.splits = -(-vocabulary // self.block)
        self.classes = min(max(64, triton.next_power_of_2(-(-shortlist // self.splits))), self.block)
        # So many class maxima reach the bound when the list is three quarters full.
        classes = min(self.splits * self.classes, vocabulary)
        self.bound_rank = math.ceil(-classes * math.expm1(-0.75 * shortlist / classes))
        self.maxima_size = triton.next_power_of_2(self.splits * self.classes)
        self.adjusted = make(rows, vocabulary, dtype=torch.float32)
        self.partial, self.maxima = make(rows, _SPLITS), make(rows, self.maxima_size, dtype=torch.float32)
        self.mass, self.count = make(rows, bins), make(rows, bins, dtype=torch.int32)
        self.record = make(rows, filters.WORDS.value)
        self.listed, self.found, self.kept = make(rows, shortlist), make(rows, capacity), make(rows, pool)
        self.tokens = make(rows)
        # The only ancestor of a draft's rows: the anchor.
        self.roots = torch.ones(rows, dtype=torch.int64, device=device)
        # Of each kernel's programs: zero before and after every launch.
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: SamplingState,
    workspace: Workspace,
) -> Tensor:
    """Launch the kernels of the package's function of this name."""
    launch, work = _Launch(logits, state, workspace), workspace
    launch.adjust(tokens, ancestors, work.tokens, masks=True, count=0)
    launch.settle(positions, work.tokens, logits, count=0)
    blocks = -(-launch.vocabulary // _NOISE_BLOCK)
    splits = min(blocks, _SPLITS, -(-_NOISE_PROGRAMS // launch.rows))
    kernel.noise_kernel[(launch.rows, splits)](
        logits,
        work.adjusted,
        work.partial,
        work.record,
        work.arrived,
        positions,
        state.numbers,
        state.integers,
        work.tokens,
        *launch.shape,
        SPLITS=_SPLITS,
        BLOCK=_NOISE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return work.tokens[: launch.rows]


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchor: Tensor,
    count: int,
    state: SamplingState,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of the package's function of this name."""
    launch, work = _Launch(logits, state, workspace), workspace
    ids = torch.empty(launch.rows, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(launch.rows, count, device=logits.device)
    launch.adjust(anchor, work.roots, work.tokens, masks=False, count=count)
    launch.settle(positions, ids, scores, count=count)
    search.rank_kernel[launch.search_grid](
        logits,
        work.adjusted,
        work.record,
        work.arrived,
        work.kept,
        positions,
        state.numbers,
        state.integers,
        ids,
        scores,
        *launch.shape,
        COUNT=count,
        **launch.search_options,
    )
    return ids, scores


class _Launch:
    """Shapes that the kernels of one call share."""

    def __init__(self, logits: Tensor, state: SamplingState, workspace: Workspace):
        self.rows, self.vocabulary = logits.shape
        assert self.rows <= workspace.rows, f"{self.rows} rows, room for {workspace.rows}"
        assert self.vocabulary == workspace.vocabulary, (
            f"{self.vocabulary} tokens, not {workspace.vocabulary}"
        )
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype}, {logits.stride()}"
        self.logits, self.state, self.work = logits, state, workspace
        self.shape = (logits.stride(0), self.vocabulary)
        self.grid = (self.rows, workspace.splits)
        self.options = {
            "SPLITS": _SPLITS,
            "BLOCK": workspace.block,
            "num_warps": 8,
            "enable_fp_fusion": False,
        }
        block = min(_SEARCH_BLOCK, triton.next_power_of_2(self.vocabulary))
        splits = min(-(-self.vocabulary // block), _SPLITS, -(-_PROGRAMS // self.rows))
        self.search_grid = (self.rows, splits)
        self.search_options = {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}

    def adjust(self, tokens: Tensor, ancestors: Tensor, chosen: Tensor, *, masks: bool, count: int) -> None:
        state, work = self.state, self.work
        assert len(tokens) <= _TREE, f"{len(tokens)} rows of a tree, at most {_TREE}"
        kernel.adjust_kernel[self.grid](
            self.logits,
            work.adjusted,
            work.partial,
            work.maxima,
            work.record,
            work.arrived,
            chosen,
            state.numbers,
            state.integers,
            state.prompt,
            state.counts,
            state.bias,
            state.allowed,
            tokens,
            ancestors,
            len(tokens),
            *self.shape,
            state.allowed.shape[1],
            MASKS=MASKED if masks else 0,
            COUNT=count,
            CLASSES=work.classes,
            MAXIMA=work.maxima_size,
            RANK=work.bound_rank,
            **self.options,
        )

    def settle(self, positions: Tensor, chosen: Tensor, scores: Tensor, *, count: int) -> None:
        """Sample (count 0) or rank on the short list; finds the last token kept of rows that stay open."""
        state, work = self.state, self.work
        kernel.shortlist_kernel[self.search_grid](
            self.logits,
            work.adjusted,
            work.partial,
            work.listed,
            work.mass,
            work.count,
            work.record,
            work.arrived,
            positions,
            state.numbers,
            state.integers,
            chosen,
            scores,
            *self.shape,
            LIST=work.shortlist,
            COUNT=count,
            SPLITS=_SPLITS,
            **self.search_options,
        )
        search.histogram_kernel[self.search_grid](
            self.logits,
            work.adjusted,
            work.mass,
            work.count,
            work.record,
            work.arrived,
            state.numbers,
            state.integers,
            *self.shape,
            COUNT=count,
            **self.search_options,
        )
        search.gather_kernel[self.search_grid](
            self.logits,
            work.adjusted,
            work.record,
            work.arrived,
            work.found,
            state.numbers,
            state.integers,
            *self.shape,
            work.capacity,
            COUNT=count,
            CHUNK=_CHUNK,
            **self.search_options,
        )
