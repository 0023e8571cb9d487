"""Split-K partial sums add up to the sum of their units, for any partition."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.quant_matmul.partial_sums import PartialSums


@given(st.sampled_from([128, 256]), st.integers(1, 4), st.integers(1, 9), st.data())
def test_parts_of_a_block_are_added(size: int, blocks: int, depth: int, data: st.DataObject) -> None:
    units = blocks * depth
    grid = data.draw(st.integers(1, units))
    columns = data.draw(st.integers((blocks - 1) * size + 4, blocks * size))
    values = torch.arange(1.0, units + 1).repeat_interleave(size).view(blocks, depth, size)
    values = values * torch.arange(1.0, size + 1)
    out, parts = torch.full((1, columns), torch.nan), torch.full((grid, 2, 8, size), torch.nan)
    share, extra, unit = units // grid, units % grid, 0
    for cta in range(grid):
        end = unit + share + (cta < extra)
        while unit < end:
            block, step = divmod(unit, depth)
            stop = min(end, (block + 1) * depth)
            total = values[block, step : stop - block * depth].sum(0)
            if stop - unit == depth:
                here = slice(block * size, min(columns, (block + 1) * size))
                out[0, here] = total[: here.stop - here.start]
            else:
                parts[cta, int(step == 0), 0] = total
            unit = stop
    sums = PartialSums(out, parts, depth, share, extra)
    wanted = values.sum(1).flatten()[:columns]
    assert torch.equal(sums.reduced()[0], wanted)
    first, rest = sums.split([4, columns - 4]) if columns > 4 else (sums, sums)
    assert torch.equal(first.reduced()[0], wanted[:4])
    assert torch.equal(rest.reduced()[0], wanted[4 if columns > 4 else 0 :])
