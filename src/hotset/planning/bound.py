"""Upper bounds on what any placement can score: what `Plan.bound` is made of.

Two kinds, each valid for any split of the tokens' worth, so that stopping early never breaks them:

- loads: every token's worth is charged to its own experts. A placement scores at most the loads of its residents, so
  per layer the n largest loads bound n experts, and over all layers the fractional knapsack bounds any placement.
  This is the linear dual of the densest-subhypergraph relaxation; it is concave in n, the truth often convex.
- pairs: every token's worth is charged to ordered pairs of its experts, which only count when both are resident. Of n
  resident experts each sees at most its n - 1 largest pairs. Follows the truth where it is convex. The charges are
  spread evenly at first; where that leaves a gap they are priced for the number of experts in question. At best this
  reaches the first level of the reformulation-linearization hierarchy (Sherali and Adams 1990).

The bound per layer and number of experts is the least of them, and an exact multiple-choice knapsack over those
gives the bound on the whole placement.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hotset.planning.budget import Budget
from hotset.planning.layers import Layer

_SLACK = 1e-9
"""Relative slack over everything summed in float64, far above its rounding."""


def expert_loads(layer: Layer, *, max_sweeps: int = 64) -> NDArray[np.float64]:
    """[E] charge of each expert, near the split that is best for every budget at once."""
    from hotset.planning.loops import balance, charged

    groups = layer.sets.astype(np.int32)
    size = layer.size.astype(np.float64)
    mass = np.zeros(groups.shape)
    load = layer.base.copy()
    if layer.value > 0 and len(groups):
        done, before = 0, np.inf
        for sweeps in (2, 2, 4, 8, 16, 32):
            balance(groups, layer.weight, layer.value, size, mass, load, min(sweeps, max_sweeps - done))
            done += sweeps
            # how far the bound is from its best, over all budgets: the area under the curve of largest loads
            now = float(np.cumsum(-np.sort(-load / size)).sum())
            if done >= max_sweeps or before - now <= 1e-5 * now:
                break
            before = now
        load = layer.base.copy()
        charged(groups, layer.weight, layer.value, mass, load)
    return load


def bound_by_loads(load: NDArray[np.float64]) -> NDArray[np.float64]:
    """[E + 1] upper bound of a layer with n resident experts, n = 0..E."""
    return np.append(0.0, np.cumsum(-np.sort(-load))) * (1 + _SLACK)


class PairBound:
    """Bounds of one layer from pairs of co-firing experts, sharper with every number of experts asked about."""

    def __init__(self, layer: Layer) -> None:
        num_experts, top_k = layer.num_experts, layer.sets.shape[1]
        alone = np.ones(len(layer.sets), np.bool_) if top_k == 1 else layer.sets[:, 1] < 0
        self._base = layer.base.copy()
        np.add.at(self._base, layer.sets[alone, 0], layer.value * layer.weight[alone])
        self._sets, self._weight, self._value = layer.sets[~alone], layer.weight[~alone], layer.value
        self._prices = np.zeros((num_experts, num_experts))
        self.steps_per_round = len(self._sets) * top_k * top_k + num_experts**2
        """Work of one round of `sharpen`, in about nanoseconds."""

    def balanced(self, *, sweeps: int = 16) -> NDArray[np.float64]:
        """[E + 1] upper bound with n resident experts, from the most even charge of unordered pairs."""
        from hotset.planning.loops import balance, charged

        num_experts, top_k = len(self._base), self._sets.shape[1]
        # pairs within the first picks come first, so that those of a set with fewer than K picks are at the front
        which = sorted(combinations(range(top_k), 2), key=lambda pair: pair[1])
        sets = self._sets.astype(np.int32)
        groups = np.full((len(sets), len(which)), -1, np.int32)
        for column, (i, j) in enumerate(which):
            both = sets[:, j] >= 0
            groups[both, column] = sets[both, i] * num_experts + sets[both, j]
        load, mass = np.zeros(num_experts**2), np.zeros(groups.shape)
        if self._value > 0:
            balance(groups, self._weight, self._value, np.ones(num_experts**2), mass, load, sweeps)
            load[:] = 0
            charged(groups, self._weight, self._value, mass, load)
        pairs = load.reshape(num_experts, num_experts)
        return self._seen((pairs + pairs.T) / 2)

    def sharpen(self, n: int, *, rounds: int = 150) -> NDArray[np.float64]:
        """[E + 1] the same from charges meant for n experts: tightest there, valid everywhere."""
        from hotset.planning.loops import priced_pairs

        average = np.empty_like(self._prices)
        self._prices *= 0.3  # a head start from the numbers asked about before, light enough to be overruled
        priced_pairs(self._sets, self._weight, self._base, self._value, n, rounds, 3.0, self._prices, average)
        worth = self._value * float(self._weight.sum())
        assert abs(average.sum() - worth) <= _SLACK * worth, "a split charges every token's worth, no more and no less"
        return self._seen(average)

    def _seen(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        num_experts = len(self._base)
        largest = -np.sort(-pairs, axis=1)[:, : num_experts - 1]
        seen = self._base[:, None] + np.pad(np.cumsum(largest, axis=1), ((0, 0), (1, 0)))
        bound = np.zeros(num_experts + 1)
        for n in range(1, num_experts + 1):
            bound[n] = np.partition(seen[:, n - 1], num_experts - n)[num_experts - n :].sum()
        return bound * (1 + _SLACK)


def fractional_bound(loads: NDArray[np.float64], budget: Budget) -> float:
    """Bound on any placement, [L, E] loads: the densest loads up to the capacity, the last one in part."""
    density = (loads / budget.sizes).ravel()
    order = np.argsort(-density, kind="stable")
    taken = np.cumsum(budget.sizes.ravel()[order])
    whole = int(np.searchsorted(taken, budget.capacity, side="right"))
    total = float(loads.ravel()[order[:whole]].sum())
    if whole < len(order):
        left = budget.capacity - (int(taken[whole - 1]) if whole else 0)
        total += left * float(density[order[whole]])
    return total * (1 + _SLACK)


def tightened(bound: float, hit_value: float, resident_value: float) -> float:
    """A score of whole values is whole: such a bound is rounded down."""
    if float(hit_value).is_integer() and float(resident_value).is_integer():
        return float(np.floor(bound + 1e-6))
    return bound
