"""The table that kernels read never points at bytes that are not there; prestage never evicts what is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.core import Move
from hotset.errors import ResidencyError
from hotset.ops import route_shed
from hotset.residency import Residency, Swap
from hotset.runtime.prestage import prestage
from hotset.runtime.slot_tables import SlotTables

BEING_WRITTEN = -2


def three_of_four() -> Residency:
    """One layer of 5 experts with 3 slots: 0, 1 and 2 are resident in the slots of their numbers."""
    return Residency(5, [3], initial_mask=np.array([[True, True, True, False, False]]))


# -- the fence ---------------------------------------------------------------------------------------------------------


def test_the_table_is_a_copy_that_changes_only_when_refreshed() -> None:
    residency = three_of_four()
    tables = SlotTables(residency)
    row = tables.row(0)
    assert row.tolist() == [0, 1, 2, -1, -1]
    residency.evict(0, 1)
    assert row.tolist() == [0, 1, 2, -1, -1]
    assert tables.refresh()
    assert row.tolist() == [0, -1, 2, -1, -1]
    assert not tables.refresh()


def test_an_evicted_expert_is_gone_before_the_copy_and_the_new_one_shows_after_it() -> None:
    residency = three_of_four()
    tables = SlotTables(residency)
    _, move = residency.begin(Swap(0, 4, 0, 1))
    assert tables.before_copy() is None
    assert tables.row(0).tolist() == [0, -1, 2, -1, -1]
    tables.publish([move])
    assert tables.row(0).tolist() == [0, -1, 2, -1, 1]
    tables.check_integrity()


def test_a_slot_that_is_claimed_but_still_shown_is_found() -> None:
    residency = three_of_four()
    tables = SlotTables(residency)
    residency.begin(Swap(0, 4, 0, 1))
    with pytest.raises(ResidencyError, match=r"slot 1 is claimed for expert 4 of row 0 .* call before_copy\(\)"):
        tables.check_integrity()


def test_a_table_that_shows_another_experts_slot_is_found() -> None:
    residency = three_of_four()
    tables = SlotTables(residency)
    _, move = residency.begin(Swap(0, 4, 0, 1))
    residency.publish(move)
    with pytest.raises(AssertionError, match="row 0 shows somebody in another's slot"):
        tables.check_integrity()


def test_publishing_a_move_without_a_claim_is_refused() -> None:
    tables = SlotTables(three_of_four())
    _, move = tables.residency.begin(Swap(0, 4, 0, 1))
    tables.residency.abort(move)
    with pytest.raises(ResidencyError, match="holds no claim"):
        tables.publish([move])


@pytest.mark.parametrize("pooled", [False, True])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_whoever_reads_the_table_finds_the_right_bytes(pooled: bool, data: st.DataObject) -> None:
    num_layers, num_experts = 2, 5
    residency = Residency.pooled(num_experts, num_layers, 5) if pooled else Residency(num_experts, [3, 2])
    tables = SlotTables(residency)
    # what lies in each slot: the arena that the table points into
    arena = np.full((1 if pooled else num_layers, 5), BEING_WRITTEN)
    pending: list[Move] = []

    def place(move: Move) -> tuple[int, int]:
        return (0 if pooled else move.row), move.slot

    for _ in range(data.draw(st.integers(1, 25))):
        row, expert = data.draw(st.integers(0, num_layers - 1)), data.draw(st.integers(0, num_experts - 1))
        action = data.draw(st.sampled_from(["load", "land", "abort", "evict", "refresh"]))
        if action == "load" and residency.slot(row, expert) < 0:
            if residency.arrays.claims[row, expert] >= 0:
                continue
            residents = np.flatnonzero(residency.mask()[row])
            if residency.free_slots(row):
                swap = Swap(row, expert)
            elif len(residents):
                swap = Swap(row, expert, row, int(data.draw(st.sampled_from(residents.tolist()))))
            else:
                continue
            _, move = residency.begin(swap)
            tables.before_copy()
            arena[place(move)] = BEING_WRITTEN
            pending.append(move)
        elif action == "land" and pending:
            move = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            arena[place(move)] = move.row * num_experts + move.expert
            tables.publish([move])
        elif action == "abort" and pending:
            residency.abort(pending.pop())
        elif action == "evict" and residency.slot(row, expert) >= 0:
            residency.evict(row, expert)
        elif action == "refresh":
            tables.refresh()
        for r, e in np.argwhere(tables.tables >= 0):
            assert arena[0 if pooled else r, tables.tables[r, e]] == r * num_experts + e
        tables.check_integrity()
        residency.check_integrity()


def test_a_torch_table_keeps_its_address_and_works_with_route_shed() -> None:
    torch = pytest.importorskip("torch")
    residency = three_of_four()
    tables = SlotTables(residency, device="cpu")
    row = tables.row(0)
    address = row.data_ptr()
    _, move = residency.begin(Swap(0, 3, 0, 0))
    tables.before_copy()
    tables.publish([move])
    assert row.tolist() == [-1, 1, 2, 0, -1]
    assert row.data_ptr() == address
    assert row.dtype == torch.int32
    routed = route_shed(torch.tensor([[3, 0]]), torch.tensor([[0.5, 0.5]]), row)
    assert routed.slots.tolist() == [[0, 0]]
    assert routed.miss_ids.tolist() == [[0, -1]]
    tables.check_integrity()


# -- prestage ----------------------------------------------------------------------------------------------------------


def misses(ids: list[int], scores: list[float]) -> tuple[Any, Any]:
    return np.array([ids], np.int32), np.array([scores], np.float32)


def test_misses_are_fetched_by_score_in_place_of_the_least_valued_resident() -> None:
    residency = three_of_four()
    routed = np.array([[0, 3, 4]])
    swaps = prestage(residency, 0, routed, *misses([4, 3], [0.3, 0.6]), victim_value=[0, 9, 5, 0, 0])
    # 0 is worth least, but this token routed to it
    assert swaps == [Swap(0, 3, 0, 2), Swap(0, 4, 0, 1)]


def test_what_the_token_routed_to_is_never_evicted() -> None:
    residency = three_of_four()
    routed = np.array([[0, 1, 3], [2, 4, 3]], np.uint32)
    assert prestage(residency, 0, routed, *misses([3, 4], [0.6, 0.4]), victim_value=np.zeros(5)) == []


def test_free_slots_go_first_and_experts_in_use_or_under_way_are_left_alone() -> None:
    residency = Residency(6, [4], initial_mask=np.array([[True, True, False, False, False, False]]))
    residency.claim(0, 5)
    residency.acquire(0, 0)
    swaps = prestage(residency, 0, np.array([[5, 4, 3]]), *misses([5, 4, 3], [0.5, 0.3, 0.2]), victim_value=np.zeros(6))
    assert swaps == [Swap(0, 4), Swap(0, 3, 0, 1)]
    for swap in swaps:
        residency.begin(swap)
    residency.check_integrity()


def test_a_limit_cuts_the_least_missed_and_a_resident_miss_is_stale() -> None:
    residency = three_of_four()
    stale = misses([1, 3, 4], [0.9, 0.3, 0.2])
    assert prestage(residency, 0, np.array([[3, 4]]), *stale, victim_value=np.zeros(5), limit=1) == [Swap(0, 3, 0, 0)]
    assert prestage(residency, 0, np.array([[3, 4]]), *stale, victim_value=np.zeros(5), limit=0) == []


def test_prestage_refuses_values_of_another_length_and_a_negative_limit() -> None:
    residency = three_of_four()
    with pytest.raises(ResidencyError, match=r"victim_value has shape \(4,\): wanted one per expert, \(5,\)"):
        prestage(residency, 0, np.array([[0]]), *misses([3], [0.5]), victim_value=np.zeros(4))
    with pytest.raises(ResidencyError, match="limit is -1"):
        prestage(residency, 0, np.array([[0]]), *misses([3], [0.5]), victim_value=np.zeros(5), limit=-1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_prestage_proposes_only_what_residency_can_begin(data: st.DataObject) -> None:
    num_experts = 6
    mask = np.zeros((1, num_experts), bool)
    mask[0, data.draw(st.sets(st.integers(0, 5), max_size=4).map(sorted))] = True
    residency = Residency(num_experts, [4], initial_mask=mask)
    routed = np.array([data.draw(st.lists(st.integers(-1, 7), min_size=3, max_size=3))])
    scores = np.array([data.draw(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3))], np.float32)
    result = route_shed(routed, scores, residency.slot_table()[0])
    swaps = prestage(residency, 0, routed, result.miss_ids, result.miss_scores, victim_value=np.arange(6))
    for swap in swaps:
        assert swap.victim == -1 or swap.victim not in routed
        residency.begin(swap)
        residency.check_integrity()
