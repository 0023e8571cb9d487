"""Device time by kernel, from a trace."""

from collections import defaultdict
from collections.abc import Sequence

from bough.bench.step_profile import Span, exclusive_times


def by_kernel(spans: Sequence[Span]) -> dict[str, float]:
    """Return microseconds by kernel name, longest first."""
    totals: dict[str, float] = defaultdict(float)
    for span, microseconds in exclusive_times(spans):
        totals[span.name] += microseconds
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))
