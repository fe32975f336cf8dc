"""gpt-oss: all experts of a matrix in one tensor of MXFP4 blocks, scales apart.

`X_blocks` [E, N, K / 32, 16] bytes, low nibble first, and `X_scales` [E, N, K / 32] E8M0: Transformers'
integrations/mxfp4.py (5.24), whose dequantised parameter is [E, K, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import EXPONENTS, Arrays, Layout, StoredMatrix


class FusedMxfp4(Layout):
    """`X_blocks` and `X_scales`; the model's parameter is `X`."""

    name = "MXFP4, experts fused"
    parts: ClassVar = {"blocks": ("_blocks",), "scales": ("_scales",)}
    logical_suffix = ""
    is_fused = True
    is_transposed = True

    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        blocks, scales = entries["blocks"], entries["scales"]
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and blocks.shape[:3] == scales.shape
        return fits and blocks.dtype == "U8" and scales.dtype in EXPONENTS

    def shape(self, entries: Mapping[str, TensorEntry], _config: Mapping[str, Any]) -> tuple[int, ...]:
        experts, rows, groups, _ = entries["blocks"].shape
        return experts, groups * 32, rows

    def matrix(self, arrays: Arrays, _dtypes: Mapping[str, str], _config: Mapping[str, Any]) -> StoredMatrix:
        blocks = arrays["blocks"]
        codes = blocks.reshape(len(blocks), -1)
        return StoredMatrix("mxfp4", "e8m0", codes.shape[1] * 2, codes, arrays["scales"])
