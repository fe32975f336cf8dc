"""`hotset.load`: a Transformers model whose experts live where a plan says, and the object that runs them."""

from __future__ import annotations

import copy
import importlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from hotset.core import Machine, Plan
from hotset.errors import BudgetError, ModelError, PlanError, PolicyError, UnsupportedModelError
from hotset.kernels import LayerSpec
from hotset.models.checkpoint import resolve_model_folder
from hotset.models.experts import ExpertLayer, experts_per_token
from hotset.ops import ShedPolicy
from hotset.runtime.adapting import Adaptation, Adapter
from hotset.runtime.copy_policy import CopyPolicy, SkipRequest, resolve_copy_policy
from hotset.runtime.dispatch import IMPLEMENTATION, LayerDispatch, register
from hotset.runtime.expert_formats.choice import (
    FormatChoice,
    FormatRequest,
    KernelRequest,
    choose_formats,
    quantised_specs,
)
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors
from hotset.runtime.host_cache import DEFAULT_POLICY, HostCache
from hotset.runtime.loading import ExpertReader, load_skeleton
from hotset.runtime.memory import available_bytes, buffer_bytes, peak_bytes, resident_bytes
from hotset.runtime.prefill import PrefillStreamer, Threshold, ThresholdRequest, buffer_size, resolve_threshold
from hotset.runtime.quantising import QuantisedExperts, quantised_file
from hotset.runtime.recording import Forward, ServingRecorder
from hotset.runtime.shedding import SheddingDispatch, enable_shedding
from hotset.runtime.statistics import Phase, PhaseStatistics, merged
from hotset.runtime.store import ExpertStore
from hotset.traces.writer import TraceWriter
from hotset.units import format_bytes, parse_bytes

logger = logging.getLogger("hotset.runtime")

RESERVE_BYTES = 128 * 1024 * 1024
"""Of a host memory budget, kept for activations, KV cache and the heap's slack."""
MIN_CACHED_EXPERTS = 8
"""Buffers without which a decoded token's experts could not even be read side by side."""


