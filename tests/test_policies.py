"""Policies: one contract for all, each against an independent twin, and the offline bound over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cachetools
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotset import Trace
from hotset.adaptation.loops import HIT, MISS, NO_PICK
from hotset.errors import PolicyError
from hotset.policies import POLICIES, Policy, Setting, make_policy
from hotset.residency import Residency

IdArray = NDArray[np.int16]
Outcome = tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]


def drive(policy: Policy, residency: Residency, ids: IdArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The objects, token by token, through both phases of Residency: what the runtime does. ids [L, T, K]."""
    served, loads = np.zeros(ids.shape, np.uint8), np.zeros(ids.shape[:2], np.int32)
    for t, row in itertools.product(range(ids.shape[1]), range(ids.shape[0])):
        picks = ids[row, t]
        for k, expert in enumerate(picks.tolist()):
            if expert < 0:
                served[row, t, k] = NO_PICK
                continue
            served[row, t, k] = HIT if residency.slot(row, expert) >= 0 else MISS
            swap = policy.request(row, expert)
            if swap is not None:
                residency.publish(residency.begin(swap)[1])
                loads[row, t] += 1
        for swap in policy.finish(row, picks):
            residency.publish(residency.begin(swap)[1])
            loads[row, t] += 1
    return served, loads


def random_ids(seed: int, layers: int, tokens: int, top_k: int, experts: int, no_pick: float = 0.1) -> IdArray:
    """[L, T, K] skewed, drifting picks, some of them -1."""
    rng = np.random.default_rng(seed)
    heat = rng.normal(size=(layers, 1, experts)) + np.cumsum(rng.normal(size=(layers, tokens, experts)), axis=1) * 0.2
    ids = np.argsort(-(heat + rng.gumbel(size=heat.shape)), axis=-1)[..., :top_k].astype(np.int16)
    ids[rng.random(ids.shape) < no_pick] = -1
    return ids


def build(
    name: str, ids: IdArray, experts: int, slots: int, *, pooled: bool = False, empty: bool = False, **options: Any
) -> tuple[Policy, Residency]:
    """The policy on a fresh residency that holds the first `slots` experts of each layer, or nothing."""
    layers = len(ids)
    mask = np.zeros((layers, experts), np.bool_)
    mask[:, : 0 if empty else slots] = True
    residency = (
        Residency.pooled(experts, layers, slots * layers, initial_mask=mask)
        if pooled
        else Residency(experts, [slots] * layers, initial_mask=mask)
    )
    sizes = np.arange(1, layers * experts + 1).reshape(layers, experts)
    hotness = np.zeros((layers, experts))
    setting = Setting(residency, sizes, ids.shape[2], hotness, None, ids)
    return make_policy(name, setting, options), residency


def replayed(policy: Policy, ids: IdArray, block: int) -> Outcome:
    """`policy.replay` over all rows together, in blocks of tokens."""
    served = np.zeros(ids.shape, np.uint8)
    loads, sizes = np.zeros(ids.shape[:2], np.int32), np.zeros(ids.shape[:2], np.int64)
    for start in range(0, ids.shape[1], block):
        part = np.s_[:, start : start + block]
        block_served, block_loads, block_sizes = served[part].copy(), loads[part].copy(), sizes[part].copy()
        policy.replay(0, np.ascontiguousarray(ids[part]), block_served, block_loads, block_sizes)
        served[part], loads[part], sizes[part] = block_served, block_loads, block_sizes
    return served, loads, sizes


class PolicyContract:
    """What every policy promises."""

    name: str

    @pytest.mark.parametrize("pooled", [False, True])
    @pytest.mark.parametrize(("top_k", "slots"), [(1, 2), (2, 3), (3, 2), (2, 0), (2, 6)])
    def test_compiled_replay_equals_driving_the_objects(self, top_k: int, slots: int, pooled: bool) -> None:
        for seed in range(4):
            ids = random_ids(seed, 3, 60, top_k, 6)
            by_hand, hand_residency = build(self.name, ids, 6, slots, pooled=pooled)
            compiled, residency = build(self.name, ids, 6, slots, pooled=pooled)
            served, loads = drive(by_hand, hand_residency, ids)
            fast_served, fast_loads, sizes = replayed(compiled, ids, 60)
            assert (fast_served == served).all()
            assert (fast_loads == loads).all()
            assert (residency.slot_table() == hand_residency.slot_table()).all()
            assert ((sizes > 0) == (loads > 0)).all()
            residency.check_integrity()
            hand_residency.check_integrity()

    def test_blocks_do_not_change_the_outcome(self) -> None:
        ids = random_ids(5, 2, 50, 2, 8)
        whole = replayed(build(self.name, ids, 8, 3)[0], ids, 50)
        for block in (1, 7, 49):
            parts = replayed(build(self.name, ids, 8, 3)[0], ids, block)
            assert all((a == b).all() for a, b in zip(whole, parts, strict=True))

    def test_rows_are_independent_where_the_registry_says_so(self) -> None:
        ids = random_ids(6, 3, 80, 2, 8)
        together = replayed(build(self.name, ids, 8, 3)[0], ids, 80)[0]
        policy, _ = build(self.name, ids, 8, 3)
        apart = np.zeros_like(together)
        for row in range(3):
            loads, sizes = np.zeros((1, 80), np.int32), np.zeros((1, 80), np.int64)
            policy.replay(row, np.ascontiguousarray(ids[row : row + 1]), apart[row : row + 1], loads, sizes)
        assert POLICIES[self.name].coupled or (apart == together).all()

    def test_a_locked_expert_is_never_a_victim(self) -> None:
        ids = random_ids(7, 1, 200, 2, 8, no_pick=0.0)
        policy, residency = build(self.name, ids, 8, 3)
        residency.acquire(0, 1)
        drive(policy, residency, ids)
        assert residency.slot(0, 1) >= 0
        residency.check_integrity()

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(PolicyError, match=r"surprise|does not age"):
            build(self.name, random_ids(0, 1, 4, 1, 4), 4, 2, surprise=1)


