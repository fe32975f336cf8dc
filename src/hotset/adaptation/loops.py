"""Compiled functions over the arrays of Residency, tracker and rebalancer. Importing this module loads numba.

One definition each, used from both sides: the objects that the runtime drives token by token call these, and so do the
loops that replay a recorded trace. Numba's file cache looks at the file of the outermost function only: after editing
this file or residency.py, delete `__pycache__/*.nb?`.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg"

from __future__ import annotations

import numpy as np
from numba import njit

from hotset import residency

ABSENT = residency.ABSENT
KEEP = -2
"""Verdict: load nothing."""
FREE = -1
"""Verdict: load into a free slot. Verdicts from 0 on are the key row * E + expert of the victim."""

NO_PICK, MISS, HIT = 0, 1, 2
"""What a loop writes for each pick it served."""

RESCALE_ABOVE = 1e120
"""A lazily decayed sum is divided by its scale before that reaches this: far below what overflows a float64."""

take_free = njit(residency.take_free, cache=True, nogil=True, inline="always")
show = njit(residency.show, cache=True, nogil=True, inline="always")
hide = njit(residency.hide, cache=True, nogil=True, inline="always")


@njit(cache=True, nogil=True, inline="always")
def commit(a, row, expert, verdict):
    """Both phases of a load at once: what replay does in place of moving bytes."""
    if verdict >= 0:
        num_experts = a.table.shape[1]
        hide(a, verdict // num_experts, verdict % num_experts)
    show(a, row, expert, take_free(a, row))


@njit(cache=True, nogil=True, inline="always")
def is_away(a, row, expert):
    """Neither resident nor on its way."""
    return a.table[row, expert] == ABSENT and a.claims[row, expert] == ABSENT


@njit(cache=True, nogil=True, inline="always")
def serve(a, row, picks, served):
    """Judge one token's picks [K] against the residency as it is: served [K] = HIT, MISS or NO_PICK."""
    for k in range(len(picks)):
        expert = picks[k]
        if expert < 0:
            served[k] = NO_PICK
        elif a.table[row, expert] == ABSENT:
            served[k] = MISS
        else:
            served[k] = HIT


# -- tracker -------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def first_bad_id(ids, num_experts):
    """Flat index of the first id of [T, K] outside [-1, E), or -1."""
    lowest = highest = 0
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            lowest, highest = min(lowest, ids[t, k]), max(highest, ids[t, k])
    if lowest >= -1 and highest < num_experts:
        return -1
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            if ids[t, k] < -1 or ids[t, k] >= num_experts:
                return t * ids.shape[1] + k
    return -1


@njit(cache=True, nogil=True, inline="always")
def observe(h, row, ids):
    """Add the tokens of ids [T, K] to the row's averages, one after the other.

    h.sums[e, j] / h.scale[j] is average j (0 slow, 1 fast) of expert e: dividing the scale by the decay decays all
    experts at once, so that a token touches its own picks only.
    """
    sums = h.sums[row]
    slow_scale, fast_scale = h.scale[row, 0], h.scale[row, 1]
    slow_growth, fast_growth = 1.0 / h.decay[0], 1.0 / h.decay[1]
    slow_share, fast_share = 1.0 - h.decay[0], 1.0 - h.decay[1]
    for t in range(ids.shape[0]):
        routed = False
        for k in range(ids.shape[1]):
            expert = ids[t, k]
            if expert < 0:
                continue
            if not routed:
                routed = True
                slow_scale *= slow_growth
                if slow_scale > RESCALE_ABOVE:
                    sums[:, 0] /= slow_scale
                    slow_scale = 1.0
                fast_scale *= fast_growth
                if fast_scale > RESCALE_ABOVE:
                    sums[:, 1] /= fast_scale
                    fast_scale = 1.0
            sums[expert, 0] += slow_share * slow_scale
            sums[expert, 1] += fast_share * fast_scale
    h.scale[row, 0] = slow_scale
    h.scale[row, 1] = fast_scale


