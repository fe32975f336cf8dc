"""The demo's result in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotset.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_demo(console: Console, result: Any, strategies: Table, prompts: Table) -> None:
    """result: DemoResult; the two tables are empty, with their columns."""
    for row in result.strategies:
        gap = "-" if row.gap is None else f"{row.gap * 100:.2f} %"
        strategies.add_row(row.strategy, format_share(row.hit_rate), format_share(row.token_resident_rate), gap)
    console.print(strategies)
    for row in result.prompts:
        verdict = "the same" if row.same_text else "DIFFERENT"
        prompts.add_row(row.source, verdict, f"{row.plain_tokens_per_second:.1f}", f"{row.split_tokens_per_second:.1f}")
    console.print(prompts)
    first = result.prompts[0]
    console.print(f"{first.source}: {first.prompt!r} continues", soft_wrap=True)
    console.print(f"    {first.text!r}", soft_wrap=True)
    console.print()
    for line in (
        f"experts: {format_bytes(result.bytes_experts)} in all, {format_bytes(result.bytes_arena)} in the arena, "
        f"{format_bytes(result.bytes_host)} in host memory, each held once",
        f"host memory saved by not keeping the arena's experts twice: {format_bytes(result.host_bytes_saved)}",
        f"while running: hit rate {format_share(result.report['hit_rate'])}, "
        f"token-resident rate {format_share(result.report['token_resident_rate'])}",
    ):
        console.print(line, soft_wrap=True)
