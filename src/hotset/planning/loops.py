"""Compiled loops over one layer's picks. Import this module inside functions: it loads numba.

A layer's picks come as `sets` [D, K] int16 and `weight` [D] float64: each distinct set of experts once, ascending, -1
at the end where a token has fewer picks, with the number of tokens that picked it. `distinct_sets` makes them.
Objective everywhere: base[e] per resident expert e, plus `value` per token all of whose picks are resident.
Every loop releases the interpreter lock, so layers run on threads. Plain twins are in tests/planning_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


def frozen(ids: NDArray[np.int16]) -> NDArray[np.int16]:
    """The same ids as a read-only contiguous int16 array, so that each loop is compiled for one type only."""
    view = np.ascontiguousarray(ids, np.int16).view()
    view.flags.writeable = False
    return view


def pick_table(resident: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """[65536] worth of each id read as uint16: picks in the low half, hits in the high one; 0 for -1 (no pick)."""
    table = np.zeros(1 << 16, np.uint64)
    table[: len(resident)] = 1 + (resident.astype(np.uint64) << np.uint64(32))
    return table


@cache
def count_hits(top_k: int) -> Callable[..., tuple[int, int, int]]:
    """The loop for ids [T, top_k] as uint16: (picks + hits << 32, tokens with a pick, tokens all of whose picks hit).

    Compiled for each top-k: with the length known its inner loop is unrolled, which halves the time.
    """

    @njit(cache=True, nogil=True)
    def count(ids, table):  # type: ignore[no-untyped-def]
        total, low, half = np.uint64(0), np.uint64(0xFFFFFFFF), np.uint64(32)
        routed: Any = 0
        whole: Any = 0
        for token in range(ids.shape[0]):
            both = np.uint64(0)
            for k in range(top_k):
                both += table[ids[token, k]]
            here = both & low
            total += both
            routed += here > 0
            whole += (here > 0) & (here == both >> half)
        return total, routed, whole

    compiled: Callable[..., tuple[int, int, int]] = count
    return compiled


@njit(cache=True, nogil=True)
def distinct_sets(ids, sets, weight, heads):  # type: ignore[no-untyped-def]
    """Merge tokens with the same picks; tokens without a pick are left out. Returns how many sets there are.

    sets [T, K] int16, weight [T] float64: filled from the front, in order of first appearance. heads: int32 table,
    all -1, a power of two longer than T: open addressing on a hash of the sorted picks.
    """
    num_tokens, top_k = ids.shape
    slots = np.uint64(len(heads) - 1)
    found = 0
    for token in range(num_tokens):
        size = 0
        for k in range(top_k):
            expert = ids[token, k]
            if expert < 0:
                continue
            place = size
            while place > 0 and sets[found, place - 1] > expert:
                sets[found, place] = sets[found, place - 1]
                place -= 1
            sets[found, place] = expert
            size += 1
        if size == 0:
            continue
        mixed = np.uint64(14695981039346656037)
        for k in range(top_k):
            if k >= size:
                sets[found, k] = -1
            mixed = (mixed ^ np.uint64(np.uint16(sets[found, k]))) * np.uint64(1099511628211)
            mixed ^= mixed >> np.uint64(29)
        slot = mixed & slots
        while heads[slot] >= 0:
            other = heads[slot]
            same = True
            for k in range(top_k):
                if sets[other, k] != sets[found, k]:
                    same = False
                    break
            if same:
                break
            slot = (slot + np.uint64(1)) & slots
        if heads[slot] < 0:
            heads[slot] = found
            weight[found] = 1.0
            found += 1
        else:
            weight[heads[slot]] += 1.0
    return found


@njit(cache=True, nogil=True)
def invert(sets, num_experts):  # type: ignore[no-untyped-def]
    """(start [E + 1], member [picks] int32): the sets that hold each expert, one expert after the other."""
    num_sets, top_k = sets.shape
    start = np.zeros(num_experts + 1, np.int64)
    for i in range(num_sets):
        for k in range(top_k):
            if sets[i, k] < 0:
                break
            start[sets[i, k] + 1] += 1
    for expert in range(num_experts):
        start[expert + 1] += start[expert]
    place = start[:-1].copy()
    member = np.empty(start[num_experts], np.int32)
    for i in range(num_sets):
        for k in range(top_k):
            expert = sets[i, k]
            if expert < 0:
                break
            member[place[expert]] = i
            place[expert] += 1
    return start, member


@njit(cache=True, nogil=True)
def peel(sets, weight, start, member, base, value, size, priority):  # type: ignore[no-untyped-def]
    """Backward peeling: from all experts, remove the one whose loss per size is least, until none is left.

    Returns order [E]: the nested chain, its first n experts being the layer's placement of n. Ties: the lower
    priority goes first. The greedy peel of densest subgraph (Charikar 2000) on hypergraphs; with the inverted index a
    layer costs O(D K + E^2).
    """
    num_experts = len(base)
    top_k = sets.shape[1]
    alive = np.zeros(num_experts)
    for expert in range(num_experts):
        for p in range(start[expert], start[expert + 1]):
            alive[expert] += weight[member[p]]
    dead = np.zeros(len(sets), np.bool_)
    gone = np.zeros(num_experts, np.bool_)
    order = np.empty(num_experts, np.int64)
    for left in range(num_experts, 0, -1):
        worst, least = -1, np.inf
        for expert in range(num_experts):
            if gone[expert]:
                continue
            loss = (base[expert] + value * alive[expert]) / size[expert]
            if loss < least or (loss == least and priority[expert] < priority[worst]):
                worst, least = expert, loss
        gone[worst] = True
        order[left - 1] = worst
        for p in range(start[worst], start[worst + 1]):
            i = member[p]
            if not dead[i]:
                dead[i] = True
                for k in range(top_k):
                    if sets[i, k] < 0:
                        break
                    alive[sets[i, k]] -= weight[i]
    return order


@njit(cache=True, nogil=True)
def chain_values(sets, weight, base, value, order):  # type: ignore[no-untyped-def]
    """[E + 1] objective of the first n experts of `order`, n = 0..E."""
    num_experts = len(order)
    rank = np.empty(num_experts, np.int64)
    values = np.zeros(num_experts + 1)
    for n in range(num_experts):
        rank[order[n]] = n
        values[n + 1] = base[order[n]]
    for i in range(len(sets)):
        last = 0
        for k in range(sets.shape[1]):
            if sets[i, k] < 0:
                break
            last = max(last, rank[sets[i, k]])
        values[last + 1] += value * weight[i]
    for n in range(num_experts):
        values[n + 1] += values[n]
    return values


@njit(cache=True, nogil=True)
def balance(groups, weight, value, size, mass, load, sweeps):  # type: ignore[no-untyped-def]
    """Split each set's worth among its groups so that load / size is as even as it can be; in place.

    groups [D, M] int32 (-1 = none, at the end): what the worth may be charged to: a set's experts, or its pairs of
    experts. load [G] starts at what is charged already. mass [D, M] starts at 0 or at an earlier split, included in
    load. Block coordinate descent on sum(load^2 / size): one set at a time is spread to a common level over its least
    loaded groups. The minimum is the dual optimum of the densest-subhypergraph relaxation for every budget at once
    (Danisch, Chan and Sozio 2017); any split at all is a valid bound, so stopping early costs tightness only.
    """
    num_sets, width = groups.shape
    for _ in range(sweeps):
        for i in range(num_sets):
            used = 0
            have = value * weight[i]
            room = 0.0
            for k in range(width):
                g = groups[i, k]
                if g < 0:
                    break
                load[g] -= mass[i, k]
                have += load[g]
                room += size[g]
                used += 1
            if used == 0:
                continue
            # the level at which everything is spread evenly; groups above it take nothing and are left out
            level = have / room
            changed = True
            while changed:
                changed = False
                have, room = value * weight[i], 0.0
                for k in range(used):
                    g = groups[i, k]
                    if load[g] < level * size[g]:
                        have += load[g]
                        room += size[g]
                lower = have / room
                if lower < level * (1.0 - 1e-15):
                    level = lower
                    changed = True
            for k in range(used):
                g = groups[i, k]
                gain = level * size[g] - load[g]
                if gain > 0.0:
                    mass[i, k] = gain
                    load[g] += gain
                else:
                    mass[i, k] = 0.0


@njit(cache=True, nogil=True)
def charged(groups, weight, value, mass, load):  # type: ignore[no-untyped-def]
    """Add every set's worth to `load` afresh, split in proportion to `mass`: free of the drift of `balance`."""
    num_sets, width = groups.shape
    for i in range(num_sets):
        total = 0.0
        for k in range(width):
            if groups[i, k] < 0:
                break
            total += mass[i, k]
        if total <= 0.0:
            if groups[i, 0] >= 0:
                load[groups[i, 0]] += value * weight[i]
            continue
        for k in range(width):
            if groups[i, k] < 0:
                break
            load[groups[i, k]] += value * weight[i] * (mass[i, k] / total)


