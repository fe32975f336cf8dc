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


def place(problem: Problem) -> Placement:
    if problem.trace is None:
        return without_tokens(problem, "coverage")
    from hotset.planning.loops import best_cover

    budget, num_layers = problem.budget, problem.shape[0]
    layers = on_threads(lambda row: build_layer(problem, row), range(num_layers))
    mask = _minimum(problem)
    left = budget.capacity - int(budget.sizes[mask].sum())

    def best(row: int) -> tuple[float, float, int, int]:
        room = int(budget.max_experts[row] - mask[row].sum())
        chosen, cost = best_cover(layers[row].sets, layers[row].weight, mask[row], budget.sizes[row], left, room)
        tokens = layers[row].weight[chosen] if chosen >= 0 else 0.0
        # ordered: most tokens per size, then most tokens, then the lower layer
        return (-tokens / max(cost, 1), -tokens, row, int(chosen))

    heap = [entry for entry in on_threads(best, range(num_layers)) if entry[3] >= 0]
    heapq.heapify(heap)
    while heap:
        _, _, row, chosen = heapq.heappop(heap)
        experts = layers[row].sets[chosen]
        experts = experts[experts >= 0]
        cost = int(budget.sizes[row, experts[~mask[row, experts]]].sum())
        if cost <= left:
            mask[row, experts] = True
            left -= cost
        again = best(row)
        if again[3] >= 0:
            heapq.heappush(heap, again)
    return Placement(fill(problem, problem.counts, mask))


def _minimum(problem: Problem) -> NDArray[np.bool_]:
    """[L, E] each layer's minimum by frequency and nothing more."""
    fewest = problem.budget.min_experts
    limited = replace(problem, budget=replace(problem.budget, max_experts=fewest))
    return fill(limited, problem.counts)
