"""What one expert's weights look like as stored, and as packed for the kernels.

Knows: the formats of checkpoints (shapes, scales, groups), the activation between the two matrices, and the byte layout
of a packed expert. Does not know: which expert is where, threads, the compiled library.

Shapes: the first matrix ("gate_up") is [2F, H], or [F, H] without a gate; the second ("down") is [H, F]. Rows of a
gated first matrix are all gates then all ups, or alternate (`interleaved`, gpt-oss). `transposed` swaps both shapes
(gpt-oss, some others). NumPy has no bfloat16 and no float8: such values are np.uint16 and np.uint8 bits here; torch
tensors are taken as they are.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotset.errors import OpsError

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

PANEL = 64
"""Rows that a kernel task computes together: 4 streams of 16."""
STEP = 32
"""K is padded to a multiple of this; also the group that activations are quantised in."""

NUMBERS = {"none": 0, "fp32": 1, "fp16": 2, "bf16": 3, "e8m0": 4}
"""Codes of number types in the compiled library."""
NUMBER_BYTES = {"none": 0, "fp32": 4, "fp16": 2, "bf16": 2, "e8m0": 1}
NUMBER_DTYPES: dict[str, type] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "e8m0": np.uint8}

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1 (OCP Microscaling Formats 1.0, table 5)."""


@dataclass(frozen=True)
class Format:
    """How weights are stored. `scales` says what shares a scale: nothing, a row, `group` k's of a row, or a block of
    128 rows x 128 k's."""

    name: str
    code: int
    bits: int
    dtype: type
    scales: Literal["none", "row", "group", "block"] = "none"
    group: int = 0
    scale_numbers: tuple[str, ...] = ("none",)

    def groups(self, k: int) -> int:
        """Scales along K of one row."""
        return 1 if self.scales == "row" else math.ceil(k / self.group) if self.group else 0


_REAL = ("fp32", "bf16", "fp16")
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 0, 32, np.float32),
        Format("fp16", 1, 16, np.float16),
        Format("bf16", 2, 16, np.uint16),
        Format("int8", 3, 8, np.int8, "row", 0, _REAL),
        Format("int4_g32", 4, 4, np.uint8, "group", 32, _REAL),
        Format("int4_g128", 4, 4, np.uint8, "group", 128, _REAL),
        Format("fp8_block128", 6, 8, np.uint8, "block", 128, (*_REAL, "e8m0")),
        Format("fp8_channel", 6, 8, np.uint8, "row", 0, _REAL),
        Format("mxfp4", 5, 4, np.uint8, "group", 32, ("e8m0",)),
        Format("mxfp8", 6, 8, np.uint8, "group", 32, ("e8m0",)),
    )
}
"""int8: weight times the row's scale. int4: two weights a byte, low nibble first, stored + 8. fp8 and mxfp8: E4M3 (no
infinities). mxfp4: E2M1 codes, low nibble first. e8m0: a power of two, exponent + 127 (OCP Microscaling Formats
1.0). int4 with `LayerSpec.zero_points`: (nibble - the group's zero) times the group's scale."""


