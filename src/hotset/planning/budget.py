"""Budgets: bytes, experts, a share, or experts per layer, resolved once into sizes and a capacity in one unit.

Knows nothing of KV cache, attention or other weights: a budget here is what the experts may take. With a share and
unequal expert sizes the share is of the expert bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.errors import BudgetError
from hotset.units import format_bytes, format_share, parse_bytes, parse_share


@dataclass(frozen=True)
class Budget:
    """What may be resident. `sizes` and `capacity` are in one unit: experts (sizes all 1), or bytes / unit_bytes."""

    asked: str
    capacity: int
    sizes: NDArray[np.int64]
    """[L, E] in the same unit, each at least 1."""
    min_experts: NDArray[np.int64]
    """[L] fewest experts of each layer."""
    max_experts: NDArray[np.int64]
    """[L] most experts of each layer."""
    unit_bytes: int | None
    """Bytes of one unit, where the budget counts bytes; None where it counts experts."""

    @property
    def equal_sizes(self) -> bool:
        return bool((self.sizes == 1).all())

    def as_dict(self) -> dict[str, Any]:
        experts = self.capacity if self.equal_sizes else None
        size = None if self.unit_bytes is None else self.capacity * self.unit_bytes
        return {"asked": self.asked, "experts": experts, "bytes": size}


def resolve_budget(
    shape: tuple[int, int],
    expert_bytes: NDArray[np.int64] | None,
    *,
    experts: int | None = None,
    gpu_memory_bytes: int | str | None = None,
    fraction: float | str | None = None,
    experts_per_layer: int | Sequence[int] | None = None,
    min_experts_per_layer: int = 0,
    max_experts_per_layer: int | None = None,
) -> Budget:
    """The budget of a placement of [L, E] experts; exactly one of the four sizes must be given.

    Raises BudgetError: none or several given, negative, above what exists, below what the minimum per layer needs,
    bytes without known expert sizes, or a minimum above the maximum.
    """
    num_layers, num_experts = shape
    given = {
        "experts": experts,
        "gpu_memory_bytes": gpu_memory_bytes,
        "fraction": fraction,
        "experts_per_layer": experts_per_layer,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise BudgetError(
            f"a plan needs exactly one budget of experts, gpu_memory_bytes, fraction and experts_per_layer: "
            f"got {' and '.join(named) or 'none'}"
        )
    fewest, most = _per_layer_limits(num_layers, num_experts, min_experts_per_layer, max_experts_per_layer)
    total = num_layers * num_experts
    if experts_per_layer is not None:
        each = _each_layer(experts_per_layer, num_layers, num_experts)
        if (each < fewest).any() or (each > most).any():
            raise BudgetError(
                f"experts_per_layer {experts_per_layer} is outside the minimum {min_experts_per_layer} and maximum "
                f"{int(most[0])} per layer"
            )
        return Budget(
            f"{experts_per_layer} experts per layer", int(each.sum()), np.ones(shape, np.int64), each, each, None
        )
    if experts is not None or expert_bytes is None:
        if gpu_memory_bytes is not None:
            raise BudgetError(
                "a budget in bytes needs expert sizes, and the trace does not say any: give experts or a fraction"
            )
        if experts is not None:
            capacity, asked = _whole("experts", experts), f"{experts} experts"
        else:
            share = parse_share(fraction if fraction is not None else "")
            capacity, asked = _floor(share * total), format_share(share)
        _check_range(capacity, 0, total, "experts")
        _check_range(capacity, int(fewest.sum()), int(most.sum()), "experts", limits=True)
        return Budget(asked, capacity, np.ones(shape, np.int64), fewest, most, None)
    unit = int(np.gcd.reduce(expert_bytes, axis=None))
    sizes = expert_bytes // unit
    total_bytes = int(expert_bytes.sum())
    if gpu_memory_bytes is not None:
        capacity_bytes = parse_bytes(gpu_memory_bytes)
        asked = format_bytes(capacity_bytes)
        if capacity_bytes > total_bytes:
            raise BudgetError(
                f"budget {asked} is above the {format_bytes(total_bytes)} that all {total} experts take: everything "
                "fits, so say fraction 100%"
            )
    else:
        share = parse_share(fraction if fraction is not None else "")
        capacity_bytes, asked = _floor(share * total_bytes), format_share(share)
    least = int(sum(np.sort(row)[:n].sum() for row, n in zip(sizes, fewest, strict=True)))
    if capacity_bytes // unit < least:
        raise BudgetError(
            f"budget {format_bytes(capacity_bytes)} is below the {format_bytes(least * unit)} that "
            f"{min_experts_per_layer} experts per layer take"
        )
    if (sizes == 1).all():
        capacity = min(capacity_bytes // unit, int(most.sum()))
    else:
        capacity = capacity_bytes // unit
    return Budget(asked, capacity, sizes, fewest, most, unit)


def _per_layer_limits(
    num_layers: int, num_experts: int, fewest: int, most: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    high = num_experts if most is None else _whole("max_experts_per_layer", most)
    low = _whole("min_experts_per_layer", fewest)
    if low > high:
        raise BudgetError(f"min_experts_per_layer {low} is above max_experts_per_layer {high}")
    if high > num_experts:
        raise BudgetError(f"max_experts_per_layer {high} is above the {num_experts} experts of a layer")
    return np.full(num_layers, low, np.int64), np.full(num_layers, high, np.int64)


def _each_layer(experts_per_layer: int | Sequence[int], num_layers: int, num_experts: int) -> NDArray[np.int64]:
    try:
        each = np.array(np.broadcast_to(np.asarray(experts_per_layer), (num_layers,)))
    except ValueError:
        raise BudgetError(
            f"experts_per_layer {experts_per_layer!r}: wanted one number, or one for each of {num_layers} layers"
        ) from None
    if each.dtype.kind not in "iu":
        raise BudgetError(f"experts_per_layer {experts_per_layer!r}: wanted whole numbers")
    if (each < 0).any() or (each > num_experts).any():
        raise BudgetError(f"experts_per_layer {experts_per_layer}: wanted 0 to {num_experts}, a layer's experts")
    return each.astype(np.int64)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BudgetError(f"{name} is {value!r}: wanted a whole number")
    if value < 0:
        raise BudgetError(f"{name} is {int(value)}: a budget is never negative")
    return int(value)


def _floor(value: float) -> int:
    # 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996: a share means the nearby whole number
    return int(np.floor(value * (1 + 1e-12) + 1e-9))


def _check_range(capacity: int, low: int, high: int, what: str, *, limits: bool = False) -> None:
    if capacity < low:
        raise BudgetError(f"budget {capacity} {what} is below the {low} that the minimum per layer needs")
    if capacity > high:
        why = "that the maximum per layer allows" if limits else "that the model has"
        raise BudgetError(f"budget {capacity} {what} is above the {high} {why}")
