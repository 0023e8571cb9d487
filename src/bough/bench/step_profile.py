"""Breakdown of a step's device time by kind of kernel, from a kernel trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Kernels by name, of every backend, in groups; any other kernel is in the group "rest". The groups' names are
# the keys of the JSON result.
_KERNELS = {
    "matmul": "matmul pack_rows _matmul_kernel _add_kernel _pack_rows_kernel _transform_kernel",
    "delta net": "tree_delta tree_conv _tree_kernel _conv_kernel _index_kernel _order_kernel",
    "attention": "tree_attention _paged_kernel _merge_kernel _cache_kernel _head_kernel",
    "norms": "rows _norm_kernel _gated_norm_kernel _gated_norm_rows_kernel _silu_rows_kernel "
    "_silu_mul_kernel",
    "sampling": "adjust_kernel histogram_kernel gather_kernel rank_kernel noise_kernel accept_path_kernel "
    "_commit_kernel _move_kernel",
    "experts": "experts _router_kernel _route_kernel _group_kernel _combine_kernel _resolve_kernel "
    "_copy_kernel _rounds_kernel",
    "draft": "_ring_kernel best_tree_kernel shortlist_kernel",
}
GROUPS = {group: tuple(names.split()) for group, names in _KERNELS.items()}
# Column headings of the groups, in order.
LABELS = {
    "matmul": "matmul",
    "experts": "experts",
    "head": "LM head",
    "delta net": "delta rule",
    "attention": "attention",
    "norms": "norms",
    "sampling": "sampling",
    "draft": "draft",
    "rest": "other",
}
_FIRST = "_pad_kernel"  # the first kernel of a forward pass
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin: float
    end: float


def exclusive_times(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Yield the spans in launch order with the microseconds after all earlier kernels have ended.

    With programmatic dependent launch (PDL) a kernel starts before its predecessor ends and waits for it; the
    overlap counts for the predecessor.
    """
    done = float("-inf")
    for span in sorted(spans, key=lambda each: each.begin):
        yield span, max(0.0, span.end - max(span.begin, done))
        done = max(done, span.end)


def shares(spans: Sequence[Span], passes: int) -> dict[str, float]:
    """Return each group's share of the device's busy time over `passes` forward passes.

    The LM head is each pass's longest matmul. Matmuls after it belong to the draft: they compute its KV cache
    for the committed rows.
    """
    matmuls = [span for span in spans if span.name in GROUPS["matmul"]]
    heads = sorted(matmuls, key=lambda span: span.begin - span.end)[:passes]
    totals, after_head = dict.fromkeys(LABELS, 0.0), False
    for span, microseconds in exclusive_times(spans):
        group = _GROUP_OF.get(span.name, "rest")
        if span.name == _FIRST:
            after_head = False
        elif span in heads:
            group, after_head = "head", True
        elif after_head and group in ("matmul", "norms"):
            group = "draft"
        totals[group] += microseconds
    whole = sum(totals.values())
    return {group: each / whole for group, each in totals.items()} if whole else {}
