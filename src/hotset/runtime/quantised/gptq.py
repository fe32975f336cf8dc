"""GPTQ int4.

`X.qweight` [K / 8, N] int32, lowest nibble first along K; `X.qzeros` [groups, N / 8], each zero - 1 ("gptq_v2" stores
the zero itself); `X.scales` [groups, N]; `X.g_idx` [K] the group of each k. Source: GPTQModel's
nn_modules/qlinear (pack, dequantize_weight) and its note on checkpoint_format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hotset.errors import CheckpointError
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.quantised.contract import FLOATS, Arrays, Layout, StoredMatrix, int4_matrix, nibbles


class Gptq(Layout):
    """int4 packed along K."""

    name = "GPTQ"
    parts: ClassVar = {"qweight": (".qweight",), "scales": (".scales",), "qzeros": (".qzeros",), "g_idx": (".g_idx",)}
    optional = ("g_idx",)

    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        words, scales, zeros = (entries[name].shape for name in ("qweight", "scales", "qzeros"))
        return words[1] == scales[1] and zeros[1] * 8 == scales[1]

    def shape(self, entries: Mapping[str, TensorEntry], _config: Mapping[str, Any]) -> tuple[int, ...]:
        words, rows = entries["qweight"].shape
        return rows, words * 8

    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], config: Mapping[str, Any]) -> StoredMatrix:
        k, groups = arrays["qweight"].shape[0] * 8, len(arrays["scales"])
        if config.get("bits", 4) != 4:
            raise CheckpointError(f"GPTQ of {config['bits']} bits: only 4 are read")
        if "g_idx" in arrays and (arrays["g_idx"] != np.arange(k) // -(-k // groups)).any():
            raise CheckpointError("its columns are in activation order (desc_act, g_idx), which is not read")
        stored = nibbles(arrays["qzeros"])
        zeros: Any = stored if config.get("checkpoint_format") == "gptq_v2" else stored + 1
        if zeros.max() > 15:
            raise CheckpointError("a zero point of 16, which four bits do not hold")
        if config.get("sym", False):
            if (zeros != 8).any():
                raise CheckpointError(f"zero points from {zeros.min()} to {zeros.max()}, and its config says sym")
            zeros = None
        codes = np.ascontiguousarray(arrays["qweight"].T).view(np.uint8)
        scales = np.ascontiguousarray(arrays["scales"].T)
        return int4_matrix(
            codes, scales, FLOATS[dtypes["scales"]], None if zeros is None else np.ascontiguousarray(zeros.T)
        )
