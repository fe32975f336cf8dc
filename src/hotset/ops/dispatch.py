"""Chooses an implementation of the remapping, says which and why, and hands arrays over to it.

Knows the names of the implementations, which kinds of array each takes, and how to ask whether it can run here. Adding
one is a file with `route_shed` and `split_by_residency` and a line in BACKENDS. A backend asked for by name is that
backend or an error, never another.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from hotset.errors import BackendError
from hotset.ops.contract import Arguments, Kind, ShedRouting, SplitRouting, check_arguments, name_kind


@dataclass(frozen=True)
class Backend:
    """One implementation: where it is, what arrays it works on, and what keeps it from running here."""

    name: str
    module: str
    kind: Kind
    """Kind of array that the module's functions take and return; others are converted through host memory."""
    host_only: bool
    """True = computes in host memory, so arrays on a GPU are refused rather than copied."""
    missing: Callable[[], str | None]
    """Why it cannot run here, or None."""


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def _nothing() -> None:
    return None


def _needs(package: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        # a namespace that another package left behind is not an installation
        found = find_spec(package) is not None
        return None if found else f"{package} is not installed"

    return missing


def _mlx_missing() -> str | None:
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        return f"mlx is not installed or not usable ({error})"
    return None


def _triton_missing() -> str | None:
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    if torch.cuda.is_available() or _interpreting():
        return None
    return "there is no CUDA device (TRITON_INTERPRET=1, set before the first use, runs the kernel in Python)"


def _interpreting() -> bool:
    """Whether Triton kernels run in its interpreter: fixed when the kernel's module was imported."""
    loaded = sys.modules.get("hotset.ops.triton_backend")
    if loaded is not None:
        return bool(loaded.INTERPRETED)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("reference", "hotset.ops.reference", "numpy", True, _nothing),
        Backend("numpy", "hotset.ops.numpy_backend", "numpy", True, _nothing),
        Backend("numba", "hotset.ops.numba_backend", "numpy", True, _needs("numba")),
        Backend("torch", "hotset.ops.torch_backend", "torch", False, _needs("torch")),
        Backend("triton", "hotset.ops.triton_backend", "torch", False, _triton_missing),
        Backend("mlx", "hotset.ops.mlx_backend", "mlx", False, _mlx_missing),
    )
}


