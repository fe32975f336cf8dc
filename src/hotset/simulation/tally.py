"""Counting what replay served: one compiled pass over a block, into per-token and per-layer sums.

A decode token reads every expert it picks. The tokens of a prefill chunk share each expert, so only the first pick of
an expert in its (layer, chunk) reads it, and only the first miss of a (layer, chunk) pays the round trip.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotset.adaptation.loops import HIT, NO_PICK


class Tally(NamedTuple):
    """Sums over layers for each token [T], and over tokens for each layer [L]."""

    picks: NDArray[np.int32]
    hits: NDArray[np.int32]
    routed_rows: NDArray[np.int32]
    """Layers that routed the token."""
    resident_rows: NDArray[np.int32]
    """Layers all of whose picks were hits."""
    hit_reads: NDArray[np.int32]
    """Experts read in the arena on the token's behalf."""
    hit_bytes: NDArray[np.int64]
    miss_reads: NDArray[np.int32]
    miss_bytes: NDArray[np.int64]
    round_trips: NDArray[np.int32]
    loads: NDArray[np.int32]
    load_bytes: NDArray[np.int64]
    row_picks: NDArray[np.int64]
    row_hits: NDArray[np.int64]
    row_loads: NDArray[np.int64]


def empty_tally(num_tokens: int, num_layers: int) -> Tally:
    """All zeros."""
    dtypes = [np.int32] * 5 + [np.int64, np.int32, np.int64, np.int32, np.int32, np.int64]
    per_token = [np.zeros(num_tokens, dtype) for dtype in dtypes]
    return Tally(*per_token, *(np.zeros(num_layers, np.int64) for _ in range(3)))


@njit(cache=True, nogil=True)
def add_block(
    tally, first_row, first_token, ids, served, loads, load_bytes, expert_bytes, counted, chunk, read, missed
):
    """Add a replayed block [R, T, K]. counted [T_all]: tokens that count. chunk [T_all]: prefill chunk, -1 = decode.

    read [L, E], missed [L]: latest chunk in which the layer read the expert, or missed at all; kept between calls.
    """
    for i in range(ids.shape[0]):
        row = first_row + i
        for t in range(ids.shape[1]):
            token = first_token + t
            if not counted[token]:
                continue
            here = chunk[token]
            picks = hits = 0
            any_miss = False
            for k in range(ids.shape[2]):
                verdict = served[i, t, k]
                if verdict == NO_PICK:
                    continue
                picks += 1
                expert = ids[i, t, k]
                if verdict == HIT:
                    hits += 1
                if here >= 0:
                    if read[row, expert] == here:
                        continue
                    read[row, expert] = here
                if verdict == HIT:
                    tally.hit_reads[token] += 1
                    tally.hit_bytes[token] += expert_bytes[row, expert]
                else:
                    any_miss = True
                    tally.miss_reads[token] += 1
                    tally.miss_bytes[token] += expert_bytes[row, expert]
            if any_miss and (here < 0 or missed[row] != here):
                tally.round_trips[token] += 1
                missed[row] = here
            if picks > 0:
                tally.routed_rows[token] += 1
                if picks == hits:
                    tally.resident_rows[token] += 1
            tally.picks[token] += picks
            tally.hits[token] += hits
            tally.loads[token] += loads[i, t]
            tally.load_bytes[token] += load_bytes[i, t]
            tally.row_picks[row] += picks
            tally.row_hits[row] += hits
            tally.row_loads[row] += loads[i, t]
