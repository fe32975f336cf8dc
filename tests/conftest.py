"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hotset import Trace

REPOSITORY = Path(__file__).parents[1]
TRACES = Path(os.environ.get("HOTSET_TRACES", REPOSITORY.parent / "shared" / "traces"))


@pytest.fixture(scope="session")
def real_trace() -> Callable[[str], Trace]:
    """`real_trace("gpt-oss-20b-decode")`: a recorded trace, or a visible skip where the folder of traces is absent."""
    opened: dict[str, Trace] = {}

    def get(name: str) -> Trace:
        path = TRACES / f"{name}.npz"
        if not path.exists():
            pytest.skip(f"real trace {path.name} is not here (HOTSET_TRACES names its folder)")
        if name not in opened:
            opened[name] = Trace.open(path)
        return opened[name]

    return get
