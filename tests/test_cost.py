"""The cost model: every term computed by hand on round numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from hotset import Machine
from hotset.errors import MachineError
from hotset.machines.cost import CostModel


def machine(**changes: Any) -> Machine:
    """Host 10 B/s, GPU 100 B/s, link 5 B/s, round trip 2 s, launch 0.5 s."""
    plain = Machine(
        name="by hand",
        source="test",
        device="cuda",
        host_read_bytes_per_second=10.0,
        host_threads=1,
        gpu_read_bytes_per_second=100.0,
        host_to_device_bytes_per_second=5.0,
        device_to_host_bytes_per_second=5.0,
        disk_read_bytes_per_second=1.0,
        round_trip_seconds=2.0,
        launch_seconds=0.5,
        host_memory_bytes=1000,
        gpu_memory_bytes=1000,
    )
    return dataclasses.replace(plain, **changes)


def counts(**changes: float) -> dict[str, float]:
    """3 hits and 1 miss of 100 bytes each, in one layer, no move."""
    return {"hits": 3, "hit_bytes": 300, "misses": 1, "miss_bytes": 100, "round_trips": 1, "load_bytes": 0, **changes}


def test_a_decode_token_costs_what_the_page_says() -> None:
    parts = CostModel(machine(), non_expert_bytes=50).parts(**counts())
    assert parts.mean() == {
        "non_expert": 0.5,
        "gpu": 3.0 + 1.5,
        "cpu": 10.0,
        "round_trip": 2.0,
        "link": 0.0,
        "stall": 0.0,
        "total": 17.0,
    }


def test_a_move_stalls_only_for_what_the_token_cannot_hide() -> None:
    hidden = CostModel(machine()).parts(**counts(load_bytes=50))  # 10 s of link behind 16.5 s of work
    assert (float(hidden.link), float(hidden.stall)) == (10.0, 0.0)
    visible = CostModel(machine()).parts(**counts(load_bytes=100))
    assert (float(visible.link), float(visible.stall)) == (20.0, 3.5)
    assert float(visible.total) == 20.0


def test_a_fetched_miss_waits_for_the_link_and_needs_no_round_trip() -> None:
    parts = CostModel(machine(), on_miss="fetch").parts(**counts(load_bytes=100))
    assert parts.mean() == {
        "non_expert": 0.0,
        "gpu": 4.0 + 2.0,
        "cpu": 0.0,
        "round_trip": 0.0,
        "link": 20.0,
        "stall": 20.0,
        "total": 26.0,
    }


def test_without_a_gpu_a_hit_reads_as_slowly_as_a_miss_and_a_move_is_a_copy() -> None:
    model = CostModel(machine(device="cpu", host_to_device_bytes_per_second=None, gpu_read_bytes_per_second=None))
    parts = model.parts(**counts(load_bytes=100))
    assert float(parts.gpu) == 30.0 + 1.5
    assert float(parts.cpu) == 10.0 + 0.5
    assert float(parts.stall) == float(parts.link) == 100 / (10 / 2)
    assert model.saved_seconds_per_hit(100) == 0.0
    assert model.saved_seconds_per_resident_token == 2.0
    assert model.break_even_gain(100) == 0.0


def test_planning_weighs_a_hit_by_what_it_saves() -> None:
    model = CostModel(machine())
    assert model.saved_seconds_per_hit(np.array([100, 200])).tolist() == pytest.approx([10 - 1.5, 20 - 2.5])
    assert CostModel(machine(), on_miss="fetch").saved_seconds_per_hit(100) == pytest.approx(100 / 5)


def test_the_least_gain_that_pays_for_a_move_does_not_depend_on_size() -> None:
    # 1 / 5 seconds of link per byte against 1 / 10 - 1 / 100 saved per byte and hit, over 20 tokens
    assert CostModel(machine()).break_even_gain(20) == pytest.approx(0.2 / (0.09 * 20))


def test_arrays_go_through_entry_by_entry() -> None:
    many = CostModel(machine()).parts(**{key: np.array([value, 0.0]) for key, value in counts().items()})
    assert many.total.tolist() == [16.5, 0.0]
    assert math.isclose(many.mean()["total"], 8.25)


def test_contradictions_are_refused() -> None:
    with pytest.raises(MachineError, match="no link to fetch over"):
        CostModel(machine(device="cpu"), on_miss="fetch")
    with pytest.raises(MachineError, match="wanted compute or fetch"):
        CostModel(machine(), on_miss="drop")  # type: ignore[arg-type]
    with pytest.raises(MachineError, match="wanted at most one"):
        CostModel(machine(), non_expert_bytes=1, non_expert_seconds=1.0)


def test_planning_values_a_hit_and_a_resident_token_by_the_same_prices() -> None:
    from hotset.planning.objective import decode_time_values

    assert decode_time_values(machine(), 100.0) == (10.0 - 1.5, 2.0)


def test_the_prefill_threshold_is_where_arithmetic_on_the_host_takes_longer_than_the_link() -> None:
    # 2 of 2 experts missing, top-1: T tokens give T rows and 2 (1 - 2^-T) distinct experts. A row of 10 FLOP takes 2 s
    # on the host; a copy of 40 bytes 40 / min(link 5, staging 10 / 2) = 8 s; its computation 40 / 100 + 0.5 = 0.9 s
    model = CostModel(machine(host_flops_per_second=5.0))
    layer = {"expert_bytes": 40.0, "expert_flops": 10.0, "num_experts": 2, "top_k": 1, "missing": 2.0}
    host, streamed = model.prefill_seconds([1, 2, 7, 8], **layer)
    # one token: reading 40 / 10 = 4 s is more than 2 s of arithmetic; and 2 s of round trip
    assert host.tolist() == [4 + 2, 6 + 2, 14 + 2, 16 + 2]
    assert streamed.tolist() == [8 + 0.9, 12 + 0.9, 16 * (1 - 2**-7) + 0.9, 16 * (1 - 2**-8) + 0.9]
    assert model.prefill_threshold(**layer) == 8  # 16.8375 > 18 is false; at 7 tokens 16.775 > 16
    assert model.prefill_threshold(**layer, most=7) is None
    assert model.prefill_threshold(**{**layer, "missing": 0.0}) is None


def test_a_slow_host_memory_slows_the_staging_of_streamed_experts() -> None:
    layer = {"expert_bytes": 40.0, "expert_flops": 10.0, "num_experts": 2, "top_k": 1, "missing": 2.0}
    slow = CostModel(machine(host_read_bytes_per_second=4.0, host_flops_per_second=5.0))
    assert slow.prefill_seconds([1], **layer)[1].tolist() == [40 / 2 + 0.9]


def test_prefill_streaming_needs_a_link_and_a_host_rate() -> None:
    layer = {"expert_bytes": 40.0, "expert_flops": 10.0, "num_experts": 2, "top_k": 1, "missing": 2.0}
    with pytest.raises(MachineError, match="no host_flops_per_second"):
        CostModel(machine()).prefill_threshold(**layer)
    with pytest.raises(MachineError, match="no link"):
        CostModel(machine(device="cpu", host_flops_per_second=5.0)).prefill_threshold(**layer)
