"""What the kernels reach on this machine: the read bandwidth, decode beside it, and from how many tokens torch is
faster.

Knows: how to time so that a shared machine's moods hit both sides alike (interleaved, medians). Does not know: machine
files (`hotset.machines`) or how results are shown.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotset.kernels import native
from hotset.kernels.backend import Backend, backend
from hotset.kernels.formats import LayerSpec, quantise
from hotset.kernels.layer import CompiledLayer, ExpertLayer
from hotset.kernels.threads import available_threads

STREAMS = (
    (1, 1 << 20, 1024),
    (4, (64 << 10) + 128, 1024),
    (8, (64 << 10) + 128, 1024),
    (16, (64 << 10) + 128, 0),
)
"""(interleaved streams per thread, bytes of a piece, bytes of prefetch ahead): which one is fastest differs by CPU, so
the ceiling is the best. Pieces of 64 KiB + 128 keep streams out of each other's cache sets."""


@dataclass(frozen=True)
class KernelReport:
    """What was compiled and what it reaches."""

    backend: Backend
    instructions: str
    build_seconds: float
    """0 = it was in the cache"""
    threads: int
    read_bytes_per_second: float
    """median of the best way of reading; 0 without compiled kernels"""
    decode_bytes_per_second: dict[str, float]
    """by format: stored bytes of the experts of one token over the median time"""

    @property
    def decode_share(self) -> dict[str, float]:
        """Of the read bandwidth."""
        return {name: rate / self.read_bytes_per_second for name, rate in self.decode_bytes_per_second.items()}

    def line(self) -> str:
        """One line for people."""
        if self.backend.name == "torch":
            return self.backend.reason
        shares = ", ".join(f"{name} {share * 100:.0f} %" for name, share in self.decode_share.items())
        return (
            f"{self.backend.reason}; reads {self.read_bytes_per_second / 1e9:.1f} GB/s, decode reaches {shares} of it"
        )


def describe(
    formats: Sequence[str] = ("bf16",), *, working_set_bytes: int = 256 << 20, rounds: int = 15
) -> KernelReport:
    """Measures decode of one token beside the read bandwidth. Takes about a second; `working_set_bytes` should be
    several times the last-level cache.

    Raises BackendError as `hotset.kernels.backend` does, and OpsError for an unknown format.
    """
    chosen = backend()
    if chosen.name == "torch":
        return KernelReport(chosen, "", 0.0, available_threads(), 0.0, {})
    stream = ReadStream(working_set_bytes)
    reads: list[float] = []
    rates = {}
    for name in formats:
        layer = filled_layer(name, hidden=2048, intermediate=768, working_set_bytes=working_set_bytes)
        step = DecodeStep(layer, num_tokens=1)
        times = []
        for _ in range(rounds):  # as many bytes each, in turn: whatever else the machine does hits both alike
            reads.append(stream.rate(step.stored_bytes))
            times.append(step.seconds())
        rates[name] = step.stored_bytes / statistics.median(times)
    report = native.library()
    return KernelReport(
        chosen, native.instructions(), report.build_seconds, available_threads(), statistics.median(reads), rates
    )


class ReadStream:
    """Reads memory and does nothing with it, in the fastest of STREAMS on this machine: the ceiling of any kernel that
    is fed from memory."""

    def __init__(self, size_bytes: int = 512 << 20, threads: int | None = None) -> None:
        self._data = native.buffer(size_bytes)
        self._data[:] = 1  # pages that were never written are all the same zero page
        self._threads = threads or available_threads()
        self._at = 0
        part = size_bytes // 8
        rates = {v: statistics.median(self._rate(part, v) for _ in range(5)) for v in STREAMS}
        self.variant = max(rates, key=lambda v: rates[v])

    @property
    def size_bytes(self) -> int:
        return self._data.nbytes

    def rate(self, size_bytes: int) -> float:
        """Bytes per second of one read of about `size_bytes` (at most the buffer), from where the last one ended."""
        return self._rate(size_bytes, self.variant)

    def read(self, size_bytes: int) -> int:
        """The same read, for callers with a clock of their own: the bytes that were read."""
        return self._read(size_bytes, self.variant)

    def _rate(self, size_bytes: int, variant: tuple[int, int, int]) -> float:
        start = time.perf_counter()
        used = self._read(size_bytes, variant)
        return used / (time.perf_counter() - start)

    def _read(self, size_bytes: int, variant: tuple[int, int, int]) -> int:
        streams, piece, ahead = variant
        used = min(size_bytes, self._data.nbytes) // (streams * piece) * streams * piece
        if self._at + used > self._data.nbytes:
            self._at = 0
        part = self._data[self._at : self._at + used]
        self._at += used
        native.read(part, streams=streams, piece=piece, ahead=ahead, threads=self._threads)
        return used


