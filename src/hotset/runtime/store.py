"""The bytes of all experts: an arena of slots on the device and one host buffer for each expert that lives there.

One copy: an expert has a slot or a host buffer, never both. Which of the two is `Residency`'s to say; this module only
keeps the bytes where it says. Every reader comes through `on_gpu` or `on_host`, and asking for a host buffer that does
not exist raises ExpertNotOnHost.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core import Tier
from hotset.errors import ExpertNotOnHost
from hotset.models.experts import ExpertLayer
from hotset.residency import Residency

ExpertWeights = Mapping[str, torch.Tensor]
"""Parameter name -> this expert's tensor."""
ReadExpert = Callable[[int, int, ExpertWeights], None]
"""(row, expert, target): read that expert's parameters into the target's tensors."""

_ALIGNMENT = 64
"""Bytes: a cache line, and one AVX-512 register."""


class ExpertStore:
    """Arena and host buffers of L layers.

    layers: in row order; their `parameters` give shapes and dtypes [E, ...]. mask: [L, E] bool, True = in the arena.
    device: where the arena is; "cpu" is a real second arena in host memory.
    """

    def __init__(self, layers: Sequence[ExpertLayer], mask: NDArray[np.bool_], device: torch.device) -> None:
        self.layers = list(layers)
        self.device = device
        slots = mask.sum(axis=1)
        self.residency = Residency(mask.shape[1], slots, initial_mask=mask, home=Tier.HOST)
        self.arena: list[dict[str, torch.Tensor]] = [
            {
                name: torch.empty((int(count), *p.shape[1:]), dtype=p.dtype, device=device)
                for name, p in layer.parameters.items()
            }
            for layer, count in zip(self.layers, slots, strict=True)
        ]
        self._host: list[list[dict[str, torch.Tensor] | None]] = [[None] * layer.num_experts for layer in self.layers]

    def load(self, read: ReadExpert, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every expert once, straight into the tier where it lives. progress(experts done, experts in all)."""
        done, total = 0, sum(layer.num_experts for layer in self.layers)
        for row, layer in enumerate(self.layers):
            for expert in range(layer.num_experts):
                slot = self.residency.slot(row, expert)
                if slot < 0:
                    self._host[row][expert] = allocate_host(
                        {n: (p.shape[1:], p.dtype) for n, p in layer.parameters.items()}
                    )
                read(row, expert, self.on_gpu(row, slot) if slot >= 0 else self.on_host(row, expert))
                done += 1
                if progress is not None:
                    progress(done, total)

    def on_gpu(self, row: int, slot: int) -> ExpertWeights:
        """Views of one arena slot."""
        return {name: tensor[slot] for name, tensor in self.arena[row].items()}

    def on_host(self, row: int, expert: int) -> ExpertWeights:
        """The host copy of one expert. Raises ExpertNotOnHost where it has none."""
        weights = self._host[row][expert]
        if weights is None:
            slot = self.residency.slot(row, expert)
            why = f"it lives in arena slot {slot} and is kept once" if slot >= 0 else "it was never loaded"
            raise ExpertNotOnHost(self.layers[row].layer_id, expert, why)
        return weights

    def weights(self, row: int, expert: int) -> tuple[ExpertWeights, bool]:
        """(parameters where they live, whether that is the arena)."""
        slot = self.residency.slot(row, expert)
        if slot >= 0:
            return self.on_gpu(row, slot), True
        return self.on_host(row, expert), False

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arena slots."""
        return sum(t.numel() * t.element_size() for arena in self.arena for t in arena.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers of experts."""
        return sum(
            t.numel() * t.element_size() for row in self._host for weights in row if weights for t in weights.values()
        )


def allocate_host(shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Uninitialised tensors side by side in one anonymous mapping, each at a multiple of 64 bytes.

    A mapping of its own, not the C library's heap, so that dropping an expert gives its bytes back to the system at
    once, and temporaries of loading leave no holes between experts.
    """
    starts, total = {}, 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = total
        total += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    if total == 0:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    buffer = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
    return {
        name: buffer[starts[name] : starts[name] + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for name, (shape, dtype) in shapes.items()
    }


def _allocate(shapes: Mapping[str, tuple[torch.Size, torch.dtype]], device: torch.device) -> dict[str, torch.Tensor]:
    if device.type == "cpu":
        return allocate_host(shapes)
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
