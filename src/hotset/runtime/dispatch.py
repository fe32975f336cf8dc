"""The experts implementation named `hotset`: runs each pick where its expert lives and combines in one fixed order.

Order of combination, whatever tier computed a pick: experts ascending, each added to its tokens' rows, which is the
order of Transformers' eager loops. So the sum does not depend on residency, and on one kind of device the bits are
those of the unmodified model run with `experts_implementation="eager"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotset.models.experts import interface_implementation, picks_by_expert, run_expert

if TYPE_CHECKING:
    from hotset.runtime.runtime import Runtime

IMPLEMENTATION = "hotset"


def register() -> None:
    """Make the implementation known to Transformers; again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Transformers' contract: hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H]."""
    layer: LayerDispatch | None = module.__dict__.get("hotset_layer")
    if layer is None:  # of a tower that hotset does not manage, such as the experts for images beside those for text
        return interface_implementation("eager", module)(module, hidden_states, top_k_index, top_k_weights)
    return layer(hidden_states, top_k_index, top_k_weights)


class LayerDispatch:
    """One MoE layer's forward pass over the store's two tiers."""

    def __init__(self, runtime: Runtime, row: int, module: nn.Module) -> None:
        self.runtime = runtime
        self.row = row
        self.module = module

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H], on hidden_states' device."""
        ids = top_k_index.cpu()  # exact mode needs them on the host: the misses are computed there
        self.runtime.count(self.row, ids.numpy())
        if hidden_states.device.type == "cpu":
            return self._on_one_device(hidden_states, ids, top_k_weights)
        return self._on_two_devices(hidden_states, ids, top_k_weights)

    def _on_one_device(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        store, row, module = self.runtime.store, self.row, self.module
        out = torch.zeros_like(hidden)
        if len(hidden) == 1:  # decoding one sequence: nothing to gather, and half of the time would go into doing so
            picks = sorted((expert, at) for at, expert in enumerate(ids[0].tolist()))
            for expert, at in picks:
                if 0 <= expert < self.runtime.num_experts:
                    weights, _ = store.weights(row, expert)
                    out += (run_expert(module, hidden, weights) * gate[:, at, None]).to(out.dtype)
            return out
        for expert, positions, tokens in picks_by_expert(ids, self.runtime.num_experts):
            weights, _ = store.weights(row, expert)
            part = run_expert(module, hidden[tokens], weights) * gate[tokens, positions, None]
            out.index_add_(0, tokens, part.to(out.dtype))
        return out

    def _on_two_devices(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Resident experts on the device while the host works on the misses; their rows come back in one copy."""
        store, row, module, device = self.runtime.store, self.row, self.module, hidden.device
        picks = list(picks_by_expert(ids, self.runtime.num_experts))
        parts: dict[int, torch.Tensor] = {}
        misses = []
        for expert, _, tokens in picks:
            slot = store.residency.slot(row, expert)
            if slot >= 0:
                rows = hidden[tokens.to(device, non_blocking=True)]
                parts[expert] = run_expert(module, rows, store.on_gpu(row, slot))
            else:
                misses.append((expert, tokens))
        if misses:
            on_host = hidden.cpu()
            host_module = self.runtime.host_module(row)
            rows_of = [run_expert(host_module, on_host[tokens], store.on_host(row, e)) for e, tokens in misses]
            back = torch.cat(rows_of).to(device, non_blocking=True)
            rows_per_miss = torch.split(back, [len(tokens) for _, tokens in misses])
            parts.update(zip((expert for expert, _ in misses), rows_per_miss, strict=True))
        out = torch.zeros_like(hidden)
        for expert, positions, tokens in picks:
            on_device, at = tokens.to(device, non_blocking=True), positions.to(device, non_blocking=True)
            part = parts[expert] * gate[on_device, at, None]
            out.index_add_(0, on_device, part.to(out.dtype))  # an expert meets a token once: no two adds collide
        return out
