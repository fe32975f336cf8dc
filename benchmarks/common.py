"""What every benchmark prints around its numbers: the machine, the configuration, and one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, commit: what a number needs beside it to mean something."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }


def print_header(title: str, **config: Any) -> None:
    """Title, machine and configuration, before the measurements."""
    print(title)
    print("machine:", ", ".join(f"{key} {value}" for key, value in machine().items()))
    print("config: ", ", ".join(f"{key} {value}" for key, value in config.items()))
    print()


def print_json_line(**values: Any) -> None:
    """The last line of a benchmark."""
    print(json.dumps({**values, "machine": machine()}))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
