"""Prefill streaming: a long chunk brings the experts that it misses onto the device, one after the other, and computes
them there.

Knows two buffers, each as large as the largest expert, and one order: copies run one expert ahead of the computation.
Knows no sums: the caller computes and combines, in the order in which it named the experts. An expert in the arena is
used in its slot, locked for the layer's time, and never copied. Whether a chunk is long enough is decided once, at
load, by `resolve_threshold`.

Who waits for whom, on CUDA (copies on a stream of their own, computation on the caller's):

    staging[n]  page-locked; written by the host once the copy out of it has landed
    buffer[n]   overwritten once the kernels that read it are done (event `free`)
    kernels     start once the bytes have landed (event `landed`)

Host experts are pageable (anonymous mappings, given back one by one), so every copy goes through the staging; without
it a copy would not run beside anything. On device "cpu" the buffers are host memory and every copy is done at once.

One pair of buffers and one lock for all threads: they share one link, so a second pair would cost memory and win
nothing. The lock is held for one layer's experts at a time; whoever holds it waits for the disk and the device only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from hotset.core import Machine, Tier
from hotset.errors import ModelError
from hotset.machines.cost import CostModel
from hotset.runtime.dispatch import Ahead
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertTensors, Shapes
from hotset.runtime.store import ExpertStore

ThresholdRequest: TypeAlias = int | Literal["auto"] | None
CopyBytes: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""(source, target) on the host; tests inject failures here."""

_ALIGNMENT = 256
"""Bytes between tensors of a buffer: what CUDA's own allocations are aligned to."""


@dataclass(frozen=True)
class Threshold:
    """From how many tokens on a chunk streams its missing experts, and why; None = never."""

    tokens: int | None
    reason: str


def resolve_threshold(
    requested: ThresholdRequest,
    *,
    device: torch.device,
    machine: Machine | None,
    formats: Sequence[ExpertFormat],
    top_k: int | None,
    missing_per_layer: float,
) -> Threshold:
    """The request as a number with its reason. top_k, missing_per_layer (not in the arena): for "auto" only.

    "auto" needs a Machine with a link and a measured host rate; where one is absent nothing is guessed, and the answer
    is never. Raises ModelError on anything but "auto", None, or 1 and above.
    """
    if requested is None:
        return Threshold(None, "switched off")
    held = next((fmt.name for fmt in formats if fmt.takes_over), None)
    if held is not None:
        if requested != "auto":
            raise ModelError(
                f"gpu_prefill_token_threshold is {requested!r}: experts that are {held} cannot be streamed"
            )
        return Threshold(None, f"experts that are {held} cannot be streamed")
    if requested != "auto":
        if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
            raise ModelError(f"gpu_prefill_token_threshold is {requested!r}: wanted auto, None or 1 and above")
        return Threshold(requested, "asked for")
    if device.type == "cpu":
        return Threshold(None, "the arena is host memory: there is no faster place to stream to")
    if machine is None:
        return Threshold(None, "no machine given: measure this one with `hotset probe -o FILE` and give it as machine")
    if machine.device != "cuda":
        return Threshold(None, f"machine {machine.name!r} has no GPU and no link")
    if machine.host_flops_per_second is None:
        return Threshold(
            None, f"machine {machine.name!r} does not say host_flops_per_second: measure it with `hotset probe`"
        )
    if top_k is None:
        return Threshold(None, "the model's configuration does not say how many experts a token picks")
    largest = max(formats, key=lambda fmt: fmt.expert_bytes)
    found = CostModel(machine).prefill_threshold(
        expert_bytes=largest.expert_bytes,
        expert_flops=expert_flops(largest),
        num_experts=largest.layer.num_experts,
        top_k=top_k,
        missing=missing_per_layer,
    )
    if found is None:
        return Threshold(None, f"by machine {machine.name!r} computing on the host is faster at every length")
    return Threshold(found, f"by machine {machine.name!r} the link beats the host's arithmetic from here on")


