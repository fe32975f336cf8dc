"""What a hit and a whole token are worth on a machine, by hand; and planning for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hotset
from hotset import Machine, Trace
from hotset.errors import PlanError
from hotset.planning.objective import decode_time_values, resolve_objective

MACHINE = Machine(
    name="hand",
    source="made up",
    device="cuda",
    host_read_bytes_per_second=10.0,
    host_threads=1,
    gpu_read_bytes_per_second=100.0,
    host_to_device_bytes_per_second=5.0,
    device_to_host_bytes_per_second=5.0,
    disk_read_bytes_per_second=1.0,
    round_trip_seconds=3.0,
    launch_seconds=0.0,
    host_memory_bytes=10**6,
    gpu_memory_bytes=10**6,
)
IDS = [[[0, 1], [0, 1], [0, 2]]]


def test_a_hit_saves_the_slower_read_and_a_whole_token_the_round_trip() -> None:
    # 50 bytes: 5 s from the host, 0.5 s on the GPU
    assert decode_time_values(MACHINE, 50.0) == (4.5, 3.0)


def test_an_arena_in_host_memory_saves_the_round_trip_alone() -> None:
    assert decode_time_values(replace(MACHINE, device="cpu", gpu_read_bytes_per_second=None), 50.0) == (0.0, 3.0)
    assert decode_time_values(replace(MACHINE, gpu_read_bytes_per_second=5.0), 50.0) == (0.0, 3.0)


def test_a_machine_on_which_nothing_is_saved_is_refused() -> None:
    with pytest.raises(PlanError, match="neither a hit nor a resident token saves time"):
        decode_time_values(replace(MACHINE, device="cpu", round_trip_seconds=0.0), 50.0)


def test_decode_time_is_planned_in_seconds() -> None:
    trace = Trace.from_arrays(IDS, num_experts=3, expert_bytes=50)
    made = hotset.plan(trace, experts=2, objective="decode-time", machine=MACHINE)
    # experts 0 and 1: five hits of 4.5 s and two whole tokens of 3 s
    assert made.gpu_experts_mask.tolist() == [[True, True, False]]
    assert made.score == pytest.approx(5 * 4.5 + 2 * 3.0)
    assert made.bound == pytest.approx(made.score)
    assert made.report["objective_values"] == {"name": "decode-time", "hit_value": 4.5, "resident_value": 3.0}


def test_a_preset_is_a_machine() -> None:
    trace = Trace.from_arrays(IDS, num_experts=3, expert_bytes=50 * 2**20)
    made = hotset.plan(trace, experts=2, objective="decode-time", machine=Machine.open("rtx-4090"))
    assert made.score > 0


@pytest.mark.parametrize(
    ("objective", "machine", "sizes", "message"),
    [
        ("decode-time", None, 50, "needs a machine"),
        ("decode-time", MACHINE, None, "needs expert sizes"),
        ("whole-token", MACHINE, 50, "does not look at a machine"),
        ((1, 1), MACHINE, 50, "does not look at a machine"),
    ],
)
def test_objectives_and_machines_that_do_not_go_together_are_refused(
    objective: str | tuple[float, float], machine: Machine | None, sizes: int | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_objective(objective, machine, None if sizes is None else np.full((1, 3), sizes))