@dataclass(frozen=True)
class Activation:
    """Between the matrices. Gated: act(min(gate, limit) * alpha-scaled) * (clamp(up, -limit, limit) + up_offset);
    otherwise act(x).

    SwiGLU is the default. gpt-oss: `Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)`. DeepSeek-V4:
    `Activation(limit=10.0)`. alpha only changes silu: x * sigmoid(alpha * x).
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise OpsError(f"activation {self.kind!r} is unknown: wanted one of {', '.join(self.KINDS)}")
        if self.alpha != 1.0 and self.kind != "silu":
            raise OpsError(f"activation {self.kind!r} has no alpha (got {self.alpha}): only silu does")
        if not self.limit > 0:
            raise OpsError(f"activation limit is {self.limit}: wanted a number above 0")


@dataclass(frozen=True)
class LayerSpec:
    """One layer's experts: everything but their values. Raises OpsError where the parts do not fit each other."""

    format: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation = field(default_factory=Activation)
    gated: bool = True
    bias: Literal["none", "fp32", "fp16", "bf16"] = "none"
    interleaved: bool = False
    transposed: bool = False
    scale_number: str = ""
    """fp32, fp16, bf16 or e8m0; empty = what the format is usually stored with."""
    zero_points: bool = False
    """int4 only: each scale has a zero of 0 to 15 beside it (asymmetric, as AWQ and GPTQ make them)."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise OpsError(f"weight format {self.format!r} is unknown: wanted one of {', '.join(FORMATS)}")
        for name in ("num_experts", "hidden", "intermediate"):
            if getattr(self, name) < 1:
                raise OpsError(f"{name} is {getattr(self, name)}: wanted 1 or more")
        kind = FORMATS[self.format]
        if not self.scale_number:
            object.__setattr__(self, "scale_number", kind.scale_numbers[0])
        if self.scale_number not in kind.scale_numbers:
            raise OpsError(
                f"{self.format} scales in {self.scale_number}: wanted one of {', '.join(kind.scale_numbers)}"
            )
        if self.zero_points and kind.code != FORMATS["int4_g32"].code:
            raise OpsError(f"{self.format} has no zero points: only int4 formats do")
        if self.bias not in ("none", *_REAL):
            raise OpsError(f"biases in {self.bias!r}: wanted none, fp32, fp16 or bf16")
        if self.transposed and kind.scales != "none":
            raise OpsError(f"transposed {self.format} weights are not read: give them as [2F, H] and [H, F]")
        if self.interleaved and not self.gated:
            raise OpsError("interleaved gate and up rows of a layer without a gate: set gated or drop interleaved")
        if not self.gated and (self.activation.limit != math.inf or self.activation.up_offset):
            raise OpsError("limit and up_offset belong to a gate: this layer has none")

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def first_rows(self) -> int:
        """N of the first matrix: 2F, or F without a gate."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self)


@dataclass(frozen=True, eq=False)
class MatrixLayout:
    """Where one matrix lies in a packed expert."""

    rows: int
    k: int
    panels: int
    padded_k: int
    row_bytes: int
    """of a stored row"""
    words: int
    """4-byte words of a packed row"""
    group_steps: int
    """steps of 32 k's that share a scale"""
    groups: int
    """scales of a row, 0 = none"""
    source_row: NDArray[np.int32]
    """[panels * 64] row of the stored matrix at each packed row, -1 = padding"""
    data_at: int
    scales_at: int
    """-1 = none; as are the two below"""
    zeros_at: int
    """a byte each, in the order of the scales"""
    bias_at: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A packed expert: one buffer that holds both matrices, their scales, zero points and biases, each part on a
    multiple of 64 bytes."""

    first: MatrixLayout
    second: MatrixLayout
    expert_bytes: int
    stored_bytes: int
    """of the weights, scales and zero points (half a byte each, though a packed one takes a whole) as a checkpoint has
    them: what a plan counts"""

    @staticmethod
    def of(spec: LayerSpec) -> Layout:
        at = 0
        parts = []
        f = spec.intermediate
        made = PANEL // 2 if spec.gated else PANEL
        unit = np.arange(math.ceil(f / made) * made).reshape(-1, made)
        unit = np.where(unit < f, unit, -1)
        if not spec.gated:
            first = unit.reshape(-1)
        elif spec.interleaved:
            first = np.concatenate([np.where(unit < 0, -1, 2 * unit), np.where(unit < 0, -1, 2 * unit + 1)], 1).reshape(
                -1
            )
        else:
            first = np.concatenate([unit, np.where(unit < 0, -1, unit + f)], 1).reshape(-1)
        second = np.arange(math.ceil(spec.hidden / PANEL) * PANEL)
        second = np.where(second < spec.hidden, second, -1)
        kind = spec.kind
        stored = 0
        for rows, k, source in ((spec.first_rows, spec.hidden, first), (spec.hidden, f, second)):
            panels, padded_k = len(source) // PANEL, math.ceil(k / STEP) * STEP
            steps = padded_k // STEP
            group_steps = kind.group // STEP if kind.group else steps
            groups = math.ceil(steps / group_steps) if kind.scales != "none" else 0
            data_at, at = at, _aligned(at + len(source) * padded_k * kind.bits // 8)
            scales_at, zeros_at, bias_at = -1, -1, -1
            if groups:
                scales_at, at = at, _aligned(at + len(source) * groups * NUMBER_BYTES[spec.scale_number])
            if spec.zero_points:
                zeros_at, at = at, _aligned(at + len(source) * groups)
                stored += math.ceil(rows * groups / 2)
            if spec.bias != "none":
                bias_at, at = at, _aligned(at + len(source) * 4)
            row_bytes = math.ceil(k * kind.bits / 8)
            stored += rows * row_bytes + math.prod(scale_shape(kind, rows, k)) * NUMBER_BYTES[spec.scale_number]
            parts.append(
                MatrixLayout(
                    rows, k, panels, padded_k, row_bytes, padded_k * kind.bits // 32, group_steps, groups,
                    source.astype(np.int32), data_at, scales_at, zeros_at, bias_at,
                )
            )  # fmt: skip
        return Layout(parts[0], parts[1], at, stored)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One expert as stored: NumPy arrays or torch tensors on the CPU. See `LayerSpec` and `FORMATS` for shapes and
    dtypes.

    gate_up: [2F, H] ([F, H] without a gate); down: [H, F]; two weights a byte in 4-bit formats ([2F, H/2], or gpt-oss'
    [2F, H/32, 16]). Scales: int8, fp8_channel [2F] and [H]; groups [2F, ceil(H/group)] and [H, ceil(F/group)];
    fp8_block128 [ceil(2F/128), ceil(H/128)] and [ceil(H/128), ceil(F/128)]. Zeros, uint8 of 0 to 15, one
    a byte: the shape of the scales. Biases: [2F] and [H].
    """

    gate_up: Any
    down: Any
    gate_up_scale: Any = None
    down_scale: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None
    gate_up_zero: Any = None
    down_zero: Any = None


