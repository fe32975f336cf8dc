"""Experts computed on the host by kt-kernel's extension, where that is installed and asked for.

Knows: which class of the extension computes which format, what it must be told, and that one object of it holds one
layer's host experts in a form of its own. It takes a copy of the weights, gives no access to it and never frees it
(0.7.2): so host copies are handed over once all of a layer are read, can be neither moved nor read back, and only a
static plan without a disk tier can use it. An expert in a slot is never handed over, which is more than kt-kernel does
for itself: it holds every expert.

Nothing here is imported from kt-kernel before a layer is handed over. Source: kt-kernel/ext_bindings.cpp and
operators/{amx,avx2} of kvcache-ai/ktransformers at 95009ea; measured with 0.7.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from hotset.errors import BackendError, ExpertNotOnHost, OpsError
from hotset.kernels import LayerSpec, available_threads
from hotset.kernels.modules import expert_weights
from hotset.models.experts import ExpertLayer
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors
from hotset.runtime.expert_formats.plain import PlainFormat
from hotset.runtime.expert_formats.stored import StoredFormat, powers_of_two

MAX_ROWS = 1024
"""Picks of one call: the extension allocates room for so many when a layer is made."""


@dataclass(frozen=True)
class KtClass:
    """How the extension computes one of `hotset.kernels.formats.FORMATS`."""

    names: tuple[str, ...]
    """Of classes, the first that this CPU's variant of the extension has is taken."""
    scales: Literal["", "float32", "bfloat16", "exponent", "exponent as bfloat16"] = ""
    scale_numbers: tuple[str, ...] = ("none",)
    """Stored scales that become these without rounding."""
    bits: int = 16
    group: int = 0
    unit: int = 32
    """What H and F must be multiples of."""
    per_channel: bool = False


