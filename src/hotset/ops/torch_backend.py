"""`route_shed` and `split_by_residency` in plain torch operations, on any device.

Nothing here waits for the device: no `.item()`, no `nonzero`, no boolean indexing, no shape that depends on data, so
the calls can be captured into a CUDA graph. About 45 + 2 R launches; the Triton kernel does it in one. Contract:
`hotset.ops.contract`. `torch.set_flush_denormal(True)` breaks it for subnormal scores, as would compiling this file
with a compiler that reorders additions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotset.ops.contract import CANONICAL_NAN_BITS, INT32_MAX, INT32_MIN, ShedRouting, SplitRouting

# see numpy_backend: descending keys, NaN after every number, kept picks after every miss
_KEY_NAN = 2**31 + 1
_KEY_KEPT = 2**31 + 2


def route_shed(indices: Tensor, scores: Tensor, slot_table: Tensor) -> ShedRouting:
    """See `hotset.ops.contract`."""
    num_picks = indices.shape[1]
    ids, slot, missed, _ = _look_up(indices, slot_table)
    sum_all, sum_kept = _add_up(scores, missed)
    ratio = (sum_all / sum_kept).masked_fill(~missed.any(dim=1) | (sum_kept == 0), 1.0)
    mix = _canonical(scores * ratio[:, None]).masked_fill(missed, 0.0)
    order = _miss_order(scores, missed)
    beyond = torch.arange(num_picks, device=indices.device) >= missed.sum(dim=1, keepdim=True)
    miss_ids = ids.clamp(INT32_MIN, INT32_MAX).gather(1, order).masked_fill(beyond, -1).to(torch.int32)
    miss_scores = _canonical(scores.gather(1, order)).masked_fill(beyond, 0.0)
    return ShedRouting(_fill_slots(slot, missed), mix, miss_ids, miss_scores)


def split_by_residency(indices: Tensor, scores: Tensor, slot_table: Tensor) -> SplitRouting:
    """See `hotset.ops.contract`."""
    ids, slot, missed, inside = _look_up(indices, slot_table)
    not_on_cpu = ~(missed & inside)
    return SplitRouting(
        _fill_slots(slot, missed),
        scores.masked_fill(missed, 0.0),
        ids.masked_fill(not_on_cpu, -1).to(torch.int32),
        scores.masked_fill(not_on_cpu, 0.0),
    )


def masses(indices: Tensor, scores: Tensor, slot_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([T] sum_all, [T] sum_kept, [T] whether any pick is kept)."""
    _, _, missed, _ = _look_up(indices, slot_table)
    return *_add_up(scores, missed), ~missed.all(dim=1)


def _add_up(scores: Tensor, missed: Tensor) -> tuple[Tensor, Tensor]:
    kept_scores = scores.masked_fill(missed, 0.0)
    sum_all = torch.zeros_like(scores[:, 0])
    sum_kept = torch.zeros_like(sum_all)
    for r in range(scores.shape[1]):
        sum_all = sum_all + scores[:, r]
        # adding +0 for a miss changes nothing: a sum that starts at +0 is never -0
        sum_kept = sum_kept + kept_scores[:, r]
    return sum_all, sum_kept


def _look_up(indices: Tensor, slot_table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """([T, R] id int64, [T, R] slot int32 or something negative, [T, R] missed, [T, R] id within [0, E))."""
    ids = indices.to(torch.int64)
    outside = (ids < 0) | (ids >= slot_table.shape[0])
    slot = slot_table[ids.masked_fill(outside, 0)].masked_fill(outside, -1)
    return ids, slot, slot < 0, ~outside


def _fill_slots(slot: Tensor, missed: Tensor) -> Tensor:
    """Slots as uint32 with every miss replaced by its row's first kept slot, or 0."""
    picks = slot.shape[1]
    # argmax does not promise the first of equal values; the smallest position among the kept ones is the first
    position = torch.arange(picks, device=slot.device).expand_as(slot).masked_fill(missed, picks - 1)
    first = slot.gather(1, position.amin(dim=1, keepdim=True)).clamp(min=0)
    return torch.where(missed, first, slot).view(torch.uint32)


def _canonical(values: Tensor) -> Tensor:
    return values.view(torch.int32).masked_fill(values != values, CANONICAL_NAN_BITS).view(torch.float32)


def _miss_order(scores: Tensor, missed: Tensor) -> Tensor:
    """[T, R] int64 picks of each row: its misses by descending score, stable, NaN last; then the kept ones."""
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    key = -torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key = key.masked_fill(scores != scores, _KEY_NAN).masked_fill(~missed, _KEY_KEPT)
    packed = key * 64 + torch.arange(scores.shape[1], device=scores.device)
    return packed.sort(dim=1).values & 63
