"""The keep-mass policy, the ledger of what was dropped, and the order of fetches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.errors import OpsError
from hotset.ops import PolicyRouting, ShedLedger, ShedPolicy, order_fetches, route_shed, split_by_residency
from tests.test_ops_route_shed import Case, bits, cases, make_case, same_bits

TABLE = [0, 1, -1, -1]
"""Experts 0 and 1 are resident."""


def apply(policy: ShedPolicy, ids: list[list[int]], scores: list[list[float]], table: list[int]) -> PolicyRouting:
    return policy.apply(np.array(ids, np.int32), np.array(scores, np.float32), np.array(table, np.int32))


# -- splitting ---------------------------------------------------------------------------------------------------------


def test_a_split_keeps_every_pick_at_its_position_on_one_side() -> None:
    split = split_by_residency(
        np.array([[2, 0, 9, 1]], np.int32), np.array([[0.5, 0.25, 0.2, 0.05]], np.float32), np.array(TABLE, np.int32)
    )
    assert split.gpu_slots.tolist() == [[0, 0, 0, 1]]
    assert split.gpu_weights.tolist() == [[0.0, 0.25, 0.0, np.float32(0.05)]]
    assert split.cpu_ids.tolist() == [[2, -1, -1, -1]]
    assert split.cpu_weights.tolist() == [[0.5, 0.0, 0.0, 0.0]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_a_split_drops_nothing_and_changes_no_score(case: Case) -> None:
    indices, scores, table = case
    split = split_by_residency(*case)
    real = (indices >= 0) & (indices < len(table))
    on_gpu = np.zeros(indices.shape, bool)
    on_gpu[real] = table[indices[real].astype(np.int64)] >= 0
    on_cpu = split.cpu_ids >= 0
    assert ((on_gpu ^ on_cpu) == real).all()
    assert (split.cpu_ids[on_cpu] == indices[on_cpu]).all()
    assert (bits(split.gpu_weights) == np.where(on_gpu, bits(scores), 0)).all()
    assert (bits(split.cpu_weights) == np.where(on_cpu, bits(scores), 0)).all()
    assert (split.gpu_slots == route_shed(*case).slots).all()


# -- the policy --------------------------------------------------------------------------------------------------------


def test_a_row_is_shed_only_where_enough_mass_stays() -> None:
    # kept mass 0.75, 0.5 and 0 of 1
    routing = apply(ShedPolicy(0.75), [[0, 2], [1, 3], [2, 3]], [[0.75, 0.25], [0.5, 0.5], [0.75, 0.25]], TABLE)
    assert routing.weights.tolist() == [[1.0, 0.0], [0.5, 0.0], [0.0, 0.0]]
    assert routing.shed_ids.tolist() == [[-1, 2], [-1, -1], [-1, -1]]
    assert routing.shed_weights.tolist() == [[0.0, 0.25], [0.0, 0.0], [0.0, 0.0]]
    assert routing.cpu_ids.tolist() == [[-1, -1], [-1, 3], [2, 3]]
    assert routing.cpu_weights.tolist() == [[0.0, 0.0], [0.0, 0.5], [0.75, 0.25]]
    assert routing.over_limit.tolist() == [False, True, True]
    assert routing.miss_ids.tolist() == [[2, -1], [3, -1], [2, 3]]


def test_shedding_over_the_limit_is_counted_where_nothing_can_be_served_exactly() -> None:
    routing = apply(ShedPolicy(0.75, over_limit="shed"), [[1, 3], [2, 3]], [[0.5, 0.5], [0.75, 0.25]], TABLE)
    assert routing.weights.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert routing.cpu_ids.tolist() == [[-1, -1], [-1, -1]]
    assert routing.shed_ids.tolist() == [[-1, 3], [2, 3]]
    assert routing.over_limit.tolist() == [True, True]


def test_keep_mass_1_sheds_nothing_but_picks_without_weight() -> None:
    routing = apply(ShedPolicy(1.0), [[0, 2], [0, 2]], [[1.0, 0.0], [0.99, 0.01]], TABLE)
    assert routing.shed_ids.tolist() == [[-1, 2], [-1, -1]]
    assert routing.cpu_ids.tolist() == [[-1, -1], [-1, 2]]


def test_rows_without_a_positive_finite_mass_are_served_exactly() -> None:
    odd = [[0.0, -0.0], [-1.0, 0.5], [np.inf, 1.0], [np.nan, 1.0]]
    routing = apply(ShedPolicy(0.01), [[0, 2]] * 4, odd, TABLE)
    assert routing.over_limit.all()
    assert routing.cpu_ids.tolist() == [[-1, 2]] * 4
    assert (bits(routing.weights[:, 0]) == bits(np.array(odd, np.float32)[:, 0])).all()


def test_padding_is_on_no_side_and_a_resident_row_is_left_alone() -> None:
    routing = apply(ShedPolicy(0.5), [[-1, -1], [0, -1], [0, 1]], [[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]], TABLE)
    assert routing.weights.tolist() == [[0.0, 0.0], [0.5, 0.0], [0.25, 0.75]]
    assert (routing.cpu_ids == -1).all()
    assert (routing.shed_ids == -1).all()
    assert not routing.over_limit.any()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=cases(), keep_mass=st.floats(0.01, 1.0), over_limit=st.sampled_from(["exact", "shed"]))
def test_every_real_pick_is_on_exactly_one_side(case: Case, keep_mass: float, over_limit: Any) -> None:
    indices, _, table = case
    routing = ShedPolicy(keep_mass, over_limit).apply(*case)
    real = (indices >= 0) & (indices < len(table))
    on_gpu = np.zeros(indices.shape, bool)
    on_gpu[real] = table[indices[real].astype(np.int64)] >= 0
    sides = on_gpu.astype(int) + (routing.cpu_ids >= 0) + (routing.shed_ids >= 0)
    assert (sides == real).all()
    assert (bits(routing.weights)[~on_gpu] == 0).all()
    shed = (routing.shed_ids >= 0).any(axis=1)
    assert not ((routing.cpu_ids >= 0).any(axis=1) & shed).any()
    if over_limit == "exact":
        assert not (routing.over_limit & shed).any()


@pytest.mark.parametrize("library", ["torch", "mlx.core"])
def test_torch_and_mlx_decide_as_numpy_does(library: str) -> None:
    module = pytest.importorskip(library)
    to_native = module.from_numpy if library == "torch" else module.array
    case = make_case(np.random.default_rng(4), 400, 6, 16, 0.6, np.int32, specials=0.2)
    for policy in (ShedPolicy(0.3), ShedPolicy(0.8), ShedPolicy(0.8, "shed")):
        wanted = policy.apply(*case)
        assert wanted.over_limit.any()
        assert (wanted.shed_ids >= 0).any()
        got = PolicyRouting(*map(np.asarray, policy.apply(*map(to_native, case))))
        assert (got.over_limit == wanted.over_limit).all()
        np.testing.assert_array_equal(got.mass, wanted.mass)
        for name in PolicyRouting._fields[:-2]:
            assert (bits(getattr(got, name)) == bits(getattr(wanted, name))).all(), name


@pytest.mark.parametrize("keep_mass", [0.0, -0.1, 1.1, float("nan")])
def test_a_keep_mass_that_is_no_share_is_refused(keep_mass: float) -> None:
    with pytest.raises(OpsError, match=r"keep_mass is .*: wanted a share of gate mass above 0 and at most 1"):
        ShedPolicy(keep_mass)


def test_an_unknown_way_over_the_limit_is_refused() -> None:
    with pytest.raises(OpsError, match="over_limit is 'drop': wanted 'exact' or 'shed'"):
        ShedPolicy(0.5, "drop")  # type: ignore[arg-type]


# -- the ledger --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch on the host", "torch on its device"])
def test_a_ledger_counts_rows_picks_and_mass_per_layer(kind: str) -> None:
    ids = np.array([[0, 2], [1, 3], [0, 1]], np.int32)
    scores = np.array([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]], np.float32)
    case: Any = ids, scores, np.array(TABLE, np.int32)
    ledger = ShedLedger(2)
    if kind != "numpy":
        torch = pytest.importorskip("torch")
        case = tuple(map(torch.from_numpy, case))
        ledger = ShedLedger(2, device="cpu") if kind == "torch on its device" else ledger
    for _ in range(2):
        ledger.record(1, ShedPolicy(0.75).apply(*case))
    totals = ledger.totals()
    assert totals.tokens.tolist() == [0, 6]
    assert totals.shed_rows.tolist() == [0, 2]
    assert totals.shed_picks.tolist() == [0, 2]
    assert totals.rows_over_limit.tolist() == [0, 2]
    assert totals.mass.tolist() == [0.0, 6.0]
    assert totals.dropped_mass.tolist() == [0.0, 0.5]
    assert totals.dropped_share.tolist() == [0.0, 0.5 / 6.0]


def test_a_row_of_which_nothing_is_kept_counts_with_its_whole_mass() -> None:
    ledger = ShedLedger(1)
    policy = ShedPolicy(0.5, over_limit="shed")
    ledger.record(0, apply(policy, [[2, 3], [0, 1]], [[0.75, 0.25], [0.5, 0.5]], TABLE))
    assert ledger.totals().mass.tolist() == [2.0]
    assert ledger.totals().dropped_mass.tolist() == [1.0]
    assert ledger.totals().dropped_share.tolist() == [0.5]


def test_a_ledger_refuses_rows_and_arrays_that_are_not_its_own() -> None:
    routing = apply(ShedPolicy(0.5), [[0]], [[1.0]], TABLE)
    with pytest.raises(OpsError, match="ledger row 2: wanted 0 to 1"):
        ShedLedger(2).record(2, routing)
    with pytest.raises(OpsError, match="a ledger of 0 layers"):
        ShedLedger(0)
    pytest.importorskip("torch")
    with pytest.raises(OpsError, match="the ledger counts on cpu but the routing is not there"):
        ShedLedger(2, device="cpu").record(0, routing)


# -- the order of fetches ----------------------------------------------------------------------------------------------


def test_the_most_missed_mass_is_fetched_first() -> None:
    ids = np.array([[3, 1, -1], [1, 0, 9]], np.int32)
    scores = np.array([[0.5, 0.25, 0.0], [0.375, 0.5, 0.9]], np.float32)
    experts, mass = order_fetches(ids, scores, num_experts=4)
    # 1 was missed twice; 0 and 3 tie; 9 is no expert of this layer
    assert experts.tolist() == [1, 0, 3]
    assert mass.tolist() == [0.625, 0.5, 0.5]


def test_a_miss_without_a_usable_score_is_fetched_last_but_not_forgotten() -> None:
    ids = np.array([[0, 1, 2]], np.int32)
    experts, mass = order_fetches(ids, np.array([[np.nan, -1.0, 0.1]], np.float32), 4)
    assert experts.tolist() == [2, 0, 1]
    assert mass.tolist() == [np.float32(0.1), 0.0, 0.0]


def test_fetches_are_ordered_from_host_arrays_of_one_shape_only() -> None:
    ids = np.zeros((1, 2), np.int32)
    with pytest.raises(OpsError, match="wanted the same"):
        order_fetches(ids, np.zeros((1, 3), np.float32), 4)
    with pytest.raises(OpsError, match="miss_ids is list: wanted an array in host memory"):
        order_fetches(ids.tolist(), np.zeros((1, 2), np.float32), 4)
    torch = pytest.importorskip("torch")
    with pytest.raises(OpsError, match="miss_scores is a tensor on meta"):
        order_fetches(torch.from_numpy(ids), torch.zeros((1, 2), device="meta"), 4)


def test_order_fetches_takes_what_route_shed_returns() -> None:
    case = make_case(np.random.default_rng(8), 50, 4, 16, 0.5, np.int32)
    routed = route_shed(*case)
    experts, mass = order_fetches(routed.miss_ids, routed.miss_scores, 16)
    missed = {int(e) for e in np.unique(case[0]) if case[2][e] < 0}
    assert set(experts.tolist()) == missed
    assert (np.diff(mass) <= 0).all()
    same_bits(routed, route_shed(*case, backend="reference"))
