"""The CUDA kernel of tree attention: its tiles; that it compiles for and fits on every supported card."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.attention.cuda import NARROW, STORED, WIDE, Tile, tile_of
from bough.kernels.attention.records import SPLITS, TIERS
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS, tool_output

PAIRS = [(name, name) for name in STORED] + [("q8_0", "q4_0"), ("f16", "tq3_0"), ("q5_0", "bf16")]


def resources(card: Card, tile: Tile, folder: Path) -> tuple[int, int]:
    """Return a thread's registers and bytes of stack, from the machine code."""
    path = folder / "tile.cubin"
    macros = tile.defines(card.pdl)
    path.write_bytes(compile_cubin(tile.source(), defines=macros, arch=tile.arch(card), cached=False))
    text = tool_output("cuobjdump", "--dump-resource-usage", str(path))
    found = re.search(r"Function tree_attention:\s+REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("pair", [PAIRS[i] for i in (0, 2, 3, 5, 6, 8)], ids="/".join)
def test_a_tree_of_24_rows_keeps_its_sums_in_registers(pair: tuple[str, str], tmp_path: Path) -> None:
    card = CARDS["H200"]
    tile = tile_of(card, *pair, 144, window=pair[0] != pair[1])
    assert tile is not None and tile.queries == 144 and tile.grouped
    registers, stack = resources(card, tile, tmp_path)
    assert stack <= 64 and registers * tile.threads <= 65536


def test_warp_group_mma_overlaps_with_decoding_the_next_keys(tmp_path: Path) -> None:
    """The assembler serialises them when it runs out of registers."""
    card = CARDS["H200"]
    tile = tile_of(card, "q8_0", "q8_0", 144)
    assert tile is not None
    resources(card, tile, tmp_path)
    code = tool_output("nvdisasm", str(tmp_path / "tile.cubin"))
    assert 0 < code.count("WARPGROUP.DEPBAR") < code.count("HGMMA")


def test_a_row_leaves_room_for_a_second_block(tmp_path: Path) -> None:
    card = CARDS["H200"]
    tile = tile_of(card, "q8_0", "q8_0", 6)
    assert tile is not None and tile.queries == 8 and tile.resident == 2
    registers, stack = resources(card, tile, tmp_path)
    assert stack == 0 and registers * tile.threads * 2 <= 65536


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_card_has_tiles_for_small_codes(card: Card, tmp_path: Path) -> None:
    for queries in (6, 48):
        tile = tile_of(card, "q4_0", "tq3_0", queries, window=queries == 6)
        assert tile is not None and tile.shared_bytes <= card.shared_per_block
        assert tile.grouped == (card.arch == "sm_90")
        assert resources(card, tile, tmp_path)[1] == 0


@pytest.mark.parametrize("name", ["f16", "q8_0", "tq3_0"])
def test_the_other_tiles_of_a_step_compile(name: str, tmp_path: Path) -> None:
    card = CARDS["H200"]
    for queries in (24, 48, 96):
        tile = tile_of(card, name, name, queries)
        assert tile is not None and tile.queries == queries
        assert resources(card, tile, tmp_path)[1] == 0


@given(
    card=st.sampled_from(list(CARDS.values())),
    pair=st.sampled_from(PAIRS),
    rows=st.integers(1, 64),
    group=st.integers(1, 16),
)
def test_tiles_fit_and_their_existence_does_not_depend_on_the_rows(
    card: Card, pair: tuple[str, str], rows: int, group: int
) -> None:
    tile = tile_of(card, *pair, rows * group)
    # Another kernel for other rows would give another result.
    assert (tile is None) == (tile_of(card, *pair, 1) is None)
    if tile is not None:
        assert tile.queries in (*NARROW, *WIDE) and tile.stages >= 2
        assert tile.shared_bytes <= card.shared_per_block
        assert tile.resident * (tile.shared_bytes + 1024) <= card.shared_per_processor
        several = tile_of(card, *pair, 48)
        assert tile.queries in WIDE or rows * group <= tile.queries or tile == several


def test_q8_0_has_a_tile_in_99_kib_for_any_number_of_rows(tmp_path: Path) -> None:
    for card in (CARDS["RTX 3090"], CARDS["RTX 4090"], CARDS["RTX 5090"]):
        for queries in (6, 48, 144, 384):
            tile = tile_of(card, "q8_0", "q8_0", queries)
            assert tile is not None and tile.shared_bytes <= 99 << 10, (card, queries)
        assert tile_of(card, "q8_0", "q8_0", 144) == tile_of(card, "q8_0", "q8_0", 24)
    assert resources(card, tile, tmp_path)[1] == 0


def test_trees_are_covered_with_little_padding() -> None:
    covered = {}
    for rows in (1, 8, 16, 24, 32, 48, 64):
        tile = tile_of(CARDS["H200"], "q8_0", "q8_0", 6 * rows)
        assert tile is not None
        covered[rows] = tile.queries * -(-6 * rows // tile.queries)
    assert covered == {1: 8, 8: 48, 16: 96, 24: 144, 32: 192, 48: 288, 64: 432}


def test_rows_further_on_have_at_least_as_many_splits() -> None:
    """The grid of tree.cu puts the splits of the longest sequence first."""
    limits, splits = zip(*TIERS, strict=True)
    assert list(limits) == sorted(limits) and [*splits, SPLITS] == sorted([*splits, SPLITS])
