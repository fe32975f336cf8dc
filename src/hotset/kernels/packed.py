"""Experts packed for the compiled kernels: into bytes and back, and computed from bytes that lie wherever the caller
keeps them.

Knows: the packed layout (`formats.Layout`) and the compiled functions. Holds no expert: who calls says where each one
lies, so that there is one owner of that (`layer.py` for itself, the runtime's store for a model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.errors import HotsetError, OpsError
from hotset.kernels import native
from hotset.kernels.call import Call, bad_id
from hotset.kernels.formats import (
    FORMATS,
    NUMBER_DTYPES,
    NUMBERS,
    Buffer,
    ExpertWeights,
    Floats,
    LayerSpec,
    MatrixLayout,
    checked_weights,
    numbers_to_float,
)
from hotset.kernels.threads import torch_team

_ID_BYTES = {"int64": 8, "int32": 4, "int16": 2}


class PackedKernel:
    """The compiled functions for one layer's spec. Raises BackendError where the kernels cannot be compiled.

    layer: the model's own number of the layer; absent: what to raise for a pick whose expert has no address.
    """

    def __init__(self, spec: LayerSpec, layer: int, absent: Callable[[int], HotsetError]) -> None:
        self.spec = spec
        self.layer = layer
        self._absent = absent
        handle = native.library().handle
        self._moe, self._combine = handle.hotset_moe, handle.hotset_combine
        self._c_layer = native.CLayer.of(spec)
        self._flip = 0x80808080 if spec.format == "int8" else 0

    def pack(self, weights: ExpertWeights, packed: NDArray[np.uint8]) -> None:
        """Packs an expert into `packed`, [spec.layout.expert_bytes] bytes of the caller's on a multiple of 64.

        Raises OpsError: shapes or types that the spec does not say, scales that are NaN or infinite, zero points above
        15, NaN among FP8 weights.
        """
        self.check(packed)
        layout = self.spec.layout
        parts = checked_weights(self.spec, weights)
        if self.spec.kind.code == FORMATS["mxfp8"].code and any(
            native.has_fp8_nan(np.ascontiguousarray(data)) for data, *_ in parts
        ):
            raise OpsError(
                f"an FP8 weight of layer {self.layer} is NaN: the checkpoint is damaged, or not {self.spec.format}"
            )
        for matrix, (data, scales, zeros, bias) in zip((layout.first, layout.second), parts, strict=True):
            native.pack(packed, data, matrix, self._flip)
            rows = matrix.source_row
            there = rows >= 0
            for values, at in ((scales, matrix.scales_at), (zeros, matrix.zeros_at)):
                if values is not None:
                    by_panel = np.where(there[:, None], values[rows], values.dtype.type(0)).reshape(
                        matrix.panels, -1, matrix.groups
                    )
                    _by_group(packed, matrix, at, values.dtype)[:] = by_panel.transpose(0, 2, 1)
            if bias is not None:
                floats = np.where(there, numbers_to_float(bias, self.spec.bias)[rows], np.float32(0))
                packed[matrix.bias_at :][: len(rows) * 4].view(np.float32)[:] = floats

    def unpack(self, packed: NDArray[np.uint8], into: Mapping[str, NDArray[Any]] | None = None) -> ExpertWeights:
        """The expert as it was packed, byte for byte, in NumPy arrays of the shapes in `ExpertWeights`: new ones, but
        for the "gate_up" and "down" of `into`."""
        self.check(packed)
        spec, layout = self.spec, self.spec.layout
        parts: dict[str, Any] = {}
        for name, matrix in (("gate_up", layout.first), ("down", layout.second)):
            shape = matrix.rows, matrix.row_bytes // np.dtype(spec.kind.dtype).itemsize
            shape = shape[::-1] if spec.transposed else shape
            parts[name] = np.empty(shape, spec.kind.dtype) if into is None else into[name]
            native.unpack(packed, parts[name].T if spec.transposed else parts[name], matrix, self._flip)
            if matrix.scales_at >= 0:
                scales = _rows_of(_by_group(packed, matrix, matrix.scales_at, NUMBER_DTYPES[spec.scale_number]), matrix)
                if spec.kind.scales == "row":
                    scales = scales[:, 0]
                elif spec.kind.scales == "block":
                    scales = np.ascontiguousarray(scales[:: spec.kind.group])
                parts[f"{name}_scale"] = scales
            if matrix.zeros_at >= 0:
                parts[f"{name}_zero"] = _rows_of(_by_group(packed, matrix, matrix.zeros_at, np.uint8), matrix)
            if matrix.bias_at >= 0:
                bias = np.empty(matrix.rows, np.float32)
                there = matrix.source_row >= 0
                packed_bias = packed[matrix.bias_at :][: len(there) * 4].view(np.float32)
                bias[matrix.source_row[there]] = packed_bias[there]
                parts[f"{name}_bias"] = _exact(bias, spec.bias)
        return ExpertWeights(**parts)

    def run(self, addresses: NDArray[np.uint64], call: Call, out: Buffer, *, accumulate: bool = False) -> None:
        """Fills `out`: [T, H], or [T, K, H] float32 where the call has no weights.

        addresses: [E] of packed experts, 0 = absent; their bytes must stay where they are until this returns.
        accumulate: `out` is float32 and holds the sum of earlier picks; adding a token's picks in several calls gives
        the bits of one call with the same order. Raises OpsError for an id out of range, and what `absent` gives.
        """
        request = self._request(call, call.weights and out, None if call.weights else out, addresses)
        request.accumulate = accumulate
        status = self._moe(self._c_layer, request)
        if status == native.ABSENT:
            raise self._absent(request.bad_id)
        if status == native.BAD_ID:
            raise bad_id(self.spec, self.layer, request.bad_id)
        if status == native.NO_MEMORY:
            num_tokens, top_k = call.ids.shape
            raise MemoryError(f"no scratch memory for {num_tokens} tokens x {top_k} picks in layer {self.layer}")

    def combine(self, call: Call, picks: Buffer, out: Buffer) -> None:
        """Fills `out` [T, H] with the weighted sum of picks [T, K, H] float32: the bits of one `run` with weights."""
        self._combine(self._c_layer, self._request(call, out, picks, None))

    def check(self, packed: NDArray[np.uint8]) -> None:
        """Raises OpsError where these are no bytes for a packed expert."""
        size = self.spec.layout.expert_bytes
        if (
            packed.dtype != np.uint8
            or packed.shape != (size,)
            or not packed.flags.c_contiguous
            or packed.ctypes.data % 64
        ):
            wanted = f"{size} contiguous bytes on a multiple of 64"
            raise OpsError(f"a packed expert is {packed.dtype} {list(packed.shape)}: wanted {wanted}")

    def _request(
        self, call: Call, out: Buffer | None, picks: Buffer | None, addresses: NDArray[np.uint64] | None
    ) -> native.CCall:
        weights, (num_tokens, top_k) = call.weights, call.ids.shape
        return native.CCall(
            None if addresses is None else addresses.__array_interface__["data"][0],
            call.tokens.address,
            call.ids.address,
            weights.address if weights else None,
            out.address if out else None,
            picks.address if picks else None,
            torch_team(call.threads),
            num_tokens,
            top_k,
            _ID_BYTES[call.ids.kind],
            NUMBERS[call.tokens.kind],
            NUMBERS[weights.kind] if weights else 0,
            NUMBERS[out.kind] if out else 0,
            call.threads,
            0,
            0,
        )


def _by_group(packed: NDArray[np.uint8], matrix: MatrixLayout, at: int, dtype: Any) -> NDArray[Any]:
    """[panels, groups, 64] of `packed`: the scales or zero points that lie `at`."""
    count = len(matrix.source_row) * matrix.groups * np.dtype(dtype).itemsize
    flat: NDArray[Any] = packed[at : at + count].view(dtype)
    return flat.reshape(matrix.panels, matrix.groups, -1)


def _rows_of(by_group: NDArray[Any], matrix: MatrixLayout) -> NDArray[Any]:
    """The stored [N, groups] of [panels, groups, 64]."""
    there = matrix.source_row >= 0
    rows = np.empty((matrix.rows, matrix.groups), by_group.dtype)
    rows[matrix.source_row[there]] = by_group.transpose(0, 2, 1).reshape(-1, matrix.groups)[there]
    return rows


def _exact(bias: Floats, number: str) -> NDArray[Any]:
    """float32 back to the number type it came from, without rounding."""
    if number == "bf16":
        return (bias.view(np.uint32) >> 16).astype(np.uint16)
    return bias.astype(np.float16) if number == "fp16" else bias
