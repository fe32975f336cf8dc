"""Host memory as the system counts it, and buffers that give theirs back at once.

Knows pages and mappings; knows nothing of experts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64
"""Bytes: a cache line, and one AVX-512 register."""


def resident_bytes() -> int:
    """Bytes of this process in memory now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: the peak is the best that the standard library knows
        return peak_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most bytes that this process ever had in memory.

    Not getrusage's ru_maxrss where the system offers better: that starts with the memory of the process that forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Bytes that this process could still take, page cache included: of the machine's, and of its memory cgroup's.

    None where the system does not say.
    """
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    rooms = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = cgroup_limit_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is not None:
        rooms.append(max(0, limit - resident_bytes()))
    return min(rooms, default=None)


def cgroup_limit_bytes(membership: Path, tree: Path) -> int | None:
    """The least memory limit of the cgroup that `membership` names and those around it (version 1 or 2), if any.

    Kernel documentation: admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst.
    """
    limits = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (tree / "memory", "memory.limit_in_bytes") if controllers else (tree, "memory.max")
        folder = root / path.strip("/")
        files = [place / name for place in (folder, *folder.parents) if place.is_relative_to(root)]
        limits += [file.read_text().strip() for file in files if file.exists()]
    return min((int(limit) for limit in limits if limit != "max"), default=None)


def buffer_bytes(shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> int:
    """Bytes that `allocate_host` takes for these tensors, whole pages."""
    page = mmap.PAGESIZE
    return -(-_layout(shapes)[1] // page) * page


def allocate_host(shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Uninitialised tensors side by side in one anonymous mapping, each at a multiple of 64 bytes.

    A mapping of its own, not the C library's heap, so that dropping an expert gives its bytes back to the system at
    once, and temporaries of loading leave no holes between experts. Private, so that a limit on data (RLIMIT_DATA)
    counts it.
    """
    starts, total = _layout(shapes)
    if total == 0:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    mapping = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if total >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)  # experts are read from end to end: page tables would be walked
    with torch.inference_mode(False):  # moves allocate inside generate; the buffers outlive its inference mode
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        return {
            name: buffer[starts[name] : starts[name] + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in shapes.items()
        }


def _layout(shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> tuple[dict[str, int], int]:
    starts, total = {}, 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = total
        total += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return starts, total
