"""Whole layers from the first on, as far as the budget reaches (kt-kernel's placement of the same name).

Within a layer by frequency. Experts that were never picked wait until all picked ones have been placed.
"""

from __future__ import annotations

import numpy as np

from hotset.planning.problem import Placement, Problem, fill


def place(problem: Problem) -> Placement:
    num_layers = problem.shape[0]
    # fill ranks by score per size: any positive score that depends on the layer alone, times size, gives layer order
    order = np.arange(num_layers, 0, -1, dtype=np.float64)[:, None]
    return Placement(fill(problem, order * problem.budget.sizes))
