"""When a row may be shed, what was dropped, and what to fetch next: the policy around `route_shed`.

Knows gate mass and positions; knows nothing of residency or time. Leaving out experts of low gate
weight is the dynamic expert skipping of Lu et al. (2024, arXiv:2402.14800); here the reason is residency instead of
speed, the bound is the share of a row's gate mass that stays, and every dropped pick is counted.

Axis letters: T tokens, R picks per token, E experts, L layers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotset.errors import OpsError
from hotset.ops.contract import name_kind
from hotset.ops.dispatch import masses, route_shed, split_by_residency


class PolicyRouting(NamedTuple):
    """Every pick of an expert that exists is in one of three places, at its own position: GPU, CPU, or shed."""

    slots: Any
    """[T, R] uint32 slot to gather from; a pick that is not on the GPU carries the row's first kept slot (or 0)."""
    weights: Any
    """[T, R] float32 weight of the pick on the GPU: rescaled in a shed row, the score elsewhere, +0 where not there."""
    cpu_ids: Any
    """[T, R] int32 expert to compute on the host, -1 elsewhere."""
    cpu_weights: Any
    """[T, R] float32 its score, +0 elsewhere."""
    shed_ids: Any
    """[T, R] int32 expert that was dropped, -1 elsewhere."""
    shed_weights: Any
    """[T, R] float32 the score it had, +0 elsewhere."""
    miss_ids: Any
    """[T, R] int32 every miss of the row, dropped or not, by descending score, then -1: what to fetch."""
    miss_scores: Any
    """[T, R] float32 their scores, then +0."""
    over_limit: Any
    """[T] bool True = shedding would keep too little mass."""
    mass: Any
    """[T] float32 sum_all; of a NaN here the bits are not fixed."""


@dataclass(frozen=True)
class ShedPolicy:
    """Shed a row only where at least `keep_mass` of its gate mass stays.

    keep_mass: in (0, 1]. 1 drops only picks without weight.
    over_limit: "exact" = a row that would keep less is served exactly, its misses by the host; "shed" = it is shed all
    the same and only counted, for a captured graph in which nothing else is possible.

    Raises OpsError on other values.
    """

    keep_mass: float
    over_limit: Literal["exact", "shed"] = "exact"

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_mass <= 1.0:
            raise OpsError(f"keep_mass is {self.keep_mass}: wanted a share of gate mass above 0 and at most 1")
        if self.over_limit not in ("exact", "shed"):
            raise OpsError(f"over_limit is {self.over_limit!r}: wanted 'exact' or 'shed'")

    def apply(self, indices: Any, scores: Any, slot_table: Any, backend: str = "auto") -> PolicyRouting:
        """Route [T, R] picks; arguments and errors as for `route_shed`. Never waits for a device.

        With the sums of `route_shed` in float32: a row keeps enough where a pick is kept, sum_all is positive and
        finite, and sum_kept >= keep_mass * sum_all. A row whose experts are all resident is left alone, as is a pick
        outside [0, E) (padding): it is on no side, though its score counts as mass that is not kept.
        """
        routed = route_shed(indices, scores, slot_table, backend)
        split = split_by_residency(indices, scores, slot_table, backend)
        sum_all, sum_kept, any_kept = masses(indices, scores, slot_table)
        enough = any_kept & (sum_all > 0) & (sum_all < math.inf) & (sum_kept >= sum_all * self.keep_mass)
        missing = (split.cpu_ids >= 0).any(1)
        over = missing & ~enough
        shed = missing if self.over_limit == "shed" else missing & enough
        array_library: Any = sys.modules[_LIBRARIES[name_kind(scores) or "numpy"]]
        where, zeros_like = array_library.where, array_library.zeros_like
        shed, no_ids, no_weights = shed[:, None], zeros_like(split.cpu_ids) - 1, zeros_like(split.cpu_weights)
        return PolicyRouting(
            slots=routed.slots,
            weights=where(shed, routed.mix, split.gpu_weights),
            cpu_ids=where(shed, no_ids, split.cpu_ids),
            cpu_weights=where(shed, no_weights, split.cpu_weights),
            shed_ids=where(shed, split.cpu_ids, no_ids),
            shed_weights=where(shed, split.cpu_weights, no_weights),
            miss_ids=routed.miss_ids,
            miss_scores=routed.miss_scores,
            over_limit=over,
            mass=sum_all,
        )


_LIBRARIES = {"numpy": "numpy", "torch": "torch", "mlx": "mlx.core"}


