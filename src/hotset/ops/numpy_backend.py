"""`route_shed` and `split_by_residency` in NumPy alone: the fallback that needs no compiler.

Vectorised over tokens, a loop over picks, since the order of the additions is part of the contract (`np.sum` adds
pairwise). Contract: `hotset.ops.contract`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting, SplitRouting

_ZERO = np.float32(0)
_NAN = np.uint32(CANONICAL_NAN_BITS).view(np.float32)

# descending sort keys: a number with float32 bits b sorts by minus its order-preserving integer, within
# [-2**31 + 1, 2**31]; NaN comes after every number and a kept pick after every miss
_KEY_NAN = np.int64(2**31 + 1)
_KEY_KEPT = np.int64(2**31 + 2)


def route_shed(indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]) -> ShedRouting:
    """See `hotset.ops.contract`."""
    slot, kept, _ = _look_up(indices, slot_table)
    with np.errstate(all="ignore"):
        sum_all, sum_kept = _add_up(scores, kept)
        ratio = sum_all / sum_kept
        ratio[kept.all(axis=1) | (sum_kept == 0)] = 1
        mix = scores * ratio[:, None]
        mix[np.isnan(mix)] = _NAN
        mix[~kept] = 0
        order = _miss_order(scores, kept)
    is_miss = np.arange(indices.shape[1]) < (~kept).sum(axis=1, keepdims=True)
    ids = np.clip(indices, None if indices.dtype == np.uint32 else INT32_MIN, INT32_MAX).astype(np.int32)
    miss_ids = np.where(is_miss, np.take_along_axis(ids, order, axis=1), np.int32(-1))
    miss_scores = np.where(is_miss, np.take_along_axis(scores, order, axis=1), _ZERO)
    miss_scores[np.isnan(miss_scores)] = _NAN
    return ShedRouting(_fill_slots(slot, kept), mix, miss_ids, miss_scores)


def split_by_residency(
    indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]
) -> SplitRouting:
    """See `hotset.ops.contract`."""
    slot, kept, inside = _look_up(indices, slot_table)
    on_cpu = inside & ~kept
    return SplitRouting(
        _fill_slots(slot, kept),
        np.where(kept, scores, _ZERO),
        np.where(on_cpu, indices, -1).astype(np.int32),
        np.where(on_cpu, scores, _ZERO),
    )


def masses(
    indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """([T] sum_all, [T] sum_kept, [T] whether any pick is kept)."""
    _, kept, _ = _look_up(indices, slot_table)
    with np.errstate(all="ignore"):
        return *_add_up(scores, kept), np.any(kept, axis=1)


def _add_up(scores: NDArray[np.float32], kept: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    sum_all = np.zeros(len(scores), np.float32)
    sum_kept = np.zeros(len(scores), np.float32)
    for r in range(scores.shape[1]):
        sum_all += scores[:, r]
        # adding +0 for a miss changes nothing: a sum that starts at +0 is never -0
        sum_kept += np.where(kept[:, r], scores[:, r], _ZERO)
    return sum_all, sum_kept


def _look_up(
    indices: NDArray[Any], slot_table: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.bool_]]:
    """([T, R] slot or something negative, [T, R] kept, [T, R] id within [0, E))."""
    inside = (indices >= 0) & (indices < len(slot_table))
    slot = np.where(inside, slot_table[np.where(inside, indices, 0)], np.int32(-1))
    return slot, slot >= 0, inside


def _fill_slots(slot: NDArray[np.int32], kept: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Slots with every miss replaced by its row's first kept slot, or 0."""
    # argmax finds the first True; of a row without any it says 0, which is then masked
    first = np.take_along_axis(slot, kept.argmax(axis=1)[:, None], axis=1)
    return np.where(kept, slot, np.where(first >= 0, first, 0)).astype(np.uint32)


def _miss_order(scores: NDArray[np.float32], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[T, R] picks of each row: its misses by descending score, stable, NaN last; then the kept ones."""
    # + 0 turns -0 into +0; flipping the magnitude bits of negative numbers makes integer order the order of floats
    bits = (scores + _ZERO).view(np.int32).astype(np.int64)
    key = -np.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key[np.isnan(scores)] = _KEY_NAN
    key[kept] = _KEY_KEPT
    # the pick's number in the low six bits makes every key distinct, so any sort is stable, and comes out with it
    packed = (key << 6) | np.arange(scores.shape[1])
    packed.sort(axis=1)
    return packed & 63