@njit(cache=True, nogil=True)
def swap_tables(sets, weight, base, value, resident, gain, loss, shared):  # type: ignore[no-untyped-def]
    """What adding or dropping one expert changes; all three are overwritten. Returns the placement's objective.

    gain [E]: objective won by adding an absent expert; loss [E]: lost by dropping a resident one; shared [E, E]:
    shared[out, in] = worth of the sets that lack only `in` and hold `out`, which a swap of the two does not win.
    """
    num_sets, top_k = sets.shape
    gain[:] = base
    loss[:] = base
    shared[:] = 0.0
    total = 0.0
    for expert in range(len(base)):
        if resident[expert]:
            total += base[expert]
    for i in range(num_sets):
        lacking, which = 0, 0
        for k in range(top_k):
            expert = sets[i, k]
            if expert < 0:
                break
            if not resident[expert]:
                lacking += 1
                which = expert
                if lacking > 1:
                    break
        if lacking > 1:
            continue
        worth = value * weight[i]
        if lacking == 0:
            total += worth
        else:
            gain[which] += worth
        for k in range(top_k):
            expert = sets[i, k]
            if expert < 0:
                break
            if lacking == 0:
                loss[expert] += worth
            elif expert != which:
                shared[expert, which] += worth
    return total


@njit(cache=True, nogil=True)
def improve(sets, weight, base, value, size, resident, rounds):  # type: ignore[no-untyped-def]
    """Swap a resident for an absent expert of no greater size while that wins; in place. Returns the objective.

    Best swap first, at most `rounds` of them. Lower experts first among equals.
    """
    num_experts = len(base)
    gain, loss = np.empty(num_experts), np.empty(num_experts)
    shared = np.empty((num_experts, num_experts))
    total = swap_tables(sets, weight, base, value, resident, gain, loss, shared)
    for _ in range(rounds):
        best, out, into = 1e-9 * (1.0 + total), -1, -1
        for i in range(num_experts):
            if not resident[i]:
                continue
            for j in range(num_experts):
                if resident[j] or size[j] > size[i]:
                    continue
                change = gain[j] - loss[i] - shared[i, j]
                if change > best:
                    best, out, into = change, i, j
        if out < 0:
            break
        resident[out] = False
        resident[into] = True
        total = swap_tables(sets, weight, base, value, resident, gain, loss, shared)
    return total


