"""A memory limit that the kernel enforces on a process and on the page cache it fills: a cgroup, version 1 or 2.

A limit on the process alone (RLIMIT_DATA) leaves the page cache out, so whoever maps its files runs from all of the
machine's memory. Making a cgroup takes root, or a tree that is writable. Knows nothing of what runs in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MemoryCgroup:
    """One cgroup with a limit, swap included. Made by `memory_cgroup`."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version

    def limit(self, limit_bytes: int) -> None:
        """Set the most bytes that the members may hold: memory of their own, the kernel's for them, page cache."""
        if self.version == 1:
            self._write("memory.limit_in_bytes", limit_bytes)
            swap = "memory.memsw.limit_in_bytes", limit_bytes  # memory and swap together
        else:
            self._write("memory.max", limit_bytes)
            swap = "memory.swap.max", 0
        if (self.folder / swap[0]).exists():  # a kernel built without an account of swap has no such file
            self._write(*swap)

    def enter(self) -> None:
        """Move the calling process in: what it takes from now on counts."""
        self._write("cgroup.procs", os.getpid())

    def account(self) -> dict[str, int | None]:
        """oom_kills: members that the kernel killed; cgroup_peak_bytes: the most that they held (None: not told).

        Not memory.failcnt: it stays 0 on some kernels (6.18) while the limit holds and pages are evicted.
        """
        events, peak = "memory.oom_control", self.folder / "memory.max_usage_in_bytes"
        if self.version == 2:
            events, peak = "memory.events", self.folder / "memory.peak"
        pairs = (line.split() for line in (self.folder / events).read_text().splitlines())
        kills = next(int(value) for key, value in pairs if key == "oom_kill")
        return {"oom_kills": kills, "cgroup_peak_bytes": int(peak.read_text()) if peak.exists() else None}

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))


@contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A fresh cgroup at the top of the tree, removed at the end; its members must have ended by then.

    Raises OSError where none can be made.
    """
    root, version = _root()
    group = MemoryCgroup(root / f"{name}-{os.getpid()}", version)
    group.folder.mkdir()
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        _remove(group.folder)


def why_no_memory_cgroup() -> str | None:
    """None where `memory_cgroup` works here."""
    try:
        with memory_cgroup("hotset-try", 2**30):
            return None
    except OSError as problem:
        return str(problem)


def _root() -> tuple[Path, int]:
    """(top folder of the memory controller, cgroup version)."""
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(place), 1
        if kind == "cgroup2" and "memory" in (Path(place) / "cgroup.subtree_control").read_text().split():
            return Path(place), 2
    raise OSError("no memory cgroup is mounted")


def _remove(folder: Path) -> None:
    for left in reversed(range(50)):
        try:
            folder.rmdir()
            return
        except OSError:  # the kernel may still be putting away the last member
            if not left:
                raise
            time.sleep(0.1)
