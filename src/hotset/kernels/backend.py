"""Which implementation computes host experts here, and why.

Knows: the choice (`HOTSET_KERNELS`), made once for the process. Does not know: what either implementation does.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hotset.errors import BackendError
from hotset.kernels.formats import LayerSpec
from hotset.kernels.layer import CompiledLayer, ExpertLayer
from hotset.kernels.threads import available_threads


@dataclass(frozen=True)
class Backend:
    """The implementation in use. `reason`: one line, such as "compiled for this CPU: AVX-512 AVX512-BF16, 2
    threads"."""

    name: Literal["compiled", "torch"]
    reason: str


@lru_cache(maxsize=1)
def backend() -> Backend:
    """The implementation for this process, compiled now if need be.

    `HOTSET_KERNELS=compiled` or `torch` forces one. Otherwise the compiled kernels, and where they cannot be had
    torch's, with a warning that says why, once. Raises BackendError: an unknown name, a forced one that is not to be
    had, neither to be had.
    """
    wanted = os.environ.get("HOTSET_KERNELS", "")
    if wanted not in ("", "compiled", "torch"):
        raise BackendError(f"HOTSET_KERNELS is {wanted!r}: wanted compiled or torch, or nothing for the best one here")
    has_torch = importlib.util.find_spec("torch") is not None
    if wanted == "torch":
        if not has_torch:
            raise BackendError("HOTSET_KERNELS is torch, and torch is not installed: pip install 'hotset[hf]'")
        return Backend("torch", "torch's kernels: asked for by HOTSET_KERNELS")
    try:
        from hotset.kernels import native

        native.library()
        return Backend("compiled", f"compiled for this CPU: {native.instructions()}, {available_threads()} threads")
    except BackendError as problem:
        if wanted == "compiled":
            raise
        if not has_torch:
            raise BackendError(f"{problem}; and torch, which could stand in, is not installed") from None
        warnings.warn(
            f"hotset computes host experts with torch's kernels, which are slower: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )
        return Backend("torch", f"torch's kernels: {problem}")


def expert_layer(spec: LayerSpec, layer: int = 0) -> ExpertLayer:
    """An empty layer of the implementation in use (`backend`). Raises BackendError as `backend` does."""
    if backend().name == "compiled":
        return CompiledLayer(spec, layer)
    from hotset.kernels.torch_layer import TorchLayer

    return TorchLayer(spec, layer)
