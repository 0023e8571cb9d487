"""The package's tree functions on a CPU: padding, ancestor bits, depths, and what ends the accepted path."""

import math
from collections.abc import Sequence

import torch

from bough.kernels.tree import Acceptance, Candidates, Correction, TreeForm, accept_path, best_tree

ANCHOR = torch.tensor([99])
NOTHING = torch.empty(0, dtype=torch.int64)


def candidates() -> Candidates:
    """Two depths of two candidates, and no chains."""
    scores = torch.tensor([[0.6, 0.3], [0.7, 0.2]]).log()
    empty = torch.empty(0, 2)
    return Candidates(torch.tensor([[[1, 2], [3, 4]]]), scores[None], empty.long()[None], empty[None])


def test_rows_are_in_order_of_worth_and_padding_has_no_parent() -> None:
    [(tokens, parents, ancestors, depths)], [weights] = best_tree(ANCHOR, candidates(), TreeForm(6, 9))
    # 0.6, 0.42, 0.3, 0.21, 0.12, 0.06
    assert tokens.tolist() == [99, 1, 3, 2, 3, 4, 4, 99, 99]
    assert parents.tolist() == [-1, 0, 1, 0, 3, 1, 3, -1, -1]
    assert depths.tolist() == [0, 1, 2, 1, 2, 2, 2, 0, 0]
    bits = [0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100011, 0b1001001, 0b10000000, 0b100000000]
    assert ancestors.tolist() == bits
    expected = [1.0, 0.6, 0.42, 0.3, 0.21, 0.12, 0.06, 0.0, 0.0]
    assert torch.allclose(weights.exp(), torch.tensor(expected))


def test_the_last_of_64_rows_has_the_sign_bit() -> None:
    parts = (torch.arange(63).expand(1, 1, -1), torch.full((1, 1, 63), -1.0))
    every = Candidates(*parts, NOTHING.view(1, 0, 1), torch.empty(1, 0, 1))
    [packed], _ = best_tree(ANCHOR, every, TreeForm(63))
    assert packed[2, 63] == -(2**63) + 1 and packed[1, 63] == 0


def test_a_correction_changes_the_order() -> None:
    # Claims above a half were worth a tenth of what they said.
    correction = Correction(
        torch.tensor([0.5]).log(), torch.tensor([[0.0, math.log(0.1)]]), torch.zeros(2, dtype=torch.int64)
    )
    [packed], _ = best_tree(ANCHOR, candidates(), TreeForm(2, 3, correction=correction))
    assert packed[0].tolist() == [99, 2, 1]


def chain(length: int) -> tuple[torch.Tensor, ...]:
    """Tokens 10, 11, ... one below the other, all of which the target samples, and then 50."""
    tokens = torch.arange(10, 10 + length)
    ancestors = (torch.ones_like(tokens) << torch.arange(1, length + 1)) - 1
    return tokens, torch.arange(-1, length - 1), ancestors, torch.cat([tokens[1:], torch.tensor([50])])


def accepted(parts: Sequence[torch.Tensor], **options: torch.Tensor) -> Acceptance:
    tables = {
        "slots": torch.tensor([0]),
        "stops": NOTHING[None],
        "limits": torch.tensor([64]),
        "counts": torch.zeros(1, 100),
    }
    return accept_path(*parts, **{**tables, **options})


def test_the_accepted_path_is_what_to_commit() -> None:
    tokens, parents, ancestors, sampled = chain(4)
    # A sibling in between: row 2 becomes row 3, its children move with it.
    tokens = torch.tensor([10, 11, 77, 12, 13])
    parents = torch.tensor([-1, 0, 1, 1, 3])
    ancestors = torch.tensor([0b1, 0b11, 0b111, 0b1011, 0b11011])
    sampled = torch.tensor([11, 12, 5, 13, 50])
    counts = torch.zeros(1, 100)
    done = accepted((tokens, parents, ancestors, sampled), counts=counts)
    assert done.counts.tolist() == [4] and done.next_tokens.tolist() == [50]
    assert done.last_rows.tolist() == [4] and done.path_bits.tolist() == [0b11011]
    assert done.rows[0, :5].tolist() == [0, 1, 3, 4, -1]
    assert done.tokens[0, :5].tolist() == [11, 12, 13, 50, -1]
    assert done.source[0, :6].tolist() == [0, 1, 3, 4, 4, 5]
    assert counts[0].nonzero()[:, 0].tolist() == [10, 11, 12, 13]


def test_the_path_ends_with_a_stop_token_or_the_limit() -> None:
    parts = chain(5)
    stopped = accepted(parts, stops=torch.tensor([[12]]))
    # 12 is sampled after row 1; plain decoding would not have processed it.
    assert stopped.counts.tolist() == [2] and stopped.tokens[0, :3].tolist() == [11, 12, -1]
    short = accepted(parts, limits=torch.tensor([3]))
    assert short.counts.tolist() == [3] and short.next_tokens.tolist() == [13]


def test_several_trees_each_have_their_own_path() -> None:
    """Their stops, limits and counts are those of their slots; a sequence without rows accepts none."""
    trees = [chain(5), chain(3), chain(4)]
    parts = [torch.cat(part) for part in zip(*trees, strict=True)]
    first, slots = torch.tensor([0, 5, 5, 8, 12]), torch.tensor([2, 2, 0, 1])
    stops = torch.tensor([[11], [-1], [-1]])
    limits, counts = torch.tensor([4, 9, 9, 2]), torch.zeros(3, 100)
    done = accepted(parts, first=first, slots=slots, stops=stops, limits=limits, counts=counts)
    assert done.counts.tolist() == [4, 0, 1, 2] and done.last_rows.tolist() == [3, -1, 0, 1]
    assert done.paths() == [
        ([0, 1, 2, 3], [11, 12, 13, 14]),
        ([], []),
        ([0], [11]),
        ([0, 1], [11, 12]),
    ]
    assert counts.sum(1).tolist() == [1, 2, 4]
