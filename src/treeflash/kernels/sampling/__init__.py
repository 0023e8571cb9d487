"""Sampling tokens from logits, and ranking a draft's candidates as they will be sampled."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeflash.kernels.sampling import state as plain
from treeflash.kernels.sampling.penalties import penalised
from treeflash.kernels.sampling.reference import filtered, gumbel, philox, rank, sample
from treeflash.kernels.sampling.state import NoiseCache, SamplingState

if TYPE_CHECKING:
    from treeflash.kernels.sampling.launch import Workspace

__all__ = [
    "SamplingState",
    "filtered",
    "gumbel",
    "make_workspace",
    "penalised",
    "philox",
    "rank",
    "rank_rows",
    "sample",
    "sample_rows",
]

MAX_CANDIDATES = 32


def make_workspace(rows: int, vocabulary: int, device: torch.device) -> "Workspace | NoiseCache":
    """Return scratch memory for calls of up to `rows` rows; on a CPU only a cache of noise."""
    if device.type == "cpu":
        return NoiseCache()
    from treeflash.kernels.sampling.launch import Workspace

    return Workspace(rows, vocabulary, device)


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: SamplingState,
    workspace: "Workspace | NoiseCache",
) -> Tensor:
    """Sample a token [R] after each row of a tree: logits [R, V] float32, positions [R] of the tokens.

    tokens [T]: of the tree's rows; ancestors [R]: bit j set, row j is this row or above it. On a GPU
    nothing is read to the host, and the result is the workspace's own buffer: valid until the next call.
    """
    if isinstance(workspace, NoiseCache):
        return plain.sample_rows(logits, positions, tokens, ancestors, state, workspace)
    from treeflash.kernels.sampling import launch

    return launch.sample_rows(logits, positions, tokens, ancestors, state, workspace)


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchor: Tensor,
    count: int,
    state: SamplingState,
    workspace: "Workspace | NoiseCache",
) -> tuple[Tensor, Tensor]:
    """Rank a draft's rows [K, V] as the request samples: the `count` best ids [K, count], log probabilities.

    Where the filters leave fewer tokens the last ones are 0 and score -inf. anchor [1]: the token before.
    """
    assert 1 <= count <= MAX_CANDIDATES, f"{count} candidates, at most {MAX_CANDIDATES}"
    if isinstance(workspace, NoiseCache):
        return plain.rank_rows(logits, positions, anchor, count, state)
    from treeflash.kernels.sampling import launch

    return launch.rank_rows(logits, positions, anchor, count, state, workspace)
