"""`hotset.load`: a Transformers model whose experts live where a plan says, and the object that runs them."""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from hotset.core import Plan
from hotset.errors import ModelError, PlanError
from hotset.models.checkpoint import Checkpoint, resolve_model_folder
from hotset.models.experts import ExpertLayer
from hotset.runtime.dispatch import IMPLEMENTATION, LayerDispatch, register
from hotset.runtime.loading import load_skeleton
from hotset.runtime.statistics import Phase, PhaseStatistics, merged
from hotset.runtime.store import ExpertStore


def load(
    model: str | Path,
    *,
    plan: Plan | str | Path | ArrayLike | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """A Transformers model that `generate` works on, with each expert in exactly one tier.

    model: folder of a safetensors checkpoint, or a hub name. plan: a Plan, a plan file, or a bool mask [L, E]; None
    puts every expert in host memory. device: "auto" (CUDA where present, else "cpu"), or a torch device; on "cpu" the
    arena is a second one in host memory. dtype: "auto" as the checkpoint says. progress: called with (experts read,
    experts in all).

    The model gets `model.hotset` (the Runtime) and `model.hotset_report()`.
    Raises ModelError, CheckpointError, UnsupportedModelError, PlanError (plan of another model).
    """
    folder = resolve_model_folder(model)
    target = _resolve_device(device)
    skeleton = load_skeleton(folder, dtype=dtype, device=target)
    mask = _resolve_mask(plan, skeleton.layers, skeleton.reader.checkpoint)
    runtime = Runtime(skeleton.model, skeleton.layers, mask, target, skeleton.non_expert_bytes)
    runtime.store.load(skeleton.reader.read_into, progress)
    register()
    skeleton.model.set_experts_implementation(IMPLEMENTATION)
    runtime.attach()
    return skeleton.model


class Runtime:
    """Owns the experts of one loaded model: their store, the per-layer dispatch and the counters."""

    def __init__(
        self,
        model: Any,
        layers: list[ExpertLayer],
        mask: NDArray[np.bool_],
        device: torch.device,
        non_expert_bytes: int,
    ) -> None:
        self.model = model
        self.layers = layers
        self.num_experts = layers[0].num_experts
        self.device = device
        self.non_expert_bytes = non_expert_bytes
        self.store = ExpertStore(layers, mask, device)
        self.phase: Phase = "prefill"
        self.statistics: dict[Phase, PhaseStatistics] = {"prefill": PhaseStatistics(), "decode": PhaseStatistics()}
        self._started = 0.0
        self._host_modules: dict[int, nn.Module] = {}

    def attach(self) -> None:
        """Hang this runtime on its model: dispatch per layer, phase and time by hooks, report, refused saving."""
        for row, layer in enumerate(self.layers):
            for module in layer.modules:
                module.hotset_layer = LayerDispatch(self, row, module)  # type: ignore[assignment]
        self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self.model.register_forward_hook(self._after_forward)
        self.model.hotset = self
        self.model.hotset_report = self.report
        self.model.save_pretrained = _refuse_saving

    def count(self, row: int, ids: NDArray[np.int64]) -> None:
        """Count one layer's call. ids: [T, K] as routed."""
        valid = (ids >= 0) & (ids < self.num_experts)
        slots = self.store.residency.slots_of(row, np.where(valid, ids, 0))
        self.statistics[self.phase].count(slots, valid)

    def host_module(self, row: int) -> nn.Module:
        """A twin of the layer's experts module on the CPU, for what a gate or norm keeps as tensors of its own."""
        if row not in self._host_modules:
            twin = copy.copy(self.layers[row].module)
            if any(True for _ in self.layers[row].module.parameters()):
                twin = copy.deepcopy(self.layers[row].module).to("cpu")
            self._host_modules[row] = twin
        return self._host_modules[row]

    def reset_statistics(self) -> None:
        """Forget all counts and times."""
        self.statistics = {"prefill": PhaseStatistics(), "decode": PhaseStatistics()}

    def report(self) -> dict[str, Any]:
        """JSON-able: bytes per tier, experts per tier, hits and rates per phase, peak host memory."""
        in_arena = int(self.store.residency.mask().sum())
        total = len(self.layers) * self.num_experts
        both = merged(*self.statistics.values())
        arena_on_host = self.device.type == "cpu"
        return {
            "device": str(self.device),
            "arena": "a second arena in host memory" if arena_on_host else f"device memory of {self.device}",
            "experts": {"total": total, "gpu": in_arena, "host": total - in_arena},
            "bytes": {
                "arena": self.store.arena_bytes,
                "host_experts": self.store.host_bytes,
                "non_expert": self.non_expert_bytes,
            },
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "hit_rate": both.hit_rate,
            "token_resident_rate": both.token_resident_rate,
            "prefill": self.statistics["prefill"].to_json(),
            "decode": self.statistics["decode"].to_json(),
        }

    def _before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds", args[0] if args else None)
        shape = inputs.shape if inputs is not None else (1, 1)
        self.phase = "decode" if shape[1] == 1 else "prefill"
        self.statistics[self.phase].tokens += int(shape[0] * shape[1])
        self._started = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.statistics[self.phase].seconds += time.perf_counter() - self._started


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as problem:
        raise ModelError(f"device {device!r}: {str(problem).splitlines()[0]}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} asked for, but torch finds no CUDA device here: use device='cpu'")
    if resolved.type not in ("cuda", "cpu"):
        raise ModelError(f"device {device!r} is not supported: wanted cuda or cpu")
    return resolved


def _resolve_mask(
    plan: Plan | str | Path | ArrayLike | None, layers: list[ExpertLayer], checkpoint: Checkpoint
) -> NDArray[np.bool_]:
    shape = (len(layers), layers[0].num_experts)
    if plan is None:
        return np.zeros(shape, np.bool_)
    if isinstance(plan, str | Path):
        plan = Plan.open(plan)
    if not isinstance(plan, Plan):
        mask = np.asarray(plan)
        if mask.dtype != np.bool_ or mask.shape != shape:
            raise PlanError(f"the mask is {mask.dtype} {list(mask.shape)}: this model wants bool {list(shape)}")
        return mask
    if plan.gpu_experts_mask.shape != shape:
        raise PlanError(
            f"the plan is for {plan.num_layers} MoE layers of {plan.num_experts} experts, the model in "
            f"{checkpoint.folder} has {shape[0]} of {shape[1]}: record and plan this model"
        )
    ids = [layer.layer_id for layer in layers]
    if plan.layer_ids.tolist() != ids:
        raise PlanError(f"the plan is for layers {plan.layer_ids.tolist()}, the model has MoE layers {ids}")
    if plan.model_fingerprint is not None and plan.model_fingerprint != checkpoint.fingerprint:
        raise PlanError(
            f"the plan was made for another model (fingerprint {plan.model_fingerprint}, the checkpoint in "
            f"{checkpoint.folder} has {checkpoint.fingerprint}): record and plan this model"
        )
    return plan.gpu_experts_mask


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise ModelError(
        "this model holds each expert once, in the arena or on the host, and does not save itself: "
        "copy its checkpoint folder instead"
    )
