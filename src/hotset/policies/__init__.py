"""Policies: which expert to load, and in whose place, when a token has been served. One contract, one registry.

A policy reads Residency and proposes `Swap`s; it never moves anything. Driving one, in the runtime or by hand:

    for expert in picks:                       # in pick order
        hit = residency.slot(row, expert) >= 0
        swap = policy.request(row, expert)     # demand policies answer here
        if swap: out, move = residency.begin(swap); ...copy the bytes...; residency.publish(move)
    for swap in policy.finish(row, picks):     # the others answer here, once the layer is done
        out, move = residency.begin(swap); ...; residency.publish(move)

`policy.replay` does the same over a block of recorded tokens in compiled code, with the same decision functions.

**What a hit is.** A layer's K picks of one token are a stream of requests in pick order. A pick is a hit if its expert
is resident when its turn comes. Demand policies (lru, lfu, lfu-aged) load a missing expert before the next pick's turn,
as a cache does; all others change residency only between one (token, layer) and the next, as the runtime does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.core import Machine
from hotset.errors import PolicyError
from hotset.residency import Residency, Swap


class Policy(Protocol):
    """What replay and the runtime ask of a policy."""

    name: str

    def request(self, row: int, expert: int) -> Swap | None:
        """One pick's turn has come and its hit is judged: load something now? The answer must be begun at once."""

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:
        """A layer has served its picks [K]: proposals, each to be begun before the next is asked for."""

    def replay(
        self,
        first_row: int,
        ids: NDArray[np.int16],
        served: NDArray[np.uint8],
        loads: NDArray[np.int32],
        load_bytes: NDArray[np.int64],
    ) -> None:
        """Serve ids [R, T, K] of the rows from `first_row` on, token by token, committing every swap at once.

        Filled in: served [R, T, K] (`adaptation.loops` HIT, MISS, NO_PICK), loads [R, T], load_bytes [R, T].
        """


@dataclass(frozen=True)
class Setting:
    """What every policy is built from."""

    residency: Residency
    expert_bytes: NDArray[np.int64]
    """[L, E], all 1 where sizes are not known."""
    top_k: int
    hotness: NDArray[np.float64]
    """[L, E] activation probabilities to start from; zeros where nothing is known."""
    machine: Machine | None
    future: NDArray[np.int16]
    """[L, T, K] what will be asked: only the offline bound may look."""


@dataclass(frozen=True)
class _Entry:
    module: str
    coupled: bool
    """Decisions about one row depend on other rows: all rows must be replayed together, token by token."""
    about: str


POLICIES: dict[str, _Entry] = {
    "static": _Entry("hotset.policies.static", False, "the plan, never changed"),
    "lru": _Entry("hotset.policies.demand", False, "load every miss, evict the least recently used"),
    "lfu": _Entry("hotset.policies.demand", False, "load every miss, evict the least often used since its load"),
    "lfu-aged": _Entry("hotset.policies.demand", False, "the same with counts that outlive eviction and fade"),
    "ema": _Entry("hotset.policies.ema", False, "EmaHotnessTracker and Rebalancer"),
    "look-ahead": _Entry("hotset.policies.lookahead", True, "ema, and prefetch of what the previous layer announces"),
    "belady": _Entry("hotset.policies.belady", False, "farthest next use with by-pass: the offline bound"),
}


def make_policy(name: str, setting: Setting, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy of that name. Raises PolicyError on an unknown name or option."""
    entry = policy_entry(name)
    try:
        made: Policy = import_module(entry.module).make(name, setting, **dict(options or {}))
    except TypeError as problem:
        if "unexpected keyword" not in str(problem):
            raise
        raise PolicyError(f"policy {name}: {str(problem).split(') ', 1)[-1]}") from None
    return made


def policy_entry(name: str) -> _Entry:
    """The registry's line. Raises PolicyError on an unknown name."""
    if name not in POLICIES:
        raise PolicyError(f"policy {name!r} is unknown: choose {', '.join(POLICIES)}")
    return POLICIES[name]
