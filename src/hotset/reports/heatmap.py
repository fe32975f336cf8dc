"""Layers x experts in a terminal: how hot each expert is, and which are resident.

With colour, the background is the heat and a dot marks a resident expert; without, digits 0-9 are host experts and
letters A-J resident ones, coldest to hottest. Where a layer has more experts than there are columns, neighbours share
a cell: mean heat, resident where at least half of them are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.text import Text

_LEVELS = 10
# dark to light along one hue, steps of even lightness (ends of the "YlOrBr" scheme of ColorBrewer, Apache-2.0)
_COLD, _HOT = (38, 32, 38), (255, 196, 92)
_LABEL_COLUMNS = 18


def heat_levels(counts: NDArray[Any]) -> NDArray[np.int64]:
    """[L, E] 0..9: each expert's picks against the even share of its layer, from an eighth of it to eight times it."""
    table = np.asarray(counts, np.float64)
    even = table.mean(axis=1, keepdims=True)
    relative = np.divide(table, even, out=np.zeros_like(table), where=even > 0)
    octaves = np.log2(np.clip(relative, 1 / 8, 8))
    levels: NDArray[np.int64] = ((octaves + 3) / 6 * (_LEVELS - 1)).round().astype(np.int64)
    return levels


def heat_map(
    counts: NDArray[Any] | None,
    mask: NDArray[np.bool_] | None,
    layer_ids: NDArray[Any],
    *,
    columns: int,
    colour: bool,
) -> list[Text]:
    """One line per layer, a header and a legend before and after. counts, mask: [L, E], one of them at least."""
    from rich.text import Text

    shape = mask.shape if mask is not None else np.asarray(counts).shape
    levels = np.zeros(shape, np.float64) if counts is None else heat_levels(counts).astype(np.float64)
    resident = np.zeros(shape, np.float64) if mask is None else mask.astype(np.float64)
    per_layer = None if mask is None else mask.sum(axis=1)
    per_cell = max(1, -(-shape[1] // max(8, columns - _LABEL_COLUMNS)))
    levels, resident = _binned(levels, per_cell), _binned(resident, per_cell)
    lines = [Text(f"layer  experts 0 to {shape[1] - 1}" + (f", {per_cell} per cell" if per_cell > 1 else ""))]
    for row, layer in enumerate(layer_ids):
        line = Text(f"{int(layer):5d}  ")
        for level, share in zip(levels[row], resident[row], strict=True):
            line.append(*_cell(round(level), share >= 0.5, colour, counts is not None))
        if per_layer is not None:
            line.append(f"  {int(per_layer[row])}/{shape[1]}")
        lines.append(line)
    lines.append(_legend(counts is not None, mask is not None, colour))
    return lines


def _binned(table: NDArray[np.float64], per_cell: int) -> NDArray[np.float64]:
    if per_cell == 1:
        return table
    edges = np.arange(0, table.shape[1], per_cell)
    widths = np.diff(np.append(edges, table.shape[1]))
    return np.add.reduceat(table, edges, axis=1) / widths


def _cell(level: int, resident: bool, colour: bool, heat: bool) -> tuple[str, str]:
    if not heat:
        return ("#" if resident else "."), ""
    if not colour:
        return (chr(ord("A") + level) if resident else str(level)), ""
    share = level / (_LEVELS - 1)
    red, green, blue = (round(c + (h - c) * share) for c, h in zip(_COLD, _HOT, strict=True))
    ink = "black" if share > 0.45 else "white"
    return ("•" if resident else " "), f"bold {ink} on rgb({red},{green},{blue})"


def _legend(heat: bool, marked: bool, colour: bool) -> Text:
    from rich.text import Text

    if not heat:
        return Text("# in GPU memory   . not")
    line = Text("picks, 1/8 of the even share to 8 times it: ")
    for level in range(_LEVELS):
        line.append(*_cell(level, False, colour, True))
    if marked:
        line.append("   resident: ")
        if colour:
            line.append(*_cell(_LEVELS - 1, True, True, True))
        else:
            line.append("A to J on the same scale")
    return line
