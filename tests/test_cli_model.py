"""The commands that run a model: record, plan and run from the shell, exit codes, Ctrl-C, a full disk."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import Trace
from hotset.cli.main import main
from tests.tiny_models import add_tokenizer, make_checkpoint

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("plan", ...)` -> (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hotset", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = tmp_path_factory.mktemp("texts")
    for name, start in (("low", 3), ("high", 60)):
        (made / f"{name}.txt").write_text(" ".join(f"w{start + i % 60}" for i in range(300)))
    return sorted(made.iterdir())


def test_record_plan_run_is_three_commands(cli: Cli, folder: Path, texts: list[Path], tmp_path: Path) -> None:
    code, out, err = cli("record", folder, *texts, "-o", tmp_path / "trace", "--max-tokens", 64, "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["tokens"], summary["sequences"], summary["layer_ids"]) == (600, 10, [0, 2])
    code, out, err = cli("plan", tmp_path / "trace", "--fraction", "50%", "-o", tmp_path / "plan.safetensors", "--json")
    assert code == 0, err
    assert json.loads(out)["gpu_experts"] == 8
    arguments = ["run", folder, "--prompt", "w5 w6", "--max-new-tokens", 5, "--json"]
    code, out, err = cli(*arguments, "--plan", tmp_path / "plan.safetensors")
    assert code == 0, err
    split = json.loads(out)
    assert split["report"]["experts"] == {"total": 16, "gpu": 8, "host": 8}
    code, out, _ = cli(*arguments)
    assert json.loads(out)["answers"] == split["answers"]


def test_run_streams_text_on_stdout_and_its_summary_on_stderr(cli: Cli, folder: Path) -> None:
    code, out, err = cli("run", folder, "--prompt", "w5 w6", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("w5 w6")
    assert "token-resident rate" in err
    assert "token-resident rate" not in out


def test_recording_refuses_what_it_cannot_do_with_one_line(
    cli: Cli, folder: Path, texts: list[Path], tmp_path: Path
) -> None:
    def refusal(*args: object) -> str:
        code, out, err = cli(*args)
        assert code == 1
        assert out == ""
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        return line

    assert "no such model folder" in refusal("record", tmp_path / "absent", *texts, "-o", tmp_path / "a")
    assert "No such file" in refusal("record", folder, tmp_path / "absent.txt", "-o", tmp_path / "b")
    (tmp_path / "file").write_text("x")
    assert "a file of that name is in the way" in refusal("record", folder, *texts, "-o", tmp_path / "file")
    assert "not a safetensors" in refusal("run", folder, "--plan", __file__, "--prompt", "w3")
    assert "no chat template" not in refusal("run", folder, "--prompt", "", "--max-new-tokens", 1)
    assert "dtype 'float99' is unknown" in refusal("run", folder, "--prompt", "w3", "--dtype", "float99")
    assert "torch finds no CUDA" in refusal("run", folder, "--prompt", "w3", "--device", "cuda")


def test_wrong_usage_exits_with_two(cli: Cli, folder: Path, texts: list[Path], tmp_path: Path) -> None:
    assert cli("record", folder)[0] == 2
    assert cli("run", folder)[0] == 2
    assert cli("run", folder, "--prompt", "w3", "--no-such-option")[0] == 2
    assert cli("record", folder, *texts, "-o", tmp_path / "t", "--prefill", "--generate", 3)[0] == 2
    assert cli("record", folder, *texts, "-o", tmp_path / "t", "--temperature", 1)[0] == 2
    assert cli("no-such-command")[0] == 2


def test_a_full_disk_while_recording_is_one_line_and_keeps_what_is_written(
    cli: Cli, folder: Path, texts: list[Path], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))  # stands for a full disk
    try:
        code, _, err = cli("record", folder, *texts, "-o", tmp_path / "t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "cannot be written" in line
    assert "0 of 2 sequences are safe" in line
    assert list((tmp_path / "t").iterdir()) == []


def test_ctrl_c_while_recording_keeps_the_complete_sequences(
    cli: Cli, folder: Path, texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotset.traces.writer import TraceWriter

    add = TraceWriter.add_sequence

    def add_then_press_ctrl_c(self: TraceWriter, *args: Any, **kwargs: Any) -> None:
        add(self, *args, **kwargs)
        if self.num_sequences == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TraceWriter, "add_sequence", add_then_press_ctrl_c)
    code, _, err = cli("record", folder, *texts, "-o", tmp_path / "t", "--max-tokens", 8, "--batch-size", 1)
    assert code == 130
    assert "3 sequences and 24 tokens are kept in" in err
    assert Trace.open(tmp_path / "t").num_tokens == 24
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["trace-00000.safetensors"]


def test_every_bad_file_is_one_line_and_exit_code_one(
    cli: Cli, folder: Path, texts: list[Path], tmp_path: Path
) -> None:
    """Truncated and missing weights, a plan of another model, ids out of range, impossible budgets, no trace at all."""
    import shutil

    from safetensors.numpy import save_file

    from hotset.storage import read_arrays

    def refusal(*args: object) -> str:
        code, out, err = cli(*args)
        assert (code, out) == (1, ""), (args, err)
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert "Traceback" not in err
        return line

    trace, plan = tmp_path / "trace", tmp_path / "plan.safetensors"
    assert cli("record", folder, texts[0], "-o", trace)[0] == 0
    assert cli("plan", trace, "--experts", 4, "-o", plan)[0] == 0

    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "cut short" in refusal("run", broken, "--prompt", "w3")
    assert "cut short" in refusal("record", broken, texts[0], "-o", tmp_path / "a")
    weights.unlink()
    assert "wanted a safetensors checkpoint" in refusal("run", broken, "--prompt", "w3")

    other = add_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "other", seed=1))
    assert "made for another model" in refusal("run", other, "--plan", plan, "--prompt", "w3")

    assert "17 experts" in refusal("plan", trace, "--experts", 17)
    assert "-1" in refusal("plan", trace, "--experts", "-1")
    refusal("plan", trace, "--gpu-memory", "1TiB")
    refusal("plan", trace, "--experts", 2, "--min-experts-per-layer", 4)

    shard = next(trace.glob("*.safetensors"))
    file = read_arrays(shard)
    arrays = {name: array.copy() for name, array in file.arrays.items()}
    arrays["expert_ids"][0, 0, 0] = 8
    save_file(arrays, shard, metadata={key: json.dumps(value) for key, value in file.metadata.items()})
    assert "expert id 8 in layer 0 is out of range: wanted 0 to 7" in refusal("show", trace)

    assert "not a hotset trace" in refusal("plan", plan, "--experts", 4)
    assert "not a safetensors file" in refusal("plan", __file__, "--experts", 4)
    assert "No such file" in refusal("show", tmp_path / "absent")
