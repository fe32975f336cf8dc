"""Work on threads: the compiled loops release the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def on_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`work` on every item, in order, on as many threads as this process may use cores."""
    several = list(items)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(several) < 2 or cores < 2:
        return [work(item) for item in several]
    with ThreadPoolExecutor(max_workers=min(cores, len(several))) as pool:
        return list(pool.map(work, several))