@dataclass(frozen=True)
class ShedTotals:
    """What a ledger has counted, per layer."""

    tokens: NDArray[np.int64]
    """[L] rows routed."""
    shed_rows: NDArray[np.int64]
    """[L] rows from which at least one pick was dropped."""
    shed_picks: NDArray[np.int64]
    """[L] picks dropped."""
    rows_over_limit: NDArray[np.int64]
    """[L] rows that would keep less than keep_mass: served exactly, or shed all the same, as the policy says."""
    mass: NDArray[np.float64]
    """[L] gate mass routed: the sum of all scores."""
    dropped_mass: NDArray[np.float64]
    """[L] gate mass of the dropped picks, before the kept ones were scaled up."""

    @property
    def dropped_share(self) -> NDArray[np.float64]:
        """[L] dropped_mass / mass, 0 where nothing was routed."""
        return np.divide(self.dropped_mass, self.mass, out=np.zeros_like(self.mass), where=self.mass > 0)


_COLUMNS = ("tokens", "shed_rows", "shed_picks", "rows_over_limit", "mass", "dropped_mass")


class ShedLedger:
    """Counts per layer what a policy dropped.

    device: None counts NumPy (or CPU torch) routings on the host; a torch device keeps the counts there, so that
    `record` neither waits for the device nor breaks a graph capture, and only `totals` waits.
    Counts are kept in float64, exact up to 2**53.
    """

    def __init__(self, num_layers: int, device: Any = None) -> None:
        if num_layers < 1:
            raise OpsError(f"a ledger of {num_layers} layers: wanted at least 1")
        self.num_layers = num_layers
        self.device = device
        if device is None:
            self._counts: Any = np.zeros((num_layers, len(_COLUMNS)))
        else:
            import torch

            self._counts = torch.zeros((num_layers, len(_COLUMNS)), dtype=torch.float64, device=device)

    def record(self, row: int, routing: PolicyRouting) -> None:
        """Add one call's routing to layer row `row`. Raises OpsError: no such row, or arrays of another device."""
        if not 0 <= row < self.num_layers:
            raise OpsError(f"ledger row {row}: wanted 0 to {self.num_layers - 1}")
        kind = name_kind(routing.weights)
        dropped = routing.shed_ids >= 0
        counts = self._counts[row]
        if self.device is not None:
            import torch

            if kind != "torch" or routing.weights.device != self._counts.device:
                raise OpsError(f"the ledger counts on {self.device} but the routing is not there")
            counts[0] += len(routing.weights)
            counts[1] += dropped.any(1).sum()
            counts[2] += dropped.sum()
            counts[3] += routing.over_limit.sum()
            counts[4] += routing.mass.sum(dtype=torch.float64)
            counts[5] += routing.shed_weights.sum(dtype=torch.float64)
            return
        if kind == "torch" and routing.weights.device.type != "cpu":
            raise OpsError(f"the routing is on {routing.weights.device}: make the ledger with device= of the router")
        mass, shed_weights, over_limit = map(np.asarray, (routing.mass, routing.shed_weights, routing.over_limit))
        dropped = np.asarray(dropped)
        counts += (
            len(mass),
            dropped.any(axis=1).sum(),
            dropped.sum(),
            over_limit.sum(),
            mass.sum(dtype=np.float64),
            shed_weights.sum(dtype=np.float64),
        )

    def totals(self) -> ShedTotals:
        """The counts so far, as NumPy arrays. Waits for the device where the ledger lives on one."""
        counts = self._counts.copy() if self.device is None else self._counts.cpu().numpy()
        named = dict(zip(_COLUMNS, counts.T, strict=True))
        return ShedTotals(**{n: v if n.endswith("mass") else v.astype(np.int64) for n, v in named.items()})


def order_fetches(miss_ids: Any, miss_scores: Any, num_experts: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The experts that were missed, most missed gate mass first: the order in which to fetch them.

    miss_ids [T, R] int32, miss_scores [T, R] float32: as `route_shed` returns them, in host memory. Returns (experts
    [N] distinct, in [0, num_experts); their scores summed over the tokens [N]); equal masses by ascending id. Ids
    outside the range name no expert and are left out; a score that is NaN or negative counts as 0. Raises OpsError.
    """
    for name, array in (("miss_ids", miss_ids), ("miss_scores", miss_scores)):
        kind = name_kind(array)
        if kind is None or (kind == "torch" and array.device.type != "cpu"):
            got = type(array).__name__ if kind is None else f"a tensor on {array.device}"
            raise OpsError(f"order_fetches: {name} is {got}: wanted an array in host memory (a fetch is ordered there)")
    ids, scores = np.asarray(miss_ids), np.asarray(miss_scores)
    if ids.ndim != 2 or ids.shape != scores.shape:
        raise OpsError(f"order_fetches: miss_ids {ids.shape} and miss_scores {scores.shape}: wanted the same [T, R]")
    real = (ids >= 0) & (ids < num_experts)
    mass = np.zeros(num_experts)
    np.add.at(mass, ids[real], np.where(scores[real] > 0, scores[real], 0.0))
    experts = np.unique(ids[real]).astype(np.int64)
    order = np.argsort(-mass[experts], kind="stable")
    return experts[order], mass[experts][order]
