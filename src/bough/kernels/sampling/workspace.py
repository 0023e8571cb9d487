"""The scratch memory of the sampling kernels. Imports no Triton: its size is planned on any machine."""

import math

import torch
from torch import Tensor

from bough.kernels.sampling.reference import POOL

SPLITS = 256  # programs that share a row, at most
BINS = 2048  # of 1/32 octave; those beyond 41 octaves stay empty
WORDS = 16  # of a row's record
_BLOCK = 4096


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


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

        bins, pool = BINS, POOL
        self.rows, self.vocabulary, self.capacity, self.shortlist = rows, vocabulary, capacity, shortlist
        self.block = min(_BLOCK, _power_of_two(vocabulary))
        self.splits = -(-vocabulary // self.block)
        self.classes = min(max(64, _power_of_two(-(-shortlist // self.splits))), self.block)
        # So many class maxima reach the bound when the list is three quarters full.
        classes = min(self.splits * self.classes, vocabulary)
        self.bound_rank = math.ceil(-classes * math.expm1(-0.75 * shortlist / classes))
        self.maxima_size = _power_of_two(self.splits * self.classes)
        self.adjusted = make(rows, vocabulary, dtype=torch.float32)
        self.partial, self.maxima = make(rows, SPLITS), make(rows, self.maxima_size, dtype=torch.float32)
        self.mass, self.count = make(rows, bins), make(rows, bins, dtype=torch.int32)
        self.record = make(rows, WORDS)
        self.listed, self.found, self.kept = make(rows, shortlist), make(rows, capacity), make(rows, pool)
        self.tokens = make(rows)
        # The only ancestor of a draft's rows: the anchor.
        self.roots = torch.ones(rows, dtype=torch.int64, device=device)
        # Of each kernel's programs: zero before and after every launch.
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