class TestStatic(PolicyContract):
    name = "static"


class TestLru(PolicyContract):
    name = "lru"


class TestLfu(PolicyContract):
    name = "lfu"


class TestLfuAged(PolicyContract):
    name = "lfu-aged"


class TestEma(PolicyContract):
    name = "ema"


class TestLookAhead(PolicyContract):
    name = "look-ahead"


class TestBelady(PolicyContract):
    name = "belady"


def test_every_policy_has_its_contract() -> None:
    tested = {c.name for c in PolicyContract.__subclasses__()}
    assert tested == set(POLICIES)


def test_an_unknown_policy_is_refused_with_the_list() -> None:
    with pytest.raises(PolicyError, match="'fifo' is unknown: choose static, lru"):
        build("fifo", random_ids(0, 1, 4, 1, 4), 4, 2)


# -- by hand -------------------------------------------------------------------------------------------------


def hits(name: str, stream: list[int], slots: int, experts: int = 4, **options: Any) -> list[int]:
    """1 per hit of a stream of single picks, starting empty."""
    ids = np.array(stream, np.int16).reshape(1, -1, 1)
    policy, _ = build(name, ids, experts, slots, empty=True, **options)
    return (replayed(policy, ids, len(stream))[0][0, :, 0] == HIT).astype(int).tolist()


def test_lru_evicts_the_least_recently_used() -> None:
    #                     load 0, load 1, hit, load 2 in place of 1, hit, miss
    assert hits("lru", [0, 1, 0, 2, 0, 1], 2) == [0, 0, 1, 0, 1, 0]


def test_lfu_evicts_the_least_often_used_and_forgets_its_count() -> None:
    # 0 is used twice; 1 then 2 then 1 push each other out at one use each
    assert hits("lfu", [0, 0, 1, 2, 1, 0], 2) == [0, 1, 0, 0, 0, 1]


def test_aged_lfu_remembers_across_eviction_until_counts_fade() -> None:
    # uses 0: 3, 1: 1. 2 evicts 1; 2 again hits (2 uses); 1 (2 uses now) evicts 2, the less recently used of equals
    assert hits("lfu-aged", [0, 0, 0, 1, 2, 2, 1, 2], 2) == [0, 1, 1, 0, 0, 1, 0, 0]
    # halved after every request, all counts stay at most 1: the order is that of LRU
    stream = [0, 1, 2, 0, 3, 0, 1, 2, 2, 0]
    assert hits("lfu-aged", stream, 2, aging_interval=1) == hits("lru", stream, 2)


def test_belady_bypasses_what_is_needed_later_than_all_residents() -> None:
    assert hits("belady", [0, 1, 0, 2, 0, 1], 1) == [0, 0, 1, 0, 1, 0]
    assert hits("belady", [0, 1, 0, 2, 0, 1], 2) == [0, 0, 1, 0, 1, 1]
    assert hits("belady", [0, 1, 0], 1, bypass=False) == [0, 0, 0]


def test_look_ahead_can_pass_belady_since_it_loads_before_the_pick() -> None:
    # layer 0 picks a in {0, 1} in turn, layer 1 picks the same: one slot each, always the wrong one on demand
    ids = np.tile(np.array([0, 1], np.int16), 200).reshape(1, 400, 1).repeat(2, axis=0)
    rates = {}
    for name in ("belady", "look-ahead"):
        policy, _ = build(name, ids, 2, 1)
        rates[name] = float((replayed(policy, ids, 400)[0][1] == HIT).mean())
    assert rates["belady"] < 0.51
    assert rates["look-ahead"] > 0.95


