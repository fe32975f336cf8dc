"""Terminal maps, the page and the PNG say what the plan and the trace say, and the page opens without a complaint."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import hotset
from hotset import Plan, Trace
from hotset.errors import PlanError
from hotset.reports.data import report_data
from hotset.reports.heatmap import heat_levels, heat_map
from hotset.reports.html import render_html, save_html
from hotset.reports.png import save_png
from hotset.traces.synthetic import synthetic_trace
from tests.test_cli_plan import run


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(num_layers=3, num_experts=24, top_k=3, num_tokens=600, num_sequences=6, seed=2)


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return hotset.plan(trace, fraction=0.4)


@pytest.fixture(scope="module")
def page(trace: Trace, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    save_html(report_data(plan, trace), path)
    return path


def test_levels_are_octaves_around_the_even_share() -> None:
    # an even share of 8: 64 is three octaves up, 8 in the middle, 1 three down, like 0
    assert heat_levels(np.array([[64, 8, 1, 0, 0, 0, 0, 0, 0, 7, 8]])).tolist() == [[9, 4, 0, 0, 0, 0, 0, 0, 0, 4, 4]]
    assert heat_levels(np.array([[8, 8, 8, 8]])).tolist() == [[4, 4, 4, 4]]
    assert heat_levels(np.array([[0, 0]])).tolist() == [[0, 0]]


def test_the_plain_map_marks_residents_with_letters() -> None:
    mask = np.array([[True, False, False, True]])
    lines = [line.plain for line in heat_map(np.array([[8, 8, 8, 8]]), mask, np.array([7]), columns=80, colour=False)]
    assert lines[1] == "    7  E44E  2/4"


def test_the_coloured_map_marks_residents_with_dots() -> None:
    mask = np.array([[True, False]])
    line = heat_map(np.array([[8, 8]]), mask, np.array([0]), columns=80, colour=True)[1]
    assert line.plain == "    0  •   1/2"
    assert all("on rgb" in str(span.style) for span in line.spans)


def test_wide_layers_share_cells() -> None:
    lines = heat_map(np.ones((2, 256)), None, np.arange(2), columns=80, colour=False)
    assert "5 per cell" in lines[0].plain
    assert max(len(line.plain) for line in lines[:-1]) <= 80


def test_the_data_of_the_page_are_those_of_plan_and_trace(trace: Trace, plan: Plan) -> None:
    data = report_data(plan, trace, layers=[2], budgets=["40%", "80%"])
    assert data["counts"] == trace.counts.tolist()
    assert [[c == "1" for c in row] for row in data["mask"]] == plan.gpu_experts_mask.tolist()
    assert data["token_resident_rate"] == hotset.token_resident_rate(plan, trace)
    assert data["same_trace"] is True
    curves = data["curves"]
    assert curves["token_resident_rate"]["certified"][0] == round(data["token_resident_rate"], 5)
    for name in curves["strategies"]:
        for rate, bound in (("token_resident_rate", "token_resident_bound"), ("hit_rate", "hit_bound")):
            assert (np.array(curves[rate][name]) <= np.array(curves[bound]) + 1e-5).all()
    (matrix,) = data["coactivation"]
    together = hotset.build_coactivation_matrix(trace)[2]
    np.fill_diagonal(together, 0)
    levels = np.frombuffer(base64.b64decode(matrix["levels"]), np.uint8).reshape(24, 24)
    assert matrix["largest"] == together.max()
    assert np.abs(matrix["largest"] * (levels / 255.0) ** 2 - together).max() <= matrix["largest"] / 128


def test_a_plan_of_another_model_is_refused(trace: Trace, plan: Plan) -> None:
    other = synthetic_trace(num_layers=3, num_experts=23, top_k=3, num_tokens=60)
    with pytest.raises(PlanError, match="a trace of the same model"):
        report_data(plan, other)
    renumbered = Trace.from_arrays(trace.expert_ids, num_experts=24, layer_ids=[1, 2, 3])
    with pytest.raises(PlanError, match="number their MoE layers differently"):
        report_data(plan, renumbered)
    with pytest.raises(PlanError, match="layer 9 is not an MoE layer"):
        report_data(plan, trace, layers=[9])


def test_the_page_loads_nothing_from_anywhere(page: Path) -> None:
    text = page.read_text()
    for sign in ("http://", "https://", "src=", "@import", "url("):
        assert sign not in text.replace("http://www.w3.org/2000/svg", ""), sign


def test_names_cannot_break_out_of_the_page(trace: Trace, plan: Plan) -> None:
    data = report_data(plan, trace, budgets=["40%"])
    data["trace"]["model"] = "</script><b>"
    assert "</script><b>" not in render_html(data)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def console_of(page: Path, profile: Path) -> tuple[str, str]:
    """(document after its scripts ran, lines that the page wrote to the console)."""
    done = subprocess.run(
        [
            str(CHROMIUM),
            *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"],
            *["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom"],
            f"--user-data-dir={profile}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page is not opened")
def test_the_page_opens_in_a_browser_without_console_errors(page: Path, plan: Plan, tmp_path: Path) -> None:
    document, console = console_of(page, tmp_path / "profile")
    assert console == ""
    assert f"{plan.num_gpu_experts} of 72" in document
    assert document.count("<path") == 14  # seven curves in each of two charts
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('"use strict";', '"use strict"; undefinedName();'))
    assert "undefinedName" in console_of(broken, tmp_path / "profile2")[1]


def test_the_png_is_a_picture(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_png(report_data(plan, trace, budgets=["20%", "60%"]), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_command_writes_the_page(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.safetensors")
    plan.save(tmp_path / "p.safetensors")
    run("report", tmp_path / "p.safetensors", tmp_path / "t.safetensors", "-o", tmp_path / "r.html", "--layer", 1)
    assert "<title>hotset report</title>" in (tmp_path / "r.html").read_text()
    assert "layer 7 is not" in run(
        "report", tmp_path / "p.safetensors", tmp_path / "t.safetensors", "--layer", 7, code=1
    )
    assert "not a hotset plan" in run("report", tmp_path / "t.safetensors", tmp_path / "t.safetensors", code=1)
