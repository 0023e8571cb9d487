"""Drawing tokens from logits, and ranking a draft's candidates as they will be drawn."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeflash.kernels.sampling import state as plain
from treeflash.kernels.sampling.penalties import penalised
from treeflash.kernels.sampling.reference import draw, filtered, gumbel, philox, rank
from treeflash.kernels.sampling.state import DrawState

if TYPE_CHECKING:
    from treeflash.kernels.sampling.launch import Workspace

__all__ = [
    "DrawState",
    "draw",
    "draw_rows",
    "filtered",
    "gumbel",
    "make_workspace",
    "penalised",
    "philox",
    "rank",
    "rank_rows",
]

MAX_CANDIDATES = 32


def make_workspace(rows: int, vocabulary: int, device: torch.device) -> "Workspace | None":
    """Scratch memory for calls of up to `rows` rows on the device; a CPU needs none."""
    if device.type == "cpu":
        return None
    from treeflash.kernels.sampling.launch import Workspace

    return Workspace(rows, vocabulary, device)


def draw_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: DrawState,
    workspace: "Workspace | None",
) -> Tensor:
    """A token [R] behind each row of a tree: logits [R, V] float32, positions [R] where the tokens stand.

    tokens [T]: of the tree's rows; ancestors [R]: bit j set, row j is this row or above it. With a workspace
    nothing comes to the host, and the result is the workspace's own: good until the next call.
    """
    if workspace is None:
        return plain.draw_rows(logits, positions, tokens, ancestors, state)
    from treeflash.kernels.sampling import launch

    return launch.draw_rows(logits, positions, tokens, ancestors, state, workspace)


def rank_rows(
    logits: Tensor,
    positions: Tensor,
    anchor: Tensor,
    count: int,
    state: DrawState,
    workspace: "Workspace | None",
) -> tuple[Tensor, Tensor]:
    """A draft's rows [K, V] as the request will draw: the `count` best ids [K, count], log probabilities.

    Where the filters leave fewer tokens the last ones are 0 and score -inf. anchor [1]: the token before.
    """
    assert 1 <= count <= MAX_CANDIDATES, f"{count} candidates, at most {MAX_CANDIDATES}"
    if workspace is None:
        return plain.rank_rows(logits, positions, anchor, count, state)
    from treeflash.kernels.sampling import launch

    return launch.rank_rows(logits, positions, anchor, count, state, workspace)
