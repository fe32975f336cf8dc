"""Whole layers matter: peel each layer backwards, spend the budget exactly, swap, and prove how near that is.

The objective is supermodular, the last missing expert of a token is worth most, so building up greedily is the wrong
way round. Per layer: chains of nested placements by backward peeling, and by the loads of the dual (whose level sets
are optimal for the relaxation), polished by swaps; layers of few experts are enumerated. Across layers: an exact
multiple-choice knapsack over what the layers offer. The bound comes from `hotset.planning.bound`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotset.planning.allocate import allocate
from hotset.planning.bound import PairBound, bound_by_loads, expert_loads, fractional_bound, tightened
from hotset.planning.budget import Budget
from hotset.planning.layers import Layer, build_layer, select_options
from hotset.planning.problem import Placement, Problem, fill
from hotset.planning.threads import on_threads

ENUMERATED_EXPERTS = 16
"""Layers of up to this many experts are solved by looking at every subset."""
PAIRS_FROM_GAP = 1e-4
"""With a gap above this, the pair bound is looked at."""
SHARPEN_FROM_GAP = 1e-2
"""With a gap above this, the pair bound is sharpened, as long as `_SHARPEN_WORK` lasts."""
_SHARPEN_TIMES = 2
"""How often one number of experts of one layer is sharpened, each time in thrice as many rounds."""
_SHARPEN_WORK = 3_000_000_000
"""About nanoseconds, over all layers and budgets of one problem."""
_LARGE_LAYER = 1_000_000
"""Picks in distinct sets from which on a layer gets fewer sweeps and swaps."""
_POLISH_WORK = 30_000_000
"""Candidates times picks in distinct sets up to which every candidate of a layer is polished, not only those taken."""
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
    exact: bool
    """Whether the candidates are all that matter: then they are the bound too."""
    upper: NDArray[np.float64]
    """[E + 1] proven upper bound with n resident experts."""
    least: NDArray[np.int64]
    """[E + 1] size that n experts take at least."""
    pairs: PairBound | None = None

    def bound_options(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """(sizes, upper bounds, numbers of experts) for the knapsack."""
        if self.exact:
            return self.candidates.sizes, self.candidates.values, self.candidates.masks.sum(axis=1)
        allowed = slice(self.fewest, self.most + 1)
        sizes, values, numbers = select_options(
            self.least[allowed], self.upper[allowed], np.arange(self.fewest, self.most + 1)
        )
        return sizes, values, numbers


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
        exact = problem.shape[1] <= enumerated_experts
        self._work = on_threads(lambda row: _prepare(problem, row, exact), range(problem.shape[0]))
        pairs = sum(w.layer.sets.size * (w.layer.sets.shape[1] - 1) // 2 for w in self._work)
        self._may_use_pairs = not exact and problem.objective.resident_value > 0 and pairs <= _PAIR_WORK
        self._sharpen_work = _SHARPEN_WORK

    def place(self, budget: Budget) -> Placement:
        """The placement within this budget, which differs from the problem's in capacity only."""
        problem = replace(self._problem, budget=budget)
        # candidates that polishing finds at one budget are kept from the next: a budget's answer is its own
        work = [replace(w, candidates=replace(w.candidates)) for w in self._work]
        placed = fill(problem, problem.counts, _without_unpicked(problem, _spend(problem, work)))
        score = sum(w.layer.score(row) for w, row in zip(work, placed, strict=True))
        bound = max(score, self._bound(budget, score))
        return Placement(placed, tightened(bound, problem.objective.hit_value, problem.objective.resident_value))

    def _bound(self, budget: Budget, score: float) -> float:
        """Least proven upper bound; costlier kinds only while the gap is wide."""
        bound, numbers = self._knapsack_bound(budget)
        bound = min(bound, fractional_bound(np.stack([w.load for w in self._work]), budget))
        if not self._may_use_pairs or bound <= score * (1 + PAIRS_FROM_GAP):
            return bound
        if self._work[0].pairs is None:
            on_threads(_use_pairs, self._work)
            now, numbers = self._knapsack_bound(budget)
            bound = min(bound, now)
        asked: Counter[tuple[int, int]] = Counter()
        while bound > score * (1 + SHARPEN_FROM_GAP) and self._sharpen_work > 0:
            # the bound is a placement of numbers of experts: sharpen each layer that is neither whole nor empty there
            todo = [
                (row, int(n))
                for row, n in enumerate(numbers)
                if 1 < n < self._problem.shape[1] and asked[row, int(n)] < _SHARPEN_TIMES
            ]
            if not todo:
                break
            asked.update(todo)
            self._sharpen_work -= sum(on_threads(lambda item: self._sharpen(*item, 150 * 3 ** (asked[item] - 1)), todo))
            now, numbers = self._knapsack_bound(budget)
            bound = min(bound, now)
        return bound

    def _knapsack_bound(self, budget: Budget) -> tuple[float, NDArray[np.int64]]:
        """(bound, [L] numbers of experts that reach it)."""
        options = [w.bound_options() for w in self._work]
        answer = allocate([o[0] for o in options], [o[1] for o in options], budget.capacity, for_bound=True)
        assert answer is not None, "the smallest experts of every layer fit, or the budget would have been refused"
        bound, taken = answer
        return bound * (1 + 1e-12), np.array([o[2][i] for o, i in zip(options, taken, strict=True)])

    def _sharpen(self, row: int, n: int, rounds: int) -> int:
        """Tighten one layer around a number of experts; returns the work that took."""
        work = self._work[row]
        assert work.pairs is not None
        work.upper = np.minimum(work.upper, work.pairs.sharpen(n, rounds=rounds))
        return int(rounds * work.pairs.steps_per_round)


def _prepare(problem: Problem, row: int, exact: bool) -> _Work:
    layer = build_layer(problem, row)
    fewest, most = int(problem.budget.min_experts[row]), int(problem.budget.max_experts[row])
    large = layer.sets.size >= _LARGE_LAYER
    load = expert_loads(layer, max_sweeps=10 if large else 64)
    if exact:
        candidates = _every_subset(layer, fewest, most)
    else:
        candidates = _chains(problem, layer, row, load, fewest, most)
        if len(candidates.sizes) * layer.sets.size <= _POLISH_WORK:
            _polish(layer, candidates, fewest, most)
    least = np.append(0, np.cumsum(np.sort(layer.size)))
    return _Work(layer, fewest, most, candidates, load, exact, bound_by_loads(load), least)


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


def _use_pairs(work: _Work) -> None:
    work.pairs = PairBound(work.layer)
    work.upper = np.minimum(work.upper, work.pairs.balanced())