@njit(cache=True, nogil=True)
def _room(scale, growth):
    """Tokens for which a scale may grow before it must be divided out."""
    return max(1, int(np.log(RESCALE_ABOVE / scale) / np.log(growth)))


@njit(cache=True, nogil=True)
def _add_one(slow, ids, scale, growth, share):
    """Add tokens to one average [E + 1]; the scale afterwards. An unsigned index turns -1 into the largest."""
    spare = np.uint64(len(slow) - 1)
    for t in range(ids.shape[0]):
        scale *= growth
        weight = share * scale
        for k in range(ids.shape[1]):
            slow[min(np.uint64(ids[t, k]), spare)] += weight
    return scale


@njit(cache=True, nogil=True)
def _add_both(slow, fast, ids, slow_scale, slow_growth, slow_share, fast_scale, fast_growth, fast_share):
    """Add tokens to both averages; the scales afterwards."""
    spare = np.uint64(len(slow) - 1)
    for t in range(ids.shape[0]):
        slow_scale *= slow_growth
        fast_scale *= fast_growth
        slow_weight, fast_weight = slow_share * slow_scale, fast_share * fast_scale
        for k in range(ids.shape[1]):
            expert = min(np.uint64(ids[t, k]), spare)
            slow[expert] += slow_weight
            fast[expert] += fast_weight
    return slow_scale, fast_scale


@njit(cache=True, nogil=True)
def _observe_full(h, row, ids):
    """`observe` for many tokens all of whose picks are real: no test per pick, and nothing that has faded away.

    Two liberties, both below the rounding of a float64: tokens so old that their whole weight is under 2 ** -60 are
    left out, and the fast average starts where its own memory does. Ids outside [0, E) go to the spare entry E, for the
    caller to find; False, and nothing changed, where one did.
    """
    num_experts = h.sums.shape[1] - 1
    slow, fast = h.sums[row, :, 0].copy(), h.sums[row, :, 1].copy()
    num_tokens = len(ids)
    slow_growth, fast_growth = 1.0 / h.decay[0], 1.0 / h.decay[1]
    slow_begin = max(0, num_tokens - int(60 * np.log(2.0) / np.log(slow_growth)))
    fast_begin = max(slow_begin, num_tokens - int(60 * np.log(2.0) / np.log(fast_growth)))
    if h.fast_weight[0] == 0.0:
        fast_begin = num_tokens  # nobody will ask for it
    if slow_begin > 0 and first_bad_id(ids[:slow_begin], num_experts) >= 0:
        return False
    slow_scale, slow_share = h.scale[row, 0], 1.0 - h.decay[0]
    fast_scale, fast_share = h.scale[row, 1], 1.0 - h.decay[1]
    if slow_begin > 0:
        slow[:] = 0.0
        slow_scale = 1.0
    if fast_begin > 0:
        fast[:] = 0.0
        fast_scale = 1.0
    t = slow_begin
    while t < num_tokens:
        both = t >= fast_begin
        stop = min(num_tokens if both else fast_begin, t + _room(slow_scale, slow_growth))
        if both:
            stop = min(stop, t + _room(fast_scale, fast_growth))
            slow_scale, fast_scale = _add_both(
                slow, fast, ids[t:stop], slow_scale, slow_growth, slow_share, fast_scale, fast_growth, fast_share
            )
        else:
            slow_scale = _add_one(slow, ids[t:stop], slow_scale, slow_growth, slow_share)
        t = stop
        if slow_scale > RESCALE_ABOVE / (2.0 * slow_growth):
            slow /= slow_scale
            slow_scale = 1.0
        if fast_scale > RESCALE_ABOVE / (2.0 * fast_growth):
            fast /= fast_scale
            fast_scale = 1.0
    if slow[num_experts] != 0.0:
        return False
    h.sums[row, :, 0], h.sums[row, :, 1] = slow, fast
    h.scale[row, 0], h.scale[row, 1] = slow_scale, fast_scale
    return True


