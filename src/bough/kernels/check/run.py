"""Runs cases against their references, and times them. A fault is a result, never an exception."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.kernels.check.cases import Case, Outputs, Work
from bough.kernels.runtime.backends import reason_of
from bough.kernels.runtime.launches import KernelLaunch, Launches

_REPEATS = 7
_FLUSHED = 1 << 30  # bytes written between two runs: the L2 cache is cold, and the launch is queued


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    failure: str = ""  # why it is wrong; empty: it is right
    error: float = math.nan
    tolerance: float = 0.0
    seconds: float = math.nan
    read: int = 0
    flops: int = 0
    kernels: tuple[KernelLaunch, ...] = ()


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the card reaches in plain operations of PyTorch."""

    bandwidth: float  # bytes a second, of a copy: read and written
    arithmetic: float  # operations a second, of a matmul in float16

    def share(self, result: Result) -> str:
        """Return which limit a case is nearer to, and how near."""
        times = {"memory": result.read / self.bandwidth, "arithmetic": result.flops / self.arithmetic}
        limit = max(times, key=times.__getitem__)
        if not times[limit] or not result.seconds > 0:
            return ""
        return f"{min(1.0, times[limit] / result.seconds):.0%} {limit}"


def check(case: Case) -> Result:
    """Return whether a case computes what its reference does."""
    try:
        return _checked(case, case.make())
    except torch.OutOfMemoryError:
        raise  # not the kernel's fault
    except Exception as problem:  # whatever a compiler or driver raises is the finding
        return Result(case, failure=reason_of(problem))


def measured(case: Case, flush: Tensor) -> Result:
    """Return the same with its time and what its kernels take; `flush`: memory to overwrite between runs."""
    result = Result(case)
    try:
        work = case.make()
        with Launches() as launches:
            result = _checked(case, work)
        result = replace(result, kernels=tuple(launches.kernels), read=work.read, flops=work.flops)
        seconds = statistics.median(_seconds(work, flush) for _ in range(_REPEATS))
        return replace(result, seconds=seconds)
    except Exception as problem:
        return replace(result, failure=result.failure or reason_of(problem))


def _checked(case: Case, work: Work) -> Result:
    outputs, expected = work.run(*work.fresh()), work.reference(*work.fresh())
    error = error_of(outputs, expected)
    bad = "" if error <= work.tolerance else f"wrong numbers: error {error:.1e}, at most {work.tolerance:.0e}"
    return Result(case, bad, error, work.tolerance)


def _seconds(work: Work, flush: Tensor) -> float:
    buffers = work.fresh()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    work.run(*buffers)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def error_of(outputs: Outputs, expected: Outputs) -> float:
    """Return the largest relative RMS error; infinity where integers differ, or a number is not finite."""
    errors = [0.0]
    for output, exact in zip(outputs, expected, strict=True):
        assert output.shape == exact.shape, f"{tuple(output.shape)}, needed {tuple(exact.shape)}"
        if not output.is_floating_point():
            errors.append(0.0 if torch.equal(output, exact) else math.inf)
            continue
        finite = exact.isfinite()
        numbers, close = exact.double()[finite], output.double()[finite]
        same = torch.equal(output[~finite].double(), exact[~finite].double()) and bool(close.isfinite().all())
        size = numbers.norm().clamp(min=1e-30)
        errors.append(float((close - numbers).norm() / size) if same else math.inf)
    return max(errors)


def context_lost() -> bool:
    """Return whether the GPU's context is unusable: after an illegal address every call fails."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return True
    return False


def run_all(cases: Sequence[Case], flush: Tensor) -> Iterator[Result]:
    """Yield the results of cases, until one takes the GPU's context with it."""
    for case in cases:
        result = measured(case, flush)
        yield result
        if result.failure and context_lost():
            return


def flush_buffer(device: torch.device) -> Tensor:
    free = torch.cuda.mem_get_info(device)[0]
    return torch.empty(min(_FLUSHED, free // 8), dtype=torch.uint8, device=device)


def peaks(flush: Tensor) -> Peaks:
    """Measure the card's bandwidth and arithmetic."""
    half = len(flush) // 2
    left, right = torch.randn(2, 4096, 4096, device=flush.device).half()
    out = torch.empty_like(left)

    def best(work: Work) -> float:
        return min(_seconds(work, flush[:1024]) for _ in range(_REPEATS))

    copied = best(Work(lambda: [flush[:half].copy_(flush[half : 2 * half])], list, 0.0))
    product = best(Work(lambda: [torch.mm(left, right, out=out)], list, 0.0))
    return Peaks(2 * half / copied, 2 * 4096**3 / product)
