"""`hotset plan` and `hotset show`: data on stdout, notes on stderr, one line and exit code 1 on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hotset import Plan, Trace
from hotset.cli.main import build_app
from hotset.errors import HotsetError


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((3, 90, 8)) * np.arange(1, 9), axis=2)[:, :, :2]
    trace = Trace.from_arrays(ids, num_experts=8, sequence_start=[0, 30, 60], expert_bytes=1024)
    trace.save(tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(), [str(a) for a in arguments])
    if isinstance(result.exception, HotsetError):
        assert code == 1
        assert "\n" not in str(result.exception)
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.stdout


def test_plan_writes_a_plan_that_show_prints(trace_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.safetensors"
    text = run("plan", trace_file, "--fraction", "25%", "--strategy", "frequency", "-o", output)
    assert "6 of 24 experts in GPU memory" in text
    assert Plan.open(output).num_gpu_experts == 6
    shown = run("show", output)
    assert shown.count("#") - 1 == 6  # one more in the legend
    assert "A to J" in run("show", output, "--trace", trace_file)


@pytest.mark.parametrize(
    ("option", "value", "experts"),
    [("--experts", 7, 7), ("--experts-per-layer", 2, 6), ("--gpu-memory", "5KiB", 5), ("--fraction", 0.5, 12)],
)
def test_every_kind_of_budget_is_understood(trace_file: Path, option: str, value: object, experts: int) -> None:
    printed = json.loads(run("plan", trace_file, option, value, "--json"))
    assert printed["gpu_experts"] == experts
    assert sum(len(e) for e in printed["gpu_experts_of_layer"].values()) == experts


def test_holdout_is_reported(trace_file: Path) -> None:
    printed = json.loads(run("plan", trace_file, "--experts", 8, "--holdout", "1/3", "--json"))
    assert printed["held_out"]["documents"] == 1


def test_compare_prints_and_saves_the_table(trace_file: Path, tmp_path: Path) -> None:
    arguments = ("plan", trace_file, "--compare", "certified,frequency", "--budget", "25%,12KiB", "--holdout", "1/3")
    text = run(*arguments, "-o", tmp_path / "table.json")
    assert text.count("certified") == 2
    assert "12 KiB" in text
    saved = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert saved == json.loads(run(*arguments, "--json"))
    assert [row["experts"] for row in saved] == [6, 6, 12, 12]
    run(*arguments, "--experts", 3, code=2)


def test_show_prints_a_trace(trace_file: Path) -> None:
    text = run("show", trace_file)
    assert "3 MoE layers x 8 experts, top-2" in text
    assert "90 tokens (0 decode) in 3 sequences" in text
    facts = json.loads(run("show", trace_file, "--json"))
    assert facts["picks_per_layer"] == [180, 180, 180]


def test_bad_input_is_one_line(trace_file: Path, tmp_path: Path) -> None:
    assert "exactly one budget" in run("plan", trace_file, code=1)
    assert "above the 24 that the model has" in run("plan", trace_file, "--experts", 25, code=1)
    assert "is not a number" in run("plan", trace_file, "--experts", 2, "--holdout", "1/0", code=1)
    assert "No such file" in run("plan", tmp_path / "none.safetensors", "--experts", 2, code=1)
    assert "No such file" in run("show", tmp_path / "none.safetensors", code=1)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    assert "too short" in run("show", tmp_path / "junk.safetensors", code=1)
    run("plan", trace_file, "--no-such-option", code=2)
