"""compressed-tensors' "pack-quantized" int4.

`X.weight_packed` [N, K / 8] int32, lowest nibble first, each weight + 8; `X.weight_scale` [N, groups];
`X.weight_zero_point` [N / 8, groups], packed the same way along N, where it is asymmetric; `X.weight_shape`; source:
compressed_tensors/compressors (pack_to_int32), 0.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hotset.errors import CheckpointError
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import FLOATS, Arrays, Layout, StoredMatrix, int4_matrix, nibbles


class PackQuantized(Layout):
    """int4 in groups, or one group per row."""

    name = "compressed-tensors pack-quantized"
    parts: ClassVar = {
        "packed": (".weight_packed",),
        "scale": (".weight_scale",),
        "shape": (".weight_shape",),
        "zero": (".weight_zero_point",),
        "g_idx": (".weight_g_idx",),
    }
    optional = ("shape", "zero", "g_idx")

    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        return entries["packed"].dtype == "I32" and entries["scale"].dtype in FLOATS

    def shape(self, entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        rows, words = entries["packed"].shape
        return rows, words * 8

    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], _config: Mapping[str, Any]) -> StoredMatrix:
        packed, scale = arrays["packed"], arrays["scale"]
        rows, k = len(packed), packed.shape[1] * 8
        if "shape" in arrays and arrays["shape"].tolist() != [rows, k]:
            wanted = arrays["shape"].tolist()
            raise CheckpointError(f"weights {wanted} packed into {[rows, k]} of 4 bits: only 4 bits are read")
        if "g_idx" in arrays and (arrays["g_idx"] >= 0).any() and (np.diff(arrays["g_idx"]) < 0).any():
            raise CheckpointError("its columns are in activation order (weight_g_idx), which is not read")
        zeros = None
        if "zero" in arrays:
            zeros = np.ascontiguousarray(nibbles(np.ascontiguousarray(arrays["zero"].T)).T[:rows])
        return int4_matrix(packed.view(np.uint8), scale.reshape(rows, -1), FLOATS[dtypes["scale"]], zeros)
