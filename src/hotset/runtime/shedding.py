"""Opt-in shedding for a model of `hotset.load`: rows whose kept gate mass suffices skip their missing experts.

Knows the experts implementation and the policy of `hotset.ops.ShedPolicy`; computes nothing itself: a shed pick is
handed on as an id outside the layer, which the implementation skips, and the kept picks with their rescaled weights.
Rows that are not shed go through with the bits they came with, so keep_mass 1 leaves the model as it was (but for picks
without weight).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotset.errors import ModelError
from hotset.ops import ShedLedger, ShedPolicy
from hotset.runtime.slot_tables import SlotTables

if TYPE_CHECKING:
    from hotset.runtime.dispatch import LayerDispatch


def enable_shedding(model: Any, policy: ShedPolicy) -> ShedLedger:
    """Shed in every MoE layer of `model` from now on; returns the ledger, one row per MoE layer in order.

    Picks that were shed are no hits and no misses of the model's report: they are in the ledger. Called again, it
    replaces the policy and starts a new ledger; `disable_shedding` ends it. Raises ModelError where the model does not
    come from hotset.load.
    """
    disable_shedding(model)
    runtime = model.hotset
    tables = SlotTables(runtime.store.residency, device=runtime.device)
    ledger = ShedLedger(len(runtime.layers), device=runtime.device)
    for module in _modules(runtime):
        module.hotset_layer = SheddingDispatch(module.hotset_layer, policy, tables, ledger)
    return ledger


def disable_shedding(model: Any) -> None:
    """Back to exact. Does nothing where nothing is shed. Raises ModelError where the model is not of hotset.load."""
    runtime = getattr(model, "hotset", None)
    if runtime is None:
        raise ModelError(f"{type(model).__name__} was not loaded by hotset.load: shedding needs its slots")
    for module in _modules(runtime):
        if isinstance(module.hotset_layer, SheddingDispatch):
            module.hotset_layer = module.hotset_layer.inner


def _modules(runtime: Any) -> list[Any]:
    return [module for layer in runtime.layers for module in layer.modules]


class SheddingDispatch:
    """Stands before one layer's dispatch and takes out what the policy sheds."""

    def __init__(self, inner: LayerDispatch, policy: ShedPolicy, tables: SlotTables, ledger: ShedLedger) -> None:
        self.inner = inner
        self.policy = policy
        self.tables = tables
        self.ledger = ledger
        self.sentinel = inner.runtime.num_experts

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H]."""
        self.tables.refresh()
        ids, scores = top_k_index.contiguous(), top_k_weights.detach().float().contiguous()
        routing = self.policy.apply(ids, scores, self.tables.row(self.inner.row))
        self.ledger.record(self.inner.row, routing)
        shed = routing.shed_ids >= 0
        # only a shed row's weights change; float16 and bfloat16 scores come back from float32 as they were
        weights = torch.where(shed.any(dim=1, keepdim=True), routing.weights, scores).to(top_k_weights.dtype)
        return self.inner(hidden_states, ids.masked_fill(shed, self.sentinel), weights)
