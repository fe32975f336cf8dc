"""The experts implementation named `hotset`: runs each pick where its expert lives and combines in one fixed order.

Order of combination, whatever tier computed a pick: experts ascending, each added to its tokens' rows, which is the
order of Transformers' eager loops. So the sum does not depend on residency, and on one kind of device the bits are
those of the unmodified model run with `experts_implementation="eager"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotset.core import Tier
from hotset.models.experts import interface_implementation, picks_by_expert, run_expert

if TYPE_CHECKING:
    from hotset.runtime.runtime import Runtime
    from hotset.runtime.store import ExpertStore, ExpertWeights

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

    def __deepcopy__(self, _memo: object) -> LayerDispatch:
        """A copied module runs the same experts: there is one copy of them."""
        return self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H], on hidden_states' device."""
        ids = top_k_index.cpu()  # exact mode needs them on the host: the misses are computed there
        self.runtime.count(self.row, ids.numpy(), top_k_weights)
        if hidden_states.device.type == "cpu":
            return self._on_one_device(hidden_states, ids, top_k_weights)
        return self._on_two_devices(hidden_states, ids, top_k_weights)

    def _on_one_device(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        store, row, module = self.runtime.store, self.row, self.module
        out = torch.zeros_like(hidden)
        if len(hidden) == 1:  # decoding one sequence: nothing to gather, and half of the time would go into doing so
            num_experts = self.runtime.num_experts
            picks = sorted((expert, at) for at, expert in enumerate(ids[0].tolist()) if 0 <= expert < num_experts)
            ahead = _Ahead(store, row, [expert for expert, _ in picks])
            parts = {}
            # what is in memory is computed while the rest is read; the order of the sum below stays
            for expert, at in sorted(picks, key=lambda pick: store.must_wait(row, pick[0])):
                ahead.step()
                weights, tier = store.acquire(row, expert)
                try:
                    parts[expert] = (run_expert(module, hidden, weights) * gate[:, at, None]).to(out.dtype)
                finally:
                    store.release(row, expert, tier)
            for expert, _ in picks:
                out += parts[expert]
            return out
        picks_of = list(picks_by_expert(ids, self.runtime.num_experts))
        ahead = _Ahead(store, row, [expert for expert, _, _ in picks_of])
        for expert, positions, tokens in picks_of:
            ahead.step()
            weights, tier = store.acquire(row, expert)
            try:
                part = run_expert(module, hidden[tokens], weights) * gate[tokens, positions, None]
            finally:
                store.release(row, expert, tier)
            out.index_add_(0, tokens, part.to(out.dtype))
        return out

    def _on_two_devices(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Resident experts on the device while the host works on the misses; their rows come back in one copy.

        A slot may be released once its kernels are launched: who overwrites it waits for the stream.
        """
        store, row, module, device = self.runtime.store, self.row, self.module, hidden.device
        picks = list(picks_by_expert(ids, self.runtime.num_experts))
        parts: dict[int, torch.Tensor] = {}
        misses = []

        def on_device(expert: int, tokens: torch.Tensor, weights: ExpertWeights) -> None:
            try:
                parts[expert] = run_expert(module, hidden[tokens.to(device, non_blocking=True)], weights)
            finally:
                store.release(row, expert, Tier.GPU)

        for expert, _, tokens in picks:
            resident = store.acquire_resident(row, expert)
            if resident is not None:
                on_device(expert, tokens, resident)
            else:
                misses.append((expert, tokens))
        if misses:
            on_host, host_module = hidden.cpu(), self.runtime.host_module(row)
            ahead = _Ahead(store, row, [expert for expert, _ in misses])
            computed: list[tuple[int, torch.Tensor]] = []
            for expert, tokens in misses:
                ahead.step()
                weights, tier = store.acquire(row, expert)
                if tier is Tier.GPU:  # promoted since
                    on_device(expert, tokens, weights)
                    continue
                try:
                    computed.append((expert, run_expert(host_module, on_host[tokens], weights)))
                finally:
                    store.release(row, expert, tier)
            if computed:
                back = torch.cat([part for _, part in computed]).to(device, non_blocking=True)
                rows_per_miss = torch.split(back, [len(part) for _, part in computed])
                parts.update(zip((expert for expert, _ in computed), rows_per_miss, strict=True))
        out = torch.zeros_like(hidden)
        for expert, positions, tokens in picks:
            on_gpu, at = tokens.to(device, non_blocking=True), positions.to(device, non_blocking=True)
            part = parts[expert] * gate[on_gpu, at, None]
            out.index_add_(0, on_gpu, part.to(out.dtype))  # an expert meets a token once: no two adds collide
        return out


class _Ahead:
    """Announces experts a few steps before they are computed, so that reads run beside compute and stay few."""

    def __init__(self, store: ExpertStore, row: int, experts: list[int]) -> None:
        self._store, self._row, self._experts = store, row, experts
        self._next = store.window
        store.announce(row, experts[: self._next])

    def step(self) -> None:
        """One more is about to be computed."""
        if self._next < len(self._experts):
            self._store.announce(self._row, [self._experts[self._next]])
            self._next += 1
