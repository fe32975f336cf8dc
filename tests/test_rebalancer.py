"""The rebalancer: every rule by hand on a handful of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotset import EmaHotnessTracker, Machine, Rebalancer, Residency
from hotset.errors import PolicyError
from hotset.residency import Swap


def make(
    hotness: list[list[float]], held: list[list[int]], slots: int | None = None, *, pooled: bool = False, **options: Any
) -> Rebalancer:
    """A rebalancer whose tracker knows `hotness` [L, E]; `held` lists each layer's residents."""
    heat = np.array(hotness)
    mask = np.zeros(heat.shape, np.bool_)
    for row, experts in enumerate(held):
        mask[row, experts] = True
    residency = (
        Residency.pooled(heat.shape[1], len(heat), int(mask.sum()), initial_mask=mask)
        if pooled
        else Residency(heat.shape[1], mask.sum(axis=1) if slots is None else [slots] * len(heat), initial_mask=mask)
    )
    tracker = EmaHotnessTracker(*heat.shape, decay=0.5, fast_decay=0.5, fast_weight=0.0)
    tracker.set_hotness(heat)
    return Rebalancer(tracker, residency, **{"hysteresis": 0.1, **options})


def step(rebalancer: Rebalancer, row: int, picks: list[int]) -> list[Swap]:
    """One finish, each swap begun and published."""
    done = []
    for swap in rebalancer.finish(row, np.array(picks)):
        rebalancer.residency.publish(rebalancer.residency.begin(swap)[1])
        done.append(swap)
    rebalancer.residency.check_integrity()
    return done


def test_the_hottest_pick_replaces_the_coldest_resident() -> None:
    # after the token: 0.2, 0.1, 0.45 + 0.5 = 0.7 (picked), 0.55 (picked, 0.05 before)
    rebalancer = make([[0.4, 0.2, 0.4, 0.1]], [[0, 1]])
    assert step(rebalancer, 0, [2, 3]) == [Swap(0, 2, 0, 1)]


def test_within_the_hysteresis_nothing_moves() -> None:
    picked_once = 0.5 * 0.1 + 0.5  # 0.55 against a resident at 0.5 * 0.95 = 0.475
    assert step(make([[0.95, 0.1]], [[0]]), 0, [1]) == []
    assert picked_once - 0.475 < 0.1
    assert step(make([[0.95, 0.1]], [[0]], hysteresis=0.07), 0, [1]) == [Swap(0, 1, 0, 0)]


def test_a_hot_expert_that_was_not_picked_is_no_candidate() -> None:
    assert step(make([[0.1, 0.9, 0.0]], [[0]]), 0, [0]) == []


def test_a_free_slot_is_filled_without_hysteresis() -> None:
    assert step(make([[0.9, 0.0]], [[0]], slots=2), 0, [1]) == [Swap(0, 1)]


def test_moves_per_step_are_capped_and_best_first() -> None:
    heat = [[0.0, 0.0, 0.3, 0.2, 0.1]]
    assert step(make(heat, [[0, 1]], max_moves=1), 0, [3, 2, 4]) == [Swap(0, 2, 0, 0)]
    assert step(make(heat, [[0, 1]], max_moves=2), 0, [3, 2, 4]) == [Swap(0, 2, 0, 0), Swap(0, 3, 0, 1)]
    assert step(make(heat, [[0, 1]], max_moves=0), 0, [3, 2, 4]) == []


def test_bytes_per_step_are_capped_and_the_next_smaller_expert_goes_instead() -> None:
    sizes = [[10, 10, 30, 10, 10]]
    rebalancer = make([[0.0, 0.0, 0.3, 0.2, 0.1]], [[0, 1]], max_moves=3, max_bytes=20, expert_bytes=sizes)
    assert step(rebalancer, 0, [2, 3, 4]) == [Swap(0, 3, 0, 0), Swap(0, 4, 0, 1)]


def test_a_newly_loaded_expert_dwells() -> None:
    rebalancer = make([[0.0, 0.0, 0.0]], [[0]], min_dwell=3, hysteresis=0.0)
    assert step(rebalancer, 0, [1]) == [Swap(0, 1, 0, 0)]
    assert step(rebalancer, 0, [2]) == []
    assert step(rebalancer, 0, [2]) == []
    assert step(rebalancer, 0, [2]) == [Swap(0, 2, 0, 1)]


def test_a_locked_resident_is_passed_over() -> None:
    rebalancer = make([[0.0, 0.1, 0.0]], [[0, 1]])
    rebalancer.residency.acquire(0, 0)
    assert step(rebalancer, 0, [2]) == [Swap(0, 2, 0, 1)]


