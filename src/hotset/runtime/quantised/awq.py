"""AWQ int4 ("gemm").

`X.qweight` [K, N / 8] int32, whose nibbles, lowest first, are columns 0 2 4 6 1 3 5 7; `X.qzeros` [groups, N / 8] the
same; `X.scales` [groups, N]. Source: AutoAWQ's awq/modules/linear/gemm.py (order_map) and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hotset.errors import CheckpointError
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import FLOATS, Arrays, Layout, StoredMatrix, int4_matrix, nibbles, pairs

_PLACE = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""Nibble of a word in which each of its 8 columns lies."""


class Awq(Layout):
    """int4 packed along N."""

    name = "AWQ"
    parts: ClassVar = {"qweight": (".qweight",), "scales": (".scales",), "qzeros": (".qzeros",)}

    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        words, scales, zeros = (entries[name].shape for name in ("qweight", "scales", "qzeros"))
        return words[1] * 8 == scales[1] and zeros[1] * 8 == scales[1]

    def shape(self, entries: Mapping[str, TensorEntry], _config: Mapping[str, Any]) -> tuple[int, ...]:
        k, words = entries["qweight"].shape
        return words * 8, k

    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], config: Mapping[str, Any]) -> StoredMatrix:
        if config.get("bits", config.get("w_bit", 4)) != 4:
            raise CheckpointError(f"AWQ of {config.get('bits', config.get('w_bit'))} bits: only 4 are read")
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise CheckpointError(f'AWQ of version {version!r}: only "gemm" is read')
        codes = pairs(np.ascontiguousarray(_columns(arrays["qweight"]).T))
        zeros = np.ascontiguousarray(_columns(arrays["qzeros"]).T)
        return int4_matrix(codes, np.ascontiguousarray(arrays["scales"].T), FLOATS[dtypes["scales"]], zeros)


def _columns(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, N / 8] words -> [n, N] their columns in order."""
    found = nibbles(words).reshape(*words.shape, 8)[..., _PLACE]
    return found.reshape(len(words), -1)