@njit(cache=True, nogil=True)
def check_and_observe(h, row, ids):
    """`observe` where every id is in range; otherwise nothing but the flat index of the first that is not."""
    num_experts = h.sums.shape[1] - 1
    if ids.size >= 4 * num_experts and _observe_full(h, row, ids):
        return -1
    bad = first_bad_id(ids, num_experts)
    if bad < 0:
        observe(h, row, ids)
    return bad


@njit(cache=True, nogil=True, inline="always")
def hotness(h, row, expert):
    """The expert's blended average: (1 - w) * slow + w * fast."""
    w = h.fast_weight[0]
    slow, fast = h.sums[row, expert, 0] / h.scale[row, 0], h.sums[row, expert, 1] / h.scale[row, 1]
    return (1.0 - w) * slow + w * fast


# -- rebalancer ----------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, inline="always")
def coldest(a, h, r, row):
    """(key, hotness) of the resident that may leave and is least hot in the row's group; key ABSENT where none may.

    Not while it is locked, nor within `min_dwell` tokens of its own load. Ties go to the lower slot.
    """
    num_experts = a.table.shape[1]
    group = a.group[row]
    w = h.fast_weight[0]
    best_key, best = ABSENT, 0.0
    last_row, slow_factor, fast_factor = -1, 0.0, 0.0
    for slot in range(a.slots[group]):
        key = a.holder[group, slot]
        if key == ABSENT:
            continue
        its_row, expert = row, key - row * num_experts
        if expert < 0 or expert >= num_experts:
            its_row, expert = key // num_experts, key % num_experts
        if its_row != last_row:
            last_row = its_row
            slow_factor, fast_factor = (1.0 - w) / h.scale[its_row, 0], w / h.scale[its_row, 1]
        value = slow_factor * h.sums[its_row, expert, 0] + fast_factor * h.sums[its_row, expert, 1]
        if best_key != ABSENT and value >= best:
            continue
        if a.users[its_row, expert] > 0 or r.clock[its_row] - r.loaded_at[its_row, expert] < r.min_dwell[0]:
            continue
        best_key, best = key, value
    return best_key, best


@njit(cache=True, nogil=True, inline="always")
def propose(a, h, r, row, picks, bytes_left):
    """(expert, verdict): the hottest of the picks [any] that is away, if it deserves a slot; else (ABSENT, KEEP).

    Only picks are candidates: a lazily decayed average changes relative to others at a pick alone.
    """
    best, best_hotness = ABSENT, -1.0
    for k in range(len(picks)):
        expert = picks[k]
        if expert < 0 or not is_away(a, row, expert) or r.expert_bytes[row, expert] > bytes_left:
            continue
        value = hotness(h, row, expert)
        if value > best_hotness:
            best, best_hotness = expert, value
    if best == ABSENT:
        return ABSENT, KEEP
    if a.free_count[a.group[row]] > 0:
        return best, FREE
    key, cold = coldest(a, h, r, row)
    if key == ABSENT or best_hotness <= cold + r.threshold[0]:
        return ABSENT, KEEP
    return best, key


@njit(cache=True, nogil=True)
def replay_ema(a, h, r, first_row, ids, served, loads, load_bytes, max_moves, max_bytes):
    """Serve, observe and rebalance the tokens of ids [R, T, K], committing each move before the next token."""
    for t in range(ids.shape[1]):
        for i in range(ids.shape[0]):
            row = first_row + i
            picks = ids[i, t]
            serve(a, row, picks, served[i, t])
            observe(h, row, ids[i, t : t + 1])
            r.clock[row] += 1
            bytes_left = max_bytes
            for _ in range(max_moves):
                expert, verdict = propose(a, h, r, row, picks, bytes_left)
                if expert == ABSENT:
                    break
                commit(a, row, expert, verdict)
                r.loaded_at[row, expert] = r.clock[row]
                bytes_left -= r.expert_bytes[row, expert]
                loads[i, t] += 1
                load_bytes[i, t] += r.expert_bytes[row, expert]
