"""tools/gpu_check_runtime.py: its arithmetic by hand, and all of its checks on the CPU, where no timeline exists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset.runtime.prefill import PrefillStreamer  # noqa: E402

TOOL = Path(__file__).parents[1] / "tools" / "gpu_check_runtime.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("gpu_check_runtime", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["gpu_check_runtime"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tool.make_checkpoint(tmp_path_factory.mktemp("model"), tool.TINY)
    return made


def test_a_timeline_is_the_kernels_and_copies_of_a_trace_from_zero_on(tool: ModuleType) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 1500.0, "dur": 500.0, "args": {"stream": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1000.0, "dur": 2000.0, "args": {"stream": 20}},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.0, "args": {}},
        {"cat": "kernel", "name": "a mark without length", "ts": 0.0, "args": {"stream": 7}},
        {"name": "process_name", "ph": "M", "args": {}},
    ]
    assert tool.timeline(events) == [("20", 0.0, 2.0, "Memcpy HtoD"), ("7", 0.5, 1.0, "kernel")]
    assert tool.timeline([]) == []


def test_the_hidden_share_is_copy_time_beside_kernels_and_leaves_out_copies_among_the_kernels(tool: ModuleType) -> None:
    spans = [
        ("20", 0.0, 4.0, "Memcpy HtoD"),
        ("20", 6.0, 10.0, "Memcpy HtoD"),
        ("7", 1.0, 2.0, "kernel"),
        ("7", 1.5, 3.0, "kernel"),  # 1 to 3 together: 2 ms of the first copy
        ("7", 9.0, 12.0, "kernel"),  # 1 ms of the second
        ("7", 4.0, 5.0, "Memcpy DtoH"),  # in line with the kernels: not a background copy
    ]
    assert tool.overlap(spans) == {"copy_ms": 8.0, "kernel_ms": 5.0, "hidden": 3 / 8, "possible": 5 / 8}
    assert tool.overlap([]) == {"copy_ms": 0, "kernel_ms": 0, "hidden": None, "possible": None}


def test_a_condensed_timeline_joins_close_kernels_of_a_stream_and_keeps_every_copy(tool: ModuleType) -> None:
    spans = [
        ("7", 0.0, 1.0, "kernel"),
        ("20", 0.5, 2.0, "Memcpy HtoD"),
        ("7", 1.01, 2.0, "kernel"),
        ("20", 2.0, 3.0, "Memcpy HtoD"),
        ("7", 2.5, 3.0, "kernel"),
    ]
    assert tool.condensed(spans) == [
        ("7", 0.0, 2.0, "kernel"),
        ("20", 0.5, 2.0, "Memcpy HtoD"),
        ("20", 2.0, 3.0, "Memcpy HtoD"),
        ("7", 2.5, 3.0, "kernel"),
    ]
    assert tool.condensed(spans, most=1) == [("7", 0.0, 2.0, "kernel")]


def test_masks_spread_their_share_evenly(tool: ModuleType) -> None:
    assert tool.resident(tool.TINY, 0.5).tolist() == [[False, True] * 4] * 2
    assert [int(tool.resident(tool.TINY, share).sum()) for share in (0.0, 0.25, 1.0)] == [0, 4, 16]


def test_parity_holds_on_one_device_kind_bit_for_bit(
    tool: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tool.check_parity(folder, tool.TINY, "cpu")
    assert set(found) == {"float32", "bfloat16 plain", "bfloat16", "int8", "int8 stored"}
    assert all(error == 0.0 for case in found.values() for error in case.values())
    assert not list(tmp_path.rglob("*.int8.safetensors"))


def test_parity_finds_experts_that_arrive_wrong(
    tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PrefillStreamer._run

    def mixed_up(self: Any, row: int, experts: list[int], compute: Any) -> None:
        run(self, row, experts[::-1], lambda expert, weights: compute(experts[experts.index(expert) - 1], weights))

    monkeypatch.setattr(PrefillStreamer, "_run", mixed_up)
    with pytest.raises(AssertionError, match="streamed: relative error"):
        tool.check_parity(folder, tool.TINY, "cpu")


def test_text_is_unchanged_under_moves_and_moves_are_made(tool: ModuleType, folder: Path) -> None:
    assert tool.check_text_under_moves(folder, tool.TINY, "cpu", 24) > 0


def test_the_timeline_checks_run_and_say_that_a_cpu_has_no_copies(tool: ModuleType, folder: Path) -> None:
    prefill = tool.check_prefill_timeline(folder, "cpu", 40)
    assert prefill["experts_streamed"] == 2 * 8
    assert (prefill["hidden"], prefill["timeline"]) == (None, [])
    moves = tool.check_moves_timeline(folder, tool.TINY, "cpu", 24)
    assert moves["moves"] > 0
    assert moves["timeline"] == []


def test_decode_is_measured_beside_its_prediction_from_nothing_to_everything_resident(
    tool: ModuleType, folder: Path
) -> None:
    rows = tool.check_decode(folder, tool.TINY, "cpu", 3, 1)
    assert [row["resident"] for row in rows] == ["0 %", "25.0 %", "50.0 %", "75.0 %", "100.0 %"]
    assert [row["hit_rate"] for row in rows][:: len(rows) - 1] == [0.0, 1.0]
    assert all(row["tokens_per_second"] > 0 and row["predicted_tokens_per_second"] > 0 for row in rows)
