"""Environment variables of libraries. Imports next to nothing: the package does this before anything else."""

import os

SPIN = ("GOMP_SPINCOUNT", "1000")
FUSION = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_FORCE_DISABLE_FP_FUSION": "0"}


def set_variables() -> None:
    """Set how OpenMP's threads wait, which torch reads, and whether Triton fuses multiply-adds.

    By default OpenMP's threads spin for milliseconds, on a busy machine on the CPU that the thread they wait
    for needs. Triton's own default changes with its release 3.10, and with it the last bits of every kernel
    that does not say: the text would differ from one release to the next, so users cannot set it either.
    """
    os.environ.setdefault(*SPIN)
    os.environ |= FUSION
