"""What the report page and the PNG show, as plain numbers: one dictionary, JSON-able, nothing about looks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hotset.core import Plan, Trace
from hotset.errors import PlanError
from hotset.planning.compare import compare
from hotset.planning.measures import layer_coactivation, measure
from hotset.reports.text import plan_summary, trace_summary

CURVE_STRATEGIES = ("certified", "coverage", "cluster", "frequency", "uniform", "front-loading")
CURVE_BUDGETS = tuple(f"{percent}%" for percent in range(5, 100, 5))
_MATRIX_CELLS = 2_000_000
"""Co-activation cells a page holds at most, one byte each: more layers than that are left out."""


def report_data(
    plan: Plan,
    trace: Trace,
    *,
    layers: Sequence[int] | None = None,
    strategies: Sequence[str] = CURVE_STRATEGIES,
    budgets: Sequence[str] = CURVE_BUDGETS,
    shed_quality: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything the report shows.

    layers: model layer numbers whose co-activation is shown; default all, or as many, evenly spaced, as a page holds.
    shed_quality: what `read_shed_quality` gives, shown as it is, of whatever model it was measured on.
    Raises PlanError where plan and trace do not belong together, or a layer is not in the trace.
    """
    if plan.gpu_experts_mask.shape != (trace.num_layers, trace.num_experts):
        raise PlanError(
            f"the plan is for {plan.num_layers} layers x {plan.num_experts} experts, the trace has "
            f"{trace.num_layers} x {trace.num_experts}: report a plan with a trace of the same model"
        )
    if not np.array_equal(plan.layer_ids, trace.layer_ids):
        raise PlanError("plan and trace number their MoE layers differently: they are of different models")
    rows = _chosen_rows(trace, layers)
    measured = measure(plan.gpu_experts_mask, trace)
    routed, picks = int(measured.routed.sum()), int(measured.picks.sum())
    whole = compare(trace, strategies, budgets, objective="whole-token")
    hits = compare(trace, ["certified"], budgets, objective="hit-rate")
    curves: dict[str, Any] = {
        "budgets": [float(b.rstrip("%")) for b in budgets],
        "strategies": list(strategies),
        "token_resident_rate": {n: _series(whole, n, "token_resident_rate") for n in strategies},
        "hit_rate": {n: _series(whole, n, "hit_rate") for n in strategies},
        "token_resident_bound": [r["bound"] / routed for r in whole if r["strategy"] == strategies[0]]
        if "certified" in strategies
        else None,
        "hit_bound": [r["bound"] / picks for r in hits],
    }
    return {
        "plan": plan_summary(plan),
        "trace": trace_summary(trace),
        "same_trace": plan.trace_fingerprint == trace.fingerprint,
        "layer_ids": trace.layer_ids.tolist(),
        "counts": trace.counts.tolist(),
        "mask": ["".join("1" if r else "0" for r in row) for row in plan.gpu_experts_mask],
        "layer_hit_rate": _per_layer(measured.hits, measured.picks),
        "layer_token_resident_rate": _per_layer(measured.resident, measured.routed),
        "hit_rate": measured.hit_rate,
        "token_resident_rate": measured.token_resident_rate,
        "curves": curves,
        "coactivation": [_matrix(trace, row) for row in rows],
        "shed_quality": shed_quality,
    }


def _series(rows: list[dict[str, Any]], strategy: str, name: str) -> list[float]:
    return [round(r["in_sample"][name], 5) for r in rows if r["strategy"] == strategy]


def _per_layer(part: Any, whole: Any) -> list[float]:
    return [round(float(p) / float(w), 5) if w else 0.0 for p, w in zip(part, whole, strict=True)]


def _chosen_rows(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    numbers = trace.layer_ids.tolist()
    if layers is not None:
        for layer in layers:
            if layer not in numbers:
                raise PlanError(
                    f"layer {layer} is not an MoE layer of this trace (they are {numbers[0]} to {numbers[-1]})"
                )
        return [numbers.index(layer) for layer in layers]
    fits = max(1, _MATRIX_CELLS // trace.num_experts**2)
    if trace.num_layers <= fits:
        return list(range(trace.num_layers))
    return sorted({round(i) for i in np.linspace(0, trace.num_layers - 1, fits)})


def _matrix(trace: Trace, row: int) -> dict[str, Any]:
    """A layer's co-activation as bytes: 255 * sqrt(count / largest), the diagonal (picks) left out."""
    together = layer_coactivation(trace, row)
    np.fill_diagonal(together, 0)
    largest = int(together.max())
    levels = np.round(255 * np.sqrt(together / max(1, largest))).astype(np.uint8)
    return {"row": row, "largest": largest, "levels": base64.b64encode(levels.tobytes()).decode("ascii")}