_NUMPY_KINDS: dict[Any, str] = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(np.uint16): "bf16",
    **{np.dtype(t): t.__name__ for t in (np.int64, np.int32, np.int16, np.int8, np.uint8)},
}
_TORCH_KINDS = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "uint8",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "uint8",
}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """C-contiguous numbers in host memory. `kind`: fp32, fp16, bf16, e4m3, or NumPy's name of an integer type."""

    address: int
    kind: str
    shape: tuple[int, ...]
    owner: Any
    """the array or tensor whose memory it is"""


def is_torch(value: Any) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_buffer(name: str, value: Any) -> Buffer:
    """The memory of an array or CPU tensor; a contiguous copy where it is not contiguous.

    Raises OpsError for other types and for tensors on another device.
    """
    if is_torch(value):
        if value.device.type != "cpu":
            raise OpsError(f"{name} is on {value.device}: wanted the CPU")
        value = value.detach().contiguous()
        return Buffer(value.data_ptr(), _torch_kind(value.dtype), tuple(value.shape), value)
    if not isinstance(value, np.ndarray):
        raise OpsError(f"{name} is a {type(value).__name__}: wanted a NumPy array or a torch tensor")
    kind = _numpy_kind(value.dtype)
    if not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    return Buffer(value.__array_interface__["data"][0], kind, value.shape, value)


def as_array(name: str, value: Any) -> tuple[NDArray[Any], str]:
    """The bits of an array or CPU tensor as NumPy, strides kept, not copied, and its kind as in `Buffer`. Raises
    OpsError as `as_buffer`."""
    if is_torch(value):
        if value.device.type != "cpu":
            raise OpsError(f"{name} is on {value.device}: wanted the CPU")
        torch, kind = sys.modules["torch"], _torch_kind(value.dtype)
        value = value.detach()
        if kind == "bf16":
            return value.view(torch.int16).numpy().view(np.uint16), kind
        return (value.view(torch.uint8) if kind in ("e4m3", "uint8") else value).numpy(), kind
    if not isinstance(value, np.ndarray):
        raise OpsError(f"{name} is a {type(value).__name__}: wanted a NumPy array or a torch tensor")
    kind = _numpy_kind(value.dtype)
    return (value if value.dtype in _NUMPY_KINDS else value.view(np.uint16 if kind == "bf16" else np.uint8)), kind


