"""Compiles the kernels for this very CPU on first use, and keeps the result.

Knows: which compiler, which flags, where the library is kept, and how two processes share one build. Does not know:
what the kernels compute.

A library is named by a digest of the sources, the flags, the compiler and the CPU, so that a home directory shared by
several machines holds one each. It is compiled under a temporary name, in the cache directory, with a lock held;
renamed onto its own name only when it loads. A build that was killed leaves a temporary file that the next builder
removes, and a lock that the kernel has already released.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hotset.errors import BackendError
from hotset.storage import atomic_path, write_json

SOURCES = Path(__file__).parent / "csrc"
ABI = 5
"""What `hotset_abi` of the sources returns: changes with the C interface."""

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O2",
    "-march=native",
    "-std=c++20",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
)
"""-O2: GCC 12 takes two minutes over these templates at -O3, eight seconds at -O2, and the loops that matter are
unrolled by pragma either way. -ffp-contract=fast lets a * b + c be one instruction; nothing else relaxes arithmetic."""


@dataclass(frozen=True)
class Compiler:
    """The compiler in use. `identity` changes when another one is installed in its place."""

    path: str
    identity: str

    @staticmethod
    def find() -> Compiler:
        """`HOTSET_CXX`, else the first of c++, g++, clang++ on the path. Raises BackendError where there is none."""
        named = os.environ.get("HOTSET_CXX")
        for name in (named,) if named else COMPILERS:
            found = shutil.which(name)
            if found:
                real = Path(found).resolve()
                stat = real.stat()
                return Compiler(found, f"{real} {stat.st_size} {stat.st_mtime_ns}")
        if named:
            raise BackendError(f"HOTSET_CXX names {named!r}, which is no program here: name a C++20 compiler")
        raise BackendError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}): install g++, or set HOTSET_CXX")

    def version(self) -> str:
        """The first line of `--version`."""
        done = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=False)
        return (done.stdout.splitlines() or ["unknown"])[0]


@dataclass(frozen=True)
class Library:
    """A compiled library that loads."""

    path: Path
    handle: ctypes.CDLL
    build_seconds: float
    """0 where it was already there."""


def cache_directory() -> Path:
    """`HOTSET_CACHE`, else $XDG_CACHE_HOME/hotset, else ~/.cache/hotset; the kernels lie in its folder `kernels`."""
    named = os.environ.get("HOTSET_CACHE")
    if named:
        return Path(named) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotset" / "kernels"


def flags() -> tuple[str, ...]:
    """The compiler's flags: FLAGS, then those in `HOTSET_KERNEL_FLAGS` (a sanitizer, another -march)."""
    return (*FLAGS, *shlex.split(os.environ.get("HOTSET_KERNEL_FLAGS", "")))


@lru_cache(maxsize=1)
def cpu() -> str:
    """What tells one CPU from another where -march=native is concerned."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    lines = text.split("\n\n", 1)[0].splitlines()
    return platform.machine() + "\n" + "\n".join(line for line in lines if line.split("\t")[0].strip() in wanted)


def digest(compiler: Compiler, flags: tuple[str, ...]) -> str:
    """Names the library that these make of the sources."""
    seen = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            seen.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*flags, compiler.identity, cpu()):
        seen.update(part.encode() + b"\0")
    return seen.hexdigest()[:24]


def load() -> Library:
    """The library for this CPU, compiled if it is not in the cache.

    Raises BackendError: no compiler, a failed build (the compiler's first complaint), a cache directory that cannot be
    written.
    """
    compiler, options = Compiler.find(), flags()
    target = cache_directory() / f"{digest(compiler, options)}.so"
    ready = _open(target) if target.exists() else None
    if ready is not None:
        return Library(target, ready, 0.0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            ready = _open(target) if target.exists() else None  # another process may have built it meanwhile
            if ready is not None:
                return Library(target, ready, 0.0)
            return _build(target, compiler, options)
    except OSError as problem:
        raise BackendError(
            f"{problem.filename or target.parent}: {problem.strerror}: "
            "the kernels cannot be kept there, set HOTSET_CACHE to a folder that can be written"
        ) from None


def _build(target: Path, compiler: Compiler, options: tuple[str, ...]) -> Library:
    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        stale.unlink(missing_ok=True)  # the lock is ours: whoever wrote it is gone
    started = time.perf_counter()
    with atomic_path(target) as temporary:
        command = [compiler.path, *options, str(SOURCES / "moe.cpp"), "-o", str(temporary)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as problem:
            raise BackendError(f"{compiler.path} does not run: {problem.strerror}") from None
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines()]
            complaint = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
            raise BackendError(f"{compiler.path} failed on the kernels with {done.returncode}: {complaint}")
        if _open(temporary) is None:
            raise BackendError(
                f"{compiler.path} made a library that does not load: see HOTSET_KERNEL_FLAGS and HOTSET_CXX"
            )
    seconds = time.perf_counter() - started
    write_json(
        target.with_suffix(".json"),
        {"compiler": compiler.version(), "command": command, "build_seconds": round(seconds, 2)},
    )
    handle = _open(target)
    assert handle is not None, "the same bytes loaded a moment ago"
    return Library(target, handle, seconds)


def _open(path: Path) -> ctypes.CDLL | None:
    """The library, or None where the file is not one of this interface."""
    try:
        handle = ctypes.CDLL(str(path))
        return handle if handle.hotset_abi() == ABI else None
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
