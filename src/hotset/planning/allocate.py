"""Spending a budget across layers: one option of every layer, by an exact multiple-choice knapsack.

Exact in the budget's own unit as long as that needs at most `_MAX_WORK` steps; with more (bytes whose common unit is
small), sizes are rounded to a coarser grid: up for a placement, so that it fits, down for a bound, so that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_WORK = 600_000_000
"""Additions and comparisons: about half a second."""


def allocate(
    sizes: Sequence[NDArray[np.int64]],
    values: Sequence[NDArray[np.float64]],
    capacity: int,
    *,
    for_bound: bool,
    cells: int | None = None,
) -> tuple[float, NDArray[np.int64]] | None:
    """(total value, [L] index of the option taken in each layer), or None where no choice fits.

    sizes, values: each layer's options by ascending size. for_bound: round sizes down where they must be rounded, so
    that the total is an upper bound on every choice within the capacity. cells: how fine the grid may be.
    """
    from hotset.planning.loops import knapsack

    first = np.cumsum([0, *(len(s) for s in sizes)]).astype(np.int64)
    capacity = min(capacity, sum(int(s[-1]) for s in sizes))
    if cells is None:
        cells = max(1024, _MAX_WORK // max(1, int(first[-1])))
    flat = np.concatenate(sizes).astype(np.int64)
    if capacity > cells:
        grain = -(-capacity // cells)
        flat = flat // grain if for_bound else -(-flat // grain)
        capacity //= grain
    choice = np.full((len(sizes), capacity + 1), -1, np.int32)
    best = knapsack(first, flat, np.concatenate(values), capacity, choice)
    at = int(np.argmax(best))
    if not np.isfinite(best[at]):
        return None
    total = float(best[at])
    taken = np.empty(len(sizes), np.int64)
    for row in range(len(sizes) - 1, -1, -1):
        option = int(choice[row, at])
        taken[row] = option - first[row]
        at -= int(flat[option])
    return total, taken
