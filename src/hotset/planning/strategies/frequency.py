"""Global top-k by activation frequency, kt-kernel's default: the hottest experts wherever they are.

Optimal for hit rate with equal sizes; with unequal ones the hottest per byte, greedily. Blind to which picks belong to
one token.
"""

from __future__ import annotations

from hotset.planning.problem import Placement, Problem, fill


def place(problem: Problem) -> Placement:
    return Placement(fill(problem, problem.counts))
