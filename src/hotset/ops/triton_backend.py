"""`route_shed` as one Triton kernel: one program per block of rows, one launch per call, nothing waits.

A program holds a tile [rows, picks] in registers and walks the picks in ascending r: that loop adds up the sums in the
order of the contract (`tl.sum` would add as a tree) and counts, for every pick of the tile, the misses that come
before it. A miss is then stored at its rank; nothing is sorted or compacted across threads.

The division is `tl.div_rn`, as Triton's `/` is an approximation (div.full.f32) on NVIDIA; no multiplication feeds an
addition, so nothing can be fused. tests/test_ops_triton.py reads both off the PTX that Triton makes for this kernel.
Runs under the Triton interpreter too, where TRITON_INTERPRET=1 was set before this module was imported. Contract:
`hotset.ops.contract`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.ops import torch_backend
from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting

split_by_residency = torch_backend.split_by_residency

INTERPRETED = triton.knobs.runtime.interpret

_TILE = 16_384 if INTERPRETED else 1024
"""Picks per program. 1024 = 8 a thread at 4 warps; the interpreter runs programs one after the other in Python."""

_NAN = tl.constexpr(CANONICAL_NAN_BITS)
_LOW = tl.constexpr(INT32_MIN)
_HIGH = tl.constexpr(INT32_MAX)


@triton.jit
def _order_key(score, missed):  # type: ignore[no-untyped-def]
    """int32 that orders as the scores do, NaN below every number, a kept pick below NaN."""
    # + 0 turns -0 into +0; flipping the magnitude bits of negative numbers makes integer order the order of floats
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == score, key, _LOW + 1)
    return tl.where(missed, key, _LOW)


@triton.jit  # type: ignore[untyped-decorator]
def route_shed_kernel(  # type: ignore[no-untyped-def]
    indices,
    scores,
    table,
    slots,
    mix,
    miss_ids,
    miss_scores,
    num_tokens,
    num_experts,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """indices, scores and the four results [T, R] row-major; ROWS x COLUMNS is the tile, COLUMNS >= R a power of 2."""
    # 64-bit offsets: T * R may pass 2**31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    row_in = row < num_tokens
    at = row[:, None] * R + column[None, :]
    tile_in = row_in[:, None] & (column < R)[None, :]

    expert = tl.load(indices + at, mask=tile_in, other=0).to(tl.int64)
    score = tl.load(scores + at, mask=tile_in, other=0.0)
    inside = (expert >= 0) & (expert < num_experts)
    slot = tl.load(table + expert, mask=tile_in & inside, other=-1)
    missed = slot < 0
    key = _order_key(score, missed)

    sum_all = tl.full([ROWS], 0.0, tl.float32)
    sum_kept = tl.full([ROWS], 0.0, tl.float32)
    first = tl.full([ROWS], -1, tl.int32)
    misses = tl.full([ROWS], 0, tl.int32)
    rank = tl.full([ROWS, COLUMNS], 0, tl.int32)
    for r in range(R):
        # the same values again, one column of them: they are in the cache
        expert_r = tl.load(indices + row * R + r, mask=row_in, other=0).to(tl.int64)
        score_r = tl.load(scores + row * R + r, mask=row_in, other=0.0)
        inside_r = (expert_r >= 0) & (expert_r < num_experts)
        slot_r = tl.load(table + expert_r, mask=row_in & inside_r, other=-1)
        missed_r = slot_r < 0
        sum_all = sum_all + score_r
        # adding +0 for a miss changes nothing: a sum that starts at +0 is never -0
        sum_kept = sum_kept + tl.where(missed_r, 0.0, score_r)
        first = tl.where(first < 0, slot_r, first)
        misses += missed_r.to(tl.int32)
        key_r = _order_key(score_r, missed_r)[:, None]
        rank += ((key_r > key) | ((key_r == key) & (r < column)[None, :])).to(tl.int32)

    # rows that are not scaled divide by 1 and drop the quotient
    scaled = (misses > 0) & (sum_kept != 0.0)
    ratio = tl.where(scaled, tl.div_rn(sum_all, tl.where(scaled, sum_kept, 1.0)), 1.0)
    share = score * ratio[:, None]
    share = tl.where(share == share, share.to(tl.int32, bitcast=True), _NAN).to(tl.float32, bitcast=True)
    tl.store(mix + at, tl.where(missed, 0.0, share), mask=tile_in)
    # stored as int32 bits: a kept slot is never negative
    tl.store(slots + at, tl.where(missed, tl.where(first < 0, 0, first)[:, None], slot), mask=tile_in)

    # misses to their rank, the fill to the places from their number on: no place is written twice
    to = row[:, None] * R + rank
    score = tl.where(score == score, score.to(tl.int32, bitcast=True), _NAN).to(tl.float32, bitcast=True)
    expert = tl.where(expert < _LOW, _LOW, tl.where(expert > _HIGH, _HIGH, expert))
    tl.store(miss_ids + to, expert.to(tl.int32), mask=tile_in & missed)
    tl.store(miss_scores + to, score, mask=tile_in & missed)
    beyond = tile_in & (column[None, :] >= misses[:, None])
    tl.store(miss_ids + at, tl.full([ROWS, COLUMNS], -1, tl.int32), mask=beyond)
    tl.store(miss_scores + at, tl.full([ROWS, COLUMNS], 0.0, tl.float32), mask=beyond)


def tile(num_tokens: int, num_picks: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile: powers of 2, no more rows than there are tokens."""
    columns = triton.next_power_of_2(num_picks)
    return min(max(_TILE // columns, 1), triton.next_power_of_2(max(num_tokens, 1))), columns


def route_shed(indices: Tensor, scores: Tensor, slot_table: Tensor) -> ShedRouting:
    """See `hotset.ops.contract`."""
    num_tokens, num_picks = indices.shape
    slots = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    mix, miss_ids, miss_scores = torch.empty_like(scores), torch.empty_like(slots), torch.empty_like(scores)
    result = ShedRouting(slots.view(torch.uint32), mix, miss_ids, miss_scores)
    if num_tokens == 0:
        return result
    rows, columns = tile(num_tokens, num_picks)
    route_shed_kernel[(triton.cdiv(num_tokens, rows),)](
        # uint32 ids are read as they are: the kernel widens them to int64 without a sign
        indices,
        scores,
        slot_table,
        slots,
        mix,
        miss_ids,
        miss_scores,
        num_tokens,
        slot_table.shape[0],
        R=num_picks,
        ROWS=rows,
        COLUMNS=columns,
        # nothing here could be fused; said so that no later edit can be
        enable_fp_fusion=False,
    )
    return result
