"""`hotset bench MODEL`: decode speed at several budgets, predicted and measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, quiet_transformers, table


def register(app: typer.Typer) -> None:
    @app.command()
    def bench(
        model: str = typer.Argument(help="Model folder, or a hub name like owner/model."),
        plan: list[Path] = typer.Option([], help="Plan to measure; repeatable."),
        budget: str | None = typer.Option(None, help="Shares of the experts. [default: 25%,50%,100%, without --plan]"),
        prompt: str = typer.Option("The quick brown fox jumps over the lazy dog.", help="Text to decode from."),
        new_tokens: int = typer.Option(24, help="Tokens to decode in each round."),
        rounds: int = typer.Option(7, help="Rounds; the median of their means counts."),
        machine: str | None = typer.Option(None, help="Machine file or preset: adds its own prediction."),
        device: str = typer.Option("auto", help="auto, cuda or cpu (then the arena is a second one in host memory)."),
        dtype: str = typer.Option("auto", help="auto (as the checkpoint says), float32, bfloat16 or float16."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Measure decode tokens per second at several budgets beside what the cost model predicts."""
        quiet_transformers()
        import hotset
        from hotset.bench import bench as run_bench
        from hotset.units import format_seconds, format_share

        rows = run_bench(
            model,
            plans=plan,
            budgets=[] if budget is None else [share.strip() for share in budget.split(",")],
            prompt=prompt,
            new_tokens=new_tokens,
            rounds=rounds,
            machine=None if machine is None else hotset.Machine.open(machine),
            device=device,
            dtype=dtype,
            say=lambda what: note(f"{what} ..."),
        )
        if as_json:
            print_json([asdict(row) for row in rows])
            return
        shown = table("budget", "experts", "hit rate", "predicted", "measured", "error", "tokens/s", "machine alone")
        for row in rows:
            shown.add_row(
                row.budget,
                str(row.gpu_experts),
                format_share(row.hit_rate),
                format_seconds(row.predicted),
                format_seconds(row.measured),
                f"{row.error * 100:+.1f} %",
                f"{1 / row.measured:.1f}",
                "-" if row.predicted_by_machine is None else format_seconds(row.predicted_by_machine),
            )
        console().print(shown)
