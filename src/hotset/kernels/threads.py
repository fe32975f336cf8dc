"""How many threads the kernels may use, and whose: the affinity mask, the cgroup's quota, torch, or what the user says.

Knows: Linux' accounts of allowed cores; which OpenMP torch runs on. Does not know: the pool that uses them
(csrc/pool.h).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

from hotset.errors import OpsError


def available_threads() -> int:
    """Threads the kernels use: `HOTSET_KERNEL_THREADS`, else as many as torch where that is loaded
    (`torch.set_num_threads`, `OMP_NUM_THREADS`), at most the cores this process may run on (affinity, cgroup quota
    rounded up), as it was when first asked."""
    named = os.environ.get("HOTSET_KERNEL_THREADS")
    if named is not None:
        if not named.isdigit() or int(named) < 1:
            raise OpsError(f"HOTSET_KERNEL_THREADS is {named!r}: wanted a number of threads, 1 or more")
        return int(named)
    torch = sys.modules.get("torch")
    return _allowed_cores() if torch is None else min(_allowed_cores(), torch.get_num_threads())


def torch_team(threads: int) -> int | None:
    """Address of GOMP_parallel in the OpenMP that torch runs on, where torch is loaded and uses just so many threads.

    Its workers spin after each operator of torch, and another pool's would wait for the core that they hold: a decoded
    token's experts took up to twice as long. None: the kernels' own pool is to be used.
    """
    torch = sys.modules.get("torch")
    if torch is None or threads == 1 or torch.get_num_threads() != threads:
        return None
    return _gomp_parallel()


@lru_cache(maxsize=1)
def _gomp_parallel() -> int | None:
    """The entry in torch's library or those it is linked with; None where there is none (not Linux, or not OpenMP)."""
    library = Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


@lru_cache(maxsize=1)
def _allowed_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, -(-quota[0] // quota[1])))


def cgroup_quota(membership: Path, root: Path) -> tuple[int, int] | None:
    """(microseconds of CPU, of time) that the tightest cgroup around this process allows, v2 or v1; None = no limit."""
    found: list[tuple[int, int]] = []
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        base = root if not controllers else root / controllers
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            found += _quota_of(folder)
            if folder == base:
                break
    return min(found, key=lambda q: q[0] / q[1]) if found else None


def _quota_of(folder: Path) -> list[tuple[int, int]]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    return [(int(quota), int(period))] if quota not in ("max", "-1") else []
