"""The machine file: JSON, one key per field of `Machine`, no key more; none less but for those of `_ADDED`, which older
files do not have. Presets are opened by name."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hotset.core import Machine
from hotset.errors import MachineError
from hotset.machines.presets import preset
from hotset.storage import write_json

FORMAT = "hotset-machine"
VERSION = 1

_POSITIVE = ("host_read_bytes_per_second", "host_threads", "host_memory_bytes")
_POSITIVE_OR_NONE = (
    "gpu_read_bytes_per_second",
    "host_to_device_bytes_per_second",
    "device_to_host_bytes_per_second",
    "disk_read_bytes_per_second",
    "gpu_memory_bytes",
    "host_flops_per_second",
)
_NOT_NEGATIVE = ("round_trip_seconds", "launch_seconds")
_ADDED = {"host_flops_per_second": None}
"""Fields that came later, and what their absence means."""
_WHOLE = ("host_threads", "host_memory_bytes", "gpu_memory_bytes")


def open_machine(path: str | Path) -> Machine:
    """Read a machine JSON file; a name that is no file and has no `.json` ending is a preset (`machines.presets`).

    Raises MachineError: unreadable, not JSON, an unknown, missing or impossible value, or an unknown preset.
    """
    target = Path(path)
    if not target.exists() and target.suffix != ".json":
        return preset(str(path))
    try:
        value = json.loads(target.read_text(encoding="utf-8"))
    except OSError as problem:
        raise MachineError(f"{target}: {problem.strerror}") from None
    except ValueError:
        raise MachineError(f"{target}: not JSON: make a machine file with `hotset probe -o {target}`") from None
    return machine_from_json(value, str(target))


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write `machine` as JSON, atomically. Raises MachineError on a value that `open_machine` would refuse."""
    value = machine_to_json(machine)
    machine_from_json(value, str(path))
    try:
        write_json(path, value)
    except OSError as problem:
        raise MachineError(f"{path}: {problem.strerror}") from None


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """The document of `machine`: format, version, then the fields in their order."""
    return {"format": FORMAT, "version": VERSION, **asdict(machine)}


def machine_from_json(value: Any, where: str) -> Machine:
    """The machine that the document describes. Raises MachineError, its text starting with `where`."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise MachineError(f"{where}: not a hotset machine file: make one with `hotset probe -o FILE`")
    if value.get("version") != VERSION:
        raise MachineError(f"{where}: machine version {value.get('version')}, this hotset reads {VERSION}")
    names = [f.name for f in fields(Machine)]
    body = {key: entry for key, entry in value.items() if key not in ("format", "version")}
    body = {**_ADDED, **body}
    unknown, missing = sorted(set(body) - set(names)), [n for n in names if n not in body]
    if unknown or missing:
        wrong = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise MachineError(f"{where}: {'; '.join(wrong)}: wanted exactly {', '.join(names)}")
    for name in ("name", "source"):
        if not isinstance(body[name], str) or not body[name]:
            raise MachineError(f"{where}: {name} is {body[name]!r}: wanted a text")
    if body["device"] not in ("cuda", "cpu"):
        raise MachineError(f"{where}: device is {body['device']!r}: wanted cuda or cpu")
    if not isinstance(body["details"], dict):
        raise MachineError(f"{where}: details is {type(body['details']).__name__}: wanted an object")
    for name in (*_POSITIVE, *_POSITIVE_OR_NONE, *_NOT_NEGATIVE):
        _check_number(name, body[name], where)
    if body["device"] == "cuda":
        absent = [n for n in ("gpu_read_bytes_per_second", "gpu_memory_bytes") if body[n] is None]
        absent += [n for n in ("host_to_device_bytes_per_second",) if body[n] is None]
        if absent:
            raise MachineError(f"{where}: device is cuda but {', '.join(absent)} is null: wanted a number")
    return Machine(**body)


def _check_number(name: str, value: Any, where: str) -> None:
    if value is None:
        if name in _POSITIVE_OR_NONE:
            return
        raise MachineError(f"{where}: {name} is null: wanted a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MachineError(f"{where}: {name} is {value!r}: wanted a finite number")
    if name in _WHOLE and not isinstance(value, int):
        raise MachineError(f"{where}: {name} is {value!r}: wanted a whole number")
    if value < 0 or (value == 0 and name not in _NOT_NEGATIVE):
        wanted = "0 or more" if name in _NOT_NEGATIVE else "more than 0"
        raise MachineError(f"{where}: {name} is {value!r}: wanted {wanted}")
