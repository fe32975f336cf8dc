"""The record of what shedding costs in quality: perplexity against share of experts resident and keep_mass.

Knows the record's format and refuses what is not one. Measures nothing: `benchmarks/bench_shed_quality.py --output`
writes such a record, the report page draws it. Its keys, all of them needed, none besides:

- format: `FORMAT`
- model: name of the model; texts: names of the texts; tokens: tokens measured on; window_tokens: tokens of a window
- exact_perplexity: perplexity of the unmodified model on these tokens
- rows: a list, one row per strategy, share and bound, every bound of a strategy, "exact" among them, at each of its
  shares, with
  - strategy: as in `hotset plan`
  - resident_share: share of the experts in GPU memory, 0 to 1
  - keep_mass: the bound of `hotset.ops.ShedPolicy`, 0 to 1; "exact" (nothing shed) or "all" (shed without a bound)
  - perplexity: under that policy
  - rows_to_host_share: rows (one token in one layer) with a miss that the host serves, share of all rows, 0 to 1
  - dropped_mass: gate mass shed, share of all gate mass, 0 to 1
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotset.errors import ReportError
from hotset.storage import wrap_format_errors

FORMAT = "hotset-shed-quality-1"
_WANTED = "give what benchmarks/bench_shed_quality.py --output writes"
_HEAD = ("format", "model", "texts", "tokens", "window_tokens", "exact_perplexity", "rows")
_ROW = ("strategy", "resident_share", "keep_mass", "perplexity", "rows_to_host_share", "dropped_mass")


def read_shed_quality(path: str | Path) -> dict[str, Any]:
    """The record in that file. Raises ReportError where it is not one, is incomplete, or cannot be read."""
    raw = wrap_format_errors(ReportError, Path(path).read_bytes)
    try:
        record = json.loads(raw)
    except ValueError:  # UnicodeDecodeError is one
        raise ReportError(f"{path}: not JSON; {_WANTED}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ReportError(f"{path}: not a shed quality record (no format {FORMAT!r}); {_WANTED}")
    _check_keys(record, _HEAD, f"{path}")
    for key in ("tokens", "window_tokens"):
        if not isinstance(record[key], int) or record[key] < 1:
            raise ReportError(f"{path}: {key} is {record[key]!r}, wanted a number of tokens; {_WANTED}")
    if not isinstance(record["model"], str) or not _is_list_of(record["texts"], str):
        raise ReportError(f"{path}: model and texts are names, wanted one and a list of them; {_WANTED}")
    if not record["rows"] or not _is_list_of(record["rows"], dict):
        raise ReportError(f"{path}: rows has no measurement in it; {_WANTED}")
    _check_perplexity(record, "exact_perplexity", f"{path}")
    seen: set[tuple[Any, ...]] = set()
    for index, row in enumerate(record["rows"]):
        _check_row(row, f"{path}: rows[{index}]")
        cell = (row["strategy"], row["resident_share"], row["keep_mass"])
        if cell in seen:
            raise ReportError(f"{path}: rows[{index}] measures strategy, share and keep_mass of an earlier row again")
        seen.add(cell)
    _check_grid(seen, f"{path}")
    return record


def _check_keys(found: Mapping[str, Any], wanted: tuple[str, ...], where: str) -> None:
    if set(found) != set(wanted):
        odd = sorted(set(found) ^ set(wanted))
        raise ReportError(f"{where}: missing or unknown keys: {', '.join(odd)}; {_WANTED}")


def _check_perplexity(found: Mapping[str, Any], key: str, where: str) -> None:
    if not _is_number(found[key]) or not 1 <= found[key] < math.inf:  # NaN is neither
        raise ReportError(f"{where}: {key} is {found[key]!r}, wanted a perplexity, 1 or more; {_WANTED}")


def _check_share(found: Mapping[str, Any], key: str, where: str) -> None:
    if not _is_number(found[key]) or not 0 <= found[key] <= 1:
        raise ReportError(f"{where}: {key} is {found[key]!r}, wanted a share, 0 to 1; {_WANTED}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_row(row: Mapping[str, Any], where: str) -> None:
    _check_keys(row, _ROW, where)
    if not isinstance(row["strategy"], str):
        raise ReportError(f"{where}: strategy is {row['strategy']!r}, wanted its name; {_WANTED}")
    _check_perplexity(row, "perplexity", where)
    for key in ("resident_share", "rows_to_host_share", "dropped_mass"):
        _check_share(row, key, where)
    if row["keep_mass"] not in ("exact", "all"):
        _check_share(row, "keep_mass", where)


def _check_grid(cells: set[tuple[Any, ...]], where: str) -> None:
    """Every bound of a strategy at each of its shares, "exact" among them: a curve has no holes."""
    for strategy in {cell[0] for cell in cells}:
        mine = {cell[1:] for cell in cells if cell[0] == strategy}
        shares, bounds = {share for share, _ in mine}, {bound for _, bound in mine}
        if len(mine) != len(shares) * len(bounds) or "exact" not in bounds:
            raise ReportError(f"{where}: {strategy} lacks a keep_mass, or exact, at one of its shares; {_WANTED}")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
