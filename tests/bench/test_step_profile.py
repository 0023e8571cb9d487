"""The breakdown of a step's trace: overlapping kernels, groups, and kernels without a group."""

import re
from pathlib import Path

import pytest

import bough
from bough.bench.step import lines, part_lines
from bough.bench.step_profile import GROUPS, LABELS, Span, exclusive_times, shares
from workshop.kernel_times import by_kernel

# Kernels of prefill, or of a step's embedding and slot mapping, which have no group.
ELSEWHERE = {
    *("_chunk_attention_kernel", "_chunk_conv_kernel", "_prepare_kernel", "_scan_kernel", "_expand_kernel"),
    *("_embed_kernel", "_pad_kernel", "_ragged_kernel", "_slot_mapping_kernel", "expand"),
    *("_scale_rows_kernel", "_quantise_kernel", "_requantise_kernel"),
}


def test_overlap_counts_for_the_earlier_kernel() -> None:
    spans = [Span("c", 9, 12), Span("a", 0, 5), Span("b", 1, 8), Span("d", 2, 4)]
    assert [(span.name, time) for span, time in exclusive_times(spans)] == [
        ("a", 5),
        ("b", 3),
        ("d", 0),
        ("c", 3),
    ]
    assert by_kernel([*spans, Span("a", 20, 21)]) == {"a": 6, "b": 3, "c": 3, "d": 0}


def test_groups_of_two_passes() -> None:
    one = [
        Span("_pad_kernel", 0, 1),
        Span("rows", 1, 3),
        Span("matmul", 2, 10),  # waits for the norm until 3
        Span("tree_delta", 10, 12),
        Span("tree_attention", 12, 13),
        Span("matmul", 13, 33),  # the head
        Span("adjust_kernel", 33, 36),
        Span("matmul", 36, 39),  # for the draft, as are norm and ring
        Span("rows", 39, 40),
        Span("_ring_kernel", 40, 42),
        Span("void at::native::something", 42, 43),
    ]
    spans = one + [Span(span.name, span.begin + 100, span.end + 100) for span in one]
    found = shares(spans, 2)
    assert list(found) == list(LABELS)
    wanted = {
        **{"matmul": 7, "head": 20, "delta net": 2, "attention": 1, "norms": 2},
        **{"sampling": 3, "draft": 6, "rest": 2, "experts": 0},
    }
    assert {group: round(43 * share, 6) for group, share in found.items()} == wanted
    assert shares([], 3) == {}


def test_every_kernel_of_a_step_has_a_group() -> None:
    """Or is listed in ELSEWHERE: a new kernel would otherwise silently count as "rest"."""
    kernels = set()
    for file in (Path(bough.__file__).parent / "kernels").rglob("*.*"):
        if file.suffix == ".py":
            kernels |= set(re.findall(r"@triton\.jit.*\ndef (\w+_kernel)\(", file.read_text()))
        elif file.suffix == ".cu":
            kernels |= set(re.findall(r"__global__[^{;]*?\b(\w+)\((?!THREADS|256|512)", file.read_text()))
    named = {name for names in GROUPS.values() for name in names}
    assert {"matmul", "rows", "tree_delta", "_paged_kernel"} <= kernels
    assert kernels == named | ELSEWHERE


@pytest.mark.parametrize("traced", [True, False])
def test_tables(traced: bool) -> None:
    row = {
        **dict.fromkeys(("draft_ms", "verify_ms", "walk_ms", "gap_ms"), 1.25),
        **{"rows": 24, "step_ms": 5.0, "bytes": 16_754_159_148, "bandwidth_share": 0.456},
    }
    if traced:
        row["parts_ms"] = {group: 0.5 + index for index, group in enumerate(LABELS)}
    head, cells = lines({"sizes": [row]})
    assert dict(zip(head, cells, strict=True)) | {"rows": "24"} == {
        **{"rows": "24", "draft + tree": "1.25", "verify": "1.25", "sample + accept + commit": "1.25"},
        **{"gap": "1.25", "step ms": "5.00", "GB read": "16.75", "of read speed": "46%"},
    }
    parts = part_lines({"sizes": [row]})
    assert parts == (
        [["rows", *LABELS.values()], ["24", *(f"{0.5 + p:.2f}" for p in range(len(LABELS)))]]
        if traced
        else []
    )
