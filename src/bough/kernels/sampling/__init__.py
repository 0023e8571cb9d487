"""Sampling tokens from logits, and ranking a draft's candidates as they will be sampled."""

import torch
from torch import Tensor

from bough.kernels.sampling import state as plain
from bough.kernels.sampling.reference import filtered, gumbel, penalised, philox, rank, sample
from bough.kernels.sampling.state import NoiseCache, RowOwners, SampledRows, SamplingState
from bough.kernels.sampling.workspace import Workspace

MAX_CANDIDATES = 32


def make_workspace(rows: int, vocabulary: int, device: torch.device) -> Workspace | NoiseCache:
    """Return scratch memory for calls of up to `rows` rows; on a CPU only a cache of noise."""
    if device.type == "cpu":
        return NoiseCache()
    return Workspace(rows, vocabulary, device)


def sample_rows(rows: SampledRows, state: SamplingState, workspace: Workspace | NoiseCache) -> Tensor:
    """Sample a token [R] after each of some rows; those of no slot mean nothing.

    On a GPU nothing is read to the host, and the result is the workspace's own buffer: valid until the next
    call.
    """
    if isinstance(workspace, NoiseCache):
        return plain.sample_rows(rows, state, workspace)
    from bough.kernels.sampling import launch

    return launch.sample_rows(rows, state, workspace)


def rank_rows(
    rows: SampledRows, count: int, state: SamplingState, workspace: Workspace | NoiseCache
) -> tuple[Tensor, Tensor]:
    """Rank a draft's rows as their requests sample: the best ids [R, count] and log probabilities.

    Where the filters leave fewer tokens the last ones are 0 and score -inf.
    """
    assert 1 <= count <= MAX_CANDIDATES, f"{count} candidates, at most {MAX_CANDIDATES}"
    if isinstance(workspace, NoiseCache):
        return plain.rank_rows(rows, count, state)
    from bough.kernels.sampling import launch

    return launch.rank_rows(rows, count, state, workspace)
