"""The closing summary of a run, from `model.hotset_report()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotset.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console


def print_run(console: Console, report: Mapping[str, Any]) -> None:
    """Hit rates, bytes per tier, peak memory and tokens per second, one fact per line."""
    experts, sizes = report["experts"], report["bytes"]
    lines = [
        (
            "experts",
            f"{experts['gpu']} of {experts['total']} in the arena ({report['arena']}), "
            f"{experts['host']} in host memory",
        ),
        (
            "bytes",
            f"arena {format_bytes(sizes['arena'])}, host experts {format_bytes(sizes['host_experts'])}, "
            f"everything else {format_bytes(sizes['non_expert'])}",
        ),
        ("peak host memory", format_bytes(report["peak_host_bytes"])),
    ]
    for phase in ("prefill", "decode"):
        part = report[phase]
        if part["tokens"]:
            lines.append(
                (
                    phase,
                    f"{part['tokens']:,} tokens at {part['tokens_per_second']:,.1f} tokens/s, "
                    f"hit rate {format_share(part['hit_rate'])}, "
                    f"token-resident rate {format_share(part['token_resident_rate'])}",
                )
            )
    console.print()
    for name, text in lines:
        console.print(f"{name + ':':18}{text}", soft_wrap=True)
