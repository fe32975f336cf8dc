"""Machine files and presets: what is written is read back, and every wrong value is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hotset import Machine
from hotset.errors import MachineError
from hotset.machines.format import machine_to_json
from hotset.machines.presets import DISKS, GPUS, HOSTS, LINKS


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    machine = Machine.open("rtx-4090")
    machine.save(tmp_path / "machine.json")
    assert Machine.open(tmp_path / "machine.json") == machine
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]


def test_a_preset_has_the_figures_of_its_data_sheets() -> None:
    machine = Machine.open("rtx-4090+pcie3-x8+ddr4-3200-x2+nvme3")
    assert machine.name == "rtx-4090+pcie3-x8+ddr4-3200-x2+nvme3"
    assert machine.gpu_read_bytes_per_second == 1008e9
    assert machine.gpu_memory_bytes == 24 * 10**9
    assert machine.host_to_device_bytes_per_second == pytest.approx(8e9 * 8 * 128 / 130 / 8)  # 7.88 GB/s
    assert machine.host_read_bytes_per_second == 3200e6 * 8 * 2  # 51.2 GB/s
    assert machine.disk_read_bytes_per_second == 3500e6
    assert "assumed" in machine.details["sources"]["round_trip_seconds"]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_preset_is_a_valid_machine_with_a_source(gpu: str, tmp_path: Path) -> None:
    machine = Machine.open(gpu)
    machine.save(tmp_path / "m.json")
    assert machine.details["sources"]["gpu"]


def test_every_part_names_its_source() -> None:
    assert all(part.source for table in (GPUS, LINKS, HOSTS, DISKS) for part in table.values())
    assert all(gpu.link in LINKS for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rtx-9999", "'rtx-9999' is unknown"),
        ("pcie4-x16", "names no GPU"),
        ("rtx-4090+rtx-3090", "names two GPUs"),
        ("l4+pcie4-x16+pcie3-x16", "names two links"),
        ("nowhere.json", "No such file"),
    ],
)
def test_a_wrong_name_is_refused_with_its_reason(name: str, said: str) -> None:
    with pytest.raises(MachineError, match=said):
        Machine.open(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "not a hotset machine file"),
        ({"version": 99}, "machine version 99"),
        ({"surprise": 1}, "unknown surprise"),
        ({"name": ""}, "name is ''"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"details": []}, "details is list"),
        ({"host_threads": 1.5}, "host_threads is 1.5: wanted a whole number"),
        ({"host_threads": True}, "host_threads is True"),
        ({"host_read_bytes_per_second": 0}, "wanted more than 0"),
        ({"host_read_bytes_per_second": None}, "host_read_bytes_per_second is null"),
        ({"launch_seconds": -1}, "wanted 0 or more"),
        ({"launch_seconds": "fast"}, "wanted a finite number"),
        ({"host_flops_per_second": 0}, "wanted more than 0"),
        ({"gpu_memory_bytes": None}, "device is cuda but gpu_memory_bytes is null"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    value = {**machine_to_json(Machine.open("l4")), **change}
    (tmp_path / "m.json").write_text(json.dumps(value))
    with pytest.raises(MachineError, match=said):
        Machine.open(tmp_path / "m.json")


def test_a_file_from_before_host_flops_were_measured_is_read(tmp_path: Path) -> None:
    value = machine_to_json(Machine.open("l4"))
    assert value.pop("host_flops_per_second") is None
    (tmp_path / "m.json").write_text(json.dumps(value))
    assert Machine.open(tmp_path / "m.json") == Machine.open("l4")


def test_a_missing_key_and_a_file_that_is_no_json_are_refused(tmp_path: Path) -> None:
    value = machine_to_json(Machine.open("l4"))
    del value["host_threads"]
    (tmp_path / "m.json").write_text(json.dumps(value))
    with pytest.raises(MachineError, match="missing host_threads"):
        Machine.open(tmp_path / "m.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MachineError, match="not JSON"):
        Machine.open(tmp_path / "bad.json")


def test_an_impossible_machine_is_not_written(tmp_path: Path) -> None:
    broken = dataclasses.replace(Machine.open("l4"), host_read_bytes_per_second=float("nan"))
    with pytest.raises(MachineError, match="finite"):
        broken.save(tmp_path / "m.json")
    assert list(tmp_path.iterdir()) == []
