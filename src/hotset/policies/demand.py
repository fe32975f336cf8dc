"""Cache policies: every miss is loaded at once, and the resident with the smallest key makes room.

lru: key = last use. lfu: uses since the load, ties to the least recently used; a reloaded expert starts again at 1, as
in cachetools and libCacheSim. lfu-aged: uses ever, halved every `aging_interval` requests of the layer, so that counts
survive eviction but fade (the reset of TinyLFU: Einziger, Friedman and Manes, ACM TOS 2017).

A victim is found by looking at every slot of the layer (or of the pool): O(S) per miss, and exact under locks.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from hotset.adaptation.loops import ABSENT, FREE, HIT, KEEP, MISS, NO_PICK, commit
from hotset.errors import PolicyError
from hotset.policies import Setting
from hotset.residency import Swap

LRU, LFU, LFU_AGED = 0, 1, 2
RULES = {"lru": LRU, "lfu": LFU, "lfu-aged": LFU_AGED}

DEFAULT_AGING_REQUESTS_PER_EXPERT = 64


class DemandArrays(NamedTuple):
    rule: NDArray[np.int64]
    """[1] LRU, LFU or LFU_AGED."""
    rank: NDArray[np.int64]
    """[L * E] by key row * E + expert: uses as the rule counts them, times 2 ** 40, plus the clock of the last use."""
    clock: NDArray[np.int64]
    """[1] requests so far, all rows together."""
    row_requests: NDArray[np.int64]
    """[L] requests so far of each row."""
    aging_interval: NDArray[np.int64]
    """[1] requests of a row between two halvings."""


_CLOCK_BITS = 40
_CLOCK_MASK = (1 << _CLOCK_BITS) - 1
_MOST_USES = (1 << (62 - _CLOCK_BITS)) - 1


# Arrays are handed on one by one: taking them out of their tuple costs a reference count each time.


@njit(cache=True, nogil=True, inline="always")
def _victim(holder, num_slots, users, rank):
    """Key of the unlocked resident of lowest rank among a group's slots, or KEEP."""
    best, lowest = KEEP, 0
    num_experts = users.shape[1]
    for slot in range(num_slots):
        key = holder[slot]
        if key == ABSENT:
            continue
        value = rank[key]
        if (best == KEEP or value < lowest) and users[key // num_experts, key % num_experts] == 0:
            best, lowest = key, value
    return best


@njit(cache=True, nogil=True, inline="always")
def _note(rule, rank, clock, row_requests, aging_interval, num_experts, row, expert, resident):
    """Note one request in the ranks."""
    key = row * num_experts + expert
    clock[0] += 1
    if rule == LRU:
        rank[key] = clock[0]
        return
    uses = rank[key] >> _CLOCK_BITS
    uses = 1 if rule == LFU and not resident else min(uses + 1, _MOST_USES)
    rank[key] = (uses << _CLOCK_BITS) | clock[0]
    if rule == LFU_AGED:
        row_requests[row] += 1
        if row_requests[row] == aging_interval:
            row_requests[row] = 0
            for other in range(row * num_experts, (row + 1) * num_experts):
                value = rank[other]
                rank[other] = ((value >> (_CLOCK_BITS + 1)) << _CLOCK_BITS) | (value & _CLOCK_MASK)


@njit(cache=True, nogil=True)
def _decide(a, d, row, expert):
    """Note one request and give the verdict on it."""
    resident = a.table[row, expert] != ABSENT
    _note(d.rule[0], d.rank, d.clock, d.row_requests, d.aging_interval[0], a.table.shape[1], row, expert, resident)
    group = a.group[row]
    if resident or a.claims[row, expert] != ABSENT:
        return KEEP
    if a.free_count[group] > 0:
        return FREE
    return _victim(a.holder[group], a.slots[group], a.users, d.rank)


@njit(cache=True, nogil=True)
def _replay(a, d, expert_bytes, first_row, ids, served, loads, load_bytes):
    table, users, claims, holder, slots, free_count = a.table, a.users, a.claims, a.holder, a.slots, a.free_count
    rule, rank, clock, row_requests, aging_interval = d.rule[0], d.rank, d.clock, d.row_requests, d.aging_interval[0]
    num_experts = table.shape[1]
    for t in range(ids.shape[1]):
        for i in range(ids.shape[0]):
            row = first_row + i
            group = a.group[row]
            for k in range(ids.shape[2]):
                expert = ids[i, t, k]
                if expert < 0:
                    served[i, t, k] = NO_PICK
                    continue
                resident = table[row, expert] != ABSENT
                served[i, t, k] = HIT if resident else MISS
                _note(rule, rank, clock, row_requests, aging_interval, num_experts, row, expert, resident)
                if resident or claims[row, expert] != ABSENT:
                    continue
                verdict = FREE if free_count[group] > 0 else _victim(holder[group], slots[group], users, rank)
                if verdict != KEEP:
                    commit(a, row, expert, verdict)
                    loads[i, t] += 1
                    load_bytes[i, t] += expert_bytes[row, expert]


class DemandPolicy:
    """LRU, LFU and LFU with aging. Raises PolicyError on an aging interval below 1."""

    def __init__(self, name: str, setting: Setting, aging_interval: int) -> None:
        if aging_interval < 1:
            raise PolicyError(f"aging_interval is {aging_interval}: wanted at least 1 request")
        self.name = name
        self.residency = setting.residency
        self.expert_bytes = setting.expert_bytes
        shape = setting.expert_bytes.shape
        self.arrays = DemandArrays(
            rule=np.array([RULES[name]], np.int64),
            rank=np.zeros(shape[0] * shape[1], np.int64),
            clock=np.zeros(1, np.int64),
            row_requests=np.zeros(shape[0], np.int64),
            aging_interval=np.array([aging_interval], np.int64),
        )

    def request(self, row: int, expert: int) -> Swap | None:
        verdict = int(_decide(self.residency.arrays, self.arrays, row, expert))
        if verdict == KEEP:
            return None
        if verdict == FREE:
            return Swap(row, expert)
        return Swap(row, expert, verdict // self.residency.num_experts, verdict % self.residency.num_experts)

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:  # noqa: ARG002
        return iter(())

    def replay(
        self,
        first_row: int,
        ids: NDArray[np.int16],
        served: NDArray[np.uint8],
        loads: NDArray[np.int32],
        load_bytes: NDArray[np.int64],
    ) -> None:
        _replay(self.residency.arrays, self.arrays, self.expert_bytes, first_row, ids, served, loads, load_bytes)
        self.residency.version += int(loads.sum())


def make(name: str, setting: Setting, aging_interval: int | None = None) -> DemandPolicy:
    """Option: aging_interval, requests of a layer between two halvings (lfu-aged only)."""
    if aging_interval is not None and name != "lfu-aged":
        raise PolicyError(f"policy {name} does not age: aging_interval belongs to lfu-aged")
    if aging_interval is None:
        aging_interval = DEFAULT_AGING_REQUESTS_PER_EXPERT * setting.residency.num_experts
    return DemandPolicy(name, setting, aging_interval)
