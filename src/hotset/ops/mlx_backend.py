"""`route_shed` for MLX arrays: a Metal kernel on a Mac's GPU, plain MLX operations elsewhere.

The plain operations are what the Linux build of MLX runs, and are compared with the reference in tests. The Metal
kernel is one thread per row; tests compile its body as C++ and compare that with the reference, which checks the logic
and not a Mac: no Metal device was available. MLX compiles custom kernels in Metal's "safe"
math mode (the default of `mx.fast.metal_kernel`), in which Metal rounds additions, products and `precise::divide`
correctly, but Apple GPUs flush subnormal numbers to zero: there, rows with subnormal scores or results may differ
from the contract (`hotset.ops.contract`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting, SplitRouting
from hotset.ops.metal_source import METAL_BODY

# see numpy_backend: descending keys, NaN after every number, kept picks after every miss
_KEY_NAN = 2**31 + 1
_KEY_KEPT = 2**31 + 2


def route_shed(indices: mx.array, scores: mx.array, slot_table: mx.array) -> ShedRouting:
    """See `hotset.ops.contract`."""
    if mx.default_device() == mx.gpu and mx.metal.is_available():
        return _route_shed_metal(indices, scores, slot_table)
    num_picks = indices.shape[1]
    ids, slot, kept, _ = _look_up(indices, slot_table)
    sum_all, sum_kept = _add_up(scores, kept)
    ratio = mx.where(mx.all(kept, axis=1) | (sum_kept == 0), 1.0, sum_all / sum_kept)
    mix = mx.where(kept, _canonical(scores * ratio[:, None]), 0.0)
    order = _miss_order(scores, kept)
    is_miss = mx.arange(num_picks) < mx.sum(~kept, axis=1, keepdims=True)
    miss_ids = mx.where(is_miss, mx.take_along_axis(mx.clip(ids, INT32_MIN, INT32_MAX), order, axis=1), -1)
    miss_scores = mx.where(is_miss, _canonical(mx.take_along_axis(scores, order, axis=1)), 0.0)
    return ShedRouting(_fill_slots(slot, kept), mix, miss_ids.astype(mx.int32), miss_scores)


def split_by_residency(indices: mx.array, scores: mx.array, slot_table: mx.array) -> SplitRouting:
    """See `hotset.ops.contract`."""
    ids, slot, kept, inside = _look_up(indices, slot_table)
    on_cpu = inside & ~kept
    return SplitRouting(
        _fill_slots(slot, kept),
        mx.where(kept, scores, 0.0),
        mx.where(on_cpu, ids, -1).astype(mx.int32),
        mx.where(on_cpu, scores, 0.0),
    )


def masses(indices: mx.array, scores: mx.array, slot_table: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """([T] sum_all, [T] sum_kept, [T] whether any pick is kept)."""
    _, _, kept, _ = _look_up(indices, slot_table)
    return *_add_up(scores, kept), mx.any(kept, axis=1)


def _add_up(scores: mx.array, kept: mx.array) -> tuple[mx.array, mx.array]:
    kept_scores = mx.where(kept, scores, 0.0)
    sum_all = mx.zeros(scores.shape[0])
    sum_kept = mx.zeros(scores.shape[0])
    for r in range(scores.shape[1]):
        sum_all = sum_all + scores[:, r]
        # adding +0 for a miss changes nothing: a sum that starts at +0 is never -0
        sum_kept = sum_kept + kept_scores[:, r]
    return sum_all, sum_kept


def _look_up(indices: mx.array, slot_table: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """([T, R] id int64, [T, R] slot int32 or something negative, [T, R] kept, [T, R] id within [0, E))."""
    ids = indices.astype(mx.int64)
    inside = (ids >= 0) & (ids < slot_table.shape[0])
    slot = mx.where(inside, slot_table[mx.where(inside, ids, 0)], -1)
    return ids, slot, slot >= 0, inside


def _fill_slots(slot: mx.array, kept: mx.array) -> mx.array:
    """Slots as uint32 with every miss replaced by its row's first kept slot, or 0."""
    picks = slot.shape[1]
    position = mx.min(mx.where(kept, mx.arange(picks), picks - 1), axis=1, keepdims=True)
    first = mx.maximum(mx.take_along_axis(slot, position, axis=1), 0)
    return mx.where(kept, slot, first).astype(mx.uint32)


def _canonical(values: mx.array) -> mx.array:
    bits = mx.where(mx.isnan(values), mx.array(CANONICAL_NAN_BITS, mx.uint32), values.view(mx.uint32))
    return bits.view(mx.float32)


def _miss_order(scores: mx.array, kept: mx.array) -> mx.array:
    """[T, R] picks of each row: its misses by descending score, stable, NaN last; then the kept ones."""
    bits = (scores + 0.0).view(mx.int32).astype(mx.int64)
    key = -mx.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key = mx.where(mx.isnan(scores), mx.array(_KEY_NAN, mx.int64), key)
    key = mx.where(kept, mx.array(_KEY_KEPT, mx.int64), key)
    packed = key * 64 + mx.arange(scores.shape[1], dtype=mx.int64)
    return (mx.sort(packed, axis=1) & 63).astype(mx.int32)


@lru_cache(maxsize=1)
def _metal_kernel() -> Any:
    return mx.fast.metal_kernel(
        name="hotset_route_shed",
        input_names=["indices", "scores", "slot_table"],
        output_names=["slots", "mix", "miss_ids", "miss_scores"],
        source=METAL_BODY,
    )


def _route_shed_metal(indices: mx.array, scores: mx.array, slot_table: mx.array) -> ShedRouting:
    num_tokens, num_picks = indices.shape
    if num_tokens == 0:
        return ShedRouting(*(mx.zeros(indices.shape, dtype) for dtype in _RESULT_DTYPES))
    return ShedRouting(
        *_metal_kernel()(
            inputs=[indices, scores, slot_table],
            template=[("R", num_picks)],
            grid=(num_tokens, 1, 1),
            threadgroup=(min(num_tokens, 256), 1, 1),
            output_shapes=[indices.shape] * 4,
            output_dtypes=list(_RESULT_DTYPES),
        )
    )


_RESULT_DTYPES = (mx.uint32, mx.float32, mx.int32, mx.float32)
