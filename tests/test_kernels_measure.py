"""Measuring the kernels: what is counted, and that nothing is left changed. No times are asserted."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.errors import BackendError
from hotset.kernels import Backend, KernelReport, describe, measure_crossover, native
from hotset.kernels.measure import DecodeStep, ReadStream, filled_layer

try:
    native.library()
except BackendError as problem:  # pragma: no cover
    pytest.skip(f"no compiled kernels here: {problem}", allow_module_level=True)


def test_shares_are_of_the_read_bandwidth() -> None:
    report = KernelReport(
        Backend("compiled", "compiled for this CPU: AVX2, 2 threads"), "AVX2", 0.0, 2, 40e9, {"bf16": 30e9}
    )
    assert report.decode_share == {"bf16": 0.75}
    assert report.line() == ("compiled for this CPU: AVX2, 2 threads; reads 40.0 GB/s, decode reaches bf16 75 % of it")


def test_torchs_kernels_are_described_by_their_reason() -> None:
    assert KernelReport(Backend("torch", "torch's kernels: why"), "", 0.0, 2, 0.0, {}).line() == "torch's kernels: why"


def test_describe_measures_what_was_compiled() -> None:
    report = describe(("int8",), working_set_bytes=16 << 20, rounds=2)
    assert report.instructions == native.instructions()
    assert report.read_bytes_per_second > 0
    assert report.decode_share["int8"] > 0


def test_a_decode_step_goes_round_all_experts() -> None:
    layer = filled_layer("bf16", hidden=64, intermediate=32, working_set_bytes=0, num_experts=12)
    step = DecodeStep(layer, num_tokens=1)
    assert step.stored_bytes == 8 * 3 * 64 * 32 * 2
    seen = np.concatenate([step.next_ids()[0] for _ in range(3)])
    assert sorted(seen.tolist()) == sorted(list(range(12)) * 2)
    assert step.seconds() > 0


def test_a_read_depends_on_every_byte() -> None:
    data = native.buffer(1 << 20)
    data[:] = 3
    options = {"streams": 4, "piece": 64 << 10, "ahead": 0, "threads": 2}
    before = native.read(data, **options)
    assert native.read(data, **options) == before
    data[-1] = 4
    assert native.read(data, **options) != before
    assert ReadStream(8 << 20).rate(1 << 20) > 0


def test_the_crossover_is_measured_and_the_layer_left_as_it_was() -> None:
    pytest.importorskip("torch")
    layer = filled_layer("bf16", hidden=64, intermediate=32, working_set_bytes=0, num_experts=8)
    fewest, times = measure_crossover(layer, tokens=(1, 4), top_k=2, rounds=1)
    assert set(times) == {1, 4}
    assert fewest in (None, 1, 4)
    assert layer.torch_from_tokens is None
    assert filled_layer("int4_g32", hidden=64, intermediate=32, working_set_bytes=0, zero_points=True).spec.zero_points
    quantised = filled_layer("int8", hidden=64, intermediate=32, working_set_bytes=0, num_experts=8)
    assert measure_crossover(quantised) == (None, {})
