"""The slow, plain statement of the contract: one row at a time, one float32 operation at a time.

This is what every other implementation is compared with; it is itself compared with exact rational arithmetic in
the tests. NumPy arrays in and out, but no array arithmetic. Not for use in a hot path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting, SplitRouting

_ZERO = np.float32(0)
_ONE = np.float32(1)
_NAN = np.uint32(CANONICAL_NAN_BITS).view(np.float32)


def route_shed(indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]) -> ShedRouting:
    """See `hotset.ops.contract`."""
    num_tokens, num_picks = indices.shape
    slots = np.zeros((num_tokens, num_picks), np.uint32)
    mix = np.zeros((num_tokens, num_picks), np.float32)
    miss_ids = np.full((num_tokens, num_picks), -1, np.int32)
    miss_scores = np.zeros((num_tokens, num_picks), np.float32)
    with np.errstate(all="ignore"):
        for t in range(num_tokens):
            ids = [int(i) for i in indices[t]]
            row = [np.float32(s) for s in scores[t]]
            kept = [_slot(i, slot_table) >= 0 for i in ids]
            sum_all = sum_kept = _ZERO
            for r in range(num_picks):
                sum_all = np.float32(sum_all + row[r])
                if kept[r]:
                    sum_kept = np.float32(sum_kept + row[r])
            ratio = _ONE if all(kept) or sum_kept == _ZERO else np.float32(sum_all / sum_kept)
            first = _first_kept(ids, slot_table)
            for r in range(num_picks):
                slots[t, r] = _slot(ids[r], slot_table) if kept[r] else first
                mix[t, r] = _canonical(np.float32(row[r] * ratio)) if kept[r] else _ZERO
            misses = [r for r in range(num_picks) if not kept[r]]
            # sorted() is stable; -0 and +0 compare equal; the first part of the key puts NaN after every number
            misses.sort(key=lambda r: (bool(np.isnan(row[r])), 0.0 if np.isnan(row[r]) else -float(row[r])))
            for place, r in enumerate(misses):
                miss_ids[t, place] = min(max(ids[r], INT32_MIN), INT32_MAX)
                miss_scores[t, place] = _canonical(row[r])
    return ShedRouting(slots, mix, miss_ids, miss_scores)


def split_by_residency(
    indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]
) -> SplitRouting:
    """See `hotset.ops.contract`."""
    shape = indices.shape
    gpu_slots, gpu_weights = np.zeros(shape, np.uint32), np.zeros(shape, np.float32)
    cpu_ids, cpu_weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for t in range(shape[0]):
        ids = [int(i) for i in indices[t]]
        first = _first_kept(ids, slot_table)
        for r, expert in enumerate(ids):
            slot = _slot(expert, slot_table)
            gpu_slots[t, r] = slot if slot >= 0 else first
            if slot >= 0:
                gpu_weights[t, r] = scores[t, r]
            elif 0 <= expert < len(slot_table):
                cpu_ids[t, r] = expert
                cpu_weights[t, r] = scores[t, r]
    return SplitRouting(gpu_slots, gpu_weights, cpu_ids, cpu_weights)


def _slot(expert: int, slot_table: NDArray[np.int32]) -> int:
    return int(slot_table[expert]) if 0 <= expert < len(slot_table) else -1


def _first_kept(ids: list[int], slot_table: NDArray[np.int32]) -> int:
    return next((slot for slot in (_slot(i, slot_table) for i in ids) if slot >= 0), 0)


def _canonical(value: np.float32) -> np.float32:
    return _NAN if np.isnan(value) else value
