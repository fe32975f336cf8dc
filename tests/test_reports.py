"""Terminal maps, the page and the PNG say what the plan and the trace say, and the page opens without a complaint."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset
from hotset import Plan, Trace
from hotset.errors import PlanError, ReportError
from hotset.reports.data import report_data
from hotset.reports.heatmap import heat_levels, heat_map
from hotset.reports.html import render_html, save_html
from hotset.reports.png import save_png
from hotset.reports.shed_quality import read_shed_quality
from hotset.storage import write_json
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


def shed_record() -> dict[str, Any]:
    """One strategy, two shares; keep_mass 0.5 costs 10 %, shedding all doubles the perplexity."""
    rows = [
        {
            "strategy": "frequency",
            "resident_share": share,
            "keep_mass": keep_mass,
            "perplexity": perplexity,
            "rows_to_host_share": to_host,
            "dropped_mass": 0.0 if keep_mass == "exact" else 0.25,
        }
        for share in (0.25, 0.75)
        for keep_mass, perplexity, to_host in (("exact", 10.0, 0.5), (0.5, 11.0, 0.25), ("all", 20.0, 0.0))
    ]
    head = {"format": "hotset-shed-quality-1", "model": "four experts", "texts": ["a<b>"], "tokens": 512}
    return {**head, "window_tokens": 256, "exact_perplexity": 10.0, "rows": rows}


def test_the_tables_in_the_documentation_say_what_the_committed_record_says() -> None:
    docs = Path(__file__).parents[1] / "docs"
    record = read_shed_quality(docs / "shedding.json")
    rows = {(row["strategy"], row["resident_share"], row["keep_mass"]): row for row in record["rows"]}
    tables = (docs / "shedding.md").read_text().split("| resident | exact | keep_mass 0.9 |")[1:]
    for strategy, table in zip(("frequency", "certified"), tables, strict=True):
        lines = table.splitlines()[2:6]
        assert [line.split("|")[1].strip() for line in lines] == ["25 %", "50 %", "75 %", "90 %"]
        for line, share in zip(lines, (0.25, 0.5, 0.75, 0.9), strict=True):
            cells = [cell.strip() for cell in line.split("|")[2:-1]]
            for cell, keep_mass in zip(cells, ("exact", 0.9, 0.8, 0.7, 0.5, 0.3, "all"), strict=True):
                row = rows[strategy, share, keep_mass]
                over = f"{100 * (row['perplexity'] / record['exact_perplexity'] - 1):+.2f} %"
                first = f"{row['perplexity']:.3f}" if keep_mass == "exact" else over
                assert cell == f"{first} ({100 * row['rows_to_host_share']:.1f} %)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "not a shed quality record"),
        ({"speed": 3}, "unknown keys: speed"),
        ({"tokens": 0}, "tokens is 0"),
        ({"texts": "a"}, "model and texts"),
        ({"rows": []}, "no measurement"),
        ({"exact_perplexity": float("nan")}, "exact_perplexity is nan"),
        ({"rows": shed_record()["rows"][:-1]}, "frequency lacks a keep_mass"),
        ({"rows": [row for row in shed_record()["rows"] if row["keep_mass"] != "exact"]}, "or exact"),
        ({"rows": [*shed_record()["rows"], shed_record()["rows"][0]]}, r"rows\[6\] measures .* again"),
        ({"rows": [{**shed_record()["rows"][0], "keep_mass": "some"}]}, r"rows\[0\]: keep_mass is 'some'"),
        ({"rows": [{**shed_record()["rows"][0], "dropped_mass": 1.5}]}, r"rows\[0\]: dropped_mass is 1.5"),
        ({"rows": [{"strategy": "frequency"}]}, r"rows\[0\]: missing or unknown keys: dropped_mass"),
    ],
)
def test_a_file_that_is_no_shed_record_is_refused_in_one_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "shed.json").write_text(json.dumps({**shed_record(), **change}))
    with pytest.raises(ReportError, match=said) as refusal:
        read_shed_quality(tmp_path / "shed.json")
    assert "\n" not in str(refusal.value)
    assert str(tmp_path / "shed.json") in str(refusal.value)


def test_the_command_draws_a_shed_record_and_refuses_other_files(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.safetensors")
    plan.save(tmp_path / "p.safetensors")
    write_json(tmp_path / "shed.json", shed_record())
    command = ("report", tmp_path / "p.safetensors", tmp_path / "t.safetensors", "-o", tmp_path / "r.html")
    run(*command, "--shed-quality", tmp_path / "shed.json")
    assert '"model":"four experts"' in (tmp_path / "r.html").read_text()
    assert "not JSON" in run(*command, "--shed-quality", tmp_path / "p.safetensors", code=1)
    assert "No such file" in run(*command, "--shed-quality", tmp_path / "none.json", code=1)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page is not opened")
def test_the_page_draws_a_shed_record_without_console_errors(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    write_json(tmp_path / "shed.json", shed_record())
    data = report_data(plan, trace, budgets=["40%"], shed_quality=read_shed_quality(tmp_path / "shed.json"))
    save_html(data, tmp_path / "report.html")
    document, console = console_of(tmp_path / "report.html", tmp_path / "profile")
    assert console == ""
    assert document.count("<path") == 14 + 2 * 3  # beside the plan's curves, three in each of two charts
    assert "512 held-out tokens (a&lt;b&gt;)" in document
    assert "rows that wait for the host, planned by frequency" in document
    # the scale is that of the bounded curves, 9.8 to 11.2; what lies above is said in the caption
    assert ">9.8</text>" in document
    assert ">11.2</text>" in document
    assert ">20.0</text>" not in document
    assert "costs more than the scale shows" in document
