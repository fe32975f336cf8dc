"""One layer as the token-aware strategies see it.

A layer is its distinct sets of picks with their token counts: the objective needs no more, and real traces repeat
sets so often that this alone makes planning several times faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Trace
from hotset.planning.problem import Problem


@dataclass(frozen=True, eq=False)
class Layer:
    """`sets` [D, K] int16 (ascending, -1 at the end), `weight` [D] tokens of each; the rest is [E]."""

    sets: NDArray[np.int16]
    weight: NDArray[np.float64]
    base: NDArray[np.float64]
    """Objective of each resident expert by itself: hit_value times its picks."""
    value: float
    """Objective of one token all of whose picks are resident."""
    size: NDArray[np.int64]

    @property
    def num_experts(self) -> int:
        return len(self.base)

    @cached_property
    def index(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The sets that hold each expert: (start [E + 1], member)."""
        from hotset.planning.loops import invert

        start, member = invert(self.sets, self.num_experts)
        return start, member

    def score(self, resident: NDArray[np.bool_]) -> float:
        """Objective of a placement [E] of this layer."""
        from hotset.planning.loops import chain_values

        order = np.argsort(~resident, kind="stable")
        values = chain_values(self.sets, self.weight, self.base, self.value, order)
        return float(values[int(resident.sum())])


def build_layer(problem: Problem, row: int) -> Layer:
    """Layer `row` of the problem; without tokens, a layer with none."""
    sets, weight = (np.empty((0, 1), np.int16), np.empty(0)) if problem.trace is None else distinct(problem.trace, row)
    return Layer(
        sets=sets,
        weight=weight,
        base=problem.objective.hit_value * problem.counts[row],
        value=problem.objective.resident_value,
        size=problem.budget.sizes[row],
    )


def distinct(trace: Trace, row: int) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """(sets [D, K], tokens of each [D]) of one layer, in order of first appearance."""
    from hotset.planning.loops import distinct_sets, frozen

    ids = frozen(trace.layer(row))
    sets, weight = np.empty(ids.shape, np.int16), np.empty(len(ids))
    heads = np.full(1 << (2 * max(1, len(ids))).bit_length(), -1, np.int32)
    found = distinct_sets(ids, sets, weight, heads)
    if found * 2 > len(ids):
        return sets[:found], weight[:found]  # a copy would save little
    return sets[:found].copy(), weight[:found].copy()


def select_options(
    sizes: NDArray[np.int64], values: NDArray[np.float64], *extra: NDArray[Any]
) -> tuple[NDArray[Any], ...]:
    """Only the options that no smaller or equal one matches in value, by ascending size."""
    order = np.lexsort((-values, sizes))
    best = np.maximum.accumulate(np.append(-np.inf, values[order]))[:-1]
    kept = order[values[order] > best]
    return (sizes[kept], values[kept], *(array[kept] for array in extra))
