"""Frequency with memory and limits: scores smoothed over windows, every layer kept within a minimum and a maximum.

scores = alpha * counts + (1 - alpha) * previous_scores (kt-kernel's `score_aware_layer_balanced` proposal), then the
best of them under min and max experts per layer. Without previous scores and limits it is frequency.
"""

from __future__ import annotations

from dataclasses import replace

from hotset.planning.problem import Placement, Problem, fill


def place(problem: Problem) -> Placement:
    scores = problem.counts
    if problem.previous_scores is not None:
        scores = problem.alpha * problem.counts + (1 - problem.alpha) * problem.previous_scores
    # what counts as never picked is what no window has seen
    return Placement(fill(replace(problem, counts=scores), scores), scores=scores)
