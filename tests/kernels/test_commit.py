"""What a commit leaves; its kernels run in their own process: Triton chooses the interpreter at import."""

import torch

from bough.kernels.commit import commit_path, move_rows


def test_a_path_is_moved_after_the_committed_tokens() -> None:
    ancestors = torch.tensor([[0b1, 0b11, 0b101, 0b1101]])
    state = {
        "path": torch.full((1, 6), 9),
        "count": torch.tensor([5]),
        "lengths": torch.tensor([3]),
    }
    kept = commit_path(ancestors, torch.tensor([3]), torch.tensor([0]), **state)
    assert kept.counts.tolist() == [3] and kept.starts.tolist() == [3]
    assert kept.source.tolist() == [[0, 2, 3, 3]]
    assert state["path"].tolist() == [[0, 2, 3, 1, 9, 9]]
    assert state["count"].tolist() == [3] and state["lengths"].tolist() == [6]
    # One layer, one head, pages of two tokens in another order: token t holds t.
    table = torch.tensor([[3, 0, 2, 1]])
    plane = torch.empty(1, 4, 1, 2, 1)
    plane[0, table[0], 0, :, 0] = torch.arange(8.0).view(4, 2)
    move_rows([plane], kept, torch.tensor([0]), table)
    assert plane[0, table[0], 0, :, 0].flatten().tolist() == [0, 1, 2, 3, 5, 6, 6, 7]
