"""Quantised experts in the forms that torch's own CPU operators take: int8 as stored, int4 in the operator's packing.

    int8pack   `torch._weight_int8pack_mm`: bytes as stored, for few rows
    int4pack   `torch._weight_int4pack_mm_for_cpu`: for all but very many rows
    linear     dequantised for the call, then an ordinary product: for many rows

They meet bfloat16 activations (float32 where that way is the fastest): the two operators have no fast path for others
(float32 ones took 5 and 20 times as long), so float32 models do without them and keep float32 arithmetic. int8 scales
are applied in float32 after the product. int4pack takes scales in bfloat16, kept beside the stored ones: together a
relative error of 0.3 to 0.5 % of an expert's output.

int4pack's packing differs by instruction set and by torch's version, and torch has no function that undoes it. So it is
asked: packing the digits of each weight's own index says where every weight goes. Nothing here assumes a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import nn

from hotset.errors import ModelError, OpsError
from hotset.kernels import ExpertWeights, LayerSpec
from hotset.kernels.formats import checked_weights
from hotset.models.experts import ExpertLayer
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors, Shapes
from hotset.runtime.expert_formats.operators import ROWS, RowChoice, Run, fastest_by_rows, going_round
from hotset.runtime.expert_formats.scratch import scratch
from hotset.runtime.expert_formats.stored import StoredFormat, rows_through, stored_shapes, stored_tensors

_EVER = 1 << 30
_PAIR = "_scale_and_zero"
"""Suffix of [K / group, N, 2] bfloat16: what int4pack multiplies with and adds, (code - 8) * scale + zero."""


class _OperatorFormat(StoredFormat):
    """What both have in common. choice: the way for each number of rows, measured where it is not given."""

    WAYS: ClassVar[Mapping[str, int]]
    """Name -> most rows that it is tried with, when measuring; its own operator first."""

    def __init__(self, layer: ExpertLayer, spec: LayerSpec, choice: RowChoice | None = None) -> None:
        why_not = self.refusal(spec)
        if why_not is not None:
            raise OpsError(f"layer {layer.layer_id} cannot be held for torch's operators: {why_not}")
        super().__init__(layer, spec)
        self.name = f"{spec.format}, {next(iter(self.WAYS))}"
        self.host_shapes = self.shapes_on_host(spec)
        self.choice = choice or self._measured()

    @staticmethod
    def refusal(spec: LayerSpec) -> str | None:
        """Why such a layer cannot be held in this form; None = it can."""
        raise NotImplementedError

    @staticmethod
    def shapes_on_host(spec: LayerSpec) -> Shapes:
        return stored_shapes(spec)

    def expert_rows(self, _module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        if rows.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"layer {self.layer.layer_id} is computed by torch's quantised operators, which know no gradients: run "
                "under torch.no_grad()"
            )
        return self._rows(self.choice(len(rows)), rows, weights)

    def _rows(self, way: str, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        number = torch.float32 if way.startswith("float32") else torch.bfloat16

        def multiply(x: torch.Tensor, name: str) -> torch.Tensor:
            return self.multiply(way, x.to(number).contiguous(), weights, name)

        return rows_through(self.spec, rows, weights, multiply)

    def multiply(self, way: str, x: torch.Tensor, weights: ExpertTensors, name: str) -> torch.Tensor:
        """[n, N] float32 of rows x [n, K] and one matrix."""
        raise NotImplementedError

    def _measured(self) -> RowChoice:
        spec = self.spec
        question = {"experts": spec.format, "hidden": spec.hidden, "first_rows": spec.first_rows,
                    "intermediate": spec.intermediate, "zero_points": spec.zero_points}  # fmt: skip
        return fastest_by_rows(question, self.WAYS, self._run)

    def _run(self) -> Run:
        generator = torch.Generator().manual_seed(0)
        first = {}
        for name, (shape, dtype) in self.host_shapes.items():
            if dtype.is_floating_point:
                first[name] = torch.full(shape, 0.01, dtype=dtype)
            else:
                first[name] = torch.randint(0, 15, shape, dtype=dtype, generator=generator)
        copies = going_round(self.expert_bytes, lambda: {n: t.clone() for n, t in first.items()})
        x = torch.randn((max(ROWS), self.spec.hidden), generator=generator).bfloat16()
        return lambda way, count: self._rows(way, x[:count], next(copies))


class Int8Format(_OperatorFormat):
    """int8 with a scale per row, as stored: its bytes are what int8pack takes."""

    WAYS: ClassVar[Mapping[str, int]] = {"int8pack": _EVER, "linear": _EVER, "float32 linear": _EVER}

    @staticmethod
    def refusal(spec: LayerSpec) -> str | None:
        if spec.format != "int8":
            return f"{spec.format} is not int8"
        if any(size % 16 for size in (spec.hidden, spec.intermediate)):  # torch 2.13 crashed on odd ones
            return f"int8pack wants hidden and intermediate in multiples of 16, not {spec.hidden}, {spec.intermediate}"
        return _int8pack_problem()

    def multiply(self, way: str, x: torch.Tensor, weights: ExpertTensors, name: str) -> torch.Tensor:
        codes = weights[name]
        if way == "int8pack":
            out = torch._weight_int8pack_mm(x, codes, _ones(len(codes)))
        else:
            out = nn.functional.linear(x, scratch(codes.shape, x.dtype).copy_(codes))
        return out.float().mul_(weights[f"{name}_scale"].float())


class Int4Format(_OperatorFormat):
    """int4 with a scale, perhaps a zero point, per group of 32 or 128: packed for int4pack."""

    WAYS: ClassVar[Mapping[str, int]] = {"int4pack": _EVER, "linear": _EVER, "float32 linear": _EVER}

    @staticmethod
    def refusal(spec: LayerSpec) -> str | None:
        if spec.format not in ("int4_g32", "int4_g128"):
            return f"{spec.format} is not int4"
        group = spec.kind.group
        for name, rows, k in _matrices(spec):
            if rows % 16 or k % group:
                return f"int4pack wants rows in multiples of 16 and columns of {group}: {name} is [{rows}, {k}]"
        return _int4pack_problem()

    @staticmethod
    def shapes_on_host(spec: LayerSpec) -> Shapes:
        shapes = dict(stored_shapes(spec))
        for name, rows, k in _matrices(spec):
            shapes[f"{name}{_PAIR}"] = torch.Size([k // spec.kind.group, rows, 2]), torch.bfloat16
        return shapes

    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        weights: ExpertWeights = source.read_stored(row, expert)
        checked_weights(self.spec, weights)
        self.to_host(stored_tensors(weights), target)

    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        slot = {name: host[name] for name in self.device_shapes}
        for name, rows, k in _matrices(self.spec):
            nibbles = packing(rows, k).unpacked(host[name])
            slot[name] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        return slot

    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        for name in self.device_shapes:
            if name not in ("gate_up", "down"):
                target[name].copy_(slot[name].reshape(target[name].shape))
        for name, rows, k in _matrices(self.spec):
            target[name].copy_(packing(rows, k).packed(slot[name].reshape(rows, k // 2)).view(rows, k // 2))
            scales, zeros = target[f"{name}_scale"].float(), target.get(f"{name}_zero")
            pair = target[f"{name}{_PAIR}"]
            pair[..., 0].copy_(scales.T)
            if zeros is None:
                pair[..., 1].zero_()
            else:
                pair[..., 1].copy_((8 - zeros.float()).mul_(scales).T)

    def multiply(self, way: str, x: torch.Tensor, weights: ExpertTensors, name: str) -> torch.Tensor:
        group, codes = self.spec.kind.group, weights[name]
        if way == "int4pack":
            return torch._weight_int4pack_mm_for_cpu(x, codes, group, weights[f"{name}{_PAIR}"]).float()
        nibbles = packing(len(codes), codes.shape[1] * 2).unpacked(codes)
        zeros, scales = weights.get(f"{name}_zero"), weights[f"{name}_scale"].float()
        values = scratch(nibbles.shape, torch.float32).copy_(nibbles)
        by_group = values.view(len(codes), -1, group)
        by_group.sub_(8 if zeros is None else zeros.float()[:, :, None]).mul_(scales[:, :, None])
        if x.dtype != values.dtype:
            values = scratch(values.shape, x.dtype).copy_(values)
        return nn.functional.linear(x, values).float()


def _matrices(spec: LayerSpec) -> tuple[tuple[str, int, int], ...]:
    """(name, N, K) of both."""
    return ("gate_up", spec.first_rows, spec.hidden), ("down", spec.hidden, spec.intermediate)


@lru_cache(maxsize=16)
def _ones(count: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(count, dtype=torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where int4pack puts each weight of a matrix [N, K].

    Found as nested strides, [(count, stride)] from the outermost: then unpacking is one strided copy. Where there are
    none (rows that are no multiple of the operator's block), as a table of every position.
    """

    rows: int
    k: int
    strides: tuple[tuple[int, int], ...] | None
    order: torch.Tensor | None
    """[N * K] int32: the weight at each packed place; None where there are strides."""

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """[N, K] uint8 of 0 to 15, from the packed bytes; a `scratch`."""
        flat = packed.reshape(-1)
        out = scratch((self.rows, self.k), torch.uint8)
        if self.strides is not None:
            counts, strides = zip(*self.strides, strict=True)
            places = out.as_strided(counts, strides)
            for half, nibbles in enumerate((flat & 15, flat >> 4)):
                places[..., half::2] = nibbles.view(*counts[:-1], -1)
        elif self.order is not None:
            out.view(-1)[self.order] = torch.stack([flat & 15, flat >> 4], -1).view(-1)
        return out

    def packed(self, stored: torch.Tensor) -> torch.Tensor:
        """[N * K / 2] bytes for the operator, from stored codes [N, K / 2], low nibble first: three times as fast as by
        torch's own function."""
        nibbles = torch.stack([stored & 15, stored >> 4], -1).view(-1)
        if self.strides is not None:
            counts, strides = zip(*self.strides, strict=True)
            places = nibbles.as_strided(counts, strides)
        else:
            places = nibbles[self.order]
        return (places[..., ::2] | places[..., 1::2] << 4).reshape(-1)


