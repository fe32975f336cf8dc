"""Experts packed for the compiled kernels, float or quantised, computed many at a time.

On another device an expert is what the kernels unpack: the module's own parameters, or quantised weights as stored.

Where the CPU has AMX, which the kernels do not use and torch's products do, a float expert with many rows in a call is
unpacked into a scratch and computed by torch. From how many rows on is measured once per machine (`operators.py`), and
nothing else decides: whatever tier an expert is in, the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hotset.errors import ExpertNotOnHost, ModelError
from hotset.kernels import ExpertWeights, LayerSpec, PackedKernel
from hotset.kernels.build import cpu
from hotset.kernels.call import Call, check_out
from hotset.kernels.formats import as_array, as_buffer
from hotset.kernels.modules import expert_weights
from hotset.models.experts import ExpertLayer, run_expert
from hotset.runtime.expert_formats.contract import (
    ExpertFormat,
    ExpertSource,
    ExpertTensors,
    num_bytes,
    parameter_shapes,
)
from hotset.runtime.expert_formats.operators import Run, fastest_by_rows, going_round
from hotset.runtime.expert_formats.scratch import scratch_expert
from hotset.runtime.expert_formats.stored import rows_through, stored_rows, stored_shapes, stored_tensors
from hotset.runtime.memory import allocate_host

_CROSSOVER_ROWS = (32, 64, 128, 256, 512)
"""Fewer are the kernels': they are fed from memory, whoever computes."""
PACKED = "packed"
"""The one tensor of a packed expert: [spec.layout.expert_bytes] uint8."""


