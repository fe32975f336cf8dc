"""The bounded host tier: whole experts from disk, never more than the budget, and every failure told to who asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hotset.errors import BudgetError, CheckpointError, ExpertNotOnHost, PolicyError  # noqa: E402
from hotset.runtime.expert_formats.contract import parameter_shapes, plain_formats  # noqa: E402
from hotset.runtime.host_cache import HostCache, policy_options  # noqa: E402
from hotset.runtime.memory import buffer_bytes  # noqa: E402
from tests.tiny_store import Reader, assert_all_bytes_right, make_layers, make_store  # noqa: E402

ONE = buffer_bytes(parameter_shapes(make_layers()[0]))
"""Bytes of one buffer: a page."""


def make_cache(buffers: int, **settings: Any) -> tuple[HostCache, Reader]:
    read = Reader()
    return HostCache(plain_formats(make_layers()), read, buffers * ONE, **settings), read


def use(cache: HostCache, row: int, expert: int) -> float:
    cache.announce(row, [expert])
    value = float(cache.acquire(row, expert)["w"][0, 0])
    cache.release(row, expert)
    return value


def test_lru_by_hand() -> None:
    cache, read = make_cache(2, policy="lru")
    # two buffers: 00 and 01 miss, 00 hits, 12 evicts 01, 01 evicts 00, 12 hits
    assert [use(cache, *key) for key in [(0, 0), (0, 1), (0, 0), (1, 2), (0, 1), (1, 2)]] == [0, 1, 0, 12, 1, 12]
    assert read.reads == [(0, 0), (0, 1), (1, 2), (0, 1)]
    assert (cache.statistics.hits, cache.statistics.misses, cache.statistics.loads) == (2, 4, 4)
    assert cache.statistics.read_bytes == 4 * cache.formats[0].expert_bytes
    assert cache.held_bytes == 2 * ONE
    cache.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu-aged"])
def test_hits_and_reads_are_those_of_replay(policy: str) -> None:
    """The same requests through `policies.replay`, the compiled loop that predicts hit rates."""
    from hotset.adaptation.loops import HIT
    from hotset.core import Tier
    from hotset.policies import Setting, make_policy
    from hotset.residency import Residency

    ids = np.random.default_rng(5).zipf(1.6, (2, 200, 1)).clip(1, 4).astype(np.int16) - 1
    cache, _ = make_cache(3, policy=policy)
    for t in range(200):
        for row in range(2):
            use(cache, row, int(ids[row, t, 0]))
    residency = Residency.pooled(4, 2, 3, home=Tier.DISK)
    setting = Setting(residency, np.ones((2, 4), np.int64), 1, np.zeros((2, 4)), None, ids)
    predicted = make_policy(policy, setting, policy_options(policy, 4))
    served, loads, load_bytes = (
        np.zeros(ids.shape, np.uint8),
        np.zeros((2, 200), np.int32),
        np.zeros((2, 200), np.int64),
    )
    predicted.replay(0, ids, served, loads, load_bytes)
    assert cache.statistics.hits == (served == HIT).sum()
    assert cache.statistics.loads == loads.sum()
    assert (cache.residency.mask() == residency.mask()).all()


def test_announced_experts_are_read_side_by_side() -> None:
    together = threading.Barrier(3, timeout=10)  # breaks, and fails the reads, unless three reads run at once

    def read(row: int, expert: int, target: Mapping[str, torch.Tensor]) -> None:
        together.wait()
        target["w"].fill_(expert)

    cache = HostCache(plain_formats(make_layers()), read, 4 * ONE, readers=3)
    cache.announce(0, [0, 1, 2])
    for expert in range(3):
        assert float(cache.acquire(0, expert)["w"][0, 0]) == expert
        cache.release(0, expert)


def test_a_hit_is_not_evicted_by_a_miss_announced_with_it() -> None:
    cache, read = make_cache(2, policy="lru")
    use(cache, 0, 0)
    use(cache, 0, 1)
    cache.announce(0, [2, 0])  # 2 misses and comes first, but 0 is wanted too: 1 gives way
    assert cache.acquire(0, 2) is not None
    cache.release(0, 2)
    assert cache.acquire(0, 0) is not None
    cache.release(0, 0)
    assert read.reads == [(0, 0), (0, 1), (0, 2)]


def test_a_read_error_reaches_who_asked_and_is_tried_again() -> None:
    cache, read = make_cache(2)
    read.broken = {(1, 3)}
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot be read"):
            use(cache, 1, 3)
        cache.check_integrity()
    read.broken = set()
    assert use(cache, 1, 3) == 13
    assert cache.statistics.failures == 2


def test_threads_share_one_buffer_and_never_see_each_others_bytes() -> None:
    cache, _ = make_cache(1)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            row, expert = int(rng.integers(2)), int(rng.integers(4))
            cache.announce(row, [expert])
            weights = cache.acquire(row, expert)
            if not all((t == 10 * row + expert).all() for t in weights.values()):
                wrong.append((row, expert))
            cache.release(row, expert)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert cache.held_bytes == ONE
    assert not cache.residency.arrays.users.any()
    cache.check_integrity()


def test_layers_of_different_sizes_get_buffers_of_their_own() -> None:
    small, large = make_layers(6, 1)[0], make_layers(6000, 2)[1]
    sizes = [buffer_bytes(parameter_shapes(layer)) for layer in (small, large)]
    cache = HostCache(plain_formats([small, large]), Reader(), 2 * sum(sizes) + 1)
    assert [use(cache, row, expert) for row in (0, 1) for expert in range(4)] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert cache.held_bytes == 2 * sum(sizes)
    assert cache.num_buffers == 4
    cache.check_integrity()


def test_impossible_caches_are_refused() -> None:
    with pytest.raises(BudgetError, match="hold no expert"):
        make_cache(0)
    with pytest.raises(PolicyError, match="wanted one of lru, lfu, lfu-aged"):
        make_cache(2, policy="belady")


def test_a_store_with_a_cache_moves_experts_between_arena_and_disk() -> None:
    store, read, _ = make_store(cached=2)
    assert read.reads == [(0, 0), (0, 1), (1, 2)]  # loading reads the arena only
    assert store.host_bytes == 0
    with pytest.raises(ExpertNotOnHost, match="in the checkpoint on disk"):
        store.on_host(0, 3)
    assert store.promote(0, 3, victim=1) == store.layers[0].bytes_per_expert
    assert store.residency.mask()[0].tolist() == [True, False, False, True]
    assert store.cache is not None
    assert not store.cache.residency.mask()[0, 3]  # one copy: it left the cache as it entered the arena
    store.demote(0, 0)
    assert_all_bytes_right(store)
    assert store.cache.held_bytes == 2 * ONE


def test_a_promotion_whose_read_fails_leaves_the_old_residency() -> None:
    store, read, copy = make_store(cached=2)
    before = store.residency.slot_table()
    read.broken = {(0, 3)}
    with pytest.raises(CheckpointError):
        store.promote(0, 3, victim=1)
    assert (store.residency.slot_table() == before).all()
    read.broken = set()
    copy.fail_next(1)
    with pytest.raises(OSError, match="copy"):
        store.promote(0, 3, victim=1)
    assert (store.residency.slot_table() == before).all()
    assert_all_bytes_right(store)
