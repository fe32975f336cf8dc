"""Residency: two phases, locks, and an account of slots that always adds up."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.core import Move, Tier
from hotset.errors import ResidencyError
from hotset.residency import Residency, Swap


def two_layers() -> Residency:
    """Two layers of four experts; layer 0 holds 1 and 3 in its two slots, layer 1 holds 0 in one of its three."""
    mask = np.array([[0, 1, 0, 1], [1, 0, 0, 0]], np.bool_)
    return Residency(4, [2, 3], initial_mask=mask)


def test_initial_experts_fill_slots_in_ascending_order() -> None:
    residency = two_layers()
    assert residency.slot_table().tolist() == [[-1, 0, -1, 1], [0, -1, -1, -1]]
    assert residency.slots_of(0, np.array([[3, 0], [1, 1]])).tolist() == [[1, -1], [0, 0]]
    assert residency.holders(0).tolist() == [1, 3]
    assert residency.holders(1).tolist() == [0, -1, -1]
    assert residency.free_slots(0) == 0
    assert residency.free_slots(1) == 2
    assert residency.slots_per_layer.tolist() == [2, 3]
    residency.check_integrity()


def test_a_claimed_expert_is_invisible_until_published() -> None:
    residency = two_layers()
    move = residency.claim(1, 2)
    assert move == Move(1, 2, Tier.HOST, Tier.GPU, 1)
    assert residency.slot(1, 2) == -1
    assert not residency.mask()[1, 2]
    residency.publish(move)
    assert residency.slot(1, 2) == 1
    residency.check_integrity()


def test_an_aborted_claim_leaves_everything_as_it_was() -> None:
    residency = two_layers()
    before = residency.slot_table()
    residency.abort(residency.claim(1, 2))
    assert (residency.slot_table() == before).all()
    assert residency.free_slots(1) == 2
    residency.check_integrity()


def test_a_swap_frees_the_victims_slot_for_the_newcomer() -> None:
    residency = two_layers()
    out, move = residency.begin(Swap(0, 2, 0, 3))
    assert out == Move(0, 3, Tier.GPU, Tier.HOST, 1)
    assert move.slot == 1
    assert residency.slot_table()[0].tolist() == [-1, 0, -1, -1]
    residency.publish(move)
    assert residency.slot_table()[0].tolist() == [-1, 0, 1, -1]
    residency.check_integrity()


def test_a_pool_lends_the_slots_of_one_layer_to_another() -> None:
    mask = np.array([[1, 1], [0, 0]], np.bool_)
    pool = Residency.pooled(2, 2, 2, initial_mask=mask)
    _, move = pool.begin(Swap(1, 0, 0, 1))
    pool.publish(move)
    assert pool.mask().tolist() == [[True, False], [True, False]]
    assert pool.holders(1).tolist() == [-1, 0]
    assert pool.is_pooled
    pool.check_integrity()


def test_refusals_say_why_and_change_nothing() -> None:
    residency = two_layers()
    before = residency.slot_table()
    cases = [
        (lambda: residency.claim(0, 1), "resident already"),
        (lambda: residency.claim(0, 0), "no free slot of 2"),
        (lambda: residency.evict(0, 0), "is not resident"),
        (lambda: residency.publish(Move(1, 2, Tier.HOST, Tier.GPU, 1)), "holds no claim on slot 1"),
        (lambda: residency.abort(Move(1, 2, Tier.HOST, Tier.GPU, 1)), "holds no claim on slot 1"),
        (lambda: residency.begin(Swap(0, 1, 0, 3)), "resident or on its way"),
        (lambda: residency.begin(Swap(1, 1, 0, 3)), "share no slots"),
        (lambda: residency.begin(Swap(0, 0)), "no free slot"),
        (lambda: residency.restart(np.ones((2, 4), np.bool_)), "row 0 has 2 slots for 4 experts"),
        (lambda: residency.restart(np.ones((1, 4), np.bool_)), "mask has shape"),
        (lambda: Residency(4, [1, -1]), "none negative"),
        (lambda: Residency.pooled(2, 2, 1, initial_mask=np.ones((2, 2), np.bool_)), "the pool has 1 slots for 4"),
    ]
    for call, said in cases:
        with pytest.raises(ResidencyError, match=said):
            call()
        residency.check_integrity()
        assert (residency.slot_table() == before).all()


def test_a_claim_in_flight_cannot_be_claimed_again_nor_restarted_away() -> None:
    residency = two_layers()
    residency.claim(1, 2)
    with pytest.raises(ResidencyError, match="on its way already"):
        residency.claim(1, 2)
    with pytest.raises(ResidencyError, match="in use or on their way"):
        residency.restart(np.zeros((2, 4), np.bool_))


def test_a_locked_expert_stays_until_its_last_user_lets_go() -> None:
    residency = two_layers()
    assert residency.acquire(0, 3) == 1
    assert residency.acquire(0, 3) == 1
    assert residency.acquire(0, 0) == -1
    residency.release(0, 3)
    with pytest.raises(ResidencyError, match="in use"):
        residency.evict(0, 3)
    residency.release(0, 3)
    residency.evict(0, 3)
    with pytest.raises(AssertionError, match="more often"):
        residency.release(0, 3)


def test_version_tells_readers_of_every_visible_change() -> None:
    residency = two_layers()
    version = residency.version
    move = residency.claim(1, 2)
    assert residency.version == version
    residency.publish(move)
    assert residency.version == version + 1
    residency.evict(1, 2)
    assert residency.version == version + 2


@pytest.mark.parametrize("pooled", [False, True])
def test_integrity_holds_after_every_step_of_ten_thousand_random_moves(pooled: bool) -> None:
    rng = np.random.default_rng(0)
    layers, experts = 3, 8
    residency = Residency.pooled(experts, layers, 9) if pooled else Residency(experts, [3, 4, 0])
    in_flight: list[Move] = []
    locked: list[tuple[int, int]] = []
    seen = dict.fromkeys(("refused", "aborted", "published", "evicted", "locked"), 0)
    for _ in range(10_000):
        row, expert, victim = int(rng.integers(layers)), int(rng.integers(experts)), int(rng.integers(experts))
        action = rng.integers(6)
        before = residency.slot_table()
        try:
            if action == 0:
                in_flight.append(residency.claim(row, expert))
            elif action == 1:
                residency.evict(row, expert)
                seen["evicted"] += 1
            elif action == 2:
                in_flight.append(residency.begin(Swap(row, expert, row, victim))[1])
            elif action == 3 and in_flight:
                move = in_flight.pop(int(rng.integers(len(in_flight))))
                if rng.random() < 0.5:
                    residency.publish(move)
                    seen["published"] += 1
                else:
                    residency.abort(move)
                    seen["aborted"] += 1
            elif action == 4 and residency.acquire(row, expert) != -1:
                locked.append((row, expert))
                seen["locked"] += 1
            elif action == 5 and locked:
                residency.release(*locked.pop(int(rng.integers(len(locked)))))
        except ResidencyError:
            seen["refused"] += 1
            assert (residency.slot_table() == before).all()
        residency.check_integrity()
    assert min(seen.values()) > 100, seen
