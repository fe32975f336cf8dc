"""Threads whose exceptions a test gets to see."""

from __future__ import annotations

import threading
from collections.abc import Callable


def guarded(work: Callable[[], object], problems: list[BaseException]) -> threading.Thread:
    """A thread, not started, that does `work` and appends what it raises to `problems`."""

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    return threading.Thread(target=run)
