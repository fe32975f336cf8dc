"""Slow truths for the planning tests: brute force, and plain twins of the compiled loops."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hotset import Trace


def score(mask: NDArray[np.bool_], trace: Trace, hit_value: float, resident_value: float) -> float:
    """Objective of a placement, one token at a time."""
    total = 0.0
    for row in range(trace.num_layers):
        for token in trace.layer(row):
            picks = [int(e) for e in token if e >= 0]
            hits = sum(bool(mask[row, e]) for e in picks)
            total += hit_value * hits
            if picks and hits == len(picks):
                total += resident_value
    return total


def layer_frontier(
    picks: NDArray[np.int16],
    sizes: NDArray[np.int64],
    hit_value: float,
    resident_value: float,
    fewest: int,
    most: int,
) -> list[tuple[int, float]]:
    """(size, objective) of every subset of one layer's experts with an allowed number of them."""
    sets = [[int(e) for e in token if e >= 0] for token in picks]
    found = []
    for n in range(fewest, most + 1):
        for chosen in combinations(range(len(sizes)), n):
            inside = set(chosen)
            value = 0.0
            for token in sets:
                hits = sum(e in inside for e in token)
                value += hit_value * hits + (resident_value if token and hits == len(token) else 0.0)
            found.append((int(sizes[list(chosen)].sum()), value))
    return found


def optimum(
    trace: Trace,
    sizes: NDArray[np.int64],
    capacity: int,
    hit_value: float,
    resident_value: float,
    fewest: int = 0,
    most: int | None = None,
) -> float:
    """Best objective of any placement within the capacity, by trying every subset of every layer."""
    best = {0: 0.0}
    for row in range(trace.num_layers):
        highest = trace.num_experts if most is None else most
        options: dict[int, float] = {}
        for size, value in layer_frontier(trace.layer(row), sizes[row], hit_value, resident_value, fewest, highest):
            options[size] = max(options.get(size, -np.inf), value)
        now: dict[int, float] = {}
        for used, worth in best.items():
            for size, value in options.items():
                if used + size <= capacity:
                    now[used + size] = max(now.get(used + size, -np.inf), worth + value)
        best = now
    return max(best.values())


def peel_order(
    sets: NDArray[np.int16],
    weight: NDArray[np.float64],
    base: NDArray[np.float64],
    value: float,
    size: NDArray[np.float64],
    priority: NDArray[np.float64],
) -> list[int]:
    """Backward peeling by its definition: recount everything after each removal."""
    left = set(range(len(base)))
    order: list[int] = []
    while left:
        losses = {}
        for expert in left:
            lost = base[expert]
            for picks, tokens in zip(sets, weight, strict=True):
                inside = [int(e) for e in picks if e >= 0]
                if expert in inside and left.issuperset(inside):
                    lost += value * tokens
            losses[expert] = (lost / size[expert], priority[expert])
        worst = min(losses, key=lambda e: losses[e])
        left.remove(worst)
        order.append(worst)
    return order[::-1]
