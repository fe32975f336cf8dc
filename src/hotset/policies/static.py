"""The plan as it is: nothing ever moves."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from hotset.adaptation.loops import serve
from hotset.policies import Setting
from hotset.residency import Swap


@njit(cache=True, nogil=True)
def _replay(a, first_row, ids, served):
    for i in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            serve(a, first_row + i, ids[i, t], served[i, t])


class StaticPolicy:
    """Proposes nothing."""

    name = "static"

    def __init__(self, setting: Setting) -> None:
        self.residency = setting.residency

    def request(self, row: int, expert: int) -> Swap | None:  # noqa: ARG002
        return None

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:  # noqa: ARG002
        return iter(())

    def replay(
        self,
        first_row: int,
        ids: NDArray[np.int16],
        served: NDArray[np.uint8],
        loads: NDArray[np.int32],  # noqa: ARG002
        load_bytes: NDArray[np.int64],  # noqa: ARG002
    ) -> None:
        _replay(self.residency.arrays, first_row, ids, served)


def make(_name: str, setting: Setting) -> StaticPolicy:
    return StaticPolicy(setting)
