"""Budgets: every way to say one, and every way to say a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.errors import BudgetError
from hotset.planning.budget import resolve_budget

SIZES = np.array([[10, 10, 20], [20, 20, 40]], np.int64)


def test_a_share_without_sizes_is_of_the_experts_and_rounds_down() -> None:
    assert resolve_budget((2, 3), None, fraction=0.5).capacity == 3
    assert resolve_budget((24, 32), None, fraction="10%").capacity == 76
    assert resolve_budget((10, 10), None, fraction=0.29).capacity == 29


def test_a_share_with_sizes_is_of_the_bytes() -> None:
    budget = resolve_budget((2, 3), SIZES, fraction=0.5)
    assert budget.unit_bytes == 10
    assert budget.capacity == 6
    assert budget.as_dict() == {"asked": "50.0 %", "experts": None, "bytes": 60}


def test_bytes_are_counted_in_the_largest_common_unit() -> None:
    assert resolve_budget((2, 3), SIZES, gpu_memory_bytes=65).capacity == 6
    assert resolve_budget((2, 3), SIZES * 1024, gpu_memory_bytes="1KiB").capacity == 0
    equal = resolve_budget((2, 3), np.full((2, 3), 7), gpu_memory_bytes=30)
    assert (equal.capacity, equal.equal_sizes, equal.as_dict()["experts"]) == (4, True, 4)


def test_experts_per_layer_fixes_every_layer() -> None:
    budget = resolve_budget((2, 3), SIZES, experts_per_layer=[1, 2])
    assert budget.capacity == 3
    assert budget.min_experts.tolist() == budget.max_experts.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one budget .* got none"),
        ({"experts": 1, "fraction": 0.5}, "got experts and fraction"),
        ({"experts": -1}, "experts is -1: a budget is never negative"),
        ({"experts": 1.5}, "experts is 1.5: wanted a whole number"),
        ({"experts": True}, "experts is True: wanted a whole number"),
        ({"experts": 7}, "budget 7 experts is above the 6 that the model has"),
        ({"experts": 1, "min_experts_per_layer": 1}, "budget 1 experts is below the 2 that the minimum"),
        ({"experts": 3, "max_experts_per_layer": 1}, "budget 3 experts is above the 2 that the maximum"),
        ({"experts": 3, "min_experts_per_layer": 2, "max_experts_per_layer": 1}, "min_experts_per_layer 2 is above"),
        ({"experts": 3, "max_experts_per_layer": 4}, "max_experts_per_layer 4 is above the 3 experts"),
        ({"fraction": 1.5}, "share 1.5 is outside 0 % to 100 %"),
        ({"fraction": "much"}, "share 'much' is not a number"),
        ({"fraction": float("nan")}, "share nan is outside"),
        ({"gpu_memory_bytes": -5}, "size -5 is negative"),
        ({"gpu_memory_bytes": "12 parsecs"}, "size '12 parsecs' is not a number of bytes"),
        ({"gpu_memory_bytes": 121}, "budget 121 B is above the 120 B that all 6 experts take"),
        ({"gpu_memory_bytes": 20, "min_experts_per_layer": 1}, "budget 20 B is below the 30 B that 1 experts"),
        ({"experts_per_layer": 4}, "experts_per_layer 4: wanted 0 to 3"),
        ({"experts_per_layer": -1}, "experts_per_layer -1: wanted 0 to 3"),
        ({"experts_per_layer": [1, 2, 3]}, "one for each of 2 layers"),
        ({"experts_per_layer": 0.5}, "experts_per_layer 0.5: wanted whole numbers"),
        ({"experts_per_layer": 1, "min_experts_per_layer": 2}, "outside the minimum 2 and maximum 3"),
    ],
)
def test_a_wrong_budget_is_refused_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BudgetError, match=message) as caught:
        resolve_budget((2, 3), SIZES, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bytes_need_expert_sizes() -> None:
    with pytest.raises(BudgetError, match="a budget in bytes needs expert sizes"):
        resolve_budget((2, 3), None, gpu_memory_bytes="1GiB")
