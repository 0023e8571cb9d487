"""The package's tree functions where no GPU is: padding, bits, positions, and what ends a walk."""

import math

import torch

from treeflash.kernels.tree import Correction, build_tree, walk_tree

ANCHOR, POSITION = torch.tensor([99]), torch.tensor([1000])
NOTHING = torch.empty(0, dtype=torch.int64)


def candidates() -> tuple[torch.Tensor, ...]:
    """Two depths of two candidates, and no chains."""
    scores = torch.tensor([[0.6, 0.3], [0.7, 0.2]]).log()
    empty = torch.empty(0, 2)
    return ANCHOR, POSITION, torch.tensor([[1, 2], [3, 4]]), scores, empty.long(), empty


def test_rows_come_in_order_of_worth_and_padding_hangs_below_nothing() -> None:
    tree = build_tree(*candidates(), nodes=6, rows=9)
    # 0.6, 0.42, 0.3, 0.21, 0.12, 0.06
    assert tree.tokens.tolist() == [99, 1, 3, 2, 3, 4, 4, 99, 99]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 1, 3, -1, -1]
    assert tree.positions.tolist() == [1000, 1001, 1002, 1001, 1002, 1002, 1002, 1000, 1000]
    bits = [0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100011, 0b1001001, 0b10000000, 0b100000000]
    assert tree.ancestors.tolist() == bits
    weights = [1.0, 0.6, 0.42, 0.3, 0.21, 0.12, 0.06, 0.0, 0.0]
    assert torch.allclose(tree.weights.exp(), torch.tensor(weights))


def test_the_last_of_64_rows_has_the_sign_bit() -> None:
    parts = (torch.arange(63).expand(1, -1), torch.full((1, 63), -1.0))
    tree = build_tree(ANCHOR, POSITION, *parts, NOTHING.view(0, 1), torch.empty(0, 1), nodes=63, rows=64)
    assert tree.ancestors[63] == -(2**63) + 1 and tree.parents[63] == 0


def test_a_correction_changes_the_order() -> None:
    # Claims above a half were worth a tenth of what they said.
    correction = Correction(
        torch.tensor([0.5]).log(), torch.tensor([[0.0, math.log(0.1)]]), torch.zeros(2, dtype=torch.int64)
    )
    tree = build_tree(*candidates(), nodes=2, rows=3, correction=correction)
    assert tree.tokens.tolist() == [99, 2, 1]


def chain(length: int) -> tuple[torch.Tensor, ...]:
    """Tokens 10, 11, ... one below the other, all of which the target draws, and then 50."""
    tokens = torch.arange(10, 10 + length)
    ancestors = (torch.ones_like(tokens) << torch.arange(1, length + 1)) - 1
    return tokens, torch.arange(-1, length - 1), ancestors, torch.cat([tokens[1:], torch.tensor([50])])


def test_a_walk_says_what_to_commit() -> None:
    tokens, parents, ancestors, chosen = chain(4)
    # A sibling in between: row 2 becomes row 3, its children move with it.
    tokens = torch.tensor([10, 11, 77, 12, 13])
    parents = torch.tensor([-1, 0, 1, 1, 3])
    ancestors = torch.tensor([0b1, 0b11, 0b111, 0b1011, 0b11011])
    chosen = torch.tensor([11, 12, 5, 13, 50])
    written = torch.zeros(100)
    done = walk_tree(
        tokens, parents, ancestors, chosen, stops=NOTHING, room=torch.tensor([64]), written=written
    )
    assert done.count.tolist() == [4] and done.next_token.tolist() == [50]
    assert done.last.tolist() == [4] and done.bits.tolist() == [0b11011]
    assert done.rows[:5].tolist() == [0, 1, 3, 4, -1]
    assert done.decided[:5].tolist() == [11, 12, 13, 50, -1]
    assert done.source[:6].tolist() == [0, 1, 3, 4, 4, 5]
    assert written.nonzero()[:, 0].tolist() == [10, 11, 12, 13]


def test_a_walk_ends_with_a_stop_token_or_the_room() -> None:
    parts, room = chain(5), torch.tensor([64])
    stopped = walk_tree(*parts, stops=torch.tensor([12]), room=room)
    # 12 is drawn behind row 1; plain decoding would not have processed it.
    assert stopped.count.tolist() == [2] and stopped.decided[:3].tolist() == [11, 12, -1]
    short = walk_tree(*parts, stops=NOTHING, room=torch.tensor([3]))
    assert short.count.tolist() == [3] and short.next_token.tolist() == [13]
