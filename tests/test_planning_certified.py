"""The certified planner: its bound and its placements against brute force, its loops against plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotset import Trace
from hotset.planning import loops
from hotset.planning.allocate import allocate
from hotset.planning.api import build_problem
from hotset.planning.bound import PairBound, bound_by_loads, expert_loads
from hotset.planning.budget import resolve_budget
from hotset.planning.compare import compare
from hotset.planning.layers import Layer, build_layer, distinct
from hotset.planning.measures import measure
from hotset.planning.problem import Problem
from hotset.planning.strategies.certified import solve
from tests import planning_reference as reference

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


def whole_layer(seed: int, num_experts: int = 7, top_k: int = 3, tokens: int = 40) -> tuple[Layer, Trace]:
    trace = random_trace(seed, num_experts, top_k, tokens)
    budget = resolve_budget((2, num_experts), None, experts=num_experts)
    return build_layer(build_problem(trace, budget, (0.5, 2.0)), 0), trace


def best_of(trace: Trace, n: int) -> float:
    """Best objective of n experts of the first layer."""
    sizes = np.ones(trace.num_experts, np.int64)
    return max(value for _, value in reference.layer_frontier(trace.layer(0), sizes, 0.5, 2.0, n, n))


@pytest.mark.parametrize("seed", range(6))
def test_every_kind_of_bound_holds_for_every_number_of_experts(seed: int) -> None:
    layer, trace = whole_layer(seed)
    truth = np.array([best_of(trace, n) for n in range(8)])
    pairs = PairBound(layer)
    bounds = {"loads": bound_by_loads(expert_loads(layer)), "pairs": pairs.balanced()}
    bounds |= {f"sharpened at {n}": pairs.sharpen(n, rounds=30) for n in range(2, 7)}
    for name, bound in bounds.items():
        assert (bound >= truth * (1 - 1e-12)).all(), name
    # all experts see everything, and no bound says more than that by more than its slack
    assert bounds["loads"][-1] == pytest.approx(truth[-1])
    assert bounds["pairs"][-1] == pytest.approx(truth[-1])


def test_prices_of_many_questions_neither_overflow_nor_break_the_bound() -> None:
    layer, trace = whole_layer(3)
    pairs = PairBound(layer)
    for _ in range(4):
        for n in (2, 6, 3, 5):
            bound = pairs.sharpen(n, rounds=400)
            assert np.isfinite(bound).all()
            assert bound[n] >= best_of(trace, n) * (1 - 1e-12)


def test_pairs_follow_the_truth_where_loads_overstate() -> None:
    # 20 tokens on each of the 20 sets of three of six experts: three experts hold one set, a twentieth of the tokens
    ids = np.repeat(np.array(list(combinations(range(6), 3))), 20, axis=0)[None]
    layer = build_layer(
        build_problem(Trace.from_arrays(ids, num_experts=6), resolve_budget((1, 6), None, experts=3), "whole-token"), 0
    )
    assert bound_by_loads(expert_loads(layer))[3] == pytest.approx(200)  # half of the experts, half of the worth
    assert PairBound(layer).balanced()[3] == pytest.approx(80)  # 3 * 2 of 6 * 5 ordered pairs, a fifth of it
    assert PairBound(layer).sharpen(3)[3] == pytest.approx(80, rel=0.1)  # on its way there


@pytest.mark.parametrize("seed", range(5))
def test_distinct_sets_hold_every_token_once(seed: int) -> None:
    trace = random_trace(seed, 5, 3, 80)
    sets, weight = distinct(trace, 1)
    wanted = Counter(tuple(sorted(int(e) for e in token if e >= 0)) for token in trace.layer(1))
    del wanted[()]
    assert {tuple(int(e) for e in s if e >= 0): int(w) for s, w in zip(sets, weight, strict=True)} == wanted


@pytest.mark.parametrize("seed", range(5))
def test_peeling_is_the_plain_peeling(seed: int) -> None:
    layer, _ = whole_layer(seed, num_experts=9, top_k=4)
    rng = np.random.default_rng(seed)
    size, priority = rng.integers(1, 4, 9).astype(np.float64), rng.permutation(9).astype(np.float64)
    got = loops.peel(layer.sets, layer.weight, *layer.index, layer.base, layer.value, size, priority)
    wanted = reference.peel_order(layer.sets, layer.weight, layer.base, layer.value, size, priority)
    assert got.tolist() == wanted
    values = loops.chain_values(layer.sets, layer.weight, layer.base, layer.value, got)
    for n in range(10):
        mask = np.zeros(9, np.bool_)
        mask[got[:n]] = True
        assert values[n] == pytest.approx(layer.score(mask))


@pytest.mark.parametrize("seed", range(5))
def test_swap_tables_say_what_every_change_is_worth(seed: int) -> None:
    layer, _ = whole_layer(seed)
    resident = np.random.default_rng(seed).random(7) < 0.5
    gain, loss, shared = np.empty(7), np.empty(7), np.empty((7, 7))
    total = loops.swap_tables(layer.sets, layer.weight, layer.base, layer.value, resident, gain, loss, shared)
    assert total == pytest.approx(layer.score(resident))
    for out in range(7):
        for into in range(7):
            changed = resident.copy()
            changed[out] = changed[into] = False
            if resident[out] and not resident[into]:
                assert layer.score(changed) == pytest.approx(total - loss[out])
                changed[into] = True
                assert layer.score(changed) == pytest.approx(total - loss[out] + gain[into] - shared[out, into])


@pytest.mark.parametrize("seed", range(5))
def test_swaps_never_lose_and_end_where_no_swap_wins(seed: int) -> None:
    layer, _ = whole_layer(seed)
    resident = np.arange(7) < 3
    before = layer.score(resident)
    after = loops.improve(layer.sets, layer.weight, layer.base, layer.value, layer.size, resident, 50)
    assert after == pytest.approx(layer.score(resident))
    assert after >= before
    assert resident.sum() == 3
    for out in np.flatnonzero(resident):
        for into in np.flatnonzero(~resident):
            swapped = resident.copy()
            swapped[out], swapped[into] = False, True
            assert layer.score(swapped) <= after + 1e-6


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 10**6))
def test_the_knapsack_is_exact_and_its_coarse_form_brackets_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 4))
    sizes = [np.sort(rng.integers(0, 30, rng.integers(1, 5))) for _ in range(layers)]
    values = [rng.random(len(s)) for s in sizes]
    capacity = int(rng.integers(0, 70))
    choices = list(product(*(range(len(s)) for s in sizes)))
    worth = [
        sum(v[i] for v, i in zip(values, c, strict=True))
        for c in choices
        if sum(s[i] for s, i in zip(sizes, c, strict=True)) <= capacity
    ]
    exact = allocate(sizes, values, capacity, for_bound=False)
    if not worth:
        assert exact is None
        return
    assert exact is not None
    assert exact[0] == pytest.approx(max(worth))
    assert sum(s[i] for s, i in zip(sizes, exact[1], strict=True)) <= capacity
    above = allocate(sizes, values, capacity, for_bound=True, cells=20)
    below = allocate(sizes, values, capacity, for_bound=False, cells=20)
    assert above is not None
    assert above[0] >= max(worth) - 1e-12
    if below is not None:
        assert below[0] <= max(worth) + 1e-12
        assert sum(s[i] for s, i in zip(sizes, below[1], strict=True)) <= capacity


TRACES = ("gpt-oss-20b-decode", *(f"esft-{task}-prefill" for task in ("intent", "law", "summary", "translation")))


@pytest.mark.parametrize("name", TRACES)
def test_real_traces_are_planned_within_one_percent_or_three_at_a_tenth(
    real_trace: Callable[[str], Trace], name: str
) -> None:
    rows = compare(real_trace(name), ["certified"], ["10%", "25%", "50%", "75%", "90%"])
    assert rows[0]["gap"] <= 0.03
    assert max(row["gap"] for row in rows[1:]) <= 0.01
    rows = compare(real_trace(name), ["certified"], ["10%", "25%", "50%", "75%", "90%"], objective=(1, 1))
    assert max(row["gap"] for row in rows) <= 0.001


def test_held_out_documents_of_a_real_trace_profit(real_trace: Callable[[str], Trace]) -> None:
    rows = compare(
        real_trace("gpt-oss-20b-decode"), ["certified", "frequency"], ["10%", "25%", "50%"], holdout=1 / 3, seed=0
    )
    rates = [row["held_out"]["token_resident_rate"] for row in rows]
    assert all(rate >= floor for rate, floor in zip(rates[::2], (0.12, 0.30, 0.58), strict=True))
    assert all(ours > theirs for ours, theirs in zip(rates[::2], rates[1::2], strict=True))
