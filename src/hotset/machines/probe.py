"""`hotset probe`: measure what moving and computing costs on this machine.

Knows memory, disk, and through torch a CUDA device where there is one. Every figure is a median over repeats, kept with
its spread in `Machine.details`. Does not know models: expert size is an argument. Importing this module loads numba.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import mmap
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotset.core import Machine
from hotset.errors import MachineError

DEFAULT_EXPERT_BYTES = 3 * 2048 * 768 * 2
"""One bf16 expert of Qwen3-30B-A3B: three matrices of 2048 x 768."""

STREAMS = 8
"""Streams that each thread reads side by side, as an expert kernel does with its rows."""

_PREFILL_TOKENS = 512
_PREFILL_EXPERTS = 16
"""One pick each: 32 rows per expert, as 512 tokens give the 128 experts of Qwen3-30B-A3B by top-8."""
_PREFILL_SHAPE = (2048, 768)
_BUFFER_BYTES_PER_THREAD = 192 * 2**20
_FILE_BYTES = 256 * 2**20
_PAGE = 4096

Progress = Callable[[str], None]


@njit(cache=True, nogil=True)
def _read_streams(streams):
    """Sum of streams [8, n] int64, read side by side. Written out, since only so does it become vector code."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0
    for i in range(streams.shape[1]):
        s0 += streams[0, i]
        s1 += streams[1, i]
        s2 += streams[2, i]
        s3 += streams[3, i]
        s4 += streams[4, i]
        s5 += streams[5, i]
        s6 += streams[6, i]
        s7 += streams[7, i]
    return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7


def probe(
    *,
    name: str | None = None,
    threads: int | None = None,
    expert_bytes: int = DEFAULT_EXPERT_BYTES,
    folder: str | Path | None = None,
    repeats: int = 7,
    progress: Progress | None = None,
) -> Machine:
    """Measure this machine.

    threads: that read host memory together, default all this process may use. expert_bytes: size of a disk read.
    folder: where the disk file is written and read (256 MiB, removed afterwards), default the current one. repeats: of
    every measurement. progress: called with what is being measured.

    Raises MachineError on arguments that make no sense, and where the folder cannot be written.
    """
    if repeats < 1 or expert_bytes < _PAGE or expert_bytes > _FILE_BYTES:
        raise MachineError(
            f"repeats {repeats}, expert_bytes {expert_bytes}: wanted 1 or more, {_PAGE} to {_FILE_BYTES}"
        )
    count = len(os.sched_getaffinity(0)) if threads is None else threads
    if count < 1:
        raise MachineError(f"threads is {count}: wanted at least 1")
    say = progress or (lambda _: None)
    measured: dict[str, Any] = {}
    say(f"host memory, {count} threads of {STREAMS} streams")
    host = _rate(
        measured, "host_read_bytes_per_second", _host_read(count, repeats), f"{count} threads, {STREAMS} streams"
    )
    say("disk reads")
    disk_rates, method = _disk_read(Path(folder or "."), expert_bytes, repeats)
    disk = _rate(measured, "disk_read_bytes_per_second", disk_rates, f"{expert_bytes} bytes at a time, {method}")
    say("host kernels")
    flops = _host_flops(measured, repeats)
    torch = _torch()
    cuda = torch is not None and torch.cuda.is_available()
    gpu = to_device = to_host = None
    gpu_memory = None
    if cuda:
        say("GPU memory and link")
        gpu = _rate(measured, "gpu_read_bytes_per_second", _gpu_read(torch, repeats), "torch.sum")
        to_device = _rate(measured, "host_to_device_bytes_per_second", _link(torch, repeats, True), "pinned, 256 MiB")
        to_host = _rate(measured, "device_to_host_bytes_per_second", _link(torch, repeats, False), "pinned, 256 MiB")
        gpu_memory = int(torch.cuda.mem_get_info()[1])
    say("launch and round trip")
    launch = _rate(measured, "launch_seconds", _launch(torch, cuda, repeats), "three small products and a gate")
    if cuda:
        round_trip = _rate(
            measured, "round_trip_seconds", _round_trip(torch, repeats), "4 KiB there and back, waited for"
        )
    else:
        round_trip = 0.0
        measured["round_trip_seconds"] = {"how": "none: the arena and the misses are computed by the same cores"}
    return Machine(
        name=name or platform.node() or "this machine",
        source="measured by hotset probe",
        device="cuda" if cuda else "cpu",
        host_read_bytes_per_second=host,
        host_threads=count,
        gpu_read_bytes_per_second=gpu,
        host_to_device_bytes_per_second=to_device,
        device_to_host_bytes_per_second=to_host,
        disk_read_bytes_per_second=disk,
        round_trip_seconds=round_trip,
        launch_seconds=launch,
        host_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpu_memory_bytes=gpu_memory,
        host_flops_per_second=flops,
        details={
            "processor": _processor(),
            "gpu": torch.cuda.get_device_name() if cuda and torch is not None else None,
            "load": os.getloadavg()[0],
            "measured": measured,
        },
    )


def _rate(measured: dict[str, Any], key: str, values: list[float], how: str) -> float:
    """Keep the spread, return the median."""
    ordered = sorted(values)
    measured[key] = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "how": how}
    return float(measured[key]["median"])