def _numpy_kind(dtype: np.dtype[Any]) -> str:
    # bfloat16 and float8_e4m3fn are ml_dtypes' names; any other type is named as it is, for the error that follows
    return _NUMPY_KINDS.get(dtype) or {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(dtype.name, dtype.name)


@lru_cache(maxsize=64)
def _torch_kind(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _TORCH_KINDS.get(name, name)


def checked_weights(
    spec: LayerSpec, weights: ExpertWeights
) -> tuple[tuple[NDArray[Any], NDArray[Any] | None, Bytes | None, NDArray[Any] | None], ...]:
    """((data, scales, zeros, bias) of the first matrix, of the second): shapes and types as `spec` says, scales
    [N, groups] and finite, zeros [N, groups] of 0 to 15.

    data is [N, K] in stored elements (or [N, ceil(K/2)] bytes), perhaps a transposed view. Raises OpsError otherwise.
    """
    out = []
    for name, rows, k in (("gate_up", spec.first_rows, spec.hidden), ("down", spec.hidden, spec.intermediate)):
        data = _checked_data(spec, name, getattr(weights, name), rows, k)
        scales = _checked_scales(spec, f"{name}_scale", getattr(weights, f"{name}_scale"), rows, k)
        zeros = _checked_zeros(spec, f"{name}_zero", getattr(weights, f"{name}_zero"), rows, k)
        bias_name, bias = f"{name}_bias", getattr(weights, f"{name}_bias")
        if (bias is None) != (spec.bias == "none"):
            raise OpsError(
                f"{bias_name} is {'missing' if bias is None else 'there'}, but the layer's biases are {spec.bias!r}"
            )
        if bias is not None:
            array, kind = as_array(bias_name, bias)
            if kind != spec.bias or array.shape != (rows,):
                raise OpsError(f"{bias_name} is {kind} {list(array.shape)}: wanted {spec.bias} [{rows}]")
            bias = np.ascontiguousarray(array)
        out.append((data, scales, zeros, bias))
    return tuple(out)


def _checked_data(spec: LayerSpec, name: str, value: Any, rows: int, k: int) -> NDArray[Any]:
    kind = spec.kind
    array, number = as_array(name, value)
    wanted = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "int8"}.get(kind.name, "uint8")
    if number != wanted and not (kind.code == FORMATS["mxfp8"].code and number == "e4m3"):
        raise OpsError(f"{name} is {number}: wanted {wanted} for {spec.format}")
    if kind.bits == 4:
        if array.ndim == 3 and k % STEP == 0 and array.shape[1:] == (k // STEP, STEP // 2):
            array = array.reshape(array.shape[0], -1)
        k = math.ceil(k / 2)
    shape = (k, rows) if spec.transposed else (rows, k)
    if array.shape != shape:
        raise OpsError(f"{name} has shape {list(array.shape)}: wanted {list(shape)} for {spec.format}")
    if spec.transposed:
        array = array.T
    return array if min(array.strides) >= 0 else np.ascontiguousarray(array)


def scale_shape(kind: Format, rows: int, k: int) -> tuple[int, ...]:
    if kind.scales == "block":
        return math.ceil(rows / kind.group), math.ceil(k / kind.group)
    if kind.scales == "row":
        return (rows,)
    return (rows, kind.groups(k)) if kind.scales == "group" else (0,)


def _checked_scales(spec: LayerSpec, name: str, value: Any, rows: int, k: int) -> NDArray[Any] | None:
    kind = spec.kind
    if kind.scales == "none":
        if value is not None:
            raise OpsError(f"{name} is there, but {spec.format} has no scales: leave it out")
        return None
    if value is None:
        raise OpsError(f"{name} is missing: {spec.format} needs it")
    array, number = as_array(name, value)
    shape = scale_shape(kind, rows, k)
    wanted = "uint8" if spec.scale_number == "e8m0" else spec.scale_number
    if array.shape == (*shape, 1) and kind.scales == "row":
        array = array[:, 0]
    if number != wanted or array.shape != shape:
        raise OpsError(f"{name} is {number} {list(array.shape)}: wanted {wanted} {list(shape)} for {spec.format}")
    bad = array == 255 if spec.scale_number == "e8m0" else ~np.isfinite(numbers_to_float(array, spec.scale_number))
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise OpsError(f"{name} {where} is NaN or infinite: the checkpoint is damaged, or not {spec.format}")
    if kind.scales == "block":
        array = np.repeat(array, kind.group, axis=0)[:rows]
    return array.reshape(rows, -1)


def _checked_zeros(spec: LayerSpec, name: str, value: Any, rows: int, k: int) -> Bytes | None:
    if (value is not None) != spec.zero_points:
        state, wanted = ("missing", "has them") if value is None else ("there", "has none")
        raise OpsError(f"{name} is {state}, but the layer {wanted} (zero_points of its LayerSpec)")
    if value is None:
        return None
    array, number = as_array(name, value)
    shape = scale_shape(spec.kind, rows, k)
    if number != "uint8" or array.shape != shape:
        raise OpsError(f"{name} is {number} {list(array.shape)}: wanted uint8 {list(shape)}, one zero point a byte")
    if array.max() > 15:
        where = [int(i) for i in np.argwhere(array > 15)[0]]
        raise OpsError(f"{name} {where} is {array[tuple(where)]}: wanted 0 to 15, one zero point a byte")
    return array


def numbers_to_float(array: NDArray[Any], number: str) -> Floats:
    """float32 values of fp32, fp16, bf16 (np.uint16) or e8m0 (np.uint8) numbers."""
    if number == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if number == "e8m0":
        return np.ldexp(np.float32(1), array.astype(np.int32) - 127).astype(np.float32)
    return array.astype(np.float32)


def float_to_numbers(array: NDArray[Any], number: str) -> NDArray[Any]:
    """The nearest fp32, fp16 or bf16 (np.uint16) numbers, ties to even."""
    values = np.asarray(array, np.float32)
    if number == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    return values.astype(NUMBER_DTYPES[number])


def fp8_to_float(codes: Bytes) -> Floats:
    """float32 values of E4M3 codes (no infinities; 0x7f and 0xff are NaN)."""
    values: Floats = _fp8_table()[codes]
    return values


def _fp8_table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))
    value[code & 0x7F == 0x7F] = np.nan
    signed: Floats = np.where(code & 0x80, -value, value).astype(np.float32)
    return signed


