"""Per layer, grow a co-firing cluster from the hottest expert: next comes whoever fires most with those chosen.

Every layer gets the same share of the budget, as with `uniform`; what no layer can use goes by frequency.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotset.planning.measures import layer_coactivation
from hotset.planning.problem import Placement, Problem, fill, without_tokens
from hotset.planning.threads import on_threads


def place(problem: Problem) -> Placement:
    trace = problem.trace
    if trace is None:
        return without_tokens(problem, "cluster")
    budget, (num_layers, num_experts) = problem.budget, problem.shape

    def grow(row: int) -> NDArray[np.bool_]:
        together = layer_coactivation(trace, row)
        left, room = budget.capacity // num_layers, int(budget.max_experts[row])
        resident = np.zeros(num_experts, np.bool_)
        with_chosen = np.zeros(num_experts)
        while room:
            fits = ~resident & (problem.counts[row] > 0) & (budget.sizes[row] <= left)
            if not fits.any():
                break
            # most co-firing first, then most frequent, then the lower expert
            order = np.lexsort((-problem.counts[row], -with_chosen, ~fits))
            chosen = int(order[0])
            resident[chosen] = True
            with_chosen += together[chosen]
            left -= int(budget.sizes[row, chosen])
            room -= 1
        return resident

    return Placement(fill(problem, problem.counts, np.stack(on_threads(grow, range(num_layers)))))
