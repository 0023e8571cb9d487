"""What a device is at work on during a step, from a trace of its kernels. Knows no engine and no profiler."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Kernels by name, of every backend; those of a pass's beginning and end that are none of these: "rest".
PARTS = {
    "matmul": ("matmul", "pack_rows", "_matmul_kernel", "_add_kernel", "_pack_rows_kernel"),
    "delta net": ("tree_delta", "tree_conv", "_tree_kernel", "_conv_kernel", "_index_kernel", "_fold_kernel"),
    "attention": ("tree_attention", "_paged_kernel", "_merge_kernel", "_cache_kernel", "_head_kernel"),
    "norms": (
        *("rows", "_norm_kernel", "_gated_norm_kernel", "_gated_norm_rows_kernel"),
        *("_silu_rows_kernel", "_silu_mul_kernel"),
    ),
    "sampling": (
        *("adjust_kernel", "histogram_kernel", "gather_kernel", "rank_kernel", "noise_kernel", "walk_kernel"),
        *("_commit_kernel", "_move_kernel"),
    ),
    "draft": ("_ring_kernel", "build_kernel", "shortlist_kernel"),
}
SHOWN = ("matmul", "head", "delta net", "attention", "norms", "sampling", "draft", "rest")
_FIRST = "_pad_kernel"  # of a pass
_PART_OF = {name: part for part, names in PARTS.items() for name in names}


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel's run, by a clock in microseconds."""

    name: str
    begin: float
    end: float


def alone(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """In the order of their beginning, with the microseconds in which none that began before was running.

    Launches overlap: a kernel begins early and waits for the one before it, which is the one at work.
    """
    done = float("-inf")
    for span in sorted(spans, key=lambda each: each.begin):
        yield span, max(0.0, span.end - max(span.begin, done))
        done = max(done, span.end)


def by_kernel(spans: Sequence[Span]) -> dict[str, float]:
    """Microseconds by name, the longest first."""
    totals: dict[str, float] = defaultdict(float)
    for span, microseconds in alone(spans):
        totals[span.name] += microseconds
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def shares(spans: Sequence[Span], passes: int) -> dict[str, float]:
    """Of the time in which anything ran, by the names of SHOWN; the spans are those of so many passes.

    The head is each pass's longest product. Products behind it are the draft's, for what was committed.
    """
    products = [span for span in spans if span.name in PARTS["matmul"]]
    heads = sorted(products, key=lambda span: span.begin - span.end)[:passes]
    totals, behind = dict.fromkeys(SHOWN, 0.0), False
    for span, microseconds in alone(spans):
        part = _PART_OF.get(span.name, "rest")
        if span.name == _FIRST:
            behind = False
        elif span in heads:
            part, behind = "head", True
        elif behind and part in ("matmul", "norms"):
            part = "draft"
        totals[part] += microseconds
    whole = sum(totals.values())
    return {part: each / whole for part, each in totals.items()} if whole else {}