class PackedFormat(ExpertFormat):
    """Packed for, and computed by, the compiled kernels. Raises BackendError where those cannot be compiled.

    spec: the layer's; quantised ones are read as stored, float ones by the module's parameters. alone_from_rows: see
    the contract; float ones only.
    """

    computes_together = True

    def __init__(self, layer: ExpertLayer, spec: LayerSpec, *, alone_from_rows: int | None = None) -> None:
        super().__init__(layer)
        self.alone_from_rows = alone_from_rows
        self.spec = spec
        self.kernel = PackedKernel(spec, layer.layer_id, self._absent)
        self.name = f"{spec.format}, packed"
        self.host_shapes = {PACKED: (torch.Size([spec.layout.expert_bytes]), torch.uint8)}
        self._is_float = spec.kind.scales == "none"
        self._parameters = parameter_shapes(layer)
        self.device_shapes = self._parameters if self._is_float else stored_shapes(spec)
        self.expert_bytes = num_bytes(self.device_shapes)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        if self._is_float:
            scratch = scratch_expert(self._parameters)
            source.read_into(row, expert, scratch)
            weights = expert_weights(scratch)
        else:
            weights = source.read_stored(row, expert)
        self.kernel.pack(weights, target[PACKED].numpy())

    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        weights = self.kernel.unpack(host[PACKED].numpy())
        return self._module_tensors(weights) if self._is_float else stored_tensors(weights)

    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        weights = expert_weights(slot) if self._is_float else ExpertWeights(**slot)
        self.kernel.pack(weights, target[PACKED].numpy())

    def _module_tensors(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        first = "gate_up_proj" if self.spec.gated else "up_proj"
        names = {"gate_up": first, "gate_up_bias": f"{first}_bias", "down": "down_proj", "down_bias": "down_proj_bias"}
        return {names[name]: tensor for name, tensor in stored_tensors(weights).items()}

    # -- computing -------------------------------------------------------------------------------------------------

    def expert_rows(self, _module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        if self.alone_from_rows is not None and len(rows) >= self.alone_from_rows:
            return self._rows_by_torch(rows, weights)
        return self._rows_by_kernels(rows, weights)

    def _rows_by_torch(self, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        """[n, H] float32, between the products as in the kernels."""
        self._refuse_gradients(rows)
        scratch = vars(expert_weights(scratch_expert(self._parameters)))
        into = {name: as_array(name, scratch[name])[0] for name in ("gate_up", "down")}
        unpacked = stored_tensors(self.kernel.unpack(weights[PACKED].numpy(), into))

        def multiply(x: torch.Tensor, name: str) -> torch.Tensor:
            matrix = unpacked[name].T if self.spec.transposed else unpacked[name]
            return nn.functional.linear(x.to(matrix.dtype), matrix).float()

        return rows_through(self.spec, rows, unpacked, multiply)

    def _rows_by_kernels(self, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        ids = torch.zeros((len(rows), 1), dtype=torch.int64)
        return self.rows(rows, ids, {0: weights})[:, 0]

    def device_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return run_expert(module, rows, weights) if self._is_float else stored_rows(self.spec, rows, weights)

    def moe(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        gate: torch.Tensor,
        experts: Mapping[int, ExpertTensors],
        *,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        call = self._call(hidden, ids, gate)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format) if add_to is None else add_to
        rows = check_out(call, out, None if add_to is None else "fp32")
        self.kernel.run(self._addresses(experts), call, rows, accumulate=add_to is not None)
        return out

    def rows(self, hidden: torch.Tensor, ids: torch.Tensor, experts: Mapping[int, ExpertTensors]) -> torch.Tensor:
        out = torch.empty((*ids.shape, self.spec.hidden))
        self.kernel.run(self._addresses(experts), self._call(hidden, ids, None), as_buffer("rows", out))
        return out

    def combine(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        call, out = self._call(hidden, ids, gate), torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self.kernel.combine(call, as_buffer("rows", rows), check_out(call, out))
        return out

    def _call(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor | None) -> Call:
        self._refuse_gradients(hidden)
        return Call.of(self.spec, self.layer.layer_id, hidden, ids, gate, None)

    def _refuse_gradients(self, hidden: torch.Tensor) -> None:
        if hidden.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"layer {self.layer.layer_id} is computed by kernels that know no gradients: load with training=True, "
                "or run under torch.no_grad()"
            )

    def _addresses(self, experts: Mapping[int, ExpertTensors]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        addresses = np.zeros(self.spec.num_experts, np.uint64)
        for expert, weights in experts.items():
            addresses[expert] = weights[PACKED].data_ptr()
        return addresses

    def _absent(self, expert: int) -> ExpertNotOnHost:
        return ExpertNotOnHost(self.layer.layer_id, expert, "it was not handed to the kernels with its pick")


def has_amx() -> bool:
    """Whether the CPU has tiles, which the compiled kernels do not use."""
    return "amx_tile" in cpu()


def measured_crossover(layer: ExpertLayer, spec: LayerSpec) -> int | None:
    """From how many rows of one expert on torch is faster on this machine, and stays so; None = never, or no AMX."""
    if not has_amx() or spec.kind.scales != "none":
        return None
    question = {"experts": f"{spec.format}, packed", "hidden": spec.hidden, "first_rows": spec.first_rows,
                "intermediate": spec.intermediate, "transposed": spec.transposed}  # fmt: skip

    def prepare() -> Run:
        fmt = PackedFormat(layer, spec)
        generator = torch.Generator().manual_seed(0)
        values = {n: torch.randn(s, generator=generator).to(t) for n, (s, t) in parameter_shapes(layer).items()}

        def packed() -> ExpertTensors:
            copy = allocate_host(fmt.host_shapes)
            fmt.to_host(values, copy)
            return copy

        copies = going_round(fmt.expert_bytes, packed)
        x = torch.randn((_CROSSOVER_ROWS[-1], spec.hidden), generator=generator).to(next(iter(values.values())).dtype)

        def run(way: str, count: int) -> object:
            compute = fmt._rows_by_kernels if way == "packed" else fmt._rows_by_torch
            return compute(x[:count], next(copies))

        return run

    choice = fastest_by_rows(question, {"packed": 1 << 30, "torch": 1 << 30}, prepare, _CROSSOVER_ROWS)
    if choice.ways[-1] != "torch":
        return None
    return choice.bounds[-1] + 1 if choice.bounds else _CROSSOVER_ROWS[0]
