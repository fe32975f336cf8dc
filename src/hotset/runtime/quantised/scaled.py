"""A weight beside its scales: FP8 in blocks (DeepSeek-V3, Qwen3-FP8), per channel or per tensor (compressed-tensors),
MXFP8, MXFP4 per matrix (DeepSeek-V4; compressed-tensors' mxfp4-pack-quantized calls it `X.weight_packed`), int8 per
channel.

Which of them it is, the shapes say: as in Transformers' `Fp8Dequantize` (integrations/finegrained_fp8.py, 5.24), the
block is the weight's shape over that of the scales. Byte scales are E8M0 exponents there, as are F8_E8M0 ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hotset.errors import CheckpointError
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import EXPONENTS, FLOATS, Arrays, Layout, StoredMatrix

_FP4 = ("I8", "U8", "F4")


class Scaled(Layout):
    """`X.weight` or `X.weight_packed`, and `X.weight_scale_inv`, `X.weight_scale` or `X.scale`."""

    name = "weights with scales"
    parts: ClassVar = {
        "weight": (".weight", ".weight_packed"),
        "scale": (".weight_scale_inv", ".weight_scale", ".scale"),
        "zero": (".weight_zero_point",),
    }
    optional = ("zero",)

    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        return entries["weight"].dtype in ("F8_E4M3", *_FP4) and len(entries["weight"].shape) == 2

    def shape(self, entries: Mapping[str, TensorEntry], _config: Mapping[str, Any]) -> tuple[int, ...]:
        rows, k = entries["weight"].shape
        is_fp4 = entries["weight"].dtype in _FP4 and entries["scale"].dtype in EXPONENTS
        return rows, 2 * k if is_fp4 else k

    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], _config: Mapping[str, Any]) -> StoredMatrix:
        codes, scales = arrays["weight"], arrays["scale"]
        rows, k = codes.shape
        if "zero" in arrays and arrays["zero"].any():  # symmetric ones may have zeros for them
            raise CheckpointError(f"{dtypes['weight']} with zero points (asymmetric): only int4 with them is read")
        grid = scales.shape if scales.ndim == 2 else (scales.size, 1)
        number = "e8m0" if dtypes["scale"] in EXPONENTS else FLOATS.get(dtypes["scale"], "")
        if not number:
            raise CheckpointError(f"scales of {dtypes['scale']}: wanted F32, F16, BF16 or E8M0")
        if dtypes["weight"] != "F8_E4M3" and number == "e8m0" and grid == (rows, 2 * k / 32):
            return StoredMatrix("mxfp4", number, 2 * k, codes.view(np.uint8), scales)
        if dtypes["weight"] == "I8" and number != "e8m0" and grid in ((rows, 1), (1, 1)):
            return StoredMatrix("int8", number, k, codes, np.broadcast_to(scales.reshape(-1), (rows,)).copy())
        if dtypes["weight"] == "F8_E4M3":
            if number == "e8m0" and grid == (rows, k / 32):
                return StoredMatrix("mxfp8", number, k, codes, scales)
            if grid == (math.ceil(rows / 128), math.ceil(k / 128)) and scales.ndim == 2:
                return StoredMatrix("fp8_block128", number, k, codes, scales.reshape(grid))
            if number != "e8m0" and grid in ((rows, 1), (1, 1)):
                return StoredMatrix(
                    "fp8_channel", number, k, codes, np.broadcast_to(scales.reshape(-1), (rows,)).copy()
                )
        raise CheckpointError(
            f"{dtypes['weight']} {[rows, k]} with {dtypes['scale']} scales {list(scales.shape)}: wanted FP8 in blocks "
            "of 128 x 128, per row or per tensor, MXFP8, MXFP4 or int8 per row"
        )
