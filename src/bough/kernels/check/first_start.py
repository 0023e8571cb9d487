"""The self-check of a first start: each kernel of a model against its reference, and what replaces it.

The verdict is kept beside the compiled kernels, for this model's kernels on this card, driver and versions.
An operation that fails runs in the next implementation from then on: CUDA C++, Triton, PyTorch.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from bough.errors import ResourceError
from bough.kernels.check.cases import Case
from bough.kernels.check.run import check, context_lost
from bough.kernels.runtime import backends
from bough.kernels.runtime.backends import NAMES, OPERATIONS, Backend

log = logging.getLogger(__name__)

_INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
_REPORT = "please send what `bough doctor` with `gpu` prints"


@dataclass(slots=True)
class Verdict:
    """Which operations are replaced, and why; a file that names an operation under test was cut off by it."""

    path: Path
    replaced: dict[str, tuple[Backend, str]] = field(default_factory=dict)
    testing: tuple[str, Backend] | None = None
    complete: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the verdict in a file, or an empty one."""
        verdict = cls(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, (backend, reason) in content["replaced"].items():
                if backend in OPERATIONS.get(name, ()):
                    verdict.replaced[name] = (backend, str(reason))
            testing = content["testing"]
            if testing and not _runs(content.get("process", 0)):
                verdict.testing = (testing[0], testing[1])
            verdict.complete = bool(content["complete"])
        except _INVALID:
            return cls(path)
        return verdict

    def save(self) -> None:
        """Write the file; a disk that cannot be written costs another check at the next start."""
        content: dict[str, Any] = {"replaced": self.replaced, "testing": self.testing}
        content |= {"complete": self.complete, "process": os.getpid()}
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self.path)
        except OSError:
            return

    def apply(self) -> None:
        """Have the implementations used that it names, and say so once."""
        for operation, (backend, reason) in self.replaced.items():
            if backend in backends.choices(operation)[1:]:
                backends.replace(operation, backend)
                log.warning("%s", sentence(operation, backend, reason))

    def move(self, operation: str, reason: str) -> None:
        """Replace an operation's implementation by the next one; raises where there is none."""
        first, *others = backends.choices(operation)
        if not others:
            raise ResourceError(
                f"{operation} does not work on this GPU in {NAMES[first]}, the last implementation: {reason}",
                f"`device` cpu runs without it; {_REPORT}",
            )
        self.replaced[operation] = (others[0], f"{NAMES[first]}: {reason}")
        backends.replace(operation, others[0])


def _runs(process: int) -> bool:
    """Return whether another process is still trying its kernels: its file is not that of a crash."""
    if process in (0, os.getpid()) or sys.platform == "win32":  # where a signal of 0 would be a Ctrl-C
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def sentence(operation: str, backend: Backend, reason: str) -> str:
    slower = "slower; other bits" if backend == "triton" else "much slower, without CUDA graphs"
    return f"{operation} runs in {NAMES[backend]} ({reason}): {slower}; {_REPORT}"


def decide(
    verdict: Verdict, cases: Sequence[Case], progress: Callable[[int, int], None] | None = None
) -> None:
    """Run all cases and replace what fails, until each operation has an implementation that is right.

    The file says what is being tried: where that ends the process, the next start goes on after it.
    """
    if verdict.testing is not None:
        operation, backend = verdict.testing
        if backends.choices(operation)[0] == backend:
            verdict.move(operation, "the process ended while it was tried")
    try:
        _try_all(verdict, cases, progress)
        verdict.complete = True
    finally:  # what Ctrl-C ends has not crashed
        verdict.testing = None
        verdict.save()


def _try_all(verdict: Verdict, cases: Sequence[Case], progress: Callable[[int, int], None] | None) -> None:
    done = 0
    for operation, group in groupby(cases, key=lambda case: case.operation):
        some = list(group)
        while (reason := _first_failure(verdict, operation, some)) is not None:
            verdict.move(operation, reason)
            backend, why = verdict.replaced[operation]
            if context_lost():
                raise ResourceError(
                    f"{operation} broke the GPU's context ({why})",
                    f"start again: it then runs in {NAMES[backend]}; {_REPORT}",
                )
            log.warning("%s", sentence(operation, backend, why))
        done += len(some)
        if progress is not None:
            progress(done, len(cases))


def _first_failure(verdict: Verdict, operation: str, cases: Sequence[Case]) -> str | None:
    verdict.testing = (operation, backends.choices(operation)[0])
    verdict.save()
    for case in cases:
        result = check(case)
        if result.failure:
            return f"{case.variant}: {result.failure}"
    return None
