"""Foreign routing records, read as Traces. Adding one is one file with `read(path) -> Trace` and one line here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from hotset.core import Trace

# file ending -> module
IMPORTERS = {
    ".npz": "hotset.traces.importers.npz",
}


def importer_for(path: Path) -> str | None:
    """The importer's module for this file name, or None where hotset's own format is meant."""
    return IMPORTERS.get(path.suffix)


def import_trace(path: Path, module: str) -> Trace:
    """Read with the importer of that name. Raises TraceError."""
    trace: Trace = import_module(module).read(path)
    return trace
