"""Experts as Transformers holds them, computed by torch's operators: any module, and the bits of its eager loops."""

from __future__ import annotations

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


class PlainFormat(ExpertFormat):
    """The module's own parameters, on every device alike."""

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
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
        return run_expert(module, rows, weights)

    def device_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return run_expert(module, rows, weights)
