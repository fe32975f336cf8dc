"""The public calls: `plan` for traces and counts, and kt-kernel's functions over frequency tables.

Pure: nothing is read or written, the previous plan is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.core import Counts, Machine, Plan, Trace
from hotset.errors import BudgetError, PlanError
from hotset.planning import report
from hotset.planning.budget import Budget, resolve_budget
from hotset.planning.measures import is_torch, measure, to_numpy
from hotset.planning.objective import Objective, resolve_objective
from hotset.planning.problem import Placement, Problem
from hotset.planning.strategies import strategy as find_strategy

DEFAULT_STRATEGY = "certified"


def plan(
    source: Trace | Counts,
    *,
    experts: int | None = None,
    gpu_memory_bytes: int | str | None = None,
    fraction: float | str | None = None,
    experts_per_layer: int | Sequence[int] | None = None,
    strategy: str = DEFAULT_STRATEGY,
    objective: str | tuple[float, float] = "whole-token",
    machine: Machine | None = None,
    previous: Plan | None = None,
    previous_scores: ArrayLike | None = None,
    alpha: float = 0.8,
    min_experts_per_layer: int = 0,
    max_experts_per_layer: int | None = None,
    holdout: float | None = None,
    context_length: int | None = None,
    seed: int = 0,
) -> Plan:
    """Choose the experts that live in GPU memory.

    source: a Trace, or Counts where tokens are not known. Exactly one budget: `experts` in all, `gpu_memory_bytes`
    for experts (a number or "12GiB"), `fraction` of the expert bytes (of the experts where sizes are not known; 0.25
    or "25%"), or `experts_per_layer` (one number, or one per layer).
    objective: "whole-token", "hit-rate", "decode-time" (needs `machine`), or (hit_value, resident_value).
    previous: the plan before: among equal experts its residents stay, and the report counts the moves.
    previous_scores, alpha: [L, E] scores of the window before; layer-balanced ranks by alpha * new + (1 - alpha) * old.
    holdout: plan on the other documents and report on this share of them (`Trace.split(holdout, seed)`), beside uniform
    and beside the best static mask, which is planned on the held-out part itself.
    context_length: tokens of KV cache to count in the report's bytes.
    seed: for the random strategy and for the split.

    Raises BudgetError, PlanError, or TraceError, one line each.
    """
    if previous_scores is not None and strategy != "layer-balanced":
        raise PlanError(f"strategy {strategy} does not look at previous_scores: leave them out, or use layer-balanced")
    if context_length is not None and context_length < 0:
        raise PlanError(f"context_length is {context_length}: wanted a number of tokens")
    held_out = None
    if holdout is not None:
        if not isinstance(source, Trace):
            raise PlanError("holdout needs tokens, and these are counts only: give a trace")
        source, held_out = source.split(holdout, seed)
    problem = build_problem(
        source,
        resolve_budget(
            (source.num_layers, source.num_experts),
            source.expert_bytes,
            experts=experts,
            gpu_memory_bytes=gpu_memory_bytes,
            fraction=fraction,
            experts_per_layer=experts_per_layer,
            min_experts_per_layer=min_experts_per_layer,
            max_experts_per_layer=max_experts_per_layer,
        ),
        objective,
        machine=machine,
        previous=previous,
        previous_scores=previous_scores,
        alpha=alpha,
        seed=seed,
    )
    placement = find_strategy(strategy)(problem)
    check_placement(problem.budget, placement.mask)
    return _as_plan(source, held_out, problem, placement, strategy, previous, context_length)


def build_problem(
    source: Trace | Counts,
    budget: Budget,
    objective: str | tuple[float, float],
    *,
    machine: Machine | None = None,
    previous: Plan | None = None,
    previous_scores: ArrayLike | None = None,
    alpha: float = 0.8,
    seed: int = 0,
) -> Problem:
    """What a strategy is given, validated. Raises PlanError."""
    alpha = _alpha(alpha)
    notes: list[str] = []
    shape = (source.num_layers, source.num_experts)
    wanted = resolve_objective(objective, machine, source.expert_bytes)
    if isinstance(source, Counts) and wanted.resident_value:
        notes.append(f"counts do not say which picks make up a token: planned for hit rate instead of {wanted.name}")
        wanted = Objective("hit-rate", 1.0, 0.0)
    if previous is not None and previous.gpu_experts_mask.shape != shape:
        raise PlanError(f"the previous plan is for {previous.gpu_experts_mask.shape} experts, this source has {shape}")
    return Problem(
        counts=(source.counts if isinstance(source, Trace) else source.activation_freq).astype(np.float64),
        trace=source if isinstance(source, Trace) else None,
        budget=budget,
        objective=wanted,
        previous_mask=None if previous is None else previous.gpu_experts_mask,
        previous_scores=None if previous_scores is None else _scores("previous_scores", previous_scores, shape),
        alpha=alpha,
        seed=seed,
        notes=tuple(notes),
    )


def check_placement(budget: Budget, mask: NDArray[np.bool_]) -> None:
    """Assert that a strategy kept to the budget and the limits per layer: anything else is our bug."""
    used, each = int(budget.sizes[mask].sum()), mask.sum(axis=1)
    assert used <= budget.capacity, f"placement takes {used} of {budget.capacity}"
    assert (each >= budget.min_experts).all(), "placement is below the minimum of a layer"
    assert (each <= budget.max_experts).all(), "placement is above the maximum of a layer"


def _as_plan(
    source: Trace | Counts,
    held_out: Trace | None,
    problem: Problem,
    placement: Placement,
    strategy: str,
    previous: Plan | None,
    context_length: int | None,
) -> Plan:
    mask, wanted = placement.mask, problem.objective
    scores = problem.counts if placement.scores is None else placement.scores
    tiers, byte_notes = report.tier_bytes(mask, source, context_length)
    facts: dict[str, Any] = {
        "notes": [
            *problem.notes,
            *placement.notes,
            *report.few_picks_warning(problem.counts, np.asarray(source.layer_ids)),
            *byte_notes,
        ],
        "objective_values": wanted.as_dict(),
        "selected_score_hit_rate": report.selected_score_hit_rate(mask, scores),
        "experts_per_layer": mask.sum(axis=1).tolist(),
        "bytes": tiers,
    }
    if isinstance(source, Trace):
        measured = measure(mask, source)
        score = measured.score(wanted.hit_value, wanted.resident_value)
        facts["in_sample"] = report.rates(measured, source)
    else:
        score = wanted.hit_value * float(problem.counts[mask].sum())
        facts["in_sample"] = {"hit_rate": report.selected_score_hit_rate(mask, problem.counts)}
    if held_out is not None:
        best = find_strategy("certified")(
            build_problem(held_out, problem.budget, (wanted.hit_value, wanted.resident_value))
        )
        facts["held_out"] = {
            **report.rates_on(mask, held_out),
            "uniform": report.rates_on(find_strategy("uniform")(problem).mask, held_out),
            "best_static": report.rates_on(best.mask, held_out),
        }
    if previous is not None:
        facts["moves"] = {
            "to_gpu": int((mask & ~previous.gpu_experts_mask).sum()),
            "to_host": int((previous.gpu_experts_mask & ~mask).sum()),
        }
    return Plan(
        gpu_experts_mask=mask,
        layer_ids=np.asarray(source.layer_ids, np.int32),
        strategy=strategy,
        objective=wanted.name,
        budget=problem.budget.as_dict(),
        score=score,
        bound=placement.bound,
        trace_fingerprint=source.fingerprint if isinstance(source, Trace) else None,
        model_fingerprint=source.model_fingerprint,
        expert_bytes=source.expert_bytes,
        report=facts,
    )


def generate_gpu_experts_masks(
    activation_freq: Any,
    num_gpu_experts: int,
    strategy: str = "frequency",
    *,
    previous_scores: Any = None,
    alpha: float = 0.8,
    min_experts_per_layer: int = 0,
    max_experts_per_layer: int | None = None,
    return_report: bool = False,
    seed: int = 0,
) -> Any:
    """kt-kernel's mask function: [L, E] bool, True = in GPU memory.

    activation_freq: [L, E] counts or frequencies, torch or NumPy; torch in gives a torch mask on the CPU, NumPy in a
    NumPy one. num_gpu_experts: experts over all layers; outside 0..L * E it is clamped, as kt-kernel does. Two
    arguments give kt-kernel's masks (equal scores are broken by lower layer, then lower expert, where kt-kernel leaves
    that open).
    return_report: (mask, report) instead, as `plan_gpu_expert_placement` gives.

    Raises PlanError or BudgetError on tables that are not [L, E], NaN, negative, and limits that cannot hold.
    """
    mask, facts = plan_gpu_expert_placement(
        activation_freq,
        num_gpu_experts,
        strategy,
        previous_scores=previous_scores,
        alpha=alpha,
        min_experts_per_layer=min_experts_per_layer,
        max_experts_per_layer=max_experts_per_layer,
        seed=seed,
    )
    return (mask, facts) if return_report else mask


def plan_gpu_expert_placement(
    activation_freq: Any,
    num_gpu_experts: int,
    strategy: str = "frequency",
    *,
    previous_scores: Any = None,
    alpha: float = 0.8,
    min_experts_per_layer: int = 0,
    max_experts_per_layer: int | None = None,
    seed: int = 0,
) -> tuple[Any, dict[str, Any]]:
    """(mask [L, E] bool, report) from a frequency table: a placement by number of experts, in kt-kernel's words.

    Arguments and errors as `generate_gpu_experts_masks`. The report has strategy, num_layers, num_experts,
    requested_num_gpu_experts, actual_num_gpu_experts, selected_score, total_score, selected_score_hit_rate and
    per_layer_counts.
    """
    counts = _frequencies(activation_freq)
    total = counts.num_layers * counts.num_experts
    if isinstance(num_gpu_experts, bool) or not isinstance(num_gpu_experts, int | np.integer):
        raise BudgetError(f"num_gpu_experts is {num_gpu_experts!r}: wanted a whole number")
    made = plan(
        counts,
        experts=min(max(int(num_gpu_experts), 0), total),
        strategy=strategy,
        objective="hit-rate",
        previous_scores=None if previous_scores is None else to_numpy(previous_scores),
        alpha=alpha,
        min_experts_per_layer=min_experts_per_layer,
        max_experts_per_layer=max_experts_per_layer,
        seed=seed,
    )
    mask = made.gpu_experts_mask
    scores = counts.activation_freq.astype(np.float64)
    selected, whole = float(scores[mask].sum()), float(scores.sum())
    facts = {
        "strategy": strategy,
        "num_layers": counts.num_layers,
        "num_experts": counts.num_experts,
        "requested_num_gpu_experts": int(num_gpu_experts),
        "actual_num_gpu_experts": made.num_gpu_experts,
        "selected_score": selected,
        "total_score": whole,
        "selected_score_hit_rate": selected / whole if whole else 0.0,
        "per_layer_counts": mask.sum(axis=1).tolist(),
        "notes": made.report["notes"],
    }
    if is_torch(activation_freq):
        import torch

        return torch.from_numpy(np.ascontiguousarray(mask)), facts
    return mask, facts


def _frequencies(activation_freq: Any) -> Counts:
    try:
        table = to_numpy(activation_freq)
    except ValueError:
        raise PlanError("activation_freq is ragged: wanted a rectangular table [L, E]") from None
    return Counts.from_array(table)


def _scores(name: str, value: ArrayLike, shape: tuple[int, int]) -> NDArray[np.float64]:
    scores = to_numpy(value)
    if scores.shape != shape:
        raise PlanError(f"{name} has shape {scores.shape}: wanted that of the counts, {shape}")
    if scores.dtype.kind not in "iuf" or not np.isfinite(scores).all() or (scores < 0).any():
        raise PlanError(f"{name} holds values that are not finite numbers of 0 or more")
    return scores.astype(np.float64)


def _alpha(alpha: float) -> float:
    if not 0.0 <= alpha <= 1.0:
        raise PlanError(f"alpha is {alpha}: wanted a share between 0 and 1 of the new scores")
    return float(alpha)
