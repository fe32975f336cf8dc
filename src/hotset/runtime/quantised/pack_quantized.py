"""compressed-tensors' "pack-quantized" int4 and int8.

`X.weight_packed` [N, K bits / 32] int32, lowest bits first, each weight + 8 or + 128; `X.weight_scale` [N, groups];
`X.weight_zero_point` [N bits / 32, groups], packed the same way along N, where it is asymmetric; `X.weight_shape`
[N, K], which tells the bits. Source: compressed_tensors/compressors/pack_quantized (pack_to_int32), read at ac8e2ba.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hotset.errors import CheckpointError
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import FLOATS, Arrays, Layout, StoredMatrix, int4_matrix, nibbles


class PackQuantized(Layout):
    """int4 in groups or one group per row, int8 with a scale per row."""

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

    def shape(self, entries: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> tuple[int, ...]:
        rows, words = entries["packed"].shape
        groups = dict(config.get("config_groups") or {}).values()
        bits = {(group.get("weights") or {}).get("num_bits", 4) for group in groups}
        return rows, words * 32 // (8 if bits == {8} else 4)

    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], _config: Mapping[str, Any]) -> StoredMatrix:
        packed, scale = np.ascontiguousarray(arrays["packed"]), arrays["scale"]
        rows, words = packed.shape
        shape = arrays["shape"].tolist() if "shape" in arrays else [rows, words * 8]
        if shape not in ([rows, words * 8], [rows, words * 4]):
            raise CheckpointError(f"weights {shape} in {[rows, words]} words: wanted 4 or 8 bits, and whole words")
        if "g_idx" in arrays and (arrays["g_idx"] >= 0).any() and (np.diff(arrays["g_idx"]) < 0).any():
            raise CheckpointError("its columns are in activation order (weight_g_idx), which is not read")
        if shape == [rows, words * 4]:
            return _int8_matrix(packed, arrays, FLOATS[dtypes["scale"]])
        zeros = None
        if "zero" in arrays:
            zeros = np.ascontiguousarray(nibbles(np.ascontiguousarray(arrays["zero"].T)).T[:rows])
        return int4_matrix(packed.view(np.uint8), scale.reshape(rows, -1), FLOATS[dtypes["scale"]], zeros)


def _int8_matrix(packed: NDArray[Any], arrays: Arrays, scale_number: str) -> StoredMatrix:
    """Four to a word, one scale per row: the kernels have int8 in no smaller groups, and without zero points."""
    scale = arrays["scale"]
    if scale.size != len(packed):
        raise CheckpointError(f"int8 with scales {list(scale.shape)}: wanted one per row")
    if "zero" in arrays and (arrays["zero"].view(np.uint8) != 128).any():
        raise CheckpointError("int8 with zero points (asymmetric): only int4 with them is read")
    codes = (packed.view(np.uint8) ^ 128).view(np.int8)
    return StoredMatrix("int8", scale_number, codes.shape[1], codes, scale.reshape(-1))
