"""Replay: figures by hand on small traces, starts, prompts, prices, and what real traces are known to give."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset
from hotset import Counts, Machine, Plan, Trace
from hotset.core import DECODE, PREFILL
from hotset.errors import MachineError, PolicyError
from hotset.simulation.replay import Replay, parse_settings, replay_sweep, without_repetitive

TASKS = ("intent", "law", "summary", "translation")


def small(**changes: Any) -> Trace:
    """One layer, four experts, five decode tokens of two picks in two sequences."""
    ids = [[[0, 1], [0, 2], [0, 1], [3, 1], [3, 1]]]
    fields: dict[str, Any] = {
        "num_experts": 4,
        "sequence_start": [0, 3],
        "phase": [DECODE] * 5,
        "expert_bytes": 100,
        "metadata": {"sequence_source": ["a", "b"]},
    }
    return Trace.from_arrays(ids, **{**fields, **changes})


def machine(**changes: Any) -> Machine:
    """Host 10 B/s, GPU 100 B/s, link 5 B/s, round trip 2 s, launch 0.5 s."""
    values: dict[str, Any] = {
        **{"name": "by hand", "source": "test", "device": "cuda", "host_threads": 1},
        **{"host_read_bytes_per_second": 10.0, "gpu_read_bytes_per_second": 100.0, "disk_read_bytes_per_second": None},
        **{"host_to_device_bytes_per_second": 5.0, "device_to_host_bytes_per_second": 5.0},
        **{"round_trip_seconds": 2.0, "launch_seconds": 0.5, "host_memory_bytes": 1000, "gpu_memory_bytes": 1000},
    }
    return Machine(**{**values, **changes})


def mask_of(*experts: int) -> Any:
    mask = np.zeros((1, 4), np.bool_)
    mask[0, list(experts)] = True
    return mask


def test_static_figures_by_hand() -> None:
    done = hotset.replay(small(), "static", plan=mask_of(0, 1))
    assert done.experts_per_layer == [2]
    assert done.hit_rate == 7 / 10
    assert done.token_resident_rate == 2 / 5
    assert done.loads_per_token == 0
    assert done.domains == {
        "a": {"tokens": 3, "hit_rate": 5 / 6, "token_resident_rate": 2 / 3, "loads_per_token": 0.0},
        "b": {"tokens": 2, "hit_rate": 1 / 2, "token_resident_rate": 0.0, "loads_per_token": 0.0},
    }
    assert done.series["token"] == [1, 2, 3, 4, 5]
    assert done.series["hit_rate"] == [1.0, 0.5, 1.0, 0.5, 0.5]
    assert done.hit_rate_per_layer == [0.7]


def test_lru_counts_its_loads_and_their_bytes() -> None:
    # slots 0, 1: token 1 loads 2 for 1; token 2 hits 0, loads 1 for 2; token 3 loads 3 for 0; then all hits
    done = hotset.replay(small(), "lru", plan=mask_of(0, 1))
    assert done.hit_rate == 7 / 10
    assert done.loads_per_token == 3 / 5
    assert done.load_bytes_per_token == 60.0


def test_decode_seconds_are_those_of_the_cost_model() -> None:
    seconds = hotset.replay(small(), "static", plan=mask_of(0, 1), machine=machine()).seconds["decode"]
    assert seconds["gpu"] == pytest.approx(7 * (1.0 + 0.5) / 5)
    assert seconds["cpu"] == pytest.approx(3 * 10.0 / 5)
    assert seconds["round_trip"] == pytest.approx(3 * 2.0 / 5)
    assert seconds["total"] == pytest.approx((10.5 + 30 + 6) / 5)
    fetched = hotset.replay(small(), "static", plan=mask_of(0, 1), machine=machine(), on_miss="fetch").seconds["decode"]
    assert fetched["stall"] == pytest.approx(3 * 20.0 / 5)


def test_a_prefill_chunk_reads_each_expert_and_pays_each_round_trip_once() -> None:
    trace = small(phase=[PREFILL] * 5, sequence_start=[0], metadata={})
    done = hotset.replay(trace, "static", plan=mask_of(0, 1), machine=machine(), prefill_chunk=3)
    # chunk 1 (3 tokens) reads 0, 1 in the arena and 2 on the host; chunk 2 reads 1 in the arena and 3 on the host
    assert done.seconds["prefill"]["gpu"] == pytest.approx((2 + 1) * 1.5 / 5)
    assert done.seconds["prefill"]["cpu"] == pytest.approx((1 + 1) * 10.0 / 5)
    assert done.seconds["prefill"]["round_trip"] == pytest.approx((1 + 1) * 2.0 / 5)
    assert "decode" not in done.seconds


def test_weights_outside_the_experts_are_read_once_per_pass() -> None:
    trace = small(metadata={"non_expert_bytes": 50})
    done = hotset.replay(trace, "static", plan=mask_of(0, 1), machine=machine())
    assert done.seconds["decode"]["non_expert"] == pytest.approx(0.5)


def test_a_cold_start_forgets_what_the_sequence_before_had_loaded() -> None:
    # the second sequence finds 3 and 1 resident where the first left them, or starts from 0, 1 again
    trace = small(sequence_start=[0, 4])
    assert hotset.replay(trace, "lru", plan=mask_of(0, 1), start="warm").domains["b"]["hit_rate"] == 1.0
    assert hotset.replay(trace, "lru", plan=mask_of(0, 1), start="cold").domains["b"]["hit_rate"] == 0.5


def test_warm_up_is_left_out_of_all_figures_but_not_of_the_replay() -> None:
    warm = hotset.replay(small(), "lru", plan=mask_of(0, 1), skip_tokens=4)
    assert (warm.tokens, warm.hit_rate, warm.loads_per_token) == (1, 1.0, 0.0)
    cold = hotset.replay(small(), "lru", plan=mask_of(0, 1), start="cold", skip_tokens=1)
    assert cold.tokens == 3
    with pytest.raises(PolicyError, match="leaves no token"):
        hotset.replay(small(), "lru", plan=mask_of(0, 1), skip_tokens=5)


def test_no_pick_neither_hits_nor_misses_nor_makes_a_token_resident() -> None:
    trace = Trace.from_arrays([[[0, -1], [-1, -1], [1, -1]]], num_experts=2)
    done = hotset.replay(trace, "static", plan=np.array([[True, False]]))
    assert (done.hit_rate, done.token_resident_rate) == (1 / 2, 1 / 2)


def test_an_empty_start_has_nothing_resident() -> None:
    assert hotset.replay(small(), "static", experts_per_layer=2, initial="empty").hit_rate == 0.0
    assert hotset.replay(small(), "lru", experts_per_layer=4, initial="empty").loads_per_token == 4 / 5


def test_a_fraction_is_of_each_layers_experts() -> None:
    assert hotset.replay(small(), "static", fraction="50%").experts_per_layer == [2]
    assert hotset.replay(small(), "static", fraction=0.25).hit_rate == 4 / 10  # expert 1, picked four times


def test_a_prompt_sets_the_residency_of_its_decode_once() -> None:
    ids = [[[0, 1], [2, 3], [2, 3], [2, 3], [2, 3]]]
    trace = Trace.from_arrays(ids, num_experts=4, phase=[0, 0, 0, 1, 1], expert_bytes=10)
    known = Counts.from_array(np.ones((1, 4)))  # every expert half likely, so that the prompt decides
    done = hotset.replay(trace, "ema", plan=mask_of(0, 1), prior=known, prompt_start=True, options={"hysteresis": 0.0})
    assert done.series["hit_rate"] == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert done.series["loads_per_token"] == [0.0, 0.0, 2.0, 0.0, 0.0]


def test_unequal_slots_and_a_pool() -> None:
    ids = np.array([[[0], [1], [0], [1]], [[0], [0], [0], [0]]])
    trace = Trace.from_arrays(ids, num_experts=2)
    assert hotset.replay(trace, "lru", experts_per_layer=[2, 0], initial="empty").hit_rate == 2 / 8
    pooled = hotset.replay(trace, "lru", experts_per_layer=[2, 1], initial="empty", pooled=True)
    assert pooled.pooled
    assert pooled.hit_rate == 5 / 8


def test_a_sweep_closes_the_gap_from_static_to_belady() -> None:
    trace = small()
    found = replay_sweep(
        trace, ["lru", "belady", "static"], [{"experts_per_layer": 2}, {"experts_per_layer": 3}], plan=None
    )
    assert [r.policy for r in found] == ["lru", "belady", "static"] * 2
    by_name = {r.policy: r for r in found[:3]}
    assert by_name["static"].gap_closed == 0.0
    assert by_name["belady"].gap_closed == 1.0
    gap = by_name["belady"].hit_rate - by_name["static"].hit_rate
    assert by_name["lru"].gap_closed == pytest.approx((by_name["lru"].hit_rate - by_name["static"].hit_rate) / gap)


def test_sweeping_equals_replaying_one_by_one() -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((3, 300, 8)) + np.linspace(0, 1, 8), axis=2)[:, :, :2]
    trace = Trace.from_arrays(ids, num_experts=8)
    for result in replay_sweep(trace, ["ema", "look-ahead"], [{"experts_per_layer": 3}, {"fraction": 0.5}]):
        alone = hotset.replay(trace, result.policy, experts_per_layer=result.experts_per_layer)
        assert dataclasses.replace(result, gap_closed=None) == alone


def test_results_go_into_json() -> None:
    text = json.dumps(hotset.replay(small(), "ema", experts_per_layer=2, machine=machine()).to_json())
    assert set(json.loads(text)) == {f.name for f in dataclasses.fields(Replay)}


def test_looping_decodes_are_left_out_by_their_mark() -> None:
    trace, left_out = without_repetitive(small(metadata={"repetitive_sequences": [0], "sequence_source": ["a", "b"]}))
    assert (left_out, trace.num_sequences, trace.metadata["sequence_source"]) == (1, 1, ["b"])
    assert without_repetitive(small())[1] == 0


def test_settings_are_read_from_text() -> None:
    assert parse_settings(["ema.hysteresis=0.05", "ema.max_moves=2", "lfu-aged.aging-interval=9"]) == {
        "ema": {"hysteresis": 0.05, "max_moves": 2},
        "lfu-aged": {"aging_interval": 9},
    }
    for text in ("ema", "ema.=1", "ema.hysteresis", "ema.hysteresis=much", "fifo.x=1"):
        with pytest.raises(PolicyError):
            parse_settings([text])


def test_wrong_requests_are_refused() -> None:
    trace = small()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"policy": "fifo"}, "'fifo' is unknown"),
        ({}, "needs a number of slots"),
        ({"experts_per_layer": 5}, "wanted 0 to 4"),
        ({"experts_per_layer": 1, "fraction": 0.5}, "both given"),
        ({"experts_per_layer": 1, "plan": mask_of(0, 1)}, "more than"),
        ({"plan": np.ones((2, 4), np.bool_)}, "this trace wants bool"),
        ({"experts_per_layer": 1, "start": "tepid"}, "wanted warm or cold"),
        ({"experts_per_layer": 1, "skip_tokens": -1}, "wanted 0 or more"),
        ({"experts_per_layer": 1, "policy": "lru", "prompt_start": True}, "has none, use ema"),
        ({"experts_per_layer": 1, "options": {"surprise": 1}}, "surprise"),
        ({"experts_per_layer": 1, "expert_bytes": 5}, "the trace says its own sizes"),
        ({"experts_per_layer": 1, "prior": Trace.from_arrays([[[0]]], num_experts=1)}, "the prior has shape"),
    ]
    for arguments, said in cases:
        with pytest.raises(PolicyError, match=said):
            hotset.replay(trace, **arguments)
    plan = Plan(mask_of(0), np.array([7], np.int32), "frequency", "hit-rate", {}, 0.0)
    with pytest.raises(PolicyError, match=r"for layers \[7\], the trace \[0\]"):
        hotset.replay(trace, plan=plan)
    with pytest.raises(MachineError, match="no link"):
        hotset.replay(trace, experts_per_layer=1, machine=machine(device="cpu"), on_miss="fetch")


# -- what the defaults promise, on real traces ---------------------------------------------------------------


def test_ema_hits_as_often_as_lru_with_a_quarter_of_its_moves(real_trace: Callable[[str], Trace]) -> None:
    trace, left_out = without_repetitive(real_trace("gpt-oss-20b-decode"))
    assert left_out > 0
    ema = hotset.replay(trace, "ema", experts_per_layer=16)
    lru = hotset.replay(trace, "lru", experts_per_layer=16)
    assert ema.hit_rate >= lru.hit_rate
    assert ema.loads_per_token <= lru.loads_per_token / 4


@pytest.mark.parametrize("slots", [16, 32])
def test_without_drift_ema_is_no_worse_than_the_static_plan(slots: int, real_trace: Callable[[str], Trace]) -> None:
    for task in TASKS:
        trace = real_trace(f"esft-{task}-prefill")
        shuffled = trace.select_sequences(np.random.default_rng(3).permutation(trace.num_sequences))
        ema = hotset.replay(shuffled, "ema", experts_per_layer=slots)
        static = hotset.replay(shuffled, "static", experts_per_layer=slots)
        assert ema.hit_rate >= static.hit_rate - 0.005, task


@pytest.mark.parametrize("slots", [16, 32])
def test_ema_recovers_within_500_tokens_of_a_change_of_task(slots: int, real_trace: Callable[[str], Trace]) -> None:
    traces = [real_trace(f"esft-{task}-prefill") for task in TASKS]
    ids = np.concatenate([t.expert_ids for t in traces], axis=1)
    stop = 0
    for before, trace in zip([None, *traces], traces, strict=False):
        start, stop = stop, stop + trace.num_tokens
        if before is None:
            continue
        window = slice(start + 500, start + 1500)
        upto = Trace.from_arrays(ids[:, : window.stop], num_experts=64)
        ema = hotset.replay(upto, "ema", experts_per_layer=slots, prior=traces[0], skip_tokens=window.start)
        # a mask planned on that task, scored on the same tokens
        own = Trace.from_arrays(ids[:, window], num_experts=64)
        planned = hotset.replay(own, "static", experts_per_layer=slots, prior=trace)
        assert ema.hit_rate >= planned.hit_rate - 0.03, trace.metadata["model"]


# -- the command ---------------------------------------------------------------------------------------------


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    from hotset.cli.main import build_app

    with pytest.raises(SystemExit) as left:
        build_app()(["replay", *arguments])
    assert left.value.code == 0
    return capsys.readouterr()


def test_the_command_prints_json_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small().save(tmp_path / "t.safetensors")
    machine().save(tmp_path / "m.json")
    out, err = run(
        [
            *[str(tmp_path / "t.safetensors"), "--policy", "static,lru", "--budget", "25%,50%", "--json"],
            *["--machine", str(tmp_path / "m.json"), "--skip-tokens", "1"],
        ],
        capsys,
    )
    found = json.loads(out)
    assert [(r["policy"], r["experts_per_layer"]) for r in found] == [
        ("static", [1]),
        ("lru", [1]),
        ("static", [2]),
        ("lru", [2]),
    ]
    assert all(r["tokens"] == 4 and r["seconds"]["decode"]["total"] > 0 for r in found)
    assert "flatters" in err


def test_the_command_prints_tables_and_writes_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    small(expert_bytes=None).save(tmp_path / "t.safetensors")
    out, _ = run(
        [
            *[str(tmp_path / "t.safetensors"), "--policy", "all", "--experts-per-layer", "2", "--expert-bytes", "4KiB"],
            *["--machine", "l4", "--plot", str(tmp_path / "p.png"), "--set", "ema.hysteresis=0.1"],
        ],
        capsys,
    )
    for word in ("look-ahead", "belady", "hit rate by domain", "s/token", "2 per layer"):
        assert word in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