def float_to_fp8(values: NDArray[Any]) -> Bytes:
    """The nearest finite E4M3 codes; magnitudes above 448 become 448."""
    magnitudes = _fp8_table()[:127].astype(np.float64)
    size = np.minimum(np.abs(values), 448.0)
    code = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, size)
    signed: Bytes = (code + np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return signed


def dequantise(spec: LayerSpec, weights: ExpertWeights) -> tuple[Floats, Floats, Floats | None, Floats | None]:
    """(gate_up [2F, H] gates first, down [H, F], gate_up bias [2F], down bias [H]): the float32 values an expert stands
    for.

    Exact for every format: a product of a scale and an element of at most 8 bits (fp32 scales round once). Raises
    OpsError as `checked_weights` does.
    """
    values: list[Floats] = []
    biases: list[Floats | None] = []
    parts = zip(checked_weights(spec, weights), (spec.hidden, spec.intermediate), strict=True)
    for (data, scales, zeros, bias), k in parts:
        kind = spec.kind
        if kind.bits == 4:
            codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)[:, :k]
            zero = np.float32(8) if zeros is None else np.repeat(zeros.astype(np.float32), kind.group, axis=1)[:, :k]
            value = FP4_VALUES[codes] if kind.name == "mxfp4" else codes.astype(np.float32) - zero
        elif kind.code == FORMATS["mxfp8"].code:
            value = fp8_to_float(data)
        elif kind.name == "int8":
            value = data.astype(np.float32)
        else:
            value = numbers_to_float(data, kind.name)
        if scales is not None:
            scale = numbers_to_float(scales, spec.scale_number)
            value = value * (np.repeat(scale, kind.group, axis=1)[:, :k] if kind.group else scale)
        values.append(value)
        biases.append(None if bias is None else numbers_to_float(bias, spec.bias))
    if spec.interleaved:
        first_bias = biases[0]
        values[0] = np.concatenate([values[0][::2], values[0][1::2]])
        biases[0] = None if first_bias is None else np.concatenate([first_bias[::2], first_bias[1::2]])
    return values[0], values[1], biases[0], biases[1]


def quantise(
    spec: LayerSpec,
    gate_up: NDArray[Any],
    down: NDArray[Any],
    gate_up_bias: NDArray[Any] | None = None,
    down_bias: NDArray[Any] | None = None,
) -> ExpertWeights:
    """An expert of this spec nearest to real values: gate_up [2F, H] with gates first, down [H, F], biases [2F] and
    [H].

    Scales are the largest magnitude of what shares them over the largest code (a power of two for e8m0); with zero
    points, the distance from a group's least value to its greatest over 15. Plain rounding, nothing clever: for tests,
    demos and measurements.
    """
    first, first_bias = np.asarray(gate_up, np.float32), gate_up_bias
    if spec.interleaved:
        f = spec.intermediate
        order = np.stack([np.arange(f), np.arange(f) + f], 1).reshape(-1)
        first, first_bias = first[order], None if first_bias is None else np.asarray(first_bias)[order]
    matrices = (first, np.asarray(down, np.float32))
    made = [_with_zeros(spec, m) if spec.zero_points else (*quantise_matrix(spec, m), None) for m in matrices]
    bias = [None if b is None else float_to_numbers(np.asarray(b), spec.bias) for b in (first_bias, down_bias)]
    data = [np.ascontiguousarray(m[0].T) if spec.transposed else m[0] for m in made]
    return ExpertWeights(data[0], data[1], made[0][1], made[1][1], bias[0], bias[1], made[0][2], made[1][2])


