"""Which of several ways to compute an expert is the fastest here, by its number of rows in a call: measured once per
machine, then remembered in a file, so that later loads neither measure again nor change their bits.

Knows: clocks and the file. Does not know: what a way does; the formats do.

A file answers one question (which format, which shapes) on one machine (CPU, torch's version, its threads), and is
named by a digest of both. What is damaged, or answers another question, is measured anew; a folder that cannot be
written costs the measuring at every start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from hotset.kernels.build import cache_directory, cpu
from hotset.storage import write_json

logger = logging.getLogger("hotset.runtime")

VERSION = 1
"""Of the file: rises when a way changes what it does."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows that are timed; a count between two goes with the larger one, one beyond the last with the last."""
MARGIN = 0.95
"""Another way replaces the first one, which is the plain one, where it takes at most this share of its time: below
that the difference is the machine's mood."""
GIVEN_UP = 2.0
"""From `FROM_ROWS` on, a way that takes so many times as long as the best one, and has grown as much since the fewest
rows, at two numbers of rows, is not tried with more."""
FROM_ROWS = 16
ROUNDS = {1: 9, 2: 9, 4: 7, 8: 7, 16: 5, 32: 5}
"""Timed rounds by rows; 3 for more."""

Expert = TypeVar("Expert")
Run = Callable[[str, int], object]
"""(way, rows): compute one expert, another one than the last time."""


@dataclass(frozen=True)
class RowChoice:
    """The way for each number of rows: `ways[i]` up to `bounds[i]` rows, the last one beyond."""

    ways: tuple[str, ...]
    bounds: tuple[int, ...] = ()

    def __call__(self, rows: int) -> str:
        return self.ways[bisect_left(self.bounds, rows)]

    def __str__(self) -> str:
        """ "mv to 2 rows, linear beyond"."""
        parts = [f"{way} to {most} row{'s' * (most > 1)}" for way, most in zip(self.ways, self.bounds, strict=False)]
        return ", ".join([*parts, f"{self.ways[-1]} beyond" if parts else self.ways[-1]])

    @staticmethod
    def of_seconds(seconds: Mapping[str, Mapping[int, float]]) -> RowChoice:
        """From each way's seconds by rows. The first way is the plain one (`MARGIN`)."""
        plain = next(iter(seconds))
        best = []
        for rows in sorted({rows for times in seconds.values() for rows in times}):
            found = {way: times[rows] for way, times in seconds.items() if rows in times}
            fastest = min(found, key=lambda way: found[way])
            keeps = plain in found and found[fastest] > MARGIN * found[plain]
            best.append((rows, plain if keeps else fastest))
        changes = [(rows, way) for (rows, way), (_, following) in pairwise(best) if way != following]
        return RowChoice((*(way for _, way in changes), best[-1][1]), tuple(rows for rows, _ in changes))


_known: dict[Path, RowChoice] = {}
_changing = threading.Lock()


def fastest_by_rows(
    question: Mapping[str, Any], ways: Mapping[str, int], prepare: Callable[[], Run], rows: Sequence[int] = ROWS
) -> RowChoice:
    """The fastest way for each number of rows.

    question: JSON-able, what the answer depends on beside the machine. ways: name -> most rows that it is tried with;
    the first is the plain one. prepare: called where something is to be measured.
    """
    asked = {
        "version": VERSION, "cpu": hashlib.sha256(cpu().encode()).hexdigest()[:16], "torch": torch.__version__,
        "threads": torch.get_num_threads(), "ways": dict(ways), "rows": list(rows), **question,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_directory().with_name("operators") / f"{name}.json"
    with _changing:
        if path not in _known:
            _known[path] = _read(path, asked, ways) or _measure(path, asked, ways, prepare(), rows)
        return _known[path]


def _read(path: Path, asked: Mapping[str, Any], ways: Mapping[str, int]) -> RowChoice | None:
    """What the file says, or None where it is not there, damaged, or of another question."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("asked") != asked:
        return None
    chosen, bounds = found.get("chosen"), found.get("bounds")
    if not (isinstance(chosen, list) and isinstance(bounds, list) and len(chosen) == len(bounds) + 1):
        return None
    if not all(way in list(ways) for way in chosen) or not all(type(rows) is int for rows in bounds):
        return None
    return RowChoice(tuple(chosen), tuple(bounds)) if bounds == sorted(set(bounds)) else None


def _measure(path: Path, asked: Mapping[str, Any], ways: Mapping[str, int], run: Run, rows: Sequence[int]) -> RowChoice:
    seconds = seconds_by_rows(ways, run, rows)
    choice = RowChoice.of_seconds(seconds)
    times = {way: {str(count): round(value, 7) for count, value in found.items()} for way, found in seconds.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"asked": asked, "chosen": choice.ways, "bounds": choice.bounds, "seconds": times})
    except OSError as problem:
        logger.warning(
            "%s: %s: the choice of operators is not kept, and is measured at every start: set HOTSET_CACHE to a folder "
            "that can be written",
            problem.filename or path,
            problem.strerror,
        )
    return choice


def seconds_by_rows(ways: Mapping[str, int], run: Run, rows: Sequence[int] = ROWS) -> dict[str, dict[int, float]]:
    """The least seconds of each way by rows: whatever else the machine does only adds. The ways take turns."""
    seconds: dict[str, dict[int, float]] = {way: {} for way in ways}
    trying, hopeless = dict(ways), dict.fromkeys(ways, 0)
    with torch.inference_mode():
        for count in rows:
            tried = [way for way, most in trying.items() if count <= most]
            if not tried:
                break
            for way in tried:
                run(way, count)  # oneDNN prepares a kernel for each new row count
            times: dict[str, list[float]] = {way: [] for way in tried}
            for _ in range(ROUNDS.get(count, 3)):
                for way in tried:
                    begin = time.perf_counter()
                    run(way, count)
                    times[way].append(time.perf_counter() - begin)
            for way in tried:
                seconds[way][count] = min(times[way])
            best = min(tried, key=lambda way: seconds[way][count])
            for way in tried:
                is_slow = count >= FROM_ROWS and seconds[way][count] > GIVEN_UP * seconds[best][count]
                hopeless[way] += is_slow and _growth(seconds[way]) >= _growth(seconds[best])
                if hopeless[way] == 2:  # once may be the machine's mood
                    del trying[way]
    return seconds


def _growth(seconds: Mapping[int, float]) -> float:
    """From the fewest rows to the most."""
    times = list(seconds.values())
    return times[-1] - times[0]


def going_round(expert_bytes: int, copy: Callable[[], Expert]) -> Iterator[Expert]:
    """Copies of one expert, one after the other without end: so many that none is in a cache when it is read."""
    return cycle([copy() for _ in range(max(2, min(24, -(-(64 << 20) // expert_bytes))))])
