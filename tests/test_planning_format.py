"""Plan files: what goes in comes out, and what is not a plan is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hotset
from hotset import Plan, Trace
from hotset.errors import PlanError
from hotset.storage import write_arrays


def made() -> Plan:
    trace = Trace.from_arrays(
        [[[0, 1], [1, 2]], [[0, 2], [0, 2]]], num_experts=3, layer_ids=[1, 4], expert_bytes=100, model_fingerprint="abc"
    )
    return hotset.plan(trace, gpu_memory_bytes=350, strategy="frequency")


def test_a_saved_plan_comes_back_whole(tmp_path: Path) -> None:
    plan = made()
    plan.save(tmp_path / "p.safetensors")
    again = Plan.open(tmp_path / "p.safetensors")
    assert np.array_equal(again.gpu_experts_mask, plan.gpu_experts_mask)
    assert again.layer_ids.tolist() == [1, 4]
    assert again.expert_bytes is not None
    assert again.expert_bytes.tolist() == [[100] * 3] * 2
    for name in ("strategy", "objective", "budget", "score", "bound", "gap", "trace_fingerprint", "model_fingerprint"):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.report == plan.report
    assert again.gpu_bytes == 300


def test_what_is_not_a_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(PlanError, match="No such file"):
        Plan.open(path)
    path.write_bytes(b"no")
    with pytest.raises(PlanError, match="too short"):
        Plan.open(path)
    trace = Trace.from_arrays([[[0, 1]]], num_experts=3)
    trace.save(path)
    with pytest.raises(PlanError, match="not a hotset plan"):
        Plan.open(path)
    made().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(PlanError, match="cut short"):
        Plan.open(path)
    with pytest.raises(PlanError, match="is a folder"):
        made().save(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "plan version 99"),
        ({"score": "high"}, "score is 'high'"),
        ({"report": None}, "report is None"),
        ({"strategy": 3}, "strategy is 3"),
    ],
)
def test_a_plan_with_a_wrong_entry_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    metadata = {
        "format": "hotset-plan",
        "version": 1,
        "strategy": "frequency",
        "objective": "hit-rate",
        "budget": {},
        "score": 1.0,
        "bound": None,
        "report": {},
    }
    arrays = {"gpu_experts_mask": np.ones((1, 2), bool), "layer_ids": np.zeros(1, np.int32)}
    write_arrays(tmp_path / "p.safetensors", arrays, {**metadata, **change})
    with pytest.raises(PlanError, match=message):
        Plan.open(tmp_path / "p.safetensors")


def test_a_plan_whose_arrays_disagree_is_refused(tmp_path: Path) -> None:
    arrays = {"gpu_experts_mask": np.ones((1, 2), bool), "layer_ids": np.zeros(3, np.int32)}
    values = {
        "format": "hotset-plan",
        "version": 1,
        "strategy": "frequency",
        "objective": "hit-rate",
        "budget": {},
        "score": 1.0,
        "bound": None,
        "report": {},
    }
    write_arrays(tmp_path / "q.safetensors", arrays, values)
    with pytest.raises(PlanError, match="1 rows but 3 layer_ids"):
        Plan.open(tmp_path / "q.safetensors")