def available_backends() -> dict[str, str | None]:
    """Each backend's name with None where it can run here, else what is missing. Imports torch and mlx to find out."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def choose_backend(kind: Kind, device: str = "cpu", backend: str = "auto") -> Choice:
    """Which implementation a call takes, and why; `str()` of it reads "numba: compiled, arrays in host memory".

    kind: "numpy", "torch" or "mlx", the library of the arrays. device: as torch writes it ("cpu", "cuda:0").
    Raises BackendError: unknown name, cannot run here, or cannot take arrays on that device.
    """
    return _choose(kind, device, backend)


@lru_cache(maxsize=256)
def _choose(kind: Kind, device: str, backend: str) -> Choice:
    if backend != "auto":
        if backend not in BACKENDS:
            raise BackendError(f"backend {backend!r} is not known: wanted auto, {', '.join(BACKENDS)}")
        why_not = BACKENDS[backend].missing()
        if why_not:
            raise BackendError(f"backend {backend!r} was asked for, but {why_not}")
        _check_device(BACKENDS[backend], kind, device)
        return Choice(backend, "asked for by name")
    if kind == "mlx":
        return Choice("mlx", "MLX arrays stay with MLX")
    on_host = device == "cpu"
    if on_host:
        why_not = BACKENDS["numba"].missing()
        if why_not is None:
            return Choice("numba", f"compiled, {kind} arrays in host memory")
        return Choice("numpy" if kind == "numpy" else "torch", f"{kind} arrays in host memory, and {why_not}")
    if device.startswith("cuda"):
        why_not = BACKENDS["triton"].missing()
        if why_not is None and not _interpreting():
            return Choice("triton", f"one launch per call, tensors on {device}")
        return Choice("torch", f"tensors on {device}, and {why_not or 'Triton is in its interpreter'}")
    return Choice("torch", f"tensors on {device}, where only plain torch operations are known to run")


def _check_device(backend: Backend, kind: Kind, device: str) -> None:
    on_host = device in ("cpu", "mlx")
    if not on_host and (backend.host_only or backend.kind != "torch"):
        raise BackendError(
            f"backend {backend.name!r} works in host memory, but the tensors are on {device}: "
            "take 'torch' or 'triton', or move them with .cpu()"
        )
    if backend.name == "triton":
        if on_host and not _interpreting():
            raise BackendError(
                f"backend 'triton' needs tensors on a CUDA device, but these {kind} arrays are in host memory: "
                "move them with .cuda(), or take 'auto'"
            )
        if not on_host and _interpreting():
            raise BackendError(
                f"backend 'triton' is in its interpreter (TRITON_INTERPRET), but the tensors are on {device}: unset it"
            )


def route_shed(indices: Any, scores: Any, slot_table: Any, backend: str = "auto") -> ShedRouting:
    """Turn routed expert ids into arena slots; shed the picks that are not resident and report them.

    indices: [T, R] uint32, int32 or int64 expert ids. scores: [T, R] float32 gate weights. slot_table: [E] int32 slot
    of each expert of the layer, negative = not resident. NumPy arrays, torch tensors or MLX arrays, all of one kind, on
    one device, C-contiguous; R at most 64. The result is of the same kind and on the same device.

    Returns (slots uint32, mix float32, miss_ids int32, miss_scores float32), all [T, R]. A kept pick has its slot and
    score * (sum of all scores / sum of kept scores); a shed pick has the row's first kept slot and 0. Misses stand at
    the front of the row by descending score, then -1 and 0. Every backend returns the same bits: see
    `hotset.ops.contract` for the arithmetic, and for NaN, infinity, zero sums and ids outside [0, E).

    Never waits for a device. Raises OpsError (dtype, rank, shape, device, layout) or BackendError (see
    `choose_backend`).
    """
    arguments = check_arguments("route_shed", indices, scores, slot_table)
    result: ShedRouting = _call("route_shed", arguments, backend, indices, scores, slot_table)
    return result


def split_by_residency(indices: Any, scores: Any, slot_table: Any, backend: str = "auto") -> SplitRouting:
    """Exact mode: which picks run from their slot and which on the host, nothing dropped and nothing rescaled.

    Arguments and errors as for `route_shed`. Returns (gpu_slots uint32, gpu_weights float32, cpu_ids int32, cpu_weights
    float32), all [T, R], each pick at its own position on one side, with weight +0 (slot: the row's first kept one, id:
    -1) on the other. An id outside [0, E) is on neither side.
    """
    arguments = check_arguments("split_by_residency", indices, scores, slot_table)
    result: SplitRouting = _call("split_by_residency", arguments, backend, indices, scores, slot_table)
    return result


def masses(indices: Any, scores: Any, slot_table: Any) -> tuple[Any, Any, Any]:
    """([T] float32 sum_all, [T] float32 sum_kept, [T] bool any kept) of checked arguments, as the contract adds."""
    kind = name_kind(scores)
    module = {"numpy": "numpy_backend", "torch": "torch_backend", "mlx": "mlx_backend"}[kind or "numpy"]
    result: tuple[Any, Any, Any] = _load(f"hotset.ops.{module}").masses(indices, scores, slot_table)
    return result


def _call(function: str, arguments: Arguments, backend: str, *arrays: Any) -> Any:
    chosen = BACKENDS[_choose(arguments.kind, arguments.device, backend).name]
    compute = getattr(_load(chosen.module), function)
    if chosen.kind == arguments.kind:
        return compute(*arrays)
    to_numpy, from_numpy = _CONVERTERS[arguments.kind]
    to_native, from_native = _CONVERTERS[chosen.kind][1], _CONVERTERS[chosen.kind][0]
    result = compute(*(to_native(to_numpy(array)) for array in arrays))
    return type(result)(*(from_numpy(from_native(array)) for array in result))


@cache
def _load(module: str) -> ModuleType:
    return importlib.import_module(module)


def _same(array: Any) -> Any:
    return array


def _torch_to_numpy(tensor: Any) -> Any:
    return tensor.numpy()


def _torch_from_numpy(array: Any) -> Any:
    import torch

    # torch has no read-only tensors and warns of undefined behaviour, though nothing here writes
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _mlx_from_numpy(array: Any) -> Any:
    import mlx.core as mx

    return mx.array(array)


# (to NumPy, from NumPy); torch tensors share memory with the array, MLX arrays are copies
_CONVERTERS: dict[Kind, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "numpy": (_same, _same),
    "torch": (_torch_to_numpy, _torch_from_numpy),
    "mlx": (np.array, _mlx_from_numpy),
}
