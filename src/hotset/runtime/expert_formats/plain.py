"""Experts as Transformers holds them, computed by torch's operators: any module, and the bits of its eager loops.

On the host, where those bits are not asked for, other operators for the same product may be faster:

    mv              one row at a time: `torch.mv`
    swapped         (W x^T)^T instead of x W^T
    float32 linear  a copy of the matrix in float32 for the call: oneDNN and MKL have fast paths that float16 may lack
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hotset.models.experts import ExpertLayer, run_expert
from hotset.runtime.expert_formats.contract import (
    ExpertFormat,
    ExpertSource,
    ExpertTensors,
    num_bytes,
    parameter_shapes,
)
from hotset.runtime.expert_formats.operators import ROWS, RowChoice, Run, fastest_by_rows, going_round
from hotset.runtime.expert_formats.scratch import scratch

_EVER = 1 << 30
EAGER = "linear"
"""What Transformers' eager loops do."""
WAYS = {EAGER: _EVER, "mv": 4, "swapped": _EVER, "float32 linear": _EVER}
"""Name -> most rows that it is tried with, when measuring."""


class PlainFormat(ExpertFormat):
    """The module's own parameters, on every device alike.

    choice: the way on the host for each number of rows; None = the eager loops' bits.
    """

    def __init__(self, layer: ExpertLayer, choice: RowChoice | None = None) -> None:
        super().__init__(layer)
        self.choice = choice
        self.host_shapes = self.device_shapes = parameter_shapes(layer)
        self.expert_bytes = num_bytes(self.host_shapes)
        dtypes = sorted({str(dtype).removeprefix("torch.") for _, dtype in self.host_shapes.values()})
        self.name = " and ".join(dtypes)

    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        source.read_into(row, expert, target)

    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        return host

    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        for name, tensor in target.items():
            tensor.copy_(slot[name])

    def expert_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        way = EAGER if self.choice is None else self.choice(len(rows))
        return run_expert(module, rows, weights, None if way == EAGER else _PRODUCTS[way])

    def device_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return run_expert(module, rows, weights)


def measured_plain(layer: ExpertLayer) -> PlainFormat | None:
    """With the fastest way for each number of rows on this machine; None where the matrices are no bfloat16 or float16.

    float32 keeps the bits of the eager loops.
    """
    matrices = {name: layer.parameters.get(name) for name in (_first_name(layer.module), "down_proj")}
    dtypes = {p.dtype for p in layer.parameters.values()}
    if any(p is None or p.ndim != 3 for p in matrices.values()) or len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    shapes = [tuple(p.shape[1:]) for p in matrices.values() if p is not None]
    is_gated, is_transposed = bool(layer.module.has_gate), bool(layer.module.is_transposed)
    question = {"experts": str(dtype).removeprefix("torch."), "shapes": [list(shape) for shape in shapes],
                "gated": is_gated, "transposed": is_transposed}  # fmt: skip

    def prepare() -> Run:
        generator = torch.Generator().manual_seed(0)
        first = [torch.randn(shape, generator=generator).mul_(0.02).to(dtype) for shape in shapes]
        copies = going_round(layer.bytes_per_expert, lambda: [matrix.clone() for matrix in first])
        x = torch.randn((max(ROWS), shapes[0][0 if is_transposed else 1]), generator=generator).to(dtype)

        def run(way: str, count: int) -> object:
            gate_up, down = (m.T if is_transposed else m for m in next(copies))
            inner = _PRODUCTS[way](x[:count], gate_up)
            gate, up = inner.chunk(2, -1) if is_gated else (inner, inner)
            return _PRODUCTS[way](nn.functional.silu(gate) * up, down)

        return run

    return PlainFormat(layer, fastest_by_rows(question, WAYS, prepare))


def _first_name(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _by_rows(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if len(rows) == 1:
        return torch.mv(matrix, rows[0])[None]
    return torch.stack([torch.mv(matrix, row) for row in rows])


def _in_float32(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(rows.float(), scratch(matrix.shape, torch.float32).copy_(matrix)).to(rows.dtype)


_PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    EAGER: nn.functional.linear,
    "mv": _by_rows,
    "swapped": lambda rows, matrix: (matrix @ rows.T).T.contiguous(),  # else whoever adds it up pays
    "float32 linear": _in_float32,
}
"""(rows [n, K], matrix [N, K]) -> [n, N]."""
