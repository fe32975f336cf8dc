"""Traces and plans as tables in a terminal, and the same facts as plain dictionaries for --json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import DECODE, Plan, Trace
from hotset.errors import PlanError
from hotset.reports.heatmap import heat_map
from hotset.storage import read_arrays, wrap_format_errors
from hotset.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console


def open_either(path: str | Path) -> Trace | Plan:
    """The trace or plan in a file or folder. Raises TraceError or PlanError."""
    target = Path(path)
    if target.suffix == ".safetensors" and target.is_file():
        kind = wrap_format_errors(PlanError, lambda: read_arrays(target)).metadata.get("format")
        if kind == "hotset-plan":
            return Plan.open(target)
    return Trace.open(target)


def trace_summary(trace: Trace) -> dict[str, Any]:
    """What `hotset show TRACE --json` prints."""
    routed = trace.counts.sum(axis=1)
    return {
        "kind": "trace",
        "model": trace.metadata.get("model"),
        "layers": trace.num_layers,
        "layer_ids": trace.layer_ids.tolist(),
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "tokens": trace.num_tokens,
        "decode_tokens": int((trace.phase == DECODE).sum()),
        "sequences": trace.num_sequences,
        "weights": trace.weight_shards is not None,
        "expert_bytes": None if trace.expert_bytes is None else int(trace.expert_bytes.sum()),
        "fingerprint": trace.fingerprint,
        "model_fingerprint": trace.model_fingerprint,
        "picks_per_layer": routed.tolist(),
        "unseen_experts_per_layer": (trace.counts == 0).sum(axis=1).tolist(),
        "hottest_quarter_share_per_layer": [round(float(s), 4) for s in hottest_quarter_share(trace.counts)],
    }


def hottest_quarter_share(counts: NDArray[Any]) -> NDArray[np.float64]:
    """[L] share of a layer's picks that its hottest quarter of experts takes; 0.25 = no skew."""
    quarter = max(1, counts.shape[1] // 4)
    hot = -np.sort(-counts, axis=1)[:, :quarter].sum(axis=1)
    total = counts.sum(axis=1)
    shares: NDArray[np.float64] = np.divide(hot, total, out=np.zeros(len(total)), where=total > 0)
    return shares


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What `hotset plan --json` and `hotset show PLAN --json` print."""
    return {
        "kind": "plan",
        "strategy": plan.strategy,
        "objective": plan.objective,
        "budget": dict(plan.budget),
        "layers": plan.num_layers,
        "layer_ids": plan.layer_ids.tolist(),
        "experts": plan.num_experts,
        "gpu_experts": plan.num_gpu_experts,
        "gpu_bytes": plan.gpu_bytes,
        "score": plan.score,
        "bound": plan.bound,
        "gap": plan.gap,
        "trace_fingerprint": plan.trace_fingerprint,
        "model_fingerprint": plan.model_fingerprint,
        "gpu_experts_of_layer": {
            str(int(layer)): np.flatnonzero(row).tolist()
            for layer, row in zip(plan.layer_ids, plan.gpu_experts_mask, strict=True)
        },
        **dict(plan.report),
    }


def print_trace(console: Console, trace: Trace) -> None:
    facts = trace_summary(trace)
    console.print(
        f"trace of {facts['model'] or 'a model'}: {facts['layers']} MoE layers x {facts['experts']} experts, "
        f"top-{facts['top_k']}"
    )
    size = facts["expert_bytes"]
    console.print(
        f"{facts['tokens']:,} tokens ({facts['decode_tokens']:,} decode) in {facts['sequences']:,} sequences"
        + ("" if size is None else f"; experts take {format_bytes(size)}")
    )
    shares = hottest_quarter_share(trace.counts)
    console.print(
        f"the hottest quarter of a layer's experts takes {format_share(float(shares.min()))} to "
        f"{format_share(float(shares.max()))} of its picks; "
        f"{int((trace.counts == 0).sum())} experts were never picked",
        soft_wrap=True,
    )
    console.print()
    _print_map(console, trace.counts, None, trace.layer_ids)


def print_plan(console: Console, plan: Plan, counts: NDArray[Any] | None) -> None:
    total = plan.num_layers * plan.num_experts
    size = "" if plan.gpu_bytes is None else f" ({format_bytes(plan.gpu_bytes)})"
    _line(
        console,
        f"{plan.strategy}: {plan.num_gpu_experts} of {total} experts in GPU memory{size}; "
        f"budget {plan.budget.get('asked', '')}",
    )
    proof = "no bound proven" if plan.gap is None else f"bound {plan.bound:,.6g}, gap {plan.gap * 100:.3f} %"
    _line(console, f"objective {plan.objective}: score {plan.score:,.6g}, {proof}")
    for title, rates in _rates(plan.report):
        _line(console, f"{title + ':':<22}{_rates_line(rates)}")
    tiers = plan.report.get("bytes", {})
    if tiers.get("gpu", {}).get("total") is not None:
        parts = [f"{name.replace('_', ' ')} {format_bytes(v)}" for name, v in tiers["gpu"].items() if v is not None]
        _line(console, f"GPU: {', '.join(parts)}; host: experts {format_bytes(tiers['host']['experts'])}")
    moves = plan.report.get("moves")
    if moves:
        _line(console, f"against the previous plan: {moves['to_gpu']} experts to the GPU, {moves['to_host']} away")
    console.print()
    _print_map(console, counts, plan.gpu_experts_mask, plan.layer_ids)


def _rates(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "in_sample" in report:
        yield "in sample", report["in_sample"]
    held_out = report.get("held_out")
    if held_out:
        yield "held out", held_out
        for name, title in (("uniform", "  uniform there"), ("best_static", "  best static there")):
            if name in held_out:
                yield title, held_out[name]


def _rates_line(rates: dict[str, Any]) -> str:
    parts = [f"hit rate {rates['hit_rate']:.4f}"]
    if "token_resident_rate" in rates:
        parts.append(f"token-resident rate {rates['token_resident_rate']:.4f}")
        parts.append(f"{rates['misses_per_token']:.2f} misses per token")
        parts.append(f"{rates['tokens']:,} tokens of {rates['documents']:,} documents")
    return ", ".join(parts)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _print_map(
    console: Console, counts: NDArray[Any] | None, mask: NDArray[np.bool_] | None, layer_ids: NDArray[Any]
) -> None:
    colour = console.is_terminal and console.color_system is not None
    for line in heat_map(counts, mask, layer_ids, columns=console.width, colour=colour):
        console.print(line, soft_wrap=True)