def test_an_expert_on_its_way_is_not_proposed_again_and_an_aborted_one_is() -> None:
    rebalancer = make([[0.0, 0.0]], [[0]])
    (swap,) = list(rebalancer.finish(0, np.array([1])))  # not begun
    _, move = rebalancer.residency.begin(swap)
    assert list(rebalancer.finish(0, np.array([1]))) == []
    rebalancer.residency.abort(move)
    assert step(rebalancer, 0, [1]) == [Swap(0, 1)]


def test_a_dropped_proposal_gives_way_to_the_next_within_a_step() -> None:
    rebalancer = make([[0.0, 0.0, 0.3, 0.2]], [[0, 1]], max_moves=3)
    assert [s.expert for s in rebalancer.finish(0, np.array([2, 3]))] == [2, 3]


def test_a_pool_shifts_its_budget_to_the_layer_that_needs_it() -> None:
    rebalancer = make([[0.3, 0.3], [0.2, 0.0]], [[0, 1], [0]], pooled=True)
    # layer 1 wants its expert 1 (0.5 now); its own 0 has decayed to 0.1, layer 0's to nothing yet
    assert step(rebalancer, 1, [1]) == [Swap(1, 1, 1, 0)]
    rebalancer = make([[0.3, 0.0], [0.8, 0.0]], [[0, 1], [0]], pooled=True)
    assert step(rebalancer, 1, [1]) == [Swap(1, 1, 0, 1)]
    assert rebalancer.residency.mask().tolist() == [[True, False], [True, True]]


def test_the_link_raises_the_margin_where_a_move_costs_more_than_it_saves() -> None:
    # memory of 1 / (1 - 0.5) = 2 tokens: a move must gain (1 / link) / (2 * (1 / host - 1 / gpu))
    machine = Machine.open("rtx-4090")
    assert make([[0.0, 0.0]], [[0]], machine=machine).arrays.threshold[0] > 1.0
    assert step(make([[0.0, 0.0]], [[0]], machine=machine), 0, [1]) == []
    assert step(make([[0.0, 0.0]], [[0]]), 0, [1]) == [Swap(0, 1, 0, 0)]


def test_a_prompt_is_observed_whole_and_its_best_pick_moves() -> None:
    rebalancer = make([[0.0, 0.0, 0.0]], [[0]])
    swaps = list(rebalancer.finish(0, np.array([[1, 2], [2, -1], [2, 0]])))
    assert swaps == [Swap(0, 2, 0, 0)]
    assert rebalancer.arrays.clock.tolist() == [3]


def test_rebalance_brings_each_layer_to_its_hottest_experts_best_gain_per_byte_first() -> None:
    heat = [[0.0, 0.9, 0.5, 0.4], [0.0, 0.3, 0.95, 0.0]]
    rebalancer = make(heat, [[0, 3], [0]])
    assert list(rebalancer.rebalance()) == [Swap(1, 2, 1, 0), Swap(0, 1, 0, 0)]
    assert list(rebalancer.rebalance(max_moves=1)) == [Swap(1, 2, 1, 0)]
    sizes = [[1, 1, 1, 1], [9, 9, 9, 9]]
    small_first = make(heat, [[0, 3], [0]], expert_bytes=sizes)
    assert list(small_first.rebalance()) == [Swap(0, 1, 0, 0), Swap(1, 2, 1, 0)]
    assert list(small_first.rebalance(max_bytes=8)) == [Swap(0, 1, 0, 0)]


def test_a_prompt_informs_the_decode_that_follows() -> None:
    rebalancer = make([[0.6, 0.0, 0.0]], [[0]])
    rebalancer.start_decode(np.array([[0, 10, 0]]), 10, weight=0.5)
    assert rebalancer.tracker.hotness().tolist() == [[0.3, 0.5, 0.0]]
    assert list(rebalancer.rebalance()) == [Swap(0, 1, 0, 0)]


def test_wrong_settings_are_refused() -> None:
    cases = [
        ({"hysteresis": -0.1}, "hysteresis is -0.1"),
        ({"max_moves": -1}, "none may be negative"),
        ({"min_dwell": -1}, "none may be negative"),
        ({"max_bytes": 5}, "max_bytes needs expert_bytes"),
    ]
    for options, said in cases:
        with pytest.raises(PolicyError, match=said):
            make([[0.0, 0.0]], [[0]], **options)
    with pytest.raises(PolicyError, match="tracker has 1 layers"):
        Rebalancer(EmaHotnessTracker(1, 2), Residency(3, [1]))
    with pytest.raises(PolicyError, match="wanted a prompt"):
        make([[0.0, 0.0]], [[0]]).start_decode(np.zeros((1, 2)), 0)
