"""The probe: it measures something on every machine, says how, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotset import Machine
from hotset.errors import MachineError
from hotset.machines import probe as probing


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes instead of hundreds: what is tested is not the figures."""
    monkeypatch.setattr(probing, "_BUFFER_BYTES_PER_THREAD", 2**20)
    monkeypatch.setattr(probing, "_FILE_BYTES", 2**20)


def test_every_figure_has_its_spread_and_the_file_on_disk_is_gone(tmp_path: Path) -> None:
    said: list[str] = []
    machine = probing.probe(name="here", threads=2, expert_bytes=8192, folder=tmp_path, repeats=3, progress=said.append)
    assert machine.name == "here"
    assert machine.host_threads == 2
    for key, spread in machine.details["measured"].items():
        assert spread["how"], key
        if "median" in spread:
            assert 0 < spread["min"] <= spread["median"] <= spread["max"], key
            assert getattr(machine, key) == spread["median"]
    assert any("host memory" in text for text in said)
    assert list(tmp_path.iterdir()) == []
    machine.save(tmp_path / "m.json")
    assert Machine.open(tmp_path / "m.json") == machine


def test_without_a_gpu_the_machine_says_that_the_arena_is_host_memory() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    machine = probing.probe(threads=1, expert_bytes=4096, repeats=1, folder="/tmp")
    assert machine.device == "cpu"
    assert machine.host_to_device_bytes_per_second is None
    assert machine.round_trip_seconds == 0.0
    assert "same cores" in machine.details["measured"]["round_trip_seconds"]["how"]


@pytest.mark.gpu
def test_with_a_gpu_link_and_round_trip_are_measured(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    machine = probing.probe(threads=2, expert_bytes=8192, folder=tmp_path, repeats=3)
    assert machine.device == "cuda"
    assert machine.round_trip_seconds > machine.launch_seconds > 0


def test_arguments_without_sense_are_refused(tmp_path: Path) -> None:
    for arguments in ({"repeats": 0}, {"threads": 0}, {"expert_bytes": 5}, {"expert_bytes": 2**40}):
        with pytest.raises(MachineError, match="wanted"):
            probing.probe(folder=tmp_path, **arguments)
    with pytest.raises(MachineError, match="give --folder a place"):
        probing.probe(threads=1, repeats=1, expert_bytes=4096, folder=tmp_path / "absent")


def test_the_command_prints_the_machine_as_json_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotset.cli.main import build_app

    target = tmp_path / "m.json"
    arguments = ["--json", "-o", str(target), "--repeats", "1", "--expert-bytes", "4KiB", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        build_app()(["probe", *arguments])
    assert left.value.code == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(target.read_text())
    assert "measuring host memory" in err