@lru_cache(maxsize=16)
def packing(rows: int, k: int) -> Packing:
    """Found by packing what is known: the digits of each weight's own index, 4 bits at a time.

    Raises OpsError where the operator does not just rearrange the codes.
    """
    with torch.inference_mode(False):
        index = torch.arange(rows * k, dtype=torch.int32).view(rows, k)
        order = torch.zeros(rows * k, dtype=torch.int32)
        for shift in range(0, (rows * k - 1).bit_length(), 4):
            digits = _pack(index >> shift & 15)
            order |= torch.stack([digits & 15, digits >> 4], -1).view(-1).int() << shift
        seen = torch.zeros(rows * k, dtype=torch.bool)
        seen[order.clamp(0, rows * k - 1)] = True
        if not seen.all():
            raise OpsError(f"int4pack's packing of [{rows}, {k}] is no rearrangement of the codes")
        found = _nested_strides(order)
        return Packing(rows, k, found, None if found else order)


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    """[N * K / 2] bytes from [N, K] int32."""
    return torch._convert_weight_to_int4pack_for_cpu(nibbles, 2).view(torch.uint8).reshape(-1)


def _nested_strides(order: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """((count, stride), ...) from the outermost such that order is the sum of index times stride over them, both halves
    of a byte in the innermost; or None."""
    found: list[tuple[int, int]] = []
    size = 1
    while size < len(order):
        block, stride, count = order[:size], int(order[size] - order[0]), 1
        while torch.equal(order[size * count : size * (count + 1)], block + stride * count):
            count += 1
        if count == 1 or len(order) % (size * count):
            return None
        found.append((count, stride))
        size *= count
    return tuple(reversed(found)) if int(order[0]) == 0 and found[0][0] % 2 == 0 else None


@lru_cache(maxsize=1)
def _int8pack_problem() -> str | None:
    """Why int8pack is not to be used with this torch on this CPU: tried on a small matrix. None = it is right."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (64, 256), dtype=torch.int8, generator=generator)
    x = torch.randn((3, 256), generator=generator).bfloat16()
    return _problem("int8pack", x.float() @ codes.float().T, lambda: torch._weight_int8pack_mm(x, codes, _ones(64)))


@lru_cache(maxsize=1)
def _int4pack_problem() -> str | None:
    """The same of int4pack, its packing and the way back."""
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 16, (64, 256), dtype=torch.uint8, generator=generator)
    pair = torch.rand((8, 64, 2), generator=generator).bfloat16()
    scale, zero = (pair[..., i].float().T.repeat_interleave(32, 1) for i in (0, 1))
    x = torch.randn((3, 256), generator=generator).bfloat16()

    def run() -> torch.Tensor:
        packed = packing(64, 256).packed(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        if not torch.equal(packed, _pack(nibbles.int())):
            raise OpsError("int4pack's packing changes codes")
        return torch._weight_int4pack_mm_for_cpu(x, packed.view(64, 128), 32, pair)

    return _problem("int4pack", x.float() @ ((nibbles.float() - 8) * scale + zero).T, run)


def _problem(name: str, wanted: torch.Tensor, run: Callable[[], torch.Tensor]) -> str | None:
    try:
        with torch.inference_mode():
            error = float((run().float() - wanted).norm() / wanted.norm())
    except (RuntimeError, AttributeError, OpsError) as problem:  # not in this torch, or not for this CPU
        return f"{name} does not work here: {str(problem).splitlines()[0]}"
    return None if error < 0.02 else f"{name} is off by {error:.2f} here"


CLASSES: dict[str, type[Int8Format | Int4Format]] = {
    "int8": Int8Format,
    "int4_g32": Int4Format,
    "int4_g128": Int4Format,
}


def held_for_torch(layer: ExpertLayer, spec: LayerSpec) -> tuple[ExpertFormat, str]:
    """(how torch on the host holds and computes a quantised layer, the reason)."""
    kind = CLASSES.get(spec.format)
    why_not = f"torch has no operator for {spec.format}" if kind is None else kind.refusal(spec)
    if any(p.dtype == torch.float32 for p in layer.parameters.values()):
        why_not = "a float32 model keeps float32 arithmetic"
    if kind is None or why_not is not None:
        return StoredFormat(layer, spec), f"dequantised for every call, for {why_not}"
    made = kind(layer, spec)
    return made, f"{made.choice} (measured)"
