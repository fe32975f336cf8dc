"""The report as one page that opens offline: data and drawing code in one file, nothing loaded from anywhere."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from hotset.errors import PlanError
from hotset.storage import atomic_path, jsonable, wrap_format_errors

_MARK = "/*DATA*/null"


def render_html(data: dict[str, Any]) -> str:
    """The page for what `report_data` gives."""
    page = resources.files("hotset.reports").joinpath("page.html").read_text(encoding="utf-8")
    assert page.count(_MARK) == 1, "the page has one place for its data"
    # "<" only ever stands in strings here; escaped, no file name can close the script element
    text = json.dumps(data, default=jsonable, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace(_MARK, text)


def save_html(data: dict[str, Any], path: str | Path) -> None:
    """Write the page by way of a temporary name. Raises PlanError where the disk refuses."""

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text(render_html(data), encoding="utf-8")

    wrap_format_errors(PlanError, write)
