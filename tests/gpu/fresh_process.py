"""Functions run in a process of their own, as memory limits and measurements of a whole process need."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Return what a module-level function returns, or raise what it raises."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
