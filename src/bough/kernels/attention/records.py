"""What a step's rows attend to, and in how many parts GPUs add it."""

from dataclasses import dataclass

from torch import Tensor

from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.tree import MAX_ROWS

SINKS = 64  # attention sinks: first tokens that a window never hides
SPLITS = 62  # of the context, at most: with a row's last two blocks 64 partial results
# Rows up to a block have fewer splits, since a split's sums are written and read again, and since on an H200
# the tiles of 24 rows and 4 KV heads should leave some SMs to the rows' last blocks. Longer contexts keep two
# programs on each of its 132 SMs with one row.
TIERS = ((66, 22), (128, 30))


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The KV cache that a step's rows attend to, which already holds their own K and V, and who sees whom.

    Row i of sequence b is at index lengths[b] + i. It attends to the committed tokens and the rows j whose
    bit is set in ancestors[b, i]: itself and those above it; without ancestors to the rows before it and
    itself. Its position p is lengths[b] and the number of rows above it. With a window it attends only to
    positions from p - window + 1 on and to the first `sinks`. Query head h reads KV head h // (H / KV).
    """

    keys: HeadPool  # [pages, KV, page, row]; a quantised pool stores rotated rows
    values: HeadPool
    page_table: Tensor  # [S, P]
    lengths: Tensor  # [S] committed tokens
    ancestors: Tensor | None = None  # [B, T] bits: B = S, or for ragged rows 1; None: prompt text
    first: Tensor | None = None  # [S + 1] first row of each sequence, for ragged rows
    window: int | None = None
    sinks: int = SINKS  # or 0

    def tree_rows(self, q: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q and gate [R, H, D] and the ancestors [R] of trees of at most MAX_ROWS rows."""
        assert q.shape[1] <= MAX_ROWS, f"{q.shape[1]} rows, at most {MAX_ROWS}"
        (keys, values), ancestors = (self.keys.codes, self.values.codes), self.ancestors
        assert ancestors is not None and ancestors.numel() == q.shape[0] * q.shape[1], f"{q.shape}"
        assert keys.shape[:3] == values.shape[:3], f"{keys.shape}, {values.shape}"
        assert q.shape[2] % keys.shape[1] == 0, f"{q.shape[2]} heads over {keys.shape[1]}"
        assert self.first is not None or len(q) == len(self.lengths), f"{len(q)} of {len(self.lengths)} trees"
        flat = None if gate is None else gate.flatten(0, 1)
        return q.flatten(0, 1).contiguous(), ancestors.flatten().contiguous(), flat
