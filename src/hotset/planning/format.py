"""The plan file: one safetensors file with the mask and its proof.

Arrays: gpu_experts_mask [L, E] bool, layer_ids [L] int32, and where known expert_bytes [L, E] int64. Metadata, each
value as JSON text: format, version, strategy, objective, budget, score, bound, trace_fingerprint, model_fingerprint,
report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Plan
from hotset.errors import PlanError
from hotset.storage import ArrayFile, read_arrays, wrap_format_errors, write_arrays

FORMAT = "hotset-plan"
VERSION = 1


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` as one file, by way of a temporary name. Raises PlanError where the disk refuses."""
    target = Path(path)
    if target.is_dir():
        raise PlanError(f"{target} is a folder: give the name of a .safetensors file")
    arrays: dict[str, NDArray[Any]] = {"gpu_experts_mask": plan.gpu_experts_mask, "layer_ids": plan.layer_ids}
    if plan.expert_bytes is not None:
        arrays["expert_bytes"] = plan.expert_bytes
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "strategy": plan.strategy,
        "objective": plan.objective,
        "budget": dict(plan.budget),
        "score": plan.score,
        "bound": plan.bound,
        "trace_fingerprint": plan.trace_fingerprint,
        "model_fingerprint": plan.model_fingerprint,
        "report": dict(plan.report),
    }
    wrap_format_errors(PlanError, lambda: write_arrays(target, arrays, metadata))


def open_plan(path: str | Path) -> Plan:
    """Read the plan in a file. Raises PlanError, each fault with its own message."""
    file = wrap_format_errors(PlanError, lambda: read_arrays(path))
    if file.metadata.get("format") != FORMAT:
        raise PlanError(f"{path}: not a hotset plan: make one with `hotset plan TRACE -o {Path(path).name}`")
    if file.metadata.get("version") != VERSION:
        raise PlanError(f"{path}: plan version {file.metadata.get('version')}, this hotset reads {VERSION}")
    return wrap_format_errors(PlanError, lambda: _plan(file))


def _plan(file: ArrayFile) -> Plan:
    mask = file.take("gpu_experts_mask", np.bool_, 2)
    layer_ids = file.take("layer_ids", np.int32, 1)
    sizes = file.take_optional("expert_bytes", np.int64, 2)
    values = file.metadata
    for key, kinds in (
        ("strategy", str),
        ("objective", str),
        ("budget", dict),
        ("score", (int, float)),
        ("bound", (int, float, type(None))),
        ("report", dict),
    ):
        if not isinstance(values.get(key), kinds):
            raise PlanError(f"{file.path}: {key} is {values.get(key)!r}: not what a plan says there")
    try:
        return Plan(
            gpu_experts_mask=mask,
            layer_ids=layer_ids,
            strategy=values["strategy"],
            objective=values["objective"],
            budget=values["budget"],
            score=values["score"],
            bound=values["bound"],
            trace_fingerprint=values.get("trace_fingerprint"),
            model_fingerprint=values.get("model_fingerprint"),
            expert_bytes=sizes,
            report=values["report"],
        )
    except PlanError as problem:
        raise PlanError(f"{file.path}: {problem}") from None