# AMXInt4_KGroup_MOE is left out: on a CPU without AMX it ended the process (segmentation fault, 0.7.2)
CLASSES: dict[str, KtClass] = {
    "bf16": KtClass(("AMXBF16_MOE", "AVX2BF16_MOE")),
    "fp8_block128": KtClass(("AMXFP8_MOE", "AVX2FP8_MOE"), "float32", ("fp32", "bf16", "fp16"), 8, 128, 128),
    "fp8_channel": KtClass(("AMXFP8PerChannel_MOE",), "float32", ("fp32", "bf16", "fp16"), 8, 0, 32, True),
    "mxfp4": KtClass(("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), "exponent as bfloat16", ("e8m0",), 4, 32, 32),
    "mxfp8": KtClass(("AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"), "exponent", ("e8m0",), 8, 32, 32),
    "int4_g32": KtClass(("AVX2RawInt4_MOE",), "bfloat16", ("bf16",), 4, 32, 32),
}


class KtKernelFormat(ExpertFormat):
    """kt-kernel on the host, torch elsewhere. Raises OpsError for a layer that it does not compute, BackendError where
    kt-kernel is not installed or has no class for the format on this CPU.

    spec: the layer's; float ones by the module's parameters, quantised ones as stored.
    """

    computes_together = True
    takes_over = True

    def __init__(self, layer: ExpertLayer, spec: LayerSpec) -> None:
        super().__init__(layer)
        self.spec = spec
        self._class = checked_class(spec)
        self._is_float = spec.kind.scales == "none"
        inner = PlainFormat(layer) if self._is_float else StoredFormat(layer, spec)
        self._inner: ExpertFormat = inner
        self.host_shapes, self.device_shapes = inner.host_shapes, inner.device_shapes
        self.expert_bytes = inner.expert_bytes
        self.name = f"{spec.format}, in kt-kernel"
        self._held: _KtLayer | None = None
        self._at: dict[int, int] = {}
        """Expert -> its place in the extension's layer."""

    # -- bytes -----------------------------------------------------------------------------------------------------

    def read(self, source: ExpertSource, row: int, expert: int, target: ExpertTensors) -> None:
        self._inner.read(source, row, expert, target)

    def to_device(self, host: ExpertTensors) -> ExpertTensors:
        return self._inner.to_device(host)

    def to_host(self, slot: ExpertTensors, target: ExpertTensors) -> None:
        self._inner.to_host(slot, target)

    def take_over(self, experts: Mapping[int, ExpertTensors]) -> None:
        self._at = {expert: at for at, expert in enumerate(experts)}
        if experts:
            parts = [self._parts(weights) for weights in experts.values()]
            self._held = _KtLayer(self.spec, self._class, self.layer.layer_id, parts)

    def _parts(self, weights: ExpertTensors) -> dict[str, torch.Tensor]:
        """One expert's gate, up and down, and their scales in the numbers that the extension reads."""
        held = vars(expert_weights(weights)) if self._is_float else dict(weights)
        f, parts = self.spec.intermediate, {}
        for name, source in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            scales = held.get(f"{source}_scale")
            for kind, tensor in (("proj", held[source]), ("scale", scales)):
                if tensor is None:
                    continue
                half = f if kind == "proj" else len(tensor) // 2
                rows = {"gate": slice(0, half), "up": slice(half, 2 * half), "down": slice(None)}[name]
                part = tensor[rows].contiguous()
                parts[f"{name}_{kind}s"] = part if kind == "proj" else _scales(part, self._class.scales)
        return parts

    # -- computing -------------------------------------------------------------------------------------------------

    def rows(self, hidden: torch.Tensor, ids: torch.Tensor, experts: Mapping[int, ExpertTensors]) -> torch.Tensor:
        del experts  # handed over long ago
        out = torch.zeros((*ids.shape, self.spec.hidden))
        tokens, picks = ((ids >= 0) & (ids < self.spec.num_experts)).nonzero(as_tuple=True)
        places = []
        for expert in ids[tokens, picks].tolist():
            if expert not in self._at:
                raise ExpertNotOnHost(self.layer.layer_id, expert, "it was not handed over to kt-kernel")
            places.append(self._at[expert])
        if places:
            assert self._held is not None, "experts have places only once they are handed over"
            out[tokens, picks] = self._held.run(hidden[tokens].bfloat16(), torch.tensor(places)).float()
        return out

    def expert_rows(self, _module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        raise NotImplementedError("experts that were handed over are computed by `rows`")

    def device_rows(self, module: nn.Module, rows: torch.Tensor, weights: ExpertTensors) -> torch.Tensor:
        return self._inner.device_rows(module, rows, weights)


def checked_class(spec: LayerSpec) -> KtClass:
    """Raises as `KtKernelFormat` does."""
    found = CLASSES.get(spec.format)
    if found is None:
        raise OpsError(f"kt-kernel: {spec.format} experts: wanted {', '.join(CLASSES)}")
    if spec.scale_number not in found.scale_numbers:
        wanted = " or ".join(found.scale_numbers)
        raise OpsError(f"kt-kernel: {spec.format} with scales in {spec.scale_number}: wanted {wanted}")
    act = spec.activation
    plain = spec.gated and act.kind == "silu" and act.alpha == 1.0 and act.limit == math.inf and act.up_offset == 0.0
    if not plain or spec.bias != "none" or spec.interleaved or spec.transposed or spec.zero_points:
        raise OpsError(
            "kt-kernel: only SwiGLU experts without limits, biases and zero points, gate rows before up rows"
        )
    if spec.hidden % found.unit or spec.intermediate % found.unit:
        raise OpsError(
            f"kt-kernel: {spec.format} experts of {spec.hidden} x {spec.intermediate}: wanted multiples of {found.unit}"
        )
    _constructor(found)
    return found


def _scales(stored: torch.Tensor, wanted: str) -> torch.Tensor:
    if wanted == "exponent":
        return stored
    if wanted == "exponent as bfloat16":
        return powers_of_two(stored).bfloat16()
    return stored.to(getattr(torch, wanted))


@lru_cache(maxsize=1)
def _extension() -> Any:
    """The compiled module, in the variant that the package chooses for this CPU."""
    if importlib.util.find_spec("kt_kernel") is None:
        raise BackendError(
            "kernels='kt-kernel': it is not installed: `pip install --no-deps kt-kernel` (it pins an old torch)"
        )
    try:
        with _stdout_to_stderr():
            import kt_kernel
    except (ImportError, OSError) as problem:
        raise BackendError(f"kernels='kt-kernel': it cannot be imported here: {problem}") from None
    return kt_kernel.kt_kernel_ext


def _constructor(wanted: KtClass) -> Any:
    moe = _extension().moe
    for name in wanted.names:
        if hasattr(moe, name):
            return getattr(moe, name)
    raise BackendError(f"kernels='kt-kernel': it has none of {', '.join(wanted.names)} for this CPU")


class _KtLayer:
    """One layer of the extension, until the process ends."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Of the one pool of threads: one layer computes at a time."""
    _pool: ClassVar[Any] = None

    def __init__(self, spec: LayerSpec, wanted: KtClass, layer_id: int, parts: list[dict[str, torch.Tensor]]) -> None:
        moe, count = _extension().moe, len(parts)
        self._hidden = spec.hidden
        self._none_elsewhere = torch.zeros(count, dtype=torch.bool)
        with self._lock, _stdout_to_stderr():
            pool = self._threads()
            config = moe.MOEConfig(count, 1, spec.hidden, spec.intermediate, self._none_elsewhere.data_ptr())
            config.layer_idx, config.pool, config.max_len = layer_id, pool.backend_, MAX_ROWS
            for name in parts[0]:
                setattr(config, name, [[part[name].data_ptr() for part in parts]])
            if wanted.bits < 16:
                quantisation = config.quant_config
                quantisation.bits, quantisation.group_size, quantisation.zero_point = wanted.bits, wanted.group, False
                if wanted.per_channel:
                    quantisation.per_channel = True
            self._layer = _constructor(wanted)(config)
            order = torch.arange(count)
            pool.submit(self._layer.load_weights_task(order.data_ptr()))
            pool.sync()

    def run(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[n, H] bfloat16: row i by the expert at places[i]."""
        out = torch.empty_like(rows)
        gate = torch.ones(len(rows))
        with self._lock:
            pool = self._threads()
            for start in range(0, len(rows), MAX_ROWS):
                part = slice(start, start + MAX_ROWS)
                count = torch.tensor([len(rows[part])], dtype=torch.int32)
                addresses = [x[part].data_ptr() for x in (places, gate, rows, out)]
                pool.submit(self._layer.forward_task(count.data_ptr(), 1, *addresses, False))
                pool.sync()
        return out

    @classmethod
    def _threads(cls) -> Any:
        if cls._pool is None:
            extension = _extension()
            config = extension.WorkerPoolConfig()
            config.subpool_count, config.subpool_numa_map = 1, [0]
            # its workers spin: on two cores one of them decoded three times as fast as two, see LOG.md
            config.subpool_thread_count = [max(1, available_threads() - 1)]
            cls._pool = extension.CPUInfer(config)
            # never taken down: when it is, it says goodbye on stdout
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(cls._pool))
        return cls._pool


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """The extension prints a line for each layer: keep it out of what a program pipes on."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
