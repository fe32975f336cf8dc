"""Compiled loops over one layer's picks. Import this module inside functions: it loads numba.

Every function takes ids [T, K] int16 (-1 = no pick) as `frozen` returns them: read-only and contiguous, so that each
loop is compiled once. Plain twins of the loops are in tests/.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


def frozen(ids: NDArray[np.int16]) -> NDArray[np.int16]:
    """The same ids as a read-only contiguous int16 array."""
    view = np.ascontiguousarray(ids, np.int16).view()
    view.flags.writeable = False
    return view


@njit(cache=True, nogil=True)
def count_hits(ids, resident):  # type: ignore[no-untyped-def]
    """(picks, hits, tokens with a pick, tokens all of whose picks hit); resident [E] uint8."""
    picks = hits = routed = whole = 0
    num_tokens, top_k = ids.shape
    for token in range(num_tokens):
        here = found = 0
        for k in range(top_k):
            expert = ids[token, k]
            if expert >= 0:
                here += 1
                found += resident[expert]
        picks += here
        hits += found
        if here > 0:
            routed += 1
            if here == found:
                whole += 1
    return picks, hits, routed, whole