def expert_flops(fmt: ExpertFormat) -> int:
    """Of one token through one expert: a multiply and an add per weight of its matrices."""
    matrices = [p for p in fmt.layer.parameters.values() if p.ndim >= 3]
    return 2 * sum(p.numel() // p.shape[0] for p in matrices)


@dataclass
class PrefillStatistics:
    """Sums since the start."""

    chunks: int = 0
    """Forward passes of at least the threshold's tokens."""
    experts_streamed: int = 0
    bytes: int = 0
    """Of the experts streamed."""
    seconds: float = 0.0
    """Of the host in streamed layers, waiting for another thread's turn left out."""


class PrefillStreamer:
    """The double buffer of one model, allocated at first use."""

    def __init__(self, store: ExpertStore, threshold: Threshold, *, copy: CopyBytes | None = None) -> None:
        self.store = store
        self.threshold = threshold
        self._copy = copy or _copy
        self._counts = PrefillStatistics()
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._stream: Any = None

    def wants(self, num_tokens: int) -> bool:
        """Whether a chunk of that many tokens streams."""
        return self.threshold.tokens is not None and num_tokens >= self.threshold.tokens

    def run(self, row: int, experts: Sequence[int], compute: Callable[[int, ExpertTensors], None]) -> None:
        """Call `compute(expert, tensors on the device)` for each of these distinct experts, in this order.

        The tensors are of `slot_shapes` and valid for kernels that are launched, on the current stream, before compute
        returns. Raises what reading, copying or computing raised; nothing stays locked and no copy is under way then.
        """
        with self._lock:
            started = time.perf_counter()
            try:
                self._run(row, experts, compute)
            except BaseException:
                if self._stream is not None:
                    self._stream.synchronize()
                raise
            finally:
                self._counts.chunks += row == 0
                self._counts.seconds += time.perf_counter() - started

    def _run(self, row: int, experts: Sequence[int], compute: Callable[[int, ExpertTensors], None]) -> None:
        store = self.store
        in_slot: dict[int, ExpertTensors] = {}
        landing: dict[int, _Buffer] = {}
        try:
            for expert in experts:
                if (resident := store.acquire_resident(row, expert)) is not None:
                    in_slot[expert] = resident
            missing = [expert for expert in experts if expert not in in_slot]
            free = self._free_buffers() if missing else []
            ahead, coming = Ahead(store, row, missing), iter(missing)
            for expert in experts:
                while free and (following := next(coming, None)) is not None:
                    buffer = free.pop(0)
                    promoted = self._begin(row, following, buffer)
                    ahead.step()  # after the copy: one more announced before it could cost this one its place
                    if promoted is None:
                        landing[following] = buffer
                    else:
                        in_slot[following] = promoted
                        free.append(buffer)
                if expert in in_slot:
                    compute(expert, in_slot[expert])
                    del in_slot[expert]
                    store.release(row, expert, Tier.GPU)
                    continue
                buffer = landing.pop(expert)
                with buffer.reading():
                    compute(expert, buffer.tensors(store.formats[row].slot_shapes(store.device)))
                free.append(buffer)
        finally:
            for expert in in_slot:
                store.release(row, expert, Tier.GPU)

    def _begin(self, row: int, expert: int, buffer: _Buffer) -> ExpertTensors | None:
        """Start bringing the expert into the buffer. Where it was promoted meanwhile: its slot, locked, and no copy."""
        store, fmt = self.store, self.store.formats[row]
        weights, tier = store.acquire(row, expert)
        if tier is Tier.GPU:
            return weights
        try:
            source = weights if store.device.type == "cpu" else fmt.to_device(weights)
            buffer.fill(source, fmt.slot_shapes(store.device), self._copy, self._stream)
        finally:
            store.release(row, expert, tier)
        self._counts.experts_streamed += 1
        self._counts.bytes += fmt.expert_bytes
        return None

    def _free_buffers(self) -> list[_Buffer]:
        if not self._buffers:
            device = self.store.device
            if device.type == "cuda":
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            size = buffer_size(self.store.formats, device)
            self._buffers = [_Buffer(size, device) for _ in range(2)]
        return list(self._buffers)

    @property
    def buffer_bytes(self) -> int:
        """Of both buffers on the device; 0 before the first use."""
        return sum(buffer.on_device.numel() for buffer in self._buffers)

    @property
    def staging_bytes(self) -> int:
        """Page-locked host memory in front of them; none where the device is the CPU."""
        return sum(buffer.staging.numel() for buffer in self._buffers if buffer.staging is not buffer.on_device)

    def report(self) -> dict[str, Any]:
        """JSON-able: the threshold, its reason, and what was streamed."""
        counts = replace(self._counts)
        return {"token_threshold": self.threshold.tokens, "reason": self.threshold.reason, **vars(counts)}


class _Buffer:
    """Room for one expert on the device and, where that is not the host, page-locked room in front of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.free: Any = None
        self.landed: Any = None
        with torch.inference_mode(False):  # allocated inside generate, but outlives its inference mode
            self.on_device = torch.empty(size, dtype=torch.uint8, device=device)
            self.staging = self.on_device
            if device.type == "cuda":
                self.staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                self.free, self.landed = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
                # the allocator may hand out memory that kernels launched earlier still read
                self.free.record(torch.cuda.current_stream(device))

    def tensors(self, shapes: Shapes) -> ExpertTensors:
        return _views(self.on_device, shapes)

    def fill(self, source: ExpertTensors, shapes: Shapes, copy: CopyBytes, stream: Any) -> None:
        """The host's part of the copy is done on return; on CUDA the rest is under way on `stream`."""
        if self.landed is not None:
            self.landed.synchronize()
        for name, target in _views(self.staging, shapes).items():
            copy(source[name], target)
        if stream is None:
            return
        stream.wait_event(self.free)
        used = _layout(shapes)[1]
        with torch.cuda.stream(stream):
            self.on_device[:used].copy_(self.staging[:used], non_blocking=True)
            self.landed.record(stream)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Kernels launched inside read the buffer: after its bytes have landed, before the next copy into it."""
        if self.landed is None:
            yield
            return
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.landed)
        try:
            yield
        finally:
            self.free.record(computing)


def buffer_size(formats: Sequence[ExpertFormat], device: torch.device) -> int:
    """Bytes of one buffer: the largest expert as a slot of this device has it."""
    return max(_layout(fmt.slot_shapes(device))[1] for fmt in formats)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _layout(shapes: Shapes) -> tuple[dict[str, int], int]:
    starts, total = {}, 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = total
        total += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def _views(buffer: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    starts, _ = _layout(shapes)
    return {
        name: buffer[starts[name] : starts[name] + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for name, (shape, dtype) in shapes.items()
    }
