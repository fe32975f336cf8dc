"""The same share for every layer, by frequency within it; what no layer can use goes to the hottest experts left."""

from __future__ import annotations

import numpy as np

from hotset.planning.problem import Placement, Problem, fill, ranking


def place(problem: Problem) -> Placement:
    budget, (num_layers, num_experts) = problem.budget, problem.shape
    rank = ranking(problem, problem.counts)
    layer_of = rank // num_experts
    mask = np.zeros(problem.shape, np.bool_)
    for row in range(num_layers):
        left, room = budget.capacity // num_layers, int(budget.max_experts[row])
        for expert in rank[layer_of == row] % num_experts:
            if room and problem.counts[row, expert] > 0 and budget.sizes[row, expert] <= left:
                mask[row, expert] = True
                left -= int(budget.sizes[row, expert])
                room -= 1
    return Placement(fill(problem, problem.counts, mask))
