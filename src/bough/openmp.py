"""How OpenMP's threads wait. Imports next to nothing: the package does this before anything else."""

import os

SPIN = ("GOMP_SPINCOUNT", "1000")


def set_waiting() -> None:
    """Make OpenMP's threads sleep after some microseconds of waiting; it is read when torch is loaded.

    By default they spin for milliseconds, on a busy machine on the CPU that the thread they wait for needs.
    """
    os.environ.setdefault(*SPIN)