@njit(cache=True, nogil=True)
def seen_pairs(base, load, n, picked):  # type: ignore[no-untyped-def]
    """The most that n experts can see of load [E, E]: each its n - 1 largest entries and its base; n experts in all.

    picked [E, E] is set to 1 where an entry was counted, else to 0.
    """
    num_experts = len(base)
    seen = base.copy()
    order = np.empty((num_experts, num_experts), np.int64)
    for i in range(num_experts):
        order[i] = np.argsort(-load[i])
        for c in range(n - 1):
            seen[i] += load[i, order[i, c]]
    picked[:] = 0.0
    total = 0.0
    best = np.argsort(-seen)
    for c in range(n):
        i = best[c]
        total += seen[i]
        for d in range(n - 1):
            picked[i, order[i, d]] = 1.0
    return total


@njit(cache=True, nogil=True)
def priced_pairs(sets, weight, base, value, n, rounds, step, prices, average):  # type: ignore[no-untyped-def]
    """Charge each set to ordered pairs of its experts so that n experts see little; returns what they see at most.

    A game: an adversary counts n experts and n - 1 partners of each; what it counts gets dearer, and every set spreads
    its worth over its pairs by exp(-step * price / sqrt(round)). The time average of the charges goes to a value of
    the pair relaxation (multiplicative weights, Freund and Schapire 1999). prices [E, E]: read as the start, and
    updated. average [E, E]: overwritten with the averaged charges, a valid split by itself, no entry on the diagonal.
    """
    num_experts = len(base)
    num_sets, top_k = sets.shape
    load, picked = np.empty((num_experts, num_experts)), np.empty((num_experts, num_experts))
    average[:] = 0.0
    total = 0.0
    for turn in range(1, rounds + 1):
        # floored: a set whose pairs are all out of sight then spreads evenly, and nothing overflows
        pull = np.exp(np.maximum((prices.min() - prices) * (step / np.sqrt(turn)), -200.0))
        load[:] = 0.0
        for s in range(num_sets):
            norm = 0.0
            for i in range(top_k):
                if sets[s, i] < 0:
                    break
                for j in range(top_k):
                    if sets[s, j] < 0:
                        break
                    if i != j:
                        norm += pull[sets[s, i], sets[s, j]]
            share = value * weight[s] / norm
            for i in range(top_k):
                if sets[s, i] < 0:
                    break
                for j in range(top_k):
                    if sets[s, j] < 0:
                        break
                    if i != j:
                        load[sets[s, i], sets[s, j]] += share * pull[sets[s, i], sets[s, j]]
        seen_pairs(base, load, n, picked)
        prices += picked
        total += turn
        average += (load - average) * (turn / total)
    return seen_pairs(base, average, n, picked)


