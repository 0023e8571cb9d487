"""Device time by kernel, from a trace."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from bough.bench.step import StepProbe
from bough.bench.step_profile import Span, exclusive_times
from bough.session.session import Session


def by_kernel(spans: Sequence[Span]) -> dict[str, float]:
    """Return microseconds by kernel name, longest first."""
    totals: dict[str, float] = defaultdict(float)
    for span, microseconds in exclusive_times(spans):
        totals[span.name] += microseconds
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


@torch.inference_mode()
def kernel_times(session: Session, rows: int, *, context: int = 256, steps: int = 4) -> dict[str, float]:
    """Return milliseconds of a forward and its acceptance by kernel name, the longest first.

    From a trace, which slows them; the time a kernel waits for its predecessor is not counted.
    """
    probe = StepProbe(session.engine, context, rounds=steps + 4)
    try:
        probe.times(rows, 1)
        kernels = by_kernel(probe.trace(rows, steps))
    finally:
        probe.close()
    return {name[:70]: microseconds / 1000 / steps for name, microseconds in kernels.items()}