# -- against others ------------------------------------------------------------------------------------------


def cachetools_hits(cache: cachetools.Cache[int, bool], stream: list[int]) -> list[bool]:
    found = []
    for expert in stream:
        found.append(expert in cache)
        if expert in cache:
            cache[expert]  # a read counts as a use
        else:
            cache[expert] = True
    return found


CACHETOOLS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache}


@pytest.mark.parametrize("name", CACHETOOLS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(stream=st.lists(st.integers(0, 7), min_size=1, max_size=80), slots=st.integers(1, 6))
def test_caches_agree_with_cachetools_on_any_stream(name: str, stream: list[int], slots: int) -> None:
    expected = cachetools_hits(CACHETOOLS[name](slots), stream)
    assert hits(name, stream, slots, experts=8) == [int(h) for h in expected]


@pytest.mark.parametrize("name", CACHETOOLS)
@pytest.mark.parametrize("slots", [8, 16])
def test_caches_agree_with_cachetools_on_a_real_trace_in_pick_order(
    name: str, slots: int, real_trace: Callable[[str], Trace]
) -> None:
    ids = real_trace("gpt-oss-20b-decode").expert_ids[5:6, :4000]
    policy, _ = build(name, ids, 32, slots, empty=True)
    served = replayed(policy, ids, ids.shape[1])[0]
    expected = cachetools_hits(CACHETOOLS[name](slots), ids.ravel().tolist())
    assert (served.ravel() == HIT).tolist() == expected


@pytest.mark.parametrize(("name", "theirs"), [("lru", "LRU"), ("lfu", "LFU"), ("belady", "Belady")])
def test_caches_agree_with_libcachesim_on_a_real_trace(
    name: str, theirs: str, real_trace: Callable[[str], Trace]
) -> None:
    libcachesim = pytest.importorskip("libcachesim", reason="libCacheSim's Python package is not installed")
    stream = real_trace("gpt-oss-20b-decode").expert_ids[5, :4000].ravel()
    next_access = np.full(len(stream), 2**62, np.int64)
    latest: dict[int, int] = {}
    for i in range(len(stream) - 1, -1, -1):
        next_access[i] = latest.get(int(stream[i]), 2**62)
        latest[int(stream[i])] = i
    for slots in (4, 8, 16):
        cache = getattr(libcachesim, theirs)(cache_size=slots)
        expected = []
        for i, expert in enumerate(stream.tolist()):
            request = libcachesim.Request(obj_id=expert + 1, obj_size=1, next_access_vtime=int(next_access[i]))
            expected.append(int(cache.get(request)))
        options = {"bypass": False} if name == "belady" else {}
        assert hits(name, stream.tolist(), slots, experts=32, **options) == expected


def most_hits(ids: IdArray, start: frozenset[int], slots: int) -> int:
    """Most hits of any policy that loads only what it picks, by trying every residency. ids [T, K]."""
    best = {start: 0}
    for picks in ids.tolist():
        wanted = {e for e in picks if e >= 0}
        following: dict[frozenset[int], int] = {}
        for held, count in best.items():
            count += len(wanted & held)
            pool = sorted(held | wanted)
            for kept in itertools.combinations(pool, min(slots, len(pool))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), count)
        best = following
    return max(best.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 3), slots=st.integers(1, 4))
def test_belady_makes_as_many_hits_as_trying_everything(seed: int, top_k: int, slots: int) -> None:
    ids = random_ids(seed, 1, 14, top_k, 5)
    policy, _ = build("belady", ids, 5, slots)
    found = int((replayed(policy, ids, 14)[0] == HIT).sum())
    assert found == most_hits(ids[0], frozenset(range(slots)), slots)


@pytest.mark.parametrize("pooled", [False, True])
def test_belady_is_never_beaten_by_a_policy_that_loads_on_demand_in_500_random_cases(pooled: bool) -> None:
    rng = np.random.default_rng(0)
    names = [name for name in POLICIES if name not in ("belady", "look-ahead")]
    strictly = 0
    for seed in range(500):
        experts = int(rng.integers(2, 12))
        top_k, slots = int(rng.integers(1, min(experts, 4) + 1)), int(rng.integers(1, experts + 1))
        ids = random_ids(seed, 2, 60, top_k, experts)
        bound, others = 0, []
        for name in ("belady", *names):
            policy, _ = build(name, ids, experts, slots, pooled=pooled)
            made = int((replayed(policy, ids, 60)[0] == HIT).sum())
            if name == "belady":
                bound = made
            else:
                others.append(made)
                assert made <= bound, f"{name} made {made} hits, Belady {bound}, in case {seed}"
        strictly += max(others) < bound
    assert strictly > 200
