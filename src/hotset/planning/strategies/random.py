"""Experts at random, seeded: the floor that every other strategy must beat."""

from __future__ import annotations

import numpy as np

from hotset.planning.problem import Placement, Problem, fill


def place(problem: Problem) -> Placement:
    draw = np.random.default_rng(problem.seed).random(problem.shape)
    return Placement(fill(problem, (1.0 + draw) * problem.budget.sizes))
