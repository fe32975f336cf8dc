"""What every command shares: notes on stderr, data on stdout, errors as one line and exit code 1.

Nothing heavy is imported here: `hotset --help` must stay quick. Commands import their work inside the function.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Rich console on stdout; as wide as the terminal, or 160 columns into a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in hotset's style: the first column is text on the left, the others numbers on the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return made


def stderr_console() -> Console:
    """Rich console on stderr, for progress and summaries beside data on stdout."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False)


@contextlib.contextmanager
def loading_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; call what it yields with (done, total)."""
    from rich.progress import Progress

    with Progress(console=stderr_console(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def quiet_transformers() -> None:
    """Keep Transformers' own progress bars and advice off the terminal; its errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError:
        from hotset.errors import MissingDependencyError

        raise MissingDependencyError("transformers", "hf", "running a model") from None
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
