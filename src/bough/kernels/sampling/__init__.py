"""Sampling tokens from logits, and ranking a draft's candidates as they will be sampled."""

import torch
from torch import Tensor

from bough.kernels.sampling import state as plain
from bough.kernels.sampling.penalties import penalised
from bough.kernels.sampling.reference import filtered, gumbel, philox, rank, sample
from bough.kernels.sampling.state import NoiseCache, RowOwners, SamplingState
from bough.kernels.sampling.workspace import Workspace

__all__ = [
    "RowOwners",
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


def make_workspace(rows: int, vocabulary: int, device: torch.device) -> Workspace | NoiseCache:
    """Return scratch memory for calls of up to `rows` rows; on a CPU only a cache of noise."""
    if device.type == "cpu":
        return NoiseCache()
    return Workspace(rows, vocabulary, device)


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    owners: RowOwners,
    state: SamplingState,
    workspace: Workspace | NoiseCache,
) -> Tensor:
    """Sample a token [R] after each row of some trees: logits [R, V] float32, positions [R] of the tokens.

    tokens [R]: of the rows; ancestors [R]: bit j set, row j of its tree is this row or above it; owners:
    the slots and trees of the rows. What is sampled after rows of no slot means nothing. On a GPU nothing is
    read to the host, and the result is the workspace's own buffer: valid until the next call.
    """
    if isinstance(workspace, NoiseCache):
        return plain.sample_rows(logits, positions, tokens, ancestors, owners, state, workspace)
    from bough.kernels.sampling import launch

    return launch.sample_rows(logits, positions, tokens, ancestors, owners, state, workspace)


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchors: Tensor,
    owners: RowOwners,
    count: int,
    state: SamplingState,
    workspace: Workspace | NoiseCache,
) -> tuple[Tensor, Tensor]:
    """Rank a draft's rows [R, V] as their requests sample: the best ids [R, count] and log probabilities.

    Where the filters leave fewer tokens the last ones are 0 and score -inf. The token before a row is
    anchors[owners.starts].
    """
    assert 1 <= count <= MAX_CANDIDATES, f"{count} candidates, at most {MAX_CANDIDATES}"
    if isinstance(workspace, NoiseCache):
        return plain.rank_rows(logits, positions, anchors, owners, count, state)
    from bough.kernels.sampling import launch

    return launch.rank_rows(logits, positions, anchors, owners, count, state, workspace)
