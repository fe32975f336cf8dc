"""The certified planner: its bound and its placements against brute force, its loops against plain ones."""

from __future__ import annotations

import numpy as np
import planning_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotset import Trace
from hotset.planning.api import build_problem
from hotset.planning.budget import resolve_budget
from hotset.planning.measures import measure
from hotset.planning.problem import Problem
from hotset.planning.strategies.certified import solve

OBJECTIVES = [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (1.0, 3.0), (0.25, 0.5)]


def random_trace(seed: int, num_experts: int, top_k: int, tokens: int, *, gaps: bool = True) -> Trace:
    """Two layers of clustered picks, some tokens with fewer than K of them."""
    rng = np.random.default_rng(seed)
    ids = np.empty((2, tokens, top_k), np.int64)
    for row in range(2):
        topics = rng.random((3, num_experts)) ** rng.choice([0.5, 2.0, 6.0]) + 1e-6
        for token in range(tokens):
            weight = topics[rng.integers(3)]
            ids[row, token] = rng.choice(num_experts, top_k, replace=False, p=weight / weight.sum())
            if gaps and rng.random() < 0.15:
                ids[row, token, rng.integers(top_k) :] = -1
    return Trace.from_arrays(ids, num_experts=num_experts)


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[Trace, Problem, NDArray[np.int64], int, tuple[float, float], int, int]:
    num_experts = draw(st.integers(3, 7))
    top_k = draw(st.integers(1, min(4, num_experts)))
    trace = random_trace(draw(st.integers(0, 10**6)), num_experts, top_k, draw(st.integers(1, 14)))
    objective = draw(st.sampled_from(OBJECTIVES))
    fewest = draw(st.sampled_from([0, 0, 0, 1]))
    most = draw(st.sampled_from([num_experts, num_experts, num_experts - 1]))
    sizes = np.ones((2, num_experts), np.int64)
    kind = draw(st.sampled_from(["equal", "by layer", "by expert"]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    if kind == "by layer":
        sizes = np.repeat(rng.integers(1, 4, (2, 1)), num_experts, axis=1)
    elif kind == "by expert":
        sizes = rng.integers(1, 5, (2, num_experts))
    least = int(sum(np.sort(row)[:fewest].sum() for row in sizes))
    capacity = draw(st.integers(least, max(least, int(sizes.sum()))))
    trace = Trace.from_arrays(trace.expert_ids, num_experts=num_experts, expert_bytes=sizes)
    budget = resolve_budget(
        (2, num_experts),
        trace.expert_bytes,
        gpu_memory_bytes=min(capacity, int(sizes.sum())),
        min_experts_per_layer=fewest,
        max_experts_per_layer=most,
    )
    problem = build_problem(trace, budget, objective)
    return trace, problem, sizes, capacity, objective, fewest, most


@settings(max_examples=150, derandomize=True, deadline=None)
@given(small_problems())
def test_no_placement_beats_the_bound_and_enumerated_layers_are_optimal(
    case: tuple[Trace, Problem, NDArray[np.int64], int, tuple[float, float], int, int],
) -> None:
    trace, problem, sizes, capacity, objective, fewest, most = case
    best = reference.optimum(trace, sizes, capacity, *objective, fewest, most)
    for enumerated in (0, 12):
        placed = solve(problem, enumerated_experts=enumerated)
        found = reference.score(placed.mask, trace, *objective)
        assert placed.bound is not None
        assert placed.bound >= best * (1 - 1e-12)
        assert found <= best * (1 + 1e-12)
        assert int(sizes[placed.mask].sum()) <= capacity
        if enumerated:
            assert found == pytest.approx(best)
            assert placed.bound == pytest.approx(best, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["equal", "by layer", "by expert"])
def test_peeling_and_swaps_find_the_optimum_in_95_of_100_cases(kind: str) -> None:
    optimal, cases = 0, 60
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        num_experts = int(rng.integers(6, 13))
        sizes = np.ones((2, num_experts), np.int64)
        if kind == "by layer":
            sizes = np.repeat(rng.integers(1, 4, (2, 1)), num_experts, axis=1)
        elif kind == "by expert":
            sizes = rng.integers(1, 5, (2, num_experts))
        ids = random_trace(seed, num_experts, int(rng.integers(2, 5)), 60).expert_ids
        trace = Trace.from_arrays(ids, num_experts=num_experts, expert_bytes=sizes)
        capacity = int(rng.uniform(0.1, 0.9) * sizes.sum())
        budget = resolve_budget((2, num_experts), trace.expert_bytes, gpu_memory_bytes=capacity)
        problem = build_problem(trace, budget, OBJECTIVES[seed % len(OBJECTIVES)])
        exact = solve(problem)
        assert exact.bound is not None
        searched = solve(problem, enumerated_experts=0)
        assert searched.bound is not None
        best = measure(exact.mask, trace).score(*OBJECTIVES[seed % len(OBJECTIVES)])
        found = measure(searched.mask, trace).score(*OBJECTIVES[seed % len(OBJECTIVES)])
        assert best == pytest.approx(exact.bound)
        assert found <= best * (1 + 1e-12)
        assert searched.bound >= best * (1 - 1e-12)
        optimal += found >= best * (1 - 1e-9)
    assert optimal >= 0.95 * cases
