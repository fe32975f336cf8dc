"""Quantised experts as checkpoints store them, computed by torch: any format, any device, no compiler, no speed.

Every call dequantises to float32 and multiplies: right, and slow on the host, where the compiled kernels are meant to
do this (`packed.py`), or torch's operators for int8 and int4 (`torch_packed.py`). In a GPU's slot it keeps the arena at
the quantised size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from hotset.kernels import ExpertWeights, LayerSpec
from hotset.kernels.formats import FP4_VALUES, Format, checked_weights, scale_shape
from hotset.kernels.torch_layer import between, tensor_of_bits
from hotset.models.experts import ExpertLayer
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors, Shapes, num_bytes

_NUMBERS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "e8m0": torch.uint8}


class StoredFormat(ExpertFormat):
    """Codes, scales and biases as stored, on every device alike. spec: the layer's, quantised."""

    def __init__(self, layer: ExpertLayer, spec: LayerSpec) -> None:
        super().__init__(layer)
        self.spec = spec
        self.name = f"{spec.format}, as stored"
        self.host_shapes = self.device_shapes = stored_shapes(spec)
        self.expert_bytes = num_bytes(self.host_shapes)

    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        weights = source.read_stored(row, expert)
        checked_weights(self.spec, weights)
        self.to_host(stored_tensors(weights), target)

    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        return host

    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        for name, tensor in target.items():
            tensor.copy_(slot[name].reshape(tensor.shape))

    def expert_rows(self, _module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return stored_rows(self.spec, rows, weights)

    def device_rows(self, _module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return stored_rows(self.spec, rows, weights)


def stored_shapes(spec: LayerSpec) -> Shapes:
    """Name in `ExpertWeights` -> shape and dtype of a quantised expert; FP8 codes are bytes."""
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, rows, k in (("gate_up", spec.first_rows, spec.hidden), ("down", spec.hidden, spec.intermediate)):
        dtype = torch.int8 if spec.format == "int8" else torch.uint8
        shapes[name] = torch.Size([rows, -(-k * spec.kind.bits // 8)]), dtype
        shapes[f"{name}_scale"] = torch.Size(scale_shape(spec.kind, rows, k)), _NUMBERS[spec.scale_number]
        if spec.zero_points:
            shapes[f"{name}_zero"] = torch.Size(scale_shape(spec.kind, rows, k)), torch.uint8
        if spec.bias != "none":
            shapes[f"{name}_bias"] = torch.Size([rows]), _NUMBERS[spec.bias]
    return shapes


def stored_tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The parts that are there, as tensors on the same memory; FP8 codes as bytes."""
    parts = {name: value for name, value in vars(weights).items() if value is not None}
    tensors = {n: v if isinstance(v, torch.Tensor) else tensor_of_bits(v) for n, v in parts.items()}
    return {
        n: t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else t
        for n, t in tensors.items()
    }


def stored_rows(spec: LayerSpec, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
    """[n, H] float32 of one quantised expert for rows [n, H], on whichever device all of it is."""
    return rows_through(
        spec, rows, weights, lambda x, name: torch.nn.functional.linear(x.float(), values_of(spec, weights, name))
    )


def rows_through(
    spec: LayerSpec,
    rows: torch.Tensor,
    weights: ExpertTensors,
    multiply: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """[n, H] float32 of one quantised expert for rows [n, H].

    multiply: (rows [n, K], "gate_up" or "down") -> [n, N] float32, bias left out, in memory of its own.
    """
    inner = multiply(rows, "gate_up")
    if spec.bias != "none":
        inner += weights["gate_up_bias"].float()
    out = multiply(between(spec, inner, interleaved=spec.interleaved), "down")
    if spec.bias != "none":
        out += weights["down_bias"].float()
    return out


def values_of(spec: LayerSpec, weights: ExpertTensors, name: str) -> torch.Tensor:
    """[N, K] float32 values of one matrix, "gate_up" or "down"."""
    k = spec.hidden if name == "gate_up" else spec.intermediate
    zeros = weights.get(f"{name}_zero")
    return float_values(spec.kind, spec.scale_number, weights[name], weights[f"{name}_scale"], zeros, k)


def float_values(
    kind: Format, scale_number: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, k: int
) -> torch.Tensor:
    """[N, K] float32 values of a quantised matrix, on whichever device it is; codes, scales, zeros as stored."""
    if kind.name == "int8":
        values = codes.float()
    else:  # by table: several times as fast as torch's own conversion of FP8, and as taking nibbles apart
        table = _values_of_byte(kind.name, zeros is not None, codes.device)
        found = table.index_select(0, codes.reshape(-1).view(torch.uint8).int())
        values = found.view(torch.float32).view(len(codes), -1)[:, :k]
    if zeros is not None:
        _by_scale(kind, values, zeros.float(), torch.Tensor.sub_)
    if scale_number == "e8m0":
        scales = powers_of_two(scales)
    _by_scale(kind, values, scales.float(), torch.Tensor.mul_)
    return values


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float32 values of E8M0 bytes."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)


def _by_scale(
    kind: Format, values: torch.Tensor, scales: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """`change` values [N, K] in place by what shares a scale with them."""
    if kind.scales == "row":
        change(values, scales.reshape(-1, 1))
        return
    if kind.scales == "block":
        scales = scales.repeat_interleave(kind.group, 0)[: len(values)]
    rows, k = values.shape
    if k % kind.group == 0 and values.is_contiguous():
        change(values.view(rows, -1, kind.group), scales[:, :, None])
    else:
        change(values, scales.repeat_interleave(kind.group, 1)[:, :k])


@lru_cache(maxsize=16)
def _values_of_byte(name: str, has_zeros: bool, device: torch.device) -> torch.Tensor:
    """[256] the float32 values that a byte of codes stands for: one, or two of 4 bits in the guise of a float64."""
    byte = torch.arange(256)
    with torch.inference_mode(False):
        if name in ("mxfp4", "int4_g32", "int4_g128"):
            nibbles = torch.stack([byte & 15, byte >> 4], -1)
            plain = nibbles.float() - (0 if has_zeros else 8)
            pairs = torch.from_numpy(FP4_VALUES)[nibbles] if name == "mxfp4" else plain
            return pairs.view(torch.float64)[:, 0].to(device)
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float().to(device)
