"""`route_shed` as one compiled pass per row: the fast path for arrays in host memory.

A kernel is compiled for each R and index dtype (and cached on disk by Numba), so that the loops over picks are
unrolled: 10-15 % over a kernel that reads R from the shape. Misses are packed as they are met and sorted by
insertion, as routers hand over picks in descending order and the sort then moves nothing. Two other shapes were
slower on an AVX-512 machine: blocks of 64 rows transposed for vector code, and ranks by counting.

Numba adds no fast-math flag unless asked and its LLVM contracts no multiply and add; the contract
(`hotset.ops.contract`) needs both. All constants are float32, so nothing is promoted to float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hotset.ops import numpy_backend
from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting

split_by_residency = numpy_backend.split_by_residency


def route_shed(indices: NDArray[Any], scores: NDArray[np.float32], slot_table: NDArray[np.int32]) -> ShedRouting:
    """See `hotset.ops.contract`."""
    shape = indices.shape
    result = ShedRouting(
        np.empty(shape, np.uint32), np.empty(shape, np.float32), np.empty(shape, np.int32), np.empty(shape, np.float32)
    )
    kernel(shape[1], indices.dtype)(
        indices.reshape(-1),
        scores.reshape(-1),
        slot_table,
        result.slots.reshape(-1),
        result.mix.reshape(-1),
        result.miss_ids.reshape(-1),
        result.miss_scores.reshape(-1),
    )
    return result


@cache
def kernel(num_picks: int, index_dtype: np.dtype[Any]) -> Callable[..., None]:
    """The compiled kernel for R = `num_picks`; takes the seven arrays flattened."""
    picks = np.uint64(num_picks)
    none, one_more = np.uint64(0), np.uint64(1)
    zero, one = np.float32(0), np.float32(1)
    nan = np.uint32(CANONICAL_NAN_BITS).view(np.float32)
    absent = np.int32(-1)
    # ids are clipped in their own type; an int32 needs no clipping and LLVM drops it
    index_type = index_dtype.type
    low, high = index_type(max(INT32_MIN, np.iinfo(index_type).min)), index_type(INT32_MAX)

    # unsigned positions throughout: Numba would otherwise test each index for a negative one
    def route_rows(indices, scores, table, slots, mix, miss_ids, miss_scores):  # type: ignore[no-untyped-def]
        num_experts = np.uint64(table.shape[0])
        base = none
        for _ in range(np.uint64(indices.shape[0]) // picks):
            misses = none
            first = absent
            sum_all = zero
            sum_kept = zero
            for r in range(picks):
                expert = indices[base + r]
                score = scores[base + r]
                # a negative id becomes a huge one
                inside = np.uint64(np.int64(expert)) < num_experts
                slot = table[np.uint64(expert) if inside else none]
                slot = slot if inside else absent
                kept = slot >= 0
                sum_all = sum_all + score
                sum_kept = sum_kept + (score if kept else zero)
                first = slot if (kept and first < 0) else first
                slots[base + r] = np.uint32(slot)
                # written for a kept pick too, then overwritten: cheaper than a branch that is hard to predict
                miss_ids[base + misses] = np.int32(min(max(expert, low), high))
                miss_scores[base + misses] = score
                misses += none if kept else one_more
            if misses == none:
                for r in range(picks):
                    score = scores[base + r]
                    mix[base + r] = score if score == score else nan
                    miss_ids[base + r] = absent
                    miss_scores[base + r] = zero
            else:
                ratio = sum_all / sum_kept if sum_kept != zero else one
                first = first if first >= 0 else np.int32(0)
                for r in range(picks):
                    kept = np.int32(slots[base + r]) >= 0
                    share = scores[base + r] * ratio
                    share = share if share == share else nan
                    mix[base + r] = share if kept else zero
                    slots[base + r] = slots[base + r] if kept else np.uint32(first)
                for here in range(one_more, misses):
                    score = miss_scores[base + here]
                    expert = miss_ids[base + here]
                    place = base + here
                    while place > base:
                        before = miss_scores[place - one_more]
                        if not (before < score or (before != before and score == score)):
                            break
                        miss_scores[place] = before
                        miss_ids[place] = miss_ids[place - one_more]
                        place -= one_more
                    miss_scores[place] = score
                    miss_ids[place] = expert
                for r in range(picks):
                    score = miss_scores[base + r]
                    score = score if score == score else nan
                    miss_scores[base + r] = score if r < misses else zero
                    miss_ids[base + r] = miss_ids[base + r] if r < misses else absent
            base += picks

    def flat(dtype: Any, readonly: bool) -> Any:
        return numba.types.Array(numba.from_dtype(np.dtype(dtype)), 1, "C", readonly=readonly)

    # an explicit signature compiles once for writable and read-only inputs alike
    signature = numba.void(
        flat(index_dtype, True),
        flat(np.float32, True),
        flat(np.int32, True),
        flat(np.uint32, False),
        flat(np.float32, False),
        flat(np.int32, False),
        flat(np.float32, False),
    )
    compiled: Callable[..., None] = numba.njit(signature, nogil=True, error_model="numpy", cache=True)(route_rows)
    return compiled
