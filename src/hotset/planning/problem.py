"""What a strategy is given and what it gives back, and the one greedy fill that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotset.core import Trace
from hotset.planning.budget import Budget
from hotset.planning.objective import Objective


@dataclass(frozen=True)
class Problem:
    """One placement to make. Everything is validated before a strategy sees it."""

    counts: NDArray[np.float64]
    """[L, E] picks (or any non-negative scores) of each expert."""
    trace: Trace | None
    """The tokens, or None where only counts are known."""
    budget: Budget
    objective: Objective
    previous_mask: NDArray[np.bool_] | None = None
    """[L, E] residents of the plan before: preferred among equals."""
    previous_scores: NDArray[np.float64] | None = None
    """[L, E] scores of the window before, for strategies that smooth."""
    alpha: float = 1.0
    """Share of the new counts when smoothing with previous_scores."""
    seed: int = 0
    notes: tuple[str, ...] = ()
    """What the user should know about how the request was understood."""

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.counts.shape[0]), int(self.counts.shape[1])


@dataclass(frozen=True)
class Placement:
    """A strategy's answer."""

    mask: NDArray[np.bool_]
    """[L, E]."""
    bound: float | None = None
    """Proven upper bound on the objective over all placements within the budget, or None."""
    scores: NDArray[np.float64] | None = None
    """[L, E] what the strategy ranked by, where that is not the counts."""
    notes: list[str] = field(default_factory=list)


def without_tokens(problem: Problem, name: str) -> Placement:
    """Frequency top-k, for a strategy that needs tokens and was given counts."""
    note = f"{name} needs tokens and these are counts only: placed by frequency instead"
    return Placement(fill(problem, problem.counts), notes=[note])


def fill(problem: Problem, scores: NDArray[np.float64], chosen: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """[L, E] mask: the best scores per size that fit, on top of `chosen`, within the layers' limits.

    First each layer gets its minimum, then the rest goes by score / size; ties go to residents of the previous plan,
    then to the higher count, the lower layer, the lower expert. An expert that was never picked is taken only after
    every picked one that its layer's maximum allows.
    """
    budget = problem.budget
    mask = np.zeros(problem.shape, np.bool_) if chosen is None else chosen.copy()
    rank = ranking(problem, scores)
    _fill_minimum(problem, rank, mask)
    left: int = budget.capacity - int(budget.sizes[mask].sum())
    room = budget.max_experts - mask.sum(axis=1)
    seen = (problem.counts > 0).ravel()
    if budget.equal_sizes and (budget.max_experts >= problem.shape[1]).all():
        free = rank[~mask.ravel()[rank]]
        mask.ravel()[free[: max(left, 0)]] = True
        return mask
    num_experts = problem.shape[1]
    sizes = budget.sizes.ravel()
    seen_left_out = False
    for flat in rank[~mask.ravel()[rank]]:
        if room[flat // num_experts] <= 0:
            continue
        if not seen[flat] and seen_left_out:
            break
        if sizes[flat] <= left:
            mask.ravel()[flat] = True
            left -= int(sizes[flat])
            room[flat // num_experts] -= 1
        else:
            seen_left_out = seen_left_out or bool(seen[flat])
    return mask


def ranking(problem: Problem, scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """[L * E] flat expert indices, best first, in the order that `fill` describes."""
    previous = np.zeros(problem.shape, np.bool_) if problem.previous_mask is None else problem.previous_mask
    density = scores / problem.budget.sizes
    keys = (-problem.counts.ravel(), ~previous.ravel(), -density.ravel(), problem.counts.ravel() <= 0)
    return np.lexsort(keys).astype(np.int64)  # stable: what is still equal stays in layer, expert order


def _fill_minimum(problem: Problem, rank: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
    budget, num_experts = problem.budget, problem.shape[1]
    missing = budget.min_experts - mask.sum(axis=1)
    if (missing <= 0).all():
        return
    by_rank = mask.copy()
    layer_of = rank // num_experts
    for row in np.flatnonzero(missing > 0):
        candidates = rank[(layer_of == row) & ~mask.ravel()[rank]]
        by_rank.ravel()[candidates[: missing[row]]] = True
    if int(budget.sizes[by_rank].sum()) <= budget.capacity:
        mask[:] = by_rank
        return
    # the best experts of every layer do not fit: the smallest ones do, or the budget would have been refused
    mask[:] = False
    for sizes, fewest, chosen in zip(budget.sizes, budget.min_experts, mask, strict=True):
        chosen[np.argsort(sizes, kind="stable")[:fewest]] = True
