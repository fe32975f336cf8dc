"""Belady with by-pass: the offline bound. It knows the future, so it is a yardstick and no policy to run.

After each (token, layer) it keeps, of the residents and the experts just picked, those whose next use is nearest
(Belady 1966; with by-pass, an expert that is needed later than all residents is not loaded). Keeping an expert from one
use to the next earns one hit and takes a slot at every step between, so this is interval scheduling on S machines, for
which dropping the interval that ends last is optimal (Faigle and Nawijn 1995).

So no policy that loads an expert only when it is picked makes more hits with the same slots and the same start. A
policy that prefetches (look-ahead) can: it may be right about an expert that was never picked before.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from hotset.adaptation.loops import ABSENT, FREE, KEEP, commit, is_away, serve
from hotset.policies import Setting
from hotset.residency import Swap

NEVER = np.iinfo(np.int64).max


class BeladyArrays(NamedTuple):
    next_use: NDArray[np.int64]
    """[L, T, K] step (token * L + row) at which each pick's expert is picked next, NEVER = not again."""
    upcoming: NDArray[np.int64]
    """[L, E] the same for every expert as of now."""
    clock: NDArray[np.int64]
    """[L] tokens that each row has finished."""
    bypass: NDArray[np.bool_]
    """[1] whether a miss may be left unloaded."""


@njit(cache=True, nogil=True)
def _look_back(ids, num_experts):
    """(next_use [L, T, K], first use [L, E]) by one pass from the end."""
    num_layers, num_tokens, top_k = ids.shape
    next_use = np.full(ids.shape, NEVER, np.int64)
    upcoming = np.full((num_layers, num_experts), NEVER, np.int64)
    for t in range(num_tokens - 1, -1, -1):
        for row in range(num_layers):
            for k in range(top_k):
                if ids[row, t, k] >= 0:
                    next_use[row, t, k] = upcoming[row, ids[row, t, k]]
            for k in range(top_k):
                if ids[row, t, k] >= 0:
                    upcoming[row, ids[row, t, k]] = t * num_layers + row
    return next_use, upcoming


@njit(cache=True, nogil=True)
def _note(b, row, picks):
    t = b.clock[row]
    for k in range(len(picks)):
        if picks[k] >= 0:
            b.upcoming[row, picks[k]] = b.next_use[row, t, k]
    b.clock[row] += 1


@njit(cache=True, nogil=True)
def _propose(a, b, row, picks):
    """(expert, verdict): the away pick whose next use is nearest, if a resident's is farther; else (ABSENT, KEEP)."""
    best, best_use = ABSENT, NEVER
    for k in range(len(picks)):
        expert = picks[k]
        if expert < 0 or not is_away(a, row, expert):
            continue
        if best == ABSENT or b.upcoming[row, expert] < best_use:
            best, best_use = expert, b.upcoming[row, expert]
    if best == ABSENT or (b.bypass[0] and best_use == NEVER):
        return ABSENT, KEEP
    group = a.group[row]
    if a.free_count[group] > 0:
        return best, FREE
    upcoming = b.upcoming.ravel()
    num_experts = a.table.shape[1]
    victim, farthest = ABSENT, -1
    for slot in range(a.slots[group]):
        key = a.holder[group, slot]
        if key != ABSENT and upcoming[key] > farthest and a.users[key // num_experts, key % num_experts] == 0:
            victim, farthest = key, upcoming[key]
    if victim == ABSENT or (b.bypass[0] and farthest <= best_use):
        return ABSENT, KEEP
    return best, victim


@njit(cache=True, nogil=True)
def _replay(a, b, expert_bytes, first_row, ids, served, loads, load_bytes):
    for t in range(ids.shape[1]):
        for i in range(ids.shape[0]):
            row = first_row + i
            picks = ids[i, t]
            serve(a, row, picks, served[i, t])
            _note(b, row, picks)
            for _ in range(len(picks)):
                expert, verdict = _propose(a, b, row, picks)
                if expert == ABSENT:
                    break
                commit(a, row, expert, verdict)
                loads[i, t] += 1
                load_bytes[i, t] += expert_bytes[row, expert]


class BeladyPolicy:
    """The bound over `setting.future`, which it must be driven through from its first token on, in order."""

    name = "belady"

    def __init__(self, setting: Setting, bypass: bool) -> None:
        self.residency = setting.residency
        self.expert_bytes = setting.expert_bytes
        next_use, upcoming = _look_back(setting.future, setting.residency.num_experts)
        clock = np.zeros(setting.residency.num_layers, np.int64)
        self.arrays = BeladyArrays(next_use, upcoming, clock, np.array([bypass]))

    def request(self, row: int, expert: int) -> Swap | None:  # noqa: ARG002
        return None

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:
        ids = np.asarray(picks)
        _note(self.arrays, row, ids)
        for _ in range(len(ids)):
            expert, verdict = _propose(self.residency.arrays, self.arrays, row, ids)
            if expert == ABSENT:
                return
            if verdict == FREE:
                yield Swap(row, int(expert))
            else:
                num_experts = self.residency.num_experts
                yield Swap(row, int(expert), int(verdict) // num_experts, int(verdict) % num_experts)

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


def make(_name: str, setting: Setting, bypass: bool = True) -> BeladyPolicy:
    """Option: bypass=False loads every miss, as plain caches do (one pick per token only)."""
    return BeladyPolicy(setting, bypass)