@njit(cache=True, nogil=True)
def knapsack(first, sizes, values, capacity, choice):  # type: ignore[no-untyped-def]
    """Multiple-choice knapsack: one option of every layer, sizes within capacity, most value. Exact.

    first [L + 1]: where each layer's options start in sizes [O] and values [O], each layer's by ascending size.
    choice [L, capacity + 1] int32: filled with the option taken. Returns best [capacity + 1], -inf where some layer
    has no option that fits. Among equals the smaller option wins.
    """
    num_layers = len(first) - 1
    best = np.zeros(capacity + 1)
    for layer in range(num_layers):
        now = np.full(capacity + 1, -np.inf)
        for option in range(first[layer], first[layer + 1]):
            size, worth = sizes[option], values[option]
            for c in range(size, capacity + 1):
                candidate = best[c - size] + worth
                if candidate > now[c]:
                    now[c] = candidate
                    choice[layer, c] = option
        best = now
    return best


@njit(cache=True, nogil=True)
def subset_values(sets, weight, base, value):  # type: ignore[no-untyped-def]
    """[2^E] objective of every subset of a small layer, expert e being bit e: sums over subsets, O(E 2^E)."""
    num_experts = len(base)
    values = np.zeros(1 << num_experts)
    for i in range(len(sets)):
        bits = np.int64(0)
        for k in range(sets.shape[1]):
            if sets[i, k] < 0:
                break
            bits |= np.int64(1) << np.int64(sets[i, k])
        values[bits] += value * weight[i]
    for expert in range(num_experts):
        values[1 << expert] += base[expert]
    for expert in range(num_experts):
        bit = 1 << expert
        for subset in range(1 << num_experts):
            if subset & bit:
                values[subset] += values[subset ^ bit]
    return values


@njit(cache=True, nogil=True)
def best_cover(weight, missing, lacking, left, room):  # type: ignore[no-untyped-def]
    """The set with most tokens per size of its missing experts, -1 where none fits.

    missing [D]: size of the experts that a set still lacks, at most `left`; lacking [D]: how many, at most `room`. Sets
    that lack none are passed over. Ties: more tokens, then the earlier set.
    """
    chosen, ratio, tokens = -1, -1.0, -1.0
    for i in range(len(weight)):
        if lacking[i] == 0 or missing[i] > left or lacking[i] > room:
            continue
        here = weight[i] / missing[i]
        if here > ratio or (here == ratio and weight[i] > tokens):
            chosen, ratio, tokens = i, here, weight[i]
    return chosen


@njit(cache=True, nogil=True)
def cover(start, member, expert, size, missing, lacking):  # type: ignore[no-untyped-def]
    """Expert `expert` is resident now: the sets that hold it lack it no more."""
    for p in range(start[expert], start[expert + 1]):
        missing[member[p]] -= size
        lacking[member[p]] -= 1


@njit(cache=True, nogil=True)
def coactivation(ids, matrix):  # type: ignore[no-untyped-def]
    """Add 1 to matrix [E, E] for every pair of a token's picks, in their order, and for each pick with itself."""
    num_tokens, top_k = ids.shape
    for token in range(num_tokens):
        for i in range(top_k):
            a = ids[token, i]
            if a < 0:
                continue
            matrix[a, a] += 1
            for j in range(i + 1, top_k):
                b = ids[token, j]
                if b >= 0:
                    matrix[a, b] += 1
