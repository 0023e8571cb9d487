"""What a draft tree is built from, and what of a verified tree is accepted."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROWS = 64  # of a tree: the ancestors of a row are the bits of one 64-bit word
HEADER = 4  # count, next token, last row, its ancestor bits


class Candidates(NamedTuple):
    """What may follow each of S anchors, K tokens deep; of one sequence without the S."""

    ids: Tensor  # [S, K, k] of each depth
    # Log probabilities [S, K, k], or [S, K, k + 1, k] after each candidate of the depth before, the last row
    # after any other token; the anchor's children have the first row.
    scores: Tensor
    chains: Tensor  # [S, m, K] whole continuations, ended by -1
    chain_scores: Tensor  # [S, m, K]


@dataclass(frozen=True, slots=True)
class Correction:
    """Calibration of log probabilities: adds table[depth_bins[d], number of edges below the score]."""

    edges: Tensor  # [E] float32, rising
    table: Tensor  # [D, E + 1] float32, to be added
    depth_bins: Tensor  # [K] int64

    def applied(self, scores: Tensor) -> Tensor:
        """Return calibrated scores [K, ..., k] of K depths, at most 0."""
        claims = torch.bucketize(scores.contiguous(), self.edges)
        bins = self.depth_bins[: len(scores)].view(-1, *[1] * (scores.ndim - 1))
        return (scores + self.table[bins, claims]).clamp(max=0)


@dataclass(frozen=True, slots=True)
class TreeForm:
    """How a tree is built: of the likeliest prefixes."""

    nodes: int  # below the root
    rows: int = MAX_ROWS  # with padding
    spine: float = 1.0  # the path of best children is included while its weight is at least this
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted paths of S trees, as named views of one tensor: one copy brings all to the host.

    Rows are numbered within their tree; a sequence without rows has accepted none.
    """

    flat: Tensor  # [S * SIZE] int64

    SIZE = HEADER + 3 * MAX_ROWS

    @property
    def sequences(self) -> int:
        return len(self.flat) // self.SIZE

    @property
    def counts(self) -> Tensor:
        """[S] accepted rows, the root included."""
        return self._header(0)

    @property
    def next_tokens(self) -> Tensor:
        """[S] the token that the target sampled after the last accepted row."""
        return self._header(1)

    @property
    def last_rows(self) -> Tensor:
        """[S] the last accepted row; -1: none."""
        return self._header(2)

    @property
    def path_bits(self) -> Tensor:
        """[S] the ancestor bits of the last accepted row: the path."""
        return self._header(3)

    @property
    def rows(self) -> Tensor:
        """[S, 64] accepted rows from the root down, then -1."""
        return self._lists()[0]

    @property
    def tokens(self) -> Tensor:
        """[S, 64] tokens of the accepted rows below the root, then the next one: `count` in all, then -1."""
        return self._lists()[1]

    @property
    def source(self) -> Tensor:
        """[S, 64] for each row, the row that replaces it when the accepted path is compacted to the front."""
        return self._lists()[2]

    def paths(self) -> list[tuple[list[int], list[int]]]:
        """Return the accepted rows of each tree and the tokens they decided; on the host."""
        flat, sequences = self.flat.numpy(), self.sequences
        counts = flat[:sequences].tolist()
        lists = flat[HEADER * sequences :].reshape(3, sequences, MAX_ROWS)
        rows, tokens = lists[:2, :, : max(counts, default=0)].tolist()
        return [(path[:n], ids[:n]) for path, ids, n in zip(rows, tokens, counts, strict=True)]

    def _header(self, field: int) -> Tensor:
        return self.flat[field * self.sequences : (field + 1) * self.sequences]

    def _lists(self) -> Tensor:
        return self.flat[HEADER * self.sequences :].view(3, self.sequences, MAX_ROWS)
