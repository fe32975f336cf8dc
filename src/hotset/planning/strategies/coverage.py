"""Greedy set cover of whole tokens: complete the picks that most tokens share per added expert, over all layers.

Each step adds the missing experts of one distinct set of picks, the one with most tokens per size of what is missing;
tokens that are covered drop out. Builds up forwards, so it sees the worth of a core of experts late or never.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hotset.planning.layers import build_layer
from hotset.planning.problem import Placement, Problem, fill, without_tokens
from hotset.planning.threads import on_threads


class _Cover:
    """What the distinct sets of one layer still lack."""

    def __init__(self, problem: Problem, row: int, resident: NDArray[np.bool_]) -> None:
        self.layer = build_layer(problem, row)
        held = self.layer.sets >= 0
        self.missing = np.where(held, self.layer.size[self.layer.sets], 0).sum(axis=1)
        self.lacking = held.sum(axis=1, dtype=np.int16)
        for expert in np.flatnonzero(resident):
            self.add(int(expert))

    def add(self, expert: int) -> None:
        from hotset.planning.loops import cover

        cover(*self.layer.index, expert, self.layer.size[expert], self.missing, self.lacking)

    def best(self, left: int, room: int) -> int:
        from hotset.planning.loops import best_cover

        return int(best_cover(self.layer.weight, self.missing, self.lacking, left, room))


def place(problem: Problem) -> Placement:
    if problem.trace is None:
        return without_tokens(problem, "coverage")
    budget = problem.budget
    mask = _minimum(problem)
    covers = on_threads(lambda row: _Cover(problem, row, mask[row]), range(problem.shape[0]))
    left = budget.capacity - int(budget.sizes[mask].sum())

    def offer(row: int) -> tuple[float, float, int, int]:
        chosen = covers[row].best(left, int(budget.max_experts[row] - mask[row].sum()))
        if chosen < 0:
            return (0.0, 0.0, row, -1)
        tokens = float(covers[row].layer.weight[chosen])
        # ordered: most tokens per size, then most tokens, then the lower layer
        return (-tokens / int(covers[row].missing[chosen]), -tokens, row, chosen)

    heap = [found for found in on_threads(offer, range(problem.shape[0])) if found[3] >= 0]
    heapq.heapify(heap)
    while heap:
        _, _, row, chosen = heapq.heappop(heap)
        if covers[row].missing[chosen] <= left:
            for expert in covers[row].layer.sets[chosen]:
                if expert >= 0 and not mask[row, expert]:
                    mask[row, expert] = True
                    left -= int(budget.sizes[row, expert])
                    covers[row].add(int(expert))
        again = offer(row)
        if again[3] >= 0:
            heapq.heappush(heap, again)
    return Placement(fill(problem, problem.counts, mask))


def _minimum(problem: Problem) -> NDArray[np.bool_]:
    """[L, E] each layer's minimum by frequency and nothing more."""
    fewest = problem.budget.min_experts
    limited = replace(problem, budget=replace(problem.budget, max_experts=fewest))
    return fill(limited, problem.counts)
