"""The table of model families in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotset.models.families import FamilyStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_models(console: Console, rows: Sequence[FamilyStatus], table: Table, measured_with: str) -> None:
    """table: empty, with columns for model type, class, experts and logits."""
    runs = [row for row in rows if row.status in ("bit-identical", "within 1e-5")]
    table.title = f"{len(runs)} of {len(rows)} families run (Transformers {measured_with})"
    for column in table.columns[1:]:
        column.justify = "left"
    table.columns[2].no_wrap = False
    for row in rows:
        table.add_row(row.model_type, row.class_name, " ".join(row.experts) or "-", row.status)
    console.print(table)
    for row in rows:
        for remark in filter(None, (row.reason, row.note)):
            console.print(f"{row.model_type}: {remark}", soft_wrap=True)
