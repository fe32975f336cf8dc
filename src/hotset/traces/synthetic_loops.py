"""The compiled part of `synthetic`. Import inside functions: it loads numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _uniform(state):  # type: ignore[no-untyped-def]
    """Next of splitmix64 (Steele, Lea and Flood 2014), as a float in [0, 1)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / 9007199254740992.0


GUIDE = 1024
"""Entries of a guide table: where to start looking in the cumulative sums (Chen and Asau 1974)."""


@njit(cache=True, nogil=True)
def _guide(cumulative):  # type: ignore[no-untyped-def]
    """[GUIDE] for each g, the first index whose cumulative share exceeds g / GUIDE."""
    guide = np.empty(GUIDE, np.int64)
    at, last = 0, len(cumulative) - 1
    for g in range(GUIDE):
        while at < last and cumulative[at] <= (g / GUIDE) * cumulative[last]:
            at += 1
        guide[g] = at
    return guide


@njit(cache=True, nogil=True)
def _draw(cumulative, guide, u):  # type: ignore[no-untyped-def]
    """Index whose share of the cumulative sums u falls in."""
    last = len(cumulative) - 1
    target = u * cumulative[last]
    at = guide[int(u * GUIDE)]
    while at < last and cumulative[at] <= target:
        at += 1
    return at


@njit(cache=True, nogil=True)
def draw_picks(ids, domain, taste, popularity, members, affinity, seed):  # type: ignore[no-untyped-def]
    """Fill ids [T, K] with K different experts per token.

    domain [T]; taste [domains, C], popularity [E] and members [C, E] are cumulative sums along their last axis.
    """
    state = np.empty(1, np.uint64)
    state[0] = seed
    num_tokens, top_k = ids.shape
    num_experts = len(popularity)
    taste_guide = np.empty((len(taste), GUIDE), np.int64)
    for d in range(len(taste)):
        taste_guide[d] = _guide(taste[d])
    member_guide = np.empty((len(members), GUIDE), np.int64)
    for c in range(len(members)):
        member_guide[c] = _guide(members[c])
    popular_guide = _guide(popularity)
    taken = np.full(num_experts, -1, np.int64)
    for token in range(num_tokens):
        community = _draw(taste[domain[token]], taste_guide[domain[token]], _uniform(state))
        k = tries = 0
        while k < top_k:
            if tries < 8 * top_k and _uniform(state) < affinity:
                expert = _draw(members[community], member_guide[community], _uniform(state))
            elif tries < 32 * top_k:
                expert = _draw(popularity, popular_guide, _uniform(state))
            else:
                expert = int(_uniform(state) * num_experts)  # extreme skew with K near E: finish evenly
            tries += 1
            if taken[expert] != token:
                taken[expert] = token
                ids[token, k] = expert
                k += 1
