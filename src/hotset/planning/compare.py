"""Several strategies at several budgets on one trace: the table behind `--compare` and behind the report's curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotset.core import Machine, Trace
from hotset.errors import BudgetError
from hotset.planning.api import build_problem, check_placement
from hotset.planning.budget import Budget, resolve_budget
from hotset.planning.measures import measure
from hotset.planning.report import rates
from hotset.planning.strategies import STRATEGIES, place_each


def parse_budget(text: str) -> dict[str, Any]:
    """Budget argument of `hotset.plan` from "25%" or "12GiB". Raises BudgetError: a bare number could mean either."""
    if text.strip().endswith("%"):
        return {"fraction": text}
    if text.strip()[-1:].isalpha():
        return {"gpu_memory_bytes": text}
    raise BudgetError(f"budget {text!r} has no unit: write a share like 25% or a size like 12GiB")


def compare(
    trace: Trace,
    strategies: Sequence[str],
    budgets: Sequence[str],
    *,
    objective: str | tuple[float, float] = "whole-token",
    machine: Machine | None = None,
    holdout: float | None = None,
    seed: int = 0,
    min_experts_per_layer: int = 0,
    max_experts_per_layer: int | None = None,
) -> list[dict[str, Any]]:
    """One row for each budget and strategy, budgets first.

    strategies: names, or ["all"]. budgets: shares like "25%" or sizes like "12GiB".
    A row has strategy, budget, experts, score, bound, gap, in_sample and, with a holdout, held_out (as in a plan's
    report). A bound that one strategy proves for a budget holds for all, so every row of that budget carries it.
    Raises as `hotset.plan` does.
    """
    held_out = None
    if holdout is not None:
        trace, held_out = trace.split(holdout, seed)
    resolved: list[Budget] = [
        resolve_budget(
            (trace.num_layers, trace.num_experts),
            trace.expert_bytes,
            min_experts_per_layer=min_experts_per_layer,
            max_experts_per_layer=max_experts_per_layer,
            **parse_budget(text),
        )
        for text in budgets
    ]
    if not resolved:
        raise BudgetError("no budget to compare at: give a list like 10%,25%,50%")
    problem = build_problem(trace, resolved[0], objective, machine=machine, seed=seed)
    wanted = problem.objective
    names = list(STRATEGIES) if list(strategies) == ["all"] else [name.strip() for name in strategies]
    placed = {name: place_each(name, problem, resolved) for name in dict.fromkeys(names)}
    rows = []
    for index, budget in enumerate(resolved):
        bounds = [p[index].bound for p in placed.values()]
        bound = min((b for b in bounds if b is not None), default=None)
        for name, placements in placed.items():
            mask = placements[index].mask
            check_placement(budget, mask)
            measured = measure(mask, trace)
            score = measured.score(wanted.hit_value, wanted.resident_value)
            row = {
                "strategy": name,
                "budget": budget.asked,
                "experts": int(mask.sum()),
                "score": score,
                "bound": bound,
                "gap": None if bound is None else (max(0.0, 1 - score / bound) if bound > 0 else 0.0),
                "in_sample": rates(measured, trace),
            }
            if held_out is not None:
                row["held_out"] = rates(measure(mask, held_out), held_out)
            rows.append(row)
    return rows
