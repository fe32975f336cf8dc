"""What a placement is worth: `hit_value` per pick that finds its expert in GPU memory, plus `resident_value` per
(token, layer) pair all of whose picks do.

Hit rate alone is modular, so the most frequent experts are optimal. Whole-token residency is supermodular: the last
missing expert of a layer is worth most. Decode time is both, weighed by what they cost on a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Machine
from hotset.errors import PlanError
from hotset.machines.cost import CostModel

OBJECTIVES = ("hit-rate", "whole-token", "decode-time")


@dataclass(frozen=True)
class Objective:
    """Worth of one hit and of one fully resident (token, layer) pair, in one unit."""

    name: str
    hit_value: float
    resident_value: float

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "hit_value": self.hit_value, "resident_value": self.resident_value}


def resolve_objective(
    objective: str | tuple[float, float], machine: Machine | None, expert_bytes: NDArray[np.int64] | None
) -> Objective:
    """An Objective from its name, or from (hit_value, resident_value).

    Raises PlanError on an unknown name, values that are negative, not finite or both 0, and on "decode-time" without
    a machine or without expert sizes.
    """
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise PlanError(
                f"objective {objective!r} is unknown: choose {', '.join(OBJECTIVES)} or (hit_value, resident_value)"
            )
        if machine is not None and objective != "decode-time":
            raise PlanError(f"objective {objective} does not look at a machine: leave it out, or choose decode-time")
        if objective == "hit-rate":
            return Objective(objective, 1.0, 0.0)
        if objective == "whole-token":
            return Objective(objective, 0.0, 1.0)
        if machine is None:
            raise PlanError("objective decode-time needs a machine: give a file from `hotset probe` or a preset")
        if expert_bytes is None:
            raise PlanError("objective decode-time needs expert sizes, and the trace does not say any")
        return Objective(objective, *decode_time_values(machine, float(expert_bytes.mean())))
    try:
        hit_value, resident_value = (float(v) for v in objective)
    except (TypeError, ValueError):
        raise PlanError(f"objective {objective!r} is not a name or two numbers (hit_value, resident_value)") from None
    if machine is not None:
        raise PlanError("an objective in numbers does not look at a machine: leave it out, or choose decode-time")
    if not (math.isfinite(hit_value) and math.isfinite(resident_value)) or min(hit_value, resident_value) < 0:
        raise PlanError(f"objective ({hit_value}, {resident_value}): wanted two finite values, neither below 0")
    if hit_value == resident_value == 0:
        raise PlanError("objective (0, 0): every placement would be worth nothing")
    return Objective(f"{hit_value:g} per hit + {resident_value:g} per resident token", hit_value, resident_value)


def decode_time_values(machine: Machine, expert_bytes: float) -> tuple[float, float]:
    """(hit_value, resident_value) in seconds saved during decode on that machine.

    The prices are those of `machines.cost.CostModel`, as in replay and bench: a hit saves the host's time less the
    GPU's, a fully resident token the round trip to the host. Sizes are averaged: the value of a hit does not differ by
    expert. On a machine whose arena is host memory too (device "cpu") a hit saves nothing, and the round trip is all
    there is.
    """
    prices = CostModel(machine)
    values = max(0.0, float(prices.saved_seconds_per_hit(expert_bytes))), prices.saved_seconds_per_resident_token
    if max(values) <= 0:
        raise PlanError(f"machine {machine.name}: neither a hit nor a resident token saves time on it")
    return values