def load(
    model: str | Path,
    *,
    plan: Plan | str | Path | ArrayLike | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    adapt: bool | Adaptation = False,
    skip_gpu_expert_cpu_copy: SkipRequest = "auto",
    training: bool = False,
    host_memory_bytes: int | str | None = None,
    host_cache_policy: str = DEFAULT_POLICY,
    expert_format: FormatRequest = "auto",
    kernels: KernelRequest = "auto",
    shed: ShedPolicy | float | None = None,
    gpu_prefill_token_threshold: ThresholdRequest = "auto",
    machine: Machine | str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """A Transformers model that `generate` works on, with each expert in exactly one tier.

    model: folder of a safetensors checkpoint, or a hub name. plan: a Plan, a plan file, or a bool mask [L, E]; None
    puts every expert in host memory. device: "auto" (CUDA where present, else "cpu"), or a torch device; on "cpu" the
    arena is a second one in host memory. dtype: "auto" as the checkpoint says. adapt: move experts between tokens as
    the workload shifts; True, or an `Adaptation` with settings. skip_gpu_expert_cpu_copy: whether experts on the GPU
    do without a host copy, see `copy_policy`. training: the caller will train (what surrounds the experts; they stay as
    they are). host_memory_bytes: the most memory that this process may take, e.g. "12GiB"; experts that do not fit
    stay in the checkpoint and are read when picked, through a cache run by host_cache_policy (lfu-aged, lru, lfu).
    expert_format: "auto" as the checkpoint has them, "float" in the dtype, or "int8", "int4_g32", "int4_g128":
    quantised at the first load and kept in a file beside the plan (else in the cache directory), in every tier alike.
    kernels: what computes experts on the host. "auto": the compiled kernels for bfloat16, float16 and quantised
    experts, torch for float32, whose bits are then those of Transformers' eager loops; "compiled" or "torch" forces
    one, "kt-kernel" takes that package's where it is installed (static plans, nothing on disk). shed: skip experts
    that are not on the GPU where the others keep this share of a token's gate mass, a policy or a keep_mass; default
    never. gpu_prefill_token_threshold: forward passes of at least so many tokens stream the experts that they miss
    onto the device, instead of computing them on the host; None = never; "auto" = from where on the cost model of
    `machine` says it is faster, never without a machine or without a GPU. machine: what `hotset probe` measured here,
    or a preset. progress: called with (experts read, experts to read).

    The model gets `model.hotset` (the Runtime) and `model.hotset_report()`.
    Raises ModelError, CheckpointError, UnsupportedModelError, PlanError (plan of another model), PolicyError,
    MachineError, BudgetError (the host memory holds too little to run at all).
    """
    folder = resolve_model_folder(model)
    target = _resolve_device(device)
    settings = Adaptation() if adapt is True else (adapt or None)
    restore = settings.restore_source if settings is not None else None
    copies = resolve_copy_policy(
        skip_gpu_expert_cpu_copy, dynamic=settings is not None, restore=restore, training=training
    )
    skeleton = load_skeleton(folder, dtype=dtype, device=target)
    mask = _resolve_mask(plan, skeleton.layers, skeleton.reader)
    quantise_to = quantised_specs(skeleton.layers, expert_format)
    specs: Sequence[LayerSpec | None] = quantise_to or [None] * len(skeleton.layers)
    if expert_format == "auto":
        specs = skeleton.reader.quantised_specs()
    moves = settings is not None
    choice = choose_formats(skeleton.layers, specs, kernels=kernels, training=training, moves=moves)
    budget = None if host_memory_bytes is None else parse_bytes(host_memory_bytes)
    threshold = resolve_threshold(
        gpu_prefill_token_threshold,
        device=target,
        machine=Machine.open(machine) if isinstance(machine, str | Path) else machine,
        formats=choice.formats,
        top_k=experts_per_token(skeleton.model.config),
        missing_per_layer=float((~mask).sum(axis=1).mean()),
    )
    # on CUDA the staging in front of the buffers is as large as they are
    streaming = 0 if threshold.tokens is None else 2 * buffer_size(choice.formats, target)
    cache_bytes = _cache_bytes(choice.formats, mask, target, copies, budget, streaming)
    if cache_bytes is not None:
        share = cache_bytes / _needed_bytes(choice.formats, mask, copies)
        choice = choose_formats(
            skeleton.layers, specs, kernels=kernels, training=training, cached_share=share, moves=moves
        )
    formats = choice.formats
    source: ExpertSource = skeleton.reader
    if quantise_to is not None:
        path = quantised_file(quantise_to[0].format, skeleton.reader.fingerprint, plan)
        source = QuantisedExperts(source, skeleton.layers, quantise_to, path, skeleton.reader.fingerprint, progress)

    def read(row: int, expert: int, into: ExpertTensors) -> None:
        formats[row].read(source, row, expert, into)

    cache = None
    if cache_bytes is not None:
        if not any(specs):  # quantised experts are read part by part, through the page cache
            room = available_bytes()
            skeleton.reader.choose_reads(None if room is None else room - cache_bytes)
        reads = skeleton.reader.reads
        cache = HostCache(formats, read, cache_bytes, policy=host_cache_policy, reads=reads)
    if cache is not None and not skeleton.reader.reads_single_experts:
        raise UnsupportedModelError(
            f"{folder}: its experts are stored so that a whole layer must be converted to read one: "
            "they cannot stay on disk; give host memory for all of them"
        )
    store = ExpertStore(
        skeleton.layers, mask, target, read, formats=formats, copies=copies, restore=restore, cache=cache
    )
    runtime = Runtime(skeleton.model, store, skeleton.non_expert_bytes, choice, settings, budget, threshold)
    runtime.model_fingerprint = skeleton.reader.fingerprint
    store.load(progress)
    register()
    skeleton.model.set_experts_implementation(IMPLEMENTATION)
    runtime.attach()
    (logger.warning if copies.warning else logger.info)(
        "skip_gpu_expert_cpu_copy=%s: host copies of experts on the GPU are %s (%s)",
        copies.requested,
        "skipped" if copies.skip else "kept",
        copies.warning or copies.reason,
    )
    logger.info("experts on the host: %s (%s)", choice.name, choice.reason)
    if cache is not None:
        logger.info("experts on disk are read %s", cache.reads)
    logger.info("gpu_prefill_token_threshold: %s (%s)", threshold.tokens or "never", threshold.reason)
    if shed is not None:
        enable_shedding(skeleton.model, shed if isinstance(shed, ShedPolicy) else ShedPolicy(keep_mass=shed))
    return skeleton.model


def _cache_bytes(
    formats: list[ExpertFormat],
    mask: NDArray[np.bool_],
    device: torch.device,
    copies: CopyPolicy,
    budget: int | None,
    streaming: int,
) -> int | None:
    """What a host memory budget leaves for the host cache. None where no budget is given or everything fits.

    streaming: bytes of host memory that prefill streaming takes.

    Raises BudgetError where too little is left to run.
    """
    if budget is None:
        return None
    sizes = np.array([buffer_bytes(fmt.host_shapes) for fmt in formats])
    needed = _needed_bytes(formats, mask, copies)
    arena = int((mask.sum(axis=1) * sizes).sum()) if device.type == "cpu" else 0
    importlib.import_module("hotset.policies.demand")  # its compiler takes memory of its own
    taken = resident_bytes()
    left = budget - taken - arena - streaming - RESERVE_BYTES
    if left >= needed:
        return None
    account = (
        f"host memory {format_bytes(budget)}: the process and the model without experts take {format_bytes(taken)}, "
        f"the arena {format_bytes(arena)}, prefill streaming {format_bytes(streaming)}, "
        f"{format_bytes(RESERVE_BYTES)} are kept for activations and KV cache"
    )
    if not copies.skip:
        raise BudgetError(
            f"{account}; host copies of all experts ({copies.reason}) need {format_bytes(needed)} more: give more "
            "memory, or skip_gpu_expert_cpu_copy='on'"
        )
    least = int(sizes.sum() if len(set(sizes.tolist())) > 1 else sizes[0]) * MIN_CACHED_EXPERTS
    if left < least:
        raise BudgetError(
            f"{account}; that leaves {format_bytes(max(left, 0))} for experts and at least "
            f"{format_bytes(least)} are needed: give {format_bytes(budget - left + least)} or more"
        )
    return left


def _needed_bytes(formats: list[ExpertFormat], mask: NDArray[np.bool_], copies: CopyPolicy) -> int:
    """Of host memory for all experts that want a place there."""
    on_host = ~mask if copies.skip else np.ones_like(mask)
    sizes = [buffer_bytes(fmt.host_shapes) for fmt in formats]
    return int((on_host.sum(axis=1) * sizes).sum())


class Runtime:
    """Owns the experts of one loaded model: their store, the per-layer dispatch, moves and counters.

    Several threads may run the model at once; each forward pass keeps its state by thread.
    """

    def __init__(
        self,
        model: Any,
        store: ExpertStore,
        non_expert_bytes: int,
        choice: FormatChoice,
        adaptation: Adaptation | None = None,
        host_memory_bytes: int | None = None,
        threshold: Threshold | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.choice = choice
        self.layers = store.layers
        self.num_experts = self.layers[0].num_experts
        self.device = store.device
        self.non_expert_bytes = non_expert_bytes
        self.host_memory_bytes = host_memory_bytes
        self.model_fingerprint: str | None = None
        self.adapter = None if adaptation is None else Adapter(store, adaptation)
        self.prefill = PrefillStreamer(store, threshold or Threshold(None, "switched off"))
        self.statistics: dict[Phase, PhaseStatistics] = {"prefill": PhaseStatistics(), "decode": PhaseStatistics()}
        self._counting = threading.Lock()
        self._running = threading.local()
        self._recorder: ServingRecorder | None = None
        self._host_modules: dict[int, nn.Module] = {}

    def attach(self) -> None:
        """Hang this runtime on its model: dispatch per layer, phase and time by hooks, report, refusals."""
        for row, layer in enumerate(self.layers):
            for module in layer.modules:
                module.hotset_layer = LayerDispatch(self, row, module)  # type: ignore[assignment]
                TrainingGuard.install(module, self.store.copies)
        TrainingGuard.install(self.model, self.store.copies)
        self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self.model.register_forward_hook(self._after_forward)
        self.model.hotset = self
        self.model.hotset_report = self.report
        self.model.save_pretrained = _refuse_saving

    def count(self, row: int, ids: NDArray[np.int64], weights: torch.Tensor) -> None:
        """Note one layer's call. ids: [T, K] as routed, weights: [T, K] the gate's."""
        valid = (ids >= 0) & (ids < self.num_experts)
        slots = self.store.residency.slots_of(row, np.where(valid, ids, 0))
        forward: Forward | None = getattr(self._running, "forward", None)
        with self._counting:
            self.statistics["decode" if forward and forward.is_decode else "prefill"].count(slots, valid)
        if forward is not None:  # None: an inner module is run without the model around it
            if self.adapter is not None or self._recorder is not None:
                forward.picks.append((row, ids))
            if self._recorder is not None:
                forward.weights.append(weights.detach())

    def host_module(self, row: int) -> nn.Module:
        """A twin of the layer's experts module on the CPU, for what a gate or norm keeps as tensors of its own."""
        if row not in self._host_modules:
            twin = copy.copy(self.layers[row].module)
            if any(True for _ in self.layers[row].module.parameters()):
                twin = copy.deepcopy(self.layers[row].module).to("cpu")
            self._host_modules[row] = twin
        return self._host_modules[row]

    def rebalance(self, *, max_moves: int | None = None, max_bytes: int | None = None) -> int:
        """Move experts to where the observed workload wants them; see `Adapter.rebalance`. Returns moves made.

        Raises PolicyError where the model was loaded without `adapt`.
        """
        if self.adapter is None:
            raise PolicyError("the plan is static: load with adapt=True to rebalance")
        return self.adapter.rebalance(max_moves=max_moves, max_bytes=max_bytes)

    def recording(self, folder: str | Path, *, overwrite: bool = False) -> ServingRecorder:
        """Record the routing of everything that runs, until the returned context is left.

        The trace is read with `Trace.open(folder)`. Raises TraceError (a trace is there already), ModelError (a
        recording is under way).
        """
        if self._recorder is not None:
            raise ModelError("a recording is under way: end it before the next one begins")
        sizes = np.array([fmt.expert_bytes for fmt in self.store.formats], np.int64)
        writer = TraceWriter(
            folder,
            num_experts=self.num_experts,
            layer_ids=np.array([layer.layer_id for layer in self.layers], np.int32),
            expert_bytes=np.repeat(sizes[:, None], self.num_experts, axis=1),
            model_fingerprint=self.model_fingerprint,
            metadata={"model_type": self.model.config.model_type, "mode": "serving"},
            overwrite=overwrite,
        )
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        eos_ids = [eos] if isinstance(eos, int) else list(eos or [])
        self._recorder = ServingRecorder(writer, eos_ids, self.num_experts).on_exit(self._stop_recording)
        return self._recorder

    def _stop_recording(self) -> None:
        self._recorder = None

    def reset_statistics(self) -> None:
        """Forget the counts and times of both phases."""
        with self._counting:
            self.statistics = {"prefill": PhaseStatistics(), "decode": PhaseStatistics()}

    def report(self) -> dict[str, Any]:
        """JSON-able: bytes, experts and traffic per tier, moves, stalls, hits and rates per phase, peak memory."""
        store, cache = self.store, self.store.cache
        in_arena = int(store.residency.mask().sum())
        total = len(self.layers) * self.num_experts
        with self._counting:
            phases = {name: replace(part) for name, part in self.statistics.items()}
        both = merged(*phases.values())
        arena_on_host = self.device.type == "cpu"
        experts = {"total": total, "gpu": in_arena, "host": total - in_arena}
        if cache is not None:
            experts["host"] = min(cache.num_held, total - in_arena)
            experts["disk"] = total - in_arena - experts["host"]
        return {
            "device": str(self.device),
            "arena": "a second arena in host memory" if arena_on_host else f"device memory of {self.device}",
            "experts": experts,
            "host_compute": {"format": self.choice.name, "kernels": self.choice.kernels, "reason": self.choice.reason},
            "bytes": {
                "arena": store.arena_bytes,
                "host_experts": store.host_bytes,
                "non_expert": self.non_expert_bytes,
                "prefill_buffers": self.prefill.buffer_bytes,
                "prefill_staging": self.prefill.staging_bytes,
            },
            "gpu_prefill": self.prefill.report(),
            "skip_gpu_expert_cpu_copy": {
                "requested": store.copies.requested,
                "skip": store.copies.skip,
                "reason": store.copies.reason,
                "warning": store.copies.warning,
            },
            "peak_host_bytes": peak_bytes(),
            "host_memory_bytes": self.host_memory_bytes,
            "hit_rate": both.hit_rate,
            "token_resident_rate": both.token_resident_rate,
            "keep_mass": None if self._shedding is None else self._shedding.policy.keep_mass,
            "dropped_mass": self._dropped_mass(),
            "moves": asdict(self.adapter.statistics) if self.adapter is not None else None,
            "disk": None if cache is None else {**cache.report(), **asdict(cache.statistics)},
            "prefill": phases["prefill"].to_json(),
            "decode": phases["decode"].to_json(),
        }

    @property
    def _shedding(self) -> SheddingDispatch | None:
        found = self.layers[0].module.hotset_layer
        return found if isinstance(found, SheddingDispatch) else None

    def _dropped_mass(self) -> float:
        """Share of the gate mass that shedding dropped; 0 in exact mode, which drops nothing."""
        if self._shedding is None:
            return 0.0
        totals = self._shedding.ledger.totals()
        mass = float(totals.mass.sum())
        return float(totals.dropped_mass.sum()) / mass if mass > 0 else 0.0

    def _before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds", args[0] if args else None)
        batch, width = inputs.shape[:2] if inputs is not None else (1, 1)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        continues = cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0
        self._running.forward = Forward(
            batch=int(batch),
            width=int(width),
            is_decode=width == 1,
            continues=continues,
            input_ids=inputs if inputs is not None and not inputs.is_floating_point() else None,
            attention_mask=kwargs.get("attention_mask"),
            started=time.perf_counter(),
        )

    def _after_forward(self, *_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        forward: Forward = self._running.forward
        self._running.forward = None
        if self._recorder is not None and forward.weights:
            self._recorder.add(forward)
        if self.adapter is not None:
            self.adapter.after_forward(forward.picks)
        with self._counting:  # moves between tokens are part of what a token costs
            part = self.statistics["decode" if forward.is_decode else "prefill"]
            part.tokens += forward.batch * forward.width
            part.seconds += time.perf_counter() - forward.started


class TrainingGuard(nn.Module):
    """An empty child module that refuses `train()` of whatever holds it, and so of any copy or part of the model.

    `nn.Module.train` asks every child; installed first, it is asked before anything else has changed.
    """

    def __init__(self, copies: CopyPolicy, owner: nn.Module) -> None:
        super().__init__()
        self.copies = copies
        self._owner = weakref.ref(owner)

    @staticmethod
    def install(owner: nn.Module, copies: CopyPolicy) -> None:
        """Become the first child of `owner`."""
        others = dict(owner._modules)
        owner._modules.clear()
        owner._modules["hotset_training_guard"] = TrainingGuard(copies, owner)
        owner._modules.update(others)

    def train(self, mode: bool = True) -> TrainingGuard:
        """Raises ModelError where host copies of experts are skipped."""
        owner = self._owner()
        if mode and self.copies.skip and owner is not None:
            owner.training = False
        if mode:
            self.copies.check_training()
        super().train(mode)
        return self


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
    plan: Plan | str | Path | ArrayLike | None, layers: list[ExpertLayer], reader: ExpertReader
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
            f"{reader.checkpoint.folder} has {shape[0]} of {shape[1]}: record and plan this model"
        )
    ids = [layer.layer_id for layer in layers]
    if plan.layer_ids.tolist() != ids:
        raise PlanError(f"the plan is for layers {plan.layer_ids.tolist()}, the model has MoE layers {ids}")
    if plan.model_fingerprint is not None and plan.model_fingerprint != reader.fingerprint:
        raise PlanError(
            f"the plan was made for another model (fingerprint {plan.model_fingerprint}, the checkpoint in "
            f"{reader.checkpoint.folder} has {reader.fingerprint}): record and plan this model"
        )
    return plan.gpu_experts_mask


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise ModelError(
        "this model holds each expert once, in the arena or on the host, and does not save itself: "
        "copy its checkpoint folder instead"
    )
