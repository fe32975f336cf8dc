"""What the store and the dispatch ask of a way to hold experts.

A format knows one layer's shapes and how bytes become numbers. It holds no expert and knows no residency: the tensors
of an expert come from the store, which alone knows where they are.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from hotset.kernels import ExpertWeights
from hotset.models.experts import ExpertLayer

ExpertTensors = Mapping[str, torch.Tensor]
"""Name -> this expert's tensor."""
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class ExpertSource(Protocol):
    """Where experts are read from. Several threads may read at once. Raises CheckpointError."""

    def read_into(self, row: int, expert: int, target: ExpertTensors) -> None:
        """Read an expert's parameters, of the module's own names and shapes, into float tensors on any device."""

    def read_stored(self, row: int, expert: int) -> ExpertWeights:
        """An expert's quantised weights as they are stored, not transposed."""


class ExpertFormat(abc.ABC):
    """How the experts of one layer are held on the host, held in a slot of another device, and computed in either."""

    name: str
    """For people: "bfloat16, packed"."""
    host_shapes: Shapes
    """What one expert is on the host; an arena in host memory has the same."""
    device_shapes: Shapes
    """What it is in a slot of another device."""
    expert_bytes: int
    """Of one expert's weights, scales and biases, without padding: what plans and budgets count."""
    computes_together: bool = False
    """Whether `moe`, `rows` and `combine` are there, which compute many experts in one call; else each is asked for its
    `expert_rows`."""

    takes_over: bool = False
    """Whether a layer's host copies are handed to `take_over` once all are read, to stay where nothing can move them or
    read them back. Of `moe`, `rows` and `combine` such a format has `rows`; what is in slots it does not compute."""

    alone_from_rows: int | None = None
    """Where it computes together: an expert with so many rows in a call or more is computed by its `expert_rows`, and
    by nothing else, for the bits differ. None = never."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer

    def slot_shapes(self, device: torch.device) -> Shapes:
        """What one expert is in an arena on this device."""
        return self.host_shapes if device.type == "cpu" else self.device_shapes

    # -- bytes -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        """Read an expert into tensors of `host_shapes`. Raises CheckpointError, OpsError (values that are refused)."""

    @abc.abstractmethod
    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        """CPU tensors of `device_shapes` with the expert of these tensors of `host_shapes`; may be the same ones."""

    @abc.abstractmethod
    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        """The inverse, byte for byte: CPU tensors of `device_shapes` into ones of `host_shapes`."""

    def take_over(self, experts: Mapping[int, ExpertTensors]) -> None:
        """Make copies of all host experts of the layer, expert -> tensors; the store lets go of these."""
        raise NotImplementedError

    # -- computing -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def expert_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        """One expert's output [n, H] before its gate weight, for rows [n, H] on the CPU; weights of `host_shapes`."""

    @abc.abstractmethod
    def device_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        """The same on another device; weights of `device_shapes`."""

    def moe(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        gate: torch.Tensor,
        experts: Mapping[int, ExpertTensors],
        *,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] weighted sum over each token's picks, in the order given: hidden [T, H], ids and gate [T, K].

        experts: whatever is picked; an id of num_experts is no pick. add_to: [T, H] float32 that holds the sum of
        earlier picks, added to in place; splitting a token's picks over several calls changes no bit.
        """
        raise NotImplementedError

    def rows(self, hidden: torch.Tensor, ids: torch.Tensor, experts: Mapping[int, ExpertTensors]) -> torch.Tensor:
        """[T, K, H] float32: each pick's own output, 0 where there is no pick."""
        raise NotImplementedError

    def combine(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, H] weighted sum of `rows` [T, K, H]: the bits of `moe`."""
        raise NotImplementedError


def num_bytes(shapes: Shapes) -> int:
    """Of all tensors together, without padding."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes.values())


def parameter_shapes(layer: ExpertLayer) -> Shapes:
    """One expert's share of each parameter of the layer's module."""
    return {name: (p.shape[1:], p.dtype) for name, p in layer.parameters.items()}


def plain_formats(layers: Sequence[ExpertLayer]) -> list[ExpertFormat]:
    """`PlainFormat` for every layer."""
    from hotset.runtime.expert_formats.plain import PlainFormat

    return [PlainFormat(layer) for layer in layers]