def _host_read(threads: int, repeats: int) -> list[float]:
    """Bytes per second of `threads` threads that each read their own streams.

    The readers hold the clocks: a thread that only waits for them gets no core while they run, and would start late.
    """
    words = _BUFFER_BYTES_PER_THREAD // 8 // STREAMS
    barrier = threading.Barrier(threads)
    spans = np.zeros((threads, repeats, 2))

    def work(index: int) -> None:
        streams = np.ones((STREAMS, words), np.int64)  # first touched by the thread that reads it
        _read_streams(streams)
        for turn in range(repeats):
            barrier.wait()
            spans[index, turn, 0] = time.perf_counter()
            _read_streams(streams)
            spans[index, turn, 1] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
    return [threads * STREAMS * words * 8 / float(s) for s in seconds]


def _host_flops(measured: dict[str, Any], repeats: int) -> float | None:
    """FLOP/s of the compiled kernels at prefill, or None where there are none: torch's rate is another machine's."""
    from hotset.kernels import ExpertWeights, LayerSpec, backend, expert_layer

    key = "host_flops_per_second"
    if backend().name != "compiled":
        measured[key] = {"how": f"not measured: {backend().reason}"}
        return None
    hidden, inner = _PREFILL_SHAPE
    layer = expert_layer(LayerSpec("bf16", num_experts=_PREFILL_EXPERTS, hidden=hidden, intermediate=inner), layer=0)
    rng = np.random.default_rng(2)

    def bf16(*shape: int) -> NDArray[np.uint16]:
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    weights = ExpertWeights(bf16(2 * inner, hidden), bf16(hidden, inner))
    for expert in range(_PREFILL_EXPERTS):
        layer.put(expert, weights)
    tokens = bf16(_PREFILL_TOKENS, hidden)
    ids = (np.arange(_PREFILL_TOKENS, dtype=np.int64) % _PREFILL_EXPERTS)[:, None]
    mass = np.ones(ids.shape, np.float32)
    flops, rates = 2 * 3 * hidden * inner * _PREFILL_TOKENS, []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        layer.moe(tokens, ids, mass)
        rates.append(flops / (time.perf_counter() - begin))
    rows = _PREFILL_TOKENS // _PREFILL_EXPERTS
    return _rate(measured, key, rates[1:], f"compiled kernels, bfloat16, {rows} rows per expert")


def _disk_read(folder: Path, expert_bytes: int, repeats: int) -> tuple[list[float], str]:
    """Bytes per second of reads of one expert each, in shuffled order, with the page cache out of the way."""
    size = expert_bytes // _PAGE * _PAGE
    count = max(1, _FILE_BYTES // size)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hotset-probe-") as file:
            block = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            with _uncached(file.name) as (descriptor, method), mmap.mmap(-1, size) as buffer:
                order = np.random.default_rng(1)
                rates = []
                for _ in range(repeats):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    offsets = (order.permutation(count) * size).tolist()
                    begin = time.perf_counter()
                    for offset in offsets:
                        done = os.preadv(descriptor, [buffer], offset)
                        assert done == size, "the file was written whole"
                    rates.append(count * size / (time.perf_counter() - begin))
                return rates, method
    except OSError as problem:
        raise MachineError(f"{folder}: {problem.strerror}: give --folder a place with 256 MiB free") from None


@contextmanager
def _uncached(path: str) -> Iterator[tuple[int, str]]:
    """An open descriptor and how it keeps the page cache out: O_DIRECT, or dropping the pages before each pass."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        method = "O_DIRECT"
    except OSError:  # some file systems have no direct reads
        descriptor = os.open(path, os.O_RDONLY)
        method = "pages dropped by posix_fadvise"
    try:
        yield descriptor, method
    finally:
        os.close(descriptor)


def _launch(torch: Any, cuda: bool, repeats: int) -> list[float]:
    """Seconds to start one expert's computation: the same calls on matrices too small to matter."""
    if torch is None:
        up, down, x = np.ones((32, 16), np.float32), np.ones((16, 16), np.float32), np.ones(16, np.float32)

        def once() -> Any:
            both = up @ x
            return down @ (both[:16] * np.tanh(both[16:]))
    else:
        device = "cuda" if cuda else "cpu"
        up, down, x = (torch.ones(shape, device=device) for shape in ((32, 16), (16, 16), (1, 16)))
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

        def once() -> Any:
            gate, value = linear(x, up).chunk(2, dim=-1)
            return linear(silu(gate) * value, down)

    calls, seconds = 200, []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            once()
        if cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds[1:]


def _gpu_read(torch: Any, repeats: int) -> list[float]:
    values = torch.ones(2**28, dtype=torch.float32, device="cuda")
    return _timed_on_gpu(torch, lambda: values.sum(), values.numel() * 4, repeats)


def _link(torch: Any, repeats: int, to_device: bool) -> list[float]:
    host = torch.ones(2**26, dtype=torch.float32).pin_memory()
    device = torch.empty_like(host, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    return _timed_on_gpu(torch, lambda: target.copy_(source, non_blocking=True), host.numel() * 4, repeats)


def _timed_on_gpu(torch: Any, call: Callable[[], Any], size: int, repeats: int) -> list[float]:
    call()
    torch.cuda.synchronize()
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - begin))
    return rates


def _round_trip(torch: Any, repeats: int) -> list[float]:
    hidden = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(100):
            (hidden + 0).cpu().to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / 100)
    return seconds[1:]


def _torch() -> Any:
    try:
        import torch
    except ImportError:  # an extra: without it there is no CUDA device to measure either
        return None
    return torch


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
