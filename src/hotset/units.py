"""Reading and writing sizes, shares and times: the one place where a number meets its unit.

Bytes accept binary units (KiB, MiB, GiB, TiB = powers of 1024) and decimal ones (KB, MB, GB, TB = powers of 1000).
"""

from __future__ import annotations

import math
import re

from hotset.errors import BudgetError

_BYTE_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{p}B": int(1000**i) for i, p in enumerate("KMGT", start=1)},
    **{f"{p}IB": int(1024**i) for i, p in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str | int) -> int:
    """Bytes of "12GiB", "1.5 GB", "4096" or 4096. Raises BudgetError on anything else, negatives included."""
    if isinstance(text, int):
        if text < 0:
            raise BudgetError(f"size {text} is negative: give a number of bytes such as 12GiB")
        return text
    match = _SIZE.match(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise BudgetError(f"size {text!r} is not a number of bytes: write it like 12GiB, 800MB or 1073741824")
    return math.floor(float(match.group(1)) * _BYTE_UNITS[unit])


def parse_share(text: str | float) -> float:
    """A share in [0, 1] from "25%", "0.25" or 0.25. Raises BudgetError outside that range."""
    wanted = "write it like 25% or 0.25"
    try:
        if isinstance(text, str) and text.strip().endswith("%"):
            share = float(text.strip()[:-1]) / 100.0
        else:
            share = float(text)
    except ValueError:
        raise BudgetError(f"share {text!r} is not a number: {wanted}") from None
    if not 0.0 <= share <= 1.0:
        raise BudgetError(f"share {text!r} is outside 0 % to 100 %: {wanted}")
    return share


def parse_ratio(text: str | float) -> float:
    """A share from "1/3", and everything that `parse_share` takes. Raises BudgetError."""
    if isinstance(text, str) and text.count("/") == 1:
        part, whole = text.split("/")
        try:
            text = float(part) / float(whole)
        except (ValueError, ZeroDivisionError):
            raise BudgetError(f"share {text!r} is not a number: write it like 1/3, 25% or 0.25") from None
    return parse_share(text)


def format_bytes(count: int | float) -> str:
    """ "12.3 GiB", "512 B": three significant digits, binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_seconds(seconds: float) -> str:
    """ "12.3 us", "1.20 ms", "3.4 s", "2 min 5 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def format_share(share: float) -> str:
    """ "12.3 %"."""
    return f"{share * 100:.1f} %"
