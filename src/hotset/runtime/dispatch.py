"""The experts implementation named `hotset`: runs each pick where its expert lives and combines in one fixed order.

Order of combination, whatever tier computed a pick: experts ascending, each added to its tokens' rows, which is the
order of Transformers' eager loops. So the sum does not depend on residency. Experts in plain format, on one kind of
device, give the bits of the unmodified model run with `experts_implementation="eager"`; formats that compute many
experts in one call sum in float32 and round once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hotset.core import Tier
from hotset.models.experts import interface_implementation, picks_by_expert
from hotset.runtime.expert_formats.contract import ExpertTensors

if TYPE_CHECKING:
    from hotset.runtime.runtime import Runtime
    from hotset.runtime.store import ExpertStore

IMPLEMENTATION = "hotset"
_FEW_TOKENS = 16
"""Up to so many tokens every pick's row is kept, so that what is in memory is computed while the rest is read."""


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
        self.format = runtime.store.formats[row]

    def __deepcopy__(self, _memo: object) -> LayerDispatch:
        """A copied module runs the same experts: there is one copy of them."""
        return self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H], on hidden_states' device."""
        ids = top_k_index.cpu()  # exact mode needs them on the host: the misses are computed there
        self.runtime.count(self.row, ids.numpy(), top_k_weights)
        if self.runtime.prefill.wants(len(ids)) and not (hidden_states.requires_grad and torch.is_grad_enabled()):
            return self._streamed(hidden_states.contiguous(), ids, top_k_weights)
        if hidden_states.device.type != "cpu" or self.format.takes_over:
            return self._on_two_devices(hidden_states, ids, top_k_weights)
        if self.format.computes_together:
            return self._together(hidden_states.contiguous(), ids, top_k_weights)
        return self._on_one_device(hidden_states, ids, top_k_weights)

    def _together(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Both tiers in host memory, all experts in one call of the kernels; where some must come from disk, several
        calls with the same bits."""
        store, row, num_experts = self.runtime.store, self.row, self.runtime.num_experts
        ids, order = ids.clamp(-1, num_experts).sort(dim=1)  # both ends are no pick to the kernels
        gate = gate.gather(1, order)
        experts = [expert for expert in np.unique(ids.numpy()).tolist() if 0 <= expert < num_experts]
        if self.format.alone_from_rows is not None:
            rows_of = np.bincount(ids.numpy().reshape(-1) + 1, minlength=num_experts + 2)[1:-1]
            if self._alone(int(rows_of.max())):
                return self._expert_by_expert(hidden, ids, gate, experts)
        ready, waiting = store.acquire_ready(row, experts)
        few = len(hidden) <= _FEW_TOKENS
        try:
            weights = {expert: tensors for expert, (tensors, _) in ready.items()}
            if few or not waiting:
                store.announce(row, list(ready))
                ahead = Ahead(store, row, waiting)
                if not waiting:
                    return self.format.moe(hidden, ids, gate, weights)
                not_yet = torch.isin(ids, torch.tensor(waiting))
                rows = self.format.rows(hidden, ids.masked_fill(not_yet, num_experts), weights)
        finally:
            for expert, (_, tier) in ready.items():
                store.release(row, expert, tier)
        if not few:
            return self._expert_by_expert(hidden, ids, gate, experts)
        for expert in waiting:
            tokens, positions = (ids == expert).nonzero(as_tuple=True)
            tensors, tier = store.acquire(row, expert)
            try:
                rows[tokens, positions] = self.format.expert_rows(self.module, hidden[tokens], tensors)
            finally:
                store.release(row, expert, tier)
            ahead.step()
        return self.format.combine(hidden, ids, gate, rows)

    def _expert_by_expert(
        self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor, experts: list[int]
    ) -> torch.Tensor:
        """The sum of `_together` for many tokens, holding one expert at a time: ids [T, K] ascending in each row."""
        store, row = self.runtime.store, self.row
        total = torch.zeros(hidden.shape)
        ahead = Ahead(store, row, experts)
        for expert in experts:
            tokens, positions = (ids == expert).nonzero(as_tuple=True)
            weights, tier = store.acquire(row, expert)
            try:
                self._add(total, expert, weights, hidden[tokens], gate[tokens, positions], tokens)
            finally:
                store.release(row, expert, tier)
            ahead.step()
        return total.to(hidden.dtype)

    def _add(
        self,
        total: torch.Tensor,
        expert: int,
        weights: ExpertTensors,
        rows: torch.Tensor,
        mass: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Add one expert's share to its tokens' sums: total [T, H] float32, rows [n, H], mass [n]."""
        part = total[tokens]
        if self._alone(len(tokens)):
            total[tokens] = part + self.format.expert_rows(self.module, rows, weights) * mass[:, None].float()
            return
        self.format.moe(rows, torch.full((len(tokens), 1), expert), mass[:, None], {expert: weights}, add_to=part)
        total[tokens] = part

    def _alone(self, num_rows: int) -> bool:
        """Whether an expert with so many rows in a call is none of those that are computed together."""
        return self.format.alone_from_rows is not None and num_rows >= self.format.alone_from_rows

    def _on_one_device(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        store, row, module = self.runtime.store, self.row, self.module
        out = torch.zeros_like(hidden)
        if len(hidden) == 1:  # decoding one sequence: nothing to gather, and half of the time would go into doing so
            num_experts = self.runtime.num_experts
            picks = sorted((expert, at) for at, expert in enumerate(ids[0].tolist()) if 0 <= expert < num_experts)
            ahead = Ahead(store, row, [expert for expert, _ in picks])
            parts = {}
            # what is in memory is computed while the rest is read; the order of the sum below stays
            for expert, at in sorted(picks, key=lambda pick: store.must_wait(row, pick[0])):
                weights, tier = store.acquire(row, expert)
                try:
                    rows = self.format.expert_rows(module, hidden, weights)
                    parts[expert] = (rows * gate[:, at, None]).to(out.dtype)
                finally:
                    store.release(row, expert, tier)
                ahead.step()
            for expert, _ in picks:
                out += parts[expert]
            return out
        picks_of = list(picks_by_expert(ids, self.runtime.num_experts))
        ahead = Ahead(store, row, [expert for expert, _, _ in picks_of])
        for expert, positions, tokens in picks_of:
            weights, tier = store.acquire(row, expert)
            try:
                part = self.format.expert_rows(module, hidden[tokens], weights) * gate[tokens, positions, None]
            finally:
                store.release(row, expert, tier)
            ahead.step()
            out.index_add_(0, tokens, part.to(out.dtype))
        return out

    def _streamed(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """A long chunk: what it misses comes to the device, expert by expert, and all is computed there.

        The sum, its order and its rounding are those of `_on_two_devices` (on the CPU those of `_together` and
        `_on_one_device`), so whether an expert was resident or streamed changes no bit.
        """
        device, fmt, module = hidden.device, self.format, self.module
        on_host = device.type == "cpu"
        picks = list(picks_by_expert(ids, self.runtime.num_experts))
        wide = torch.float32 if fmt.computes_together else hidden.dtype
        out = torch.zeros(hidden.shape, dtype=wide, device=device)
        if not picks:
            return out.to(hidden.dtype)
        # one upload for the layer: small ones between the kernels would make the host wait for each of them
        where = torch.stack([torch.cat([tokens for _, _, tokens in picks]), torch.cat([at for _, at, _ in picks])])
        per_pick = torch.split(where.to(device), [len(tokens) for _, _, tokens in picks], dim=1)
        places = {expert: at.unbind(0) for (expert, _, _), at in zip(picks, per_pick, strict=True)}

        def compute(expert: int, weights: ExpertTensors) -> None:
            tokens, positions = places[expert]
            if on_host and fmt.computes_together:
                self._add(out, expert, weights, hidden[tokens], gate[tokens, positions], tokens)
                return
            rows = (fmt.expert_rows if on_host else fmt.device_rows)(module, hidden[tokens], weights)
            out.index_add_(0, tokens, (rows * gate[tokens, positions, None]).to(wide))

        self.runtime.prefill.run(self.row, [expert for expert, _, _ in picks], compute)
        return out.to(hidden.dtype)

    def _on_two_devices(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Resident experts on the device while the host works on the misses; their rows come back in one copy. The
        device may be the CPU, where the format computes nothing that is in slots.

        A slot may be released once its kernels are launched: who overwrites it waits for the stream.
        """
        store, row, module, device = self.runtime.store, self.row, self.module, hidden.device
        picks = list(picks_by_expert(ids, self.runtime.num_experts))
        parts: dict[int, torch.Tensor] = {}
        misses = []

        def on_device(expert: int, tokens: torch.Tensor, weights: ExpertTensors) -> None:
            try:
                rows = hidden[tokens.to(device, non_blocking=True)]
                parts[expert] = self.format.device_rows(module, rows, weights)
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
            ahead = Ahead(store, row, [expert for expert, _ in misses])
            computed, misses = self._misses_together(on_host, misses)
            for expert, tokens in misses:
                weights, tier = store.acquire(row, expert)
                if tier is Tier.GPU:  # promoted since
                    on_device(expert, tokens, weights)
                else:
                    try:
                        computed.append((expert, self.format.expert_rows(host_module, on_host[tokens], weights)))
                    finally:
                        store.release(row, expert, tier)
                ahead.step()
            if computed:
                back = torch.cat([part for _, part in computed]).to(device, non_blocking=True)
                rows_per_miss = torch.split(back, [len(part) for _, part in computed])
                parts.update(zip((expert for expert, _ in computed), rows_per_miss, strict=True))
        wide = torch.float32 if self.format.computes_together else hidden.dtype
        out = torch.zeros_like(hidden, dtype=wide)
        for expert, positions, tokens in picks:
            on_gpu, at = tokens.to(device, non_blocking=True), positions.to(device, non_blocking=True)
            part = parts[expert] * gate[on_gpu, at, None]
            out.index_add_(0, on_gpu, part.to(wide))  # an expert meets a token once: no two adds collide
        return out.to(hidden.dtype)

    def _misses_together(
        self, hidden: torch.Tensor, misses: list[tuple[int, torch.Tensor]]
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """([(expert, rows [n, H])] of the misses in host memory where the format computes many in one call, the rest).

        misses: [(expert, tokens [n])]; hidden [T, H] on the CPU.
        """
        if not self.format.computes_together:
            return [], misses
        store, row = self.runtime.store, self.row
        ready, _ = store.acquire_ready(row, [expert for expert, tokens in misses if not self._alone(len(tokens))])
        try:
            on_host = {expert: weights for expert, (weights, tier) in ready.items() if tier is Tier.HOST}
            mine = [(expert, tokens) for expert, tokens in misses if expert in on_host]
            if not mine:
                return [], misses
            ids = torch.cat([torch.full((len(tokens), 1), expert) for expert, tokens in mine])
            rows = self.format.rows(hidden[torch.cat([tokens for _, tokens in mine])], ids, on_host)[:, 0]
        finally:
            for expert, (_, tier) in ready.items():
                store.release(row, expert, tier)
        parts = torch.split(rows, [len(tokens) for _, tokens in mine])
        done = [(expert, part) for (expert, _), part in zip(mine, parts, strict=True)]
        return done, [(expert, tokens) for expert, tokens in misses if expert not in on_host]


class Ahead:
    """Announces experts a few steps before they are computed, so that reads run beside compute and stay few."""

    def __init__(self, store: ExpertStore, row: int, experts: list[int]) -> None:
        self._store, self._row, self._experts = store, row, experts
        self._next = store.window
        store.announce(row, experts[: self._next])

    def step(self) -> None:
        """One was computed and released: announced before that, the next could cost one that waits its place."""
        if self._next < len(self._experts):
            self._store.announce(self._row, [self._experts[self._next]])
            self._next += 1
