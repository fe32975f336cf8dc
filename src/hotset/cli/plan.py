"""`hotset plan TRACE`: choose the experts that live in GPU memory."""

from __future__ import annotations

from pathlib import Path

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json


def register(app: typer.Typer) -> None:
    @app.command()
    def plan(
        trace: Path = typer.Argument(help="A trace: hotset's own file or folder, or a foreign record it can import."),
        gpu_memory: str = typer.Option(None, help="Budget: memory for experts, such as 12GiB."),
        experts: int = typer.Option(None, help="Budget: experts over all layers."),
        fraction: str = typer.Option(None, help="Budget: share of the expert bytes, such as 25% or 0.25."),
        experts_per_layer: int = typer.Option(None, help="Budget: this many experts of every layer."),
        strategy: str = typer.Option(None, help="frequency, uniform, front-loading or random."),
        objective: str = typer.Option("whole-token", help="hit-rate, whole-token or decode-time."),
        machine: str = typer.Option(None, help="Machine file or preset, for the decode-time objective."),
        previous: Path = typer.Option(None, help="The plan in use: among equal experts its residents stay."),
        min_experts_per_layer: int = typer.Option(0, help="Fewest experts of each layer."),
        max_experts_per_layer: int = typer.Option(None, help="Most experts of each layer."),
        holdout: str = typer.Option(None, help="Plan on the other documents, report on this share, such as 1/3."),
        seed: int = typer.Option(0, help="Seed of the random strategy and of the holdout split."),
        output: Path = typer.Option(None, "-o", "--output", help="Write the plan here (.safetensors)."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Choose which experts live in GPU memory, from a recorded trace."""
        import hotset
        from hotset.planning.api import DEFAULT_STRATEGY
        from hotset.reports.text import plan_summary, print_plan
        from hotset.units import parse_ratio

        source = hotset.Trace.open(trace)
        made = hotset.plan(
            source,
            gpu_memory_bytes=gpu_memory,
            experts=experts,
            fraction=fraction,
            experts_per_layer=experts_per_layer,
            strategy=strategy or DEFAULT_STRATEGY,
            objective=objective,
            machine=None if machine is None else hotset.Machine.open(machine),
            previous=None if previous is None else hotset.Plan.open(previous),
            min_experts_per_layer=min_experts_per_layer,
            max_experts_per_layer=max_experts_per_layer,
            holdout=None if holdout is None else parse_ratio(holdout),
            seed=seed,
        )
        if output is not None:
            made.save(output)
            note(f"plan written to {output}")
        for sentence in made.report["notes"]:
            note(f"note: {sentence}")
        if as_json:
            print_json(plan_summary(made))
        else:
            print_plan(console(), made, source.counts)
