"""`EmaHotnessTracker`: which experts are hot now, from activations, in work that does not grow with the experts.

Knows activations; knows nothing of residency, budgets or time in seconds. Importing this module loads numba.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotset.adaptation.loops import check_and_observe
from hotset.errors import PolicyError
from hotset.storage import read_arrays, wrap_format_errors, write_arrays

FORMAT = "hotset-hotness"
VERSION = 1

# Chosen on the ESFT traces; see LOG.md for the sweep and what else was tried.
DEFAULT_DECAY = 0.998
DEFAULT_FAST_DECAY = 0.9
DEFAULT_FAST_WEIGHT = 0.2


class HotnessArrays(NamedTuple):
    """The state, as arrays that compiled code can work on. An average is its sum divided by its scale."""

    sums: NDArray[np.float64]
    """[L, E + 1, 2] lazily decayed sums of the slow and of the fast average. Entry E is spare: 0 between calls."""
    scale: NDArray[np.float64]
    """[L, 2] scale of the slow and of the fast sums."""
    decay: NDArray[np.float64]
    """[2] slow and fast decay per token."""
    fast_weight: NDArray[np.float64]
    """[1] share of the fast average in the hotness."""


class EmaHotnessTracker:
    """Per-layer exponential moving averages of expert activations.

    Each routed token of a layer moves each expert's average towards 1 if the token picked it and towards 0 if not:
    `average = decay * average + (1 - decay) * picked`. Two averages are kept, a slow one (what this workload uses) and
    a fast one (what this passage uses); the hotness is `(1 - fast_weight) * slow + fast_weight * fast`, an estimate of
    the probability that the next token picks the expert. `fast_weight=0` is the plain average.

    decay, fast_decay: in (0, 1), the fast one not above the slow. layer_ids: the model's own layer numbers by which
    `observe` is called, default 0..L-1.

    `observe` costs O(K): decay is lazy, by one growing scale per layer, as in the "forward decay" of Cormode et al.
    (ICDE 2009), rescaled before it overflows.

    Raises PolicyError on settings outside their range.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        decay: float = DEFAULT_DECAY,
        fast_decay: float = DEFAULT_FAST_DECAY,
        fast_weight: float = DEFAULT_FAST_WEIGHT,
        layer_ids: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> None:
        if num_layers < 1 or num_experts < 1:
            raise PolicyError(f"tracker for {num_layers} layers of {num_experts} experts: wanted at least one of each")
        # below one half a single token would fill the whole range of a float64 in its rescaling interval
        if not 0.5 <= decay < 1.0:
            raise PolicyError(f"decay is {decay}: wanted 0.5 <= decay < 1")
        if not 0.5 <= fast_decay <= decay:
            raise PolicyError(f"fast_decay is {fast_decay}: wanted 0.5 <= fast_decay <= decay = {decay}")
        if not 0.0 <= fast_weight <= 1.0:
            raise PolicyError(f"fast_weight is {fast_weight}: wanted a share between 0 and 1")
        self.num_layers, self.num_experts = int(num_layers), int(num_experts)
        self.layer_ids = np.arange(num_layers, dtype=np.int32) if layer_ids is None else np.asarray(layer_ids, np.int32)
        if self.layer_ids.shape != (num_layers,) or len(np.unique(self.layer_ids)) != num_layers:
            raise PolicyError(f"layer_ids {self.layer_ids.tolist()} do not name {num_layers} distinct layers")
        self._row_of = {int(layer): row for row, layer in enumerate(self.layer_ids)}
        self.arrays = HotnessArrays(
            sums=np.zeros((num_layers, num_experts + 1, 2)),
            scale=np.ones((num_layers, 2)),
            decay=np.array([decay, fast_decay], np.float64),
            fast_weight=np.array([fast_weight], np.float64),
        )

    # -- observing -----------------------------------------------------------------------------------------

    def observe(self, layer: int, expert_ids: Any) -> None:
        """Count one token's picks, or several tokens' in order.

        expert_ids: [K] or [T, K] integers, NumPy or torch; -1 = no pick. A token without any pick leaves the layer as
        it is. Raises PolicyError: unknown layer, wrong rank or dtype, an id out of range (nothing is counted then).
        """
        row = self._row_of.get(layer)
        if row is None:
            raise PolicyError(f"layer {layer} is not tracked: the layers are {self.layer_ids.tolist()}")
        self.observe_row(row, as_picks(expert_ids))

    def observe_batch(self, expert_ids: Mapping[int, Any]) -> None:
        """Count several layers' tokens: {layer: [T, K]}. The same as observing each layer's tokens one by one."""
        for layer, ids in expert_ids.items():
            self.observe(layer, ids)

    def observe_row(self, row: int, ids: NDArray[Any]) -> None:
        """Count ids [T, K] (as `as_picks` gives them) for the row, that is by position, not by layer number."""
        bad = check_and_observe(self.arrays, row, ids)
        if bad >= 0:
            raise PolicyError(
                f"expert id {int(ids.ravel()[bad])} of layer {self.layer_ids[row]} is out of range: wanted 0 to "
                f"{self.num_experts - 1}, or -1 for no pick"
            )

    def warm_start(self, activation_freq: Any, top_k: int) -> None:
        """Start from counts [L, E] of an earlier workload, as if each layer had seen it for ever.

        top_k: picks per token. All layers are divided by the busiest layer's tokens, so the order of all experts, and
        with it the first mask, is that of the counts. Raises PolicyError on a wrong shape or negative or NaN counts.
        """
        freq = as_numpy(activation_freq).astype(np.float64)
        shape = (self.num_layers, self.num_experts)
        if freq.shape != shape:
            raise PolicyError(f"activation_freq has shape {freq.shape}: wanted {shape}")
        if not np.isfinite(freq).all() or (freq < 0).any():
            raise PolicyError("activation_freq holds negative or infinite counts or NaN")
        if not 1 <= top_k <= self.num_experts:
            raise PolicyError(f"top_k is {top_k}: wanted 1 to {self.num_experts}")
        busiest = freq.sum(axis=1).max() / top_k
        self.set_hotness(freq / busiest if busiest > 0 else freq)

    def set_hotness(self, probability: NDArray[np.float64]) -> None:
        """Make both averages equal to `probability` [L, E]."""
        self.arrays.sums[:, :-1] = probability[:, :, None]
        self.arrays.scale[:] = 1.0

    # -- answers -------------------------------------------------------------------------------------------

    def hotness(self) -> NDArray[np.float64]:
        """[L, E] the blended averages as they are now."""
        w = self.arrays.fast_weight[0]
        slow, fast = np.moveaxis(self.arrays.sums[:, :-1] / self.arrays.scale[:, None, :], 2, 0)
        blended: NDArray[np.float64] = (1.0 - w) * slow + w * fast
        return blended

    def mask(
        self,
        num_gpu_experts: int | None = None,
        *,
        experts_per_layer: int | Sequence[int] | NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """[L, E] bool: the hottest experts over all layers, or the hottest of each layer. Ties go to the lower index.

        Exactly one of the two budgets. Raises PolicyError: none or both, or more than exist.
        """
        if (num_gpu_experts is None) == (experts_per_layer is None):
            raise PolicyError("mask wants exactly one of num_gpu_experts and experts_per_layer")
        heat = self.hotness()
        mask = np.zeros(heat.shape, np.bool_)
        if num_gpu_experts is not None:
            if not 0 <= num_gpu_experts <= heat.size:
                raise PolicyError(f"num_gpu_experts is {num_gpu_experts}: wanted 0 to {heat.size}")
            mask.ravel()[np.argsort(-heat.ravel(), kind="stable")[:num_gpu_experts]] = True
            return mask
        return top_per_layer(heat, experts_per_layer)

    # -- keeping -------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the state as one safetensors file, by way of a temporary name."""
        a = self.arrays
        arrays: dict[str, NDArray[Any]] = {"sums": a.sums, "scale": a.scale, "layer_ids": self.layer_ids}
        settings = {"decay": a.decay[0], "fast_decay": a.decay[1], "fast_weight": a.fast_weight[0]}
        metadata = {"format": FORMAT, "version": VERSION, "settings": settings}
        wrap_format_errors(PolicyError, lambda: write_arrays(path, arrays, metadata))

    @staticmethod
    def open(path: str | Path) -> EmaHotnessTracker:
        """A tracker that goes on where the saved one stopped. Raises PolicyError on any other file."""
        file = wrap_format_errors(PolicyError, lambda: read_arrays(path))
        if file.metadata.get("format") != FORMAT or file.metadata.get("version") != VERSION:
            raise PolicyError(f"{path}: not a tracker state of version {VERSION}")
        sums, scale, layer_ids = wrap_format_errors(
            PolicyError,
            lambda: (
                file.take("sums", np.float64, 3),
                file.take("scale", np.float64, 2),
                file.take("layer_ids", np.int32, 1),
            ),
        )
        num_layers = len(layer_ids)
        if len(sums) != num_layers or sums.shape[1] < 2 or sums.shape[2] != 2 or scale.shape != (num_layers, 2):
            raise PolicyError(f"{path}: the arrays of the tracker state disagree in shape")
        tracker = EmaHotnessTracker(
            num_layers, sums.shape[1] - 1, **file.metadata["settings"], layer_ids=layer_ids.copy()
        )
        tracker.arrays.sums[:], tracker.arrays.scale[:] = sums, scale
        return tracker


def top_per_layer(
    scores: NDArray[Any], experts_per_layer: int | Sequence[int] | NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    """[L, E] bool: the largest scores of each layer, ties to the lower index. Raises PolicyError: more than exist."""
    num_layers, num_experts = scores.shape
    try:
        slots = np.broadcast_to(np.asarray(experts_per_layer, np.int64), (num_layers,))
    except (ValueError, TypeError):
        raise PolicyError(
            f"experts_per_layer {experts_per_layer!r}: wanted a number, or one per layer ({num_layers})"
        ) from None
    if (slots < 0).any() or (slots > num_experts).any():
        raise PolicyError(f"experts_per_layer {slots.tolist()}: wanted 0 to {num_experts} for each layer")
    rank = np.empty(scores.shape, np.int64)
    np.put_along_axis(rank, np.argsort(-scores, axis=1, kind="stable"), np.arange(num_experts)[None, :], axis=1)
    mask: NDArray[np.bool_] = rank < slots[:, None]
    return mask


def as_numpy(value: Any) -> NDArray[Any]:
    """A NumPy array of NumPy, torch or list input; a torch tensor on the CPU is not copied."""
    if "torch" in sys.modules and type(value).__module__.split(".")[0] == "torch":
        value = value.numpy(force=True)
    return np.asarray(value)


def as_picks(expert_ids: Any) -> NDArray[Any]:
    """[T, K] int64 from [K] or [T, K], NumPy or torch. Raises PolicyError on another rank or dtype."""
    ids = expert_ids if isinstance(expert_ids, np.ndarray) else as_numpy(expert_ids)
    if ids.dtype.kind not in "iu":
        raise PolicyError(f"expert_ids have dtype {ids.dtype}: wanted integers")
    if ids.dtype != np.int64 or not ids.flags.carray:  # one compiled version for all types and layouts
        ids = np.array(ids, np.int64, order="C")
    if ids.ndim == 1:
        return ids[None, :]
    if ids.ndim != 2:
        raise PolicyError(f"expert_ids have shape {ids.shape}: wanted [K] or [T, K]")
    return ids
