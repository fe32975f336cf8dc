"""A store of two layers of four experts without any model: every expert's values tell which one it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hotset.errors import CheckpointError
from hotset.models.experts import ExpertLayer
from hotset.runtime.copy_policy import resolve_copy_policy
from hotset.runtime.expert_formats.contract import parameter_shapes, plain_formats
from hotset.runtime.host_cache import HostCache
from hotset.runtime.memory import buffer_bytes
from hotset.runtime.store import ExpertStore

EXPERTS = 4
MASK = np.array([[1, 1, 0, 0], [0, 0, 1, 0]], np.bool_)
"""Layer 0 has two slots, layer 1 has one."""


def make_layers(size: int = 6, num_layers: int = 2, num_experts: int = EXPERTS) -> list[ExpertLayer]:
    """Layers with one parameter `w` [E, size, 2] and one `b` [E, 3]."""
    return [
        ExpertLayer(
            f"model.layers.{row}.experts",
            row,
            nn.Module(),
            num_experts,
            {
                "w": torch.empty((num_experts, size, 2), device="meta"),
                "b": torch.empty((num_experts, 3), dtype=torch.bfloat16, device="meta"),
            },
        )
        for row in range(num_layers)
    ]


class Reader:
    """Fills a target with 10 * row + expert; fails on the experts in `broken`."""

    def __init__(self) -> None:
        self.broken: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int]] = []

    def __call__(self, row: int, expert: int, target: Mapping[str, torch.Tensor]) -> None:
        self.reads.append((row, expert))
        if (row, expert) in self.broken:
            raise CheckpointError(f"shard of ({row}, {expert}) cannot be read")
        for tensor in target.values():
            tensor.fill_(10 * row + expert)


class FlakyCopy:
    """Copies, but raises on the calls whose numbers (from 1) are in `fails`, after half of the work."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails: set[int] = set()

    def __call__(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        self.calls += 1
        for index, (name, tensor) in enumerate(target.items()):
            if index == 1 and self.calls in self.fails:
                raise OSError(f"copy {self.calls} failed")
            tensor.copy_(source[name])

    def fail_next(self, *which: int) -> None:
        """Fail the which-th calls from now on (1 = the next)."""
        self.fails = {self.calls + number for number in which}


def make_store(*, cached: int | None = None, **settings: Any) -> tuple[ExpertStore, Reader, FlakyCopy]:
    """A loaded store; settings: skip, restore, size. cached: experts that the host cache holds."""
    layers, read, copy = make_layers(settings.pop("size", 6)), Reader(), FlakyCopy()
    restore = settings.pop("restore", "slot")
    copies = resolve_copy_policy(settings.pop("skip", "auto"), dynamic=True, restore=restore)
    cache = None
    if cached is not None:
        cache = HostCache(plain_formats(layers), read, cached * buffer_bytes(parameter_shapes(layers[0])), **settings)
    store = ExpertStore(layers, MASK, torch.device("cpu"), read, copies=copies, restore=restore, cache=cache, copy=copy)
    store.load()
    return store, read, copy


def assert_all_bytes_right(store: ExpertStore) -> None:
    """Every expert, wherever it is, holds its own values, and every account adds up."""
    for row in range(store.residency.num_layers):
        for expert in range(store.residency.num_experts):
            weights, tier = store.acquire(row, expert)
            assert all((t == 10 * row + expert).all() for t in weights.values()), (row, expert, tier)
            store.release(row, expert, tier)
    store.check_integrity()
