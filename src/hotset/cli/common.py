"""What every command shares: notes on stderr, data on stdout, errors as one line and exit code 1.

Nothing heavy is imported here: `hotset --help` must stay quick. Commands import their work inside the function.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

JSON_HELP = "Print one JSON document on stdout instead of tables."


def note(text: str) -> None:
    """A remark for the user, on stderr so that data on stdout stays clean."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A remark that the user should act on, on stderr."""
    note(f"warning: {text}")


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    from hotset.storage import jsonable

    print(json.dumps(value, indent=2, default=jsonable))


def console() -> Console:
    """Rich console on stdout; as wide as the terminal, or 100 columns into a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in hotset's style: the first column is text on the left, the others numbers on the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return made