def filled_layer(
    name: str,
    *,
    hidden: int,
    intermediate: int,
    working_set_bytes: int,
    num_experts: int | None = None,
    top_k: int = 8,
    zero_points: bool = False,
) -> CompiledLayer:
    """A layer of one format whose experts fill the working set: different memory, the same values (a kernel's time does
    not depend on them)."""
    rng = np.random.default_rng(0)
    scale_number = "fp16" if name.startswith("int4") else ""
    probe = LayerSpec(name, 1, hidden, intermediate, scale_number=scale_number, zero_points=zero_points)
    count = num_experts or max(top_k, working_set_bytes // probe.layout.expert_bytes)
    spec = replace(probe, num_experts=count)
    layer = CompiledLayer(spec)
    gate_up = rng.standard_normal((2 * intermediate, hidden), np.float32) * np.float32(hidden**-0.5)
    down = rng.standard_normal((hidden, intermediate), np.float32) * np.float32(intermediate**-0.5)
    first = native.buffer(spec.layout.expert_bytes)
    layer.kernel.pack(quantise(spec, gate_up, down), first)
    for expert in range(count):
        packed = native.buffer(spec.layout.expert_bytes)
        packed[:] = first
        layer.put_packed(expert, packed)
    return layer


class DecodeStep:
    """Repeated calls with `num_tokens` tokens in bfloat16, experts going round so that none is in a cache when it is
    read."""

    def __init__(self, layer: CompiledLayer, num_tokens: int, top_k: int = 8) -> None:
        rng = np.random.default_rng(1)
        self.layer = layer
        self.experts_read = min(num_tokens * top_k, layer.spec.num_experts)
        """different ones per call, where there are enough"""
        self.stored_bytes = self.experts_read * layer.spec.layout.stored_bytes
        self.tokens = (
            rng.standard_normal((num_tokens, layer.spec.hidden)).astype(np.float32).view(np.uint32) >> 16
        ).astype(np.uint16)
        self.weights = rng.random((num_tokens, top_k), np.float32)
        self._shape = (num_tokens, top_k)
        self._order = rng.permutation(layer.spec.num_experts)
        self._at = 0

    def next_ids(self) -> NDArray[np.int64]:
        """[T, K]: the experts that have not been read for longest."""
        count = self._shape[0] * self._shape[1]
        ids = self._order[(self._at + np.arange(count)) % len(self._order)]
        self._at += count
        return ids.reshape(self._shape)

    def seconds(self, run: Callable[[NDArray[np.int64]], object] | None = None) -> float:
        """Of one call, or of `run(ids)`."""
        ids = self.next_ids()
        start = time.perf_counter()
        if run is None:
            self.layer.moe(self.tokens, ids, self.weights)
        else:
            run(ids)
        return time.perf_counter() - start


def measure_crossover(
    layer: CompiledLayer, *, tokens: Sequence[int] = (16, 64, 256, 1024), top_k: int = 8, rounds: int = 3
) -> tuple[int | None, dict[int, tuple[float, float]]]:
    """(fewest of `tokens` from which torch is faster at every larger one too, or None; {tokens: (compiled, torch)
    median seconds}).

    The torch side unpacks each expert first, as it must when experts lie packed. The number is for
    `CompiledLayer(torch_from_tokens=...)`. Without torch, or for formats that torch would dequantise: (None, {}).
    """
    if importlib.util.find_spec("torch") is None or layer.spec.kind.scales != "none":
        return None, {}
    rng = np.random.default_rng(2)
    before = layer.torch_from_tokens
    times: dict[int, tuple[float, float]] = {}
    try:
        for count in tokens:
            x = (rng.standard_normal((count, layer.spec.hidden)).astype(np.float32).view(np.uint32) >> 16).astype(
                np.uint16
            )
            k = min(top_k, layer.spec.num_experts)
            ids = np.argsort(rng.random((count, layer.spec.num_experts)), axis=1)[:, :k].astype(np.int64)
            mass = np.full(ids.shape, 1 / k, np.float32)
            pairs: list[tuple[float, float]] = []
            for _ in range(rounds + 1):
                layer.torch_from_tokens = None
                mine = _seconds(layer, x, ids, mass)
                layer.torch_from_tokens = 1
                pairs.append((mine, _seconds(layer, x, ids, mass)))
            pairs = pairs[1:]  # oneDNN prepares a kernel for each new row count
            times[count] = (statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs))
    finally:
        layer.torch_from_tokens = before
    wins = [count for count in times if all(t < c for n, (c, t) in times.items() if n >= count)]
    return (min(wins) if wins else None), times


def _seconds(layer: ExpertLayer, x: NDArray[np.uint16], ids: NDArray[np.int64], mass: NDArray[np.float32]) -> float:
    start = time.perf_counter()
    layer.moe(x, ids, mass)
    return time.perf_counter() - start