def quantise_matrix(spec: LayerSpec, value: Floats) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """(codes, scales) of one matrix [N, K] as stored: `quantise` of its rows, whatever they are. Raises OpsError for a
    spec with zero points, which a pair has no place for."""
    if spec.zero_points:
        raise OpsError("a matrix alone is quantised without zero points: `quantise` makes an expert with them")
    kind = spec.kind
    rows, k = value.shape
    if kind.scales == "none":
        return float_to_numbers(value, kind.name), None
    size = np.abs(value)
    if kind.scales == "row":
        peak = size.max(1, keepdims=True)
    else:
        padded = np.zeros(
            (math.ceil(rows / 128) * 128 if kind.scales == "block" else rows, kind.groups(k) * kind.group), np.float32
        )
        padded[:rows, :k] = size
        peak = padded.reshape(len(padded), -1, kind.group).max(2)
        if kind.scales == "block":
            peak = peak.reshape(-1, kind.group, peak.shape[1]).max(1)
    largest = {"int8": 127.0, "mxfp4": 6.0}.get(kind.name, 7.0 if kind.bits == 4 else 448.0)
    if spec.scale_number == "e8m0":
        exponent = np.ceil(np.log2(np.maximum(peak, 1e-30) / largest))
        scales: NDArray[Any] = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    else:
        scales = float_to_numbers(np.maximum(peak / largest, 1e-6), spec.scale_number)
    scale = numbers_to_float(scales, spec.scale_number)
    if kind.scales == "block":
        scale = np.repeat(scale, kind.group, axis=0)[:rows]
    code = value / (np.repeat(scale, kind.group, axis=1)[:, :k] if kind.group else scale)
    if kind.name == "int8":
        data: NDArray[Any] = np.clip(np.rint(code), -127, 127).astype(np.int8)
    elif kind.bits == 8:
        data = float_to_fp8(code)
    else:
        if kind.name == "mxfp4":
            nibble = np.searchsorted((FP4_VALUES[1:8] + FP4_VALUES[:7]) / 2, np.abs(code)) + np.where(code < 0, 8, 0)
        else:
            nibble = np.clip(np.rint(code), -8, 7) + 8
        data = _nibbles_to_bytes(nibble)
    return data, scales[:, 0] if kind.scales == "row" else scales


def _with_zeros(spec: LayerSpec, value: Floats) -> tuple[Bytes, NDArray[Any], Bytes]:
    """(codes, scales, zeros) of one matrix [N, K]. The range of a group reaches to 0, so that its zero is a nibble."""
    (rows, k), group = value.shape, spec.kind.group
    padded = np.zeros((rows, spec.kind.groups(k) * group), np.float32)
    padded[:, :k] = value
    by_group = padded.reshape(rows, -1, group)
    least, most = np.minimum(by_group.min(2), 0), np.maximum(by_group.max(2), 0)
    scales = float_to_numbers(np.maximum((most - least) / 15, 1e-6), spec.scale_number)
    scale = numbers_to_float(scales, spec.scale_number)
    zeros = np.clip(np.rint(-least / scale), 0, 15)
    nibbles = np.clip(np.rint(by_group / scale[:, :, None]) + zeros[:, :, None], 0, 15).reshape(rows, -1)[:, :k]
    return _nibbles_to_bytes(nibbles), scales, zeros.astype(np.uint8)


def _nibbles_to_bytes(nibbles: NDArray[Any]) -> Bytes:
    """[N, ceil(K/2)] from [N, K], low nibble first."""
    rows, k = nibbles.shape
    padded = np.zeros((rows, math.ceil(k / 2) * 2), np.uint8)
    padded[:, :k] = nibbles
    data: Bytes = padded[:, ::2] | padded[:, 1::2] << 4
    return data


def _aligned(size: int) -> int:
    return (size + 63) // 64 * 64
