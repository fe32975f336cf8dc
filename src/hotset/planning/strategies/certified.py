"""Whole layers matter: peel each layer backwards, spend the budget exactly, swap, and prove how near that is.

The objective is supermodular, the last missing expert of a token is worth most, so building up greedily is the wrong
way round. Per layer: chains of nested placements by backward peeling, and by the loads of the dual (whose level sets
are optimal for the relaxation), polished by swaps; layers of few experts are enumerated. Across layers: an exact
multiple-choice knapsack over what the layers offer. The bound comes from `hotset.planning.bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotset.planning.allocate import allocate
from hotset.planning.bound import (
    Options,
    bound_by_loads,
    bound_by_pairs,
    expert_loads,
    fractional_bound,
    options_of,
    tightened,
)
from hotset.planning.budget import Budget
from hotset.planning.layers import Layer, build_layer, select_options
from hotset.planning.problem import Placement, Problem, fill
from hotset.planning.threads import on_threads

ENUMERATED_EXPERTS = 16
"""Layers of up to this many experts are solved by looking at every subset."""
TARGET_GAP = 1e-4
"""Below this the bound is not worth tightening further."""
_LARGE_LAYER = 1_000_000
"""Picks in distinct sets from which on a layer gets fewer sweeps and no polish of every size."""
_PAIR_WORK = 100_000_000
"""Pairs in distinct sets over all layers up to which the pair bound is computed."""


@dataclass
class _Candidates:
    """Placements of one layer worth considering, by ascending size, each better than all smaller ones."""

    sizes: NDArray[np.int64]
    values: NDArray[np.float64]
    masks: NDArray[np.bool_]
    """[O, E]."""

    def add(self, layer: Layer, masks: NDArray[np.bool_], values: NDArray[np.float64]) -> None:
        sizes = masks @ layer.size
        self.sizes, self.values, self.masks = select_options(
            np.append(self.sizes, sizes), np.append(self.values, values), np.concatenate([self.masks, masks])
        )


@dataclass
class _Work:
    """One layer under way."""

    layer: Layer
    fewest: int
    most: int
    candidates: _Candidates
    load: NDArray[np.float64]
    bound: Options


def place(problem: Problem) -> Placement:
    return solve(problem)


def place_each(problem: Problem, budgets: Sequence[Budget]) -> list[Placement]:
    """Layers are prepared once for all budgets."""
    prepared = Prepared(problem)
    return [prepared.place(budget) for budget in budgets]


def solve(problem: Problem, *, enumerated_experts: int = ENUMERATED_EXPERTS) -> Placement:
    """The placement with its bound. `enumerated_experts`: solve layers of up to so many experts by enumeration."""
    return Prepared(problem, enumerated_experts).place(problem.budget)


class Prepared:
    """What does not depend on how much may be spent: each layer's candidates and upper bounds."""

    def __init__(self, problem: Problem, enumerated_experts: int = ENUMERATED_EXPERTS) -> None:
        self._problem = problem
        self._enumerated = problem.shape[1] <= enumerated_experts
        self._work = on_threads(lambda row: _prepare(problem, row, self._enumerated), range(problem.shape[0]))
        pairs = sum(w.layer.sets.size * (w.layer.sets.shape[1] - 1) // 2 for w in self._work)
        self._may_tighten = not self._enumerated and pairs <= _PAIR_WORK

    def place(self, budget: Budget) -> Placement:
        """The placement within this budget, which differs from the problem's in capacity only."""
        problem = replace(self._problem, budget=budget)
        # candidates that polishing finds at one budget are kept from the next: a budget's answer is its own
        work = [replace(w, candidates=replace(w.candidates)) for w in self._work]
        placed = fill(problem, problem.counts, _without_unpicked(problem, _spend(problem, work)))
        score = sum(w.layer.score(row) for w, row in zip(work, placed, strict=True))
        bound = _bound(problem, self._work)
        if self._may_tighten and bound > score * (1 + TARGET_GAP):
            on_threads(_tighten, self._work)
            self._may_tighten = False
            bound = min(bound, _bound(problem, self._work))
        wanted = problem.objective
        return Placement(placed, tightened(max(bound, score), wanted.hit_value, wanted.resident_value))


def _prepare(problem: Problem, row: int, enumerated: bool) -> _Work:
    layer = build_layer(problem, row)
    fewest, most = int(problem.budget.min_experts[row]), int(problem.budget.max_experts[row])
    if enumerated:
        candidates = _every_subset(layer, fewest, most)
        load = expert_loads(layer)
        return _Work(layer, fewest, most, candidates, load, (candidates.sizes, candidates.values))
    load = expert_loads(layer, max_sweeps=10 if layer.sets.size >= _LARGE_LAYER else 64)
    candidates = _chains(problem, layer, row, load, fewest, most)
    if layer.sets.size < _LARGE_LAYER:
        _polish(layer, candidates, fewest, most)
    return _Work(layer, fewest, most, candidates, load, options_of(layer, bound_by_loads(load), fewest, most))


def _every_subset(layer: Layer, fewest: int, most: int) -> _Candidates:
    from hotset.planning.loops import subset_values

    values = subset_values(layer.sets, layer.weight, layer.base, layer.value)
    subsets = np.arange(len(values))
    masks = (subsets[:, None] >> np.arange(layer.num_experts) & 1).astype(np.bool_)
    each = masks.sum(axis=1)
    allowed = (each >= fewest) & (each <= most)
    return _Candidates(*select_options((masks @ layer.size)[allowed], values[allowed], masks[allowed]))


def _chains(problem: Problem, layer: Layer, row: int, load: NDArray[np.float64], fewest: int, most: int) -> _Candidates:
    from hotset.planning.loops import chain_values, peel

    # among equals: picked more often, resident before, lower number
    previous = np.zeros(layer.num_experts, np.bool_) if problem.previous_mask is None else problem.previous_mask[row]
    order = np.lexsort((~previous, -problem.counts[row]))
    priority = np.empty(layer.num_experts)
    priority[order] = np.arange(layer.num_experts, 0, -1)
    peeled = peel(
        layer.sets, layer.weight, *layer.index, layer.base, layer.value, layer.size.astype(np.float64), priority
    )
    by_load = order[np.argsort(-(load / layer.size)[order], kind="stable")]
    sizes, values, masks = [], [], []
    for chain in (peeled, by_load):
        worth = chain_values(layer.sets, layer.weight, layer.base, layer.value, chain)
        rank = np.empty(layer.num_experts, np.int64)
        rank[chain] = np.arange(layer.num_experts)
        nested = rank[None, :] < np.arange(fewest, most + 1)[:, None]
        masks.append(nested)
        values.append(worth[fewest : most + 1])
        sizes.append(nested @ layer.size)
    found = _Candidates(*select_options(np.concatenate(sizes), np.concatenate(values), np.concatenate(masks)))
    smallest = np.zeros(layer.num_experts, np.bool_)
    smallest[np.argsort(layer.size, kind="stable")[:fewest]] = True  # so that some option of every layer fits
    found.add(layer, smallest[None], np.array([layer.score(smallest)]))
    return found


def _polish(layer: Layer, candidates: _Candidates, fewest: int, most: int) -> None:
    """Swaps from every candidate, and from each the next larger and the next smaller one."""
    seen: set[bytes] = set()
    for _ in range(2):
        for mask in candidates.masks.copy():
            if mask.tobytes() not in seen:
                seen.add(mask.tobytes())
                _polish_one(layer, candidates, mask, fewest, most)


def _polish_one(layer: Layer, candidates: _Candidates, mask: NDArray[np.bool_], fewest: int, most: int) -> None:
    from hotset.planning.loops import improve, swap_tables

    num_experts, count = len(mask), int(mask.sum())
    resident = mask.copy()
    value = improve(
        layer.sets,
        layer.weight,
        layer.base,
        layer.value,
        layer.size,
        resident,
        4 if layer.sets.size >= _LARGE_LAYER else 64,
    )
    gain, loss, shared = np.empty(num_experts), np.empty(num_experts), np.empty((num_experts, num_experts))
    swap_tables(layer.sets, layer.weight, layer.base, layer.value, resident, gain, loss, shared)
    masks, values = [resident], [value]
    if count < min(most, num_experts):
        more = resident.copy()
        best = int(np.argmax(np.where(resident, -np.inf, gain / layer.size)))
        more[best] = True
        masks.append(more)
        values.append(value + gain[best])
    if count > fewest:
        less = resident.copy()
        worst = int(np.argmin(np.where(resident, loss / layer.size, np.inf)))
        less[worst] = False
        masks.append(less)
        values.append(value - loss[worst])
    candidates.add(layer, np.stack(masks), np.array(values))
    if (layer.size != layer.size[0]).any():
        _add_swaps(layer, candidates, resident, value, gain, loss, shared)


def _add_swaps(
    layer: Layer,
    candidates: _Candidates,
    resident: NDArray[np.bool_],
    value: float,
    gain: NDArray[np.float64],
    loss: NDArray[np.float64],
    shared: NDArray[np.float64],
) -> None:
    """Every swap of one resident for one absent expert, whatever their sizes, that no smaller candidate matches."""
    out, into = np.flatnonzero(resident), np.flatnonzero(~resident)
    if not len(out) or not len(into):
        return
    values = (value - loss[out][:, None] + gain[into][None, :] - shared[np.ix_(out, into)]).ravel()
    sizes = (int(layer.size[resident].sum()) - layer.size[out][:, None] + layer.size[into][None, :]).ravel()
    sizes, values, pair = select_options(sizes, values, np.arange(len(values)))
    at = np.searchsorted(candidates.sizes, sizes, side="right") - 1
    matched = np.where(at >= 0, candidates.values[np.maximum(at, 0)], -np.inf)
    better = values > matched * (1 + 1e-12)
    masks = np.repeat(resident[None], int(better.sum()), axis=0)
    rows = np.arange(len(masks))
    masks[rows, out[pair[better] // len(into)]] = False
    masks[rows, into[pair[better] % len(into)]] = True
    candidates.add(layer, masks, values[better])


def _spend(problem: Problem, work: list[_Work]) -> NDArray[np.bool_]:
    """Knapsack, polish what it took, and again, while that wins."""
    best, mask = -np.inf, np.zeros(problem.shape, np.bool_)
    for _ in range(8):
        answer = allocate(
            [w.candidates.sizes for w in work],
            [w.candidates.values for w in work],
            problem.budget.capacity,
            for_bound=False,
        )
        if answer is None:
            # only where a minimum per layer leaves no room for anything but the smallest experts: fill finds those
            return mask
        total, taken = answer
        if total <= best * (1 + 1e-12):
            break
        best = total
        mask = np.stack([w.candidates.masks[i] for w, i in zip(work, taken, strict=True)])
        for w, row in zip(work, mask, strict=True):
            if 0 < row.sum() < len(row):
                _polish_one(w.layer, w.candidates, row, w.fewest, w.most)
    return mask


def _without_unpicked(problem: Problem, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Experts that were never picked add nothing: unless a minimum needs them, they wait until `fill` finds room."""
    picked = mask & (problem.counts > 0)
    short = picked.sum(axis=1) < problem.budget.min_experts
    return np.where(short[:, None], mask, picked)


def _bound(problem: Problem, work: list[_Work]) -> float:
    answer = allocate([w.bound[0] for w in work], [w.bound[1] for w in work], problem.budget.capacity, for_bound=True)
    assert answer is not None, "the smallest experts of every layer fit, or the budget would have been refused"
    return min(answer[0] * (1 + 1e-12), fractional_bound(np.stack([w.load for w in work]), problem.budget))


def _tighten(work: _Work) -> None:
    both = np.minimum(bound_by_loads(work.load), bound_by_pairs(work.layer))
    work.bound = options_of(work.layer, both, work.fewest, work.most)
