"""`hotset plan TRACE`: choose the experts that live in GPU memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, table

# spelled out so that --help needs no import; a test keeps it equal to the registry
STRATEGY_HELP = "certified, frequency, layer-balanced, coverage, cluster, uniform, front-loading or random."
DEFAULT_STRATEGY = "certified"
_MEASURED_ON = {
    "held_out": "rates (misses per token) on held-out documents; score and gap on those planned with",
    "in_sample": "rates (misses per token) on the documents planned with",
}


def register(app: typer.Typer) -> None:
    @app.command()
    def plan(
        trace: Path = typer.Argument(help="A trace: hotset's own file or folder, or a foreign record it can import."),
        gpu_memory: str | None = typer.Option(None, help="Budget: GPU memory for experts, such as 12GiB."),
        experts: int | None = typer.Option(None, help="Budget: experts over all layers."),
        fraction: str | None = typer.Option(None, help="Budget: share of the expert bytes, such as 25% or 0.25."),
        experts_per_layer: int | None = typer.Option(None, help="Budget: this many experts of every layer."),
        strategy: str = typer.Option(DEFAULT_STRATEGY, help=STRATEGY_HELP),
        objective: str = typer.Option("whole-token", help="hit-rate, whole-token or decode-time."),
        machine: str | None = typer.Option(None, help="Machine file or preset, for the decode-time objective."),
        previous: Path | None = typer.Option(None, help="The plan in use: among equal experts its residents stay."),
        min_experts_per_layer: int = typer.Option(0, help="Fewest experts of each layer."),
        max_experts_per_layer: int | None = typer.Option(None, help="Most experts of each layer."),
        holdout: str | None = typer.Option(None, help="Plan on the other documents, report on this share: 1/3."),
        context: int | None = typer.Option(None, help="Tokens of KV cache to count in the bytes shown."),
        compare: str | None = typer.Option(
            None, help="Compare strategies (a,b,c or all) at --budget; no plan is made."
        ),
        budget: str = typer.Option("10%,25%,50%", help="With --compare: the budgets, shares or sizes."),
        seed: int = typer.Option(0, help="Seed of the random strategy and of the holdout split."),
        output: Path | None = typer.Option(
            None, "-o", "--output", help="Write the plan (.safetensors), or the table (.json)."
        ),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Choose which experts live in GPU memory, from a recorded trace."""
        import hotset
        from hotset.planning.compare import compare as compare_strategies
        from hotset.reports.text import plan_summary, print_plan
        from hotset.storage import write_json
        from hotset.units import parse_ratio

        source = hotset.Trace.open(trace)
        common: dict[str, Any] = {
            "objective": objective,
            "machine": None if machine is None else hotset.Machine.open(machine),
            "min_experts_per_layer": min_experts_per_layer,
            "max_experts_per_layer": max_experts_per_layer,
            "holdout": None if holdout is None else parse_ratio(holdout),
            "seed": seed,
        }
        if compare is not None:
            _refuse(gpu_memory=gpu_memory, experts=experts, fraction=fraction, experts_per_layer=experts_per_layer)
            rows = compare_strategies(source, compare.split(","), budget.split(","), **common)
            if output is not None:
                write_json(output, {"trace": source.fingerprint, "objective": objective, "rows": rows})
                note(f"table written to {output}")
            if as_json:
                print_json(rows)
            else:
                _print_comparison(rows)
            return
        made = hotset.plan(
            source,
            gpu_memory_bytes=gpu_memory,
            experts=experts,
            fraction=fraction,
            experts_per_layer=experts_per_layer,
            strategy=strategy,
            previous=None if previous is None else hotset.Plan.open(previous),
            context_length=context,
            **common,
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


def _refuse(**budgets: object) -> None:
    given = [name for name, value in budgets.items() if value is not None]
    if given:
        raise typer.BadParameter(f"--compare takes its budgets from --budget, not from --{given[0].replace('_', '-')}")


def _print_comparison(rows: list[dict[str, Any]]) -> None:
    """The table of `hotset plan --compare`: held-out figures where there are any, else in sample."""
    where = "held_out" if "held_out" in rows[0] else "in_sample"
    made = table(
        "strategy",
        "budget",
        "experts",
        "token-resident",
        "hit rate",
        "misses",
        "score",
        "gap",
        title=_MEASURED_ON[where],
    )
    last = None
    for row in rows:
        if last not in (None, row["budget"]):
            made.add_section()
        last = row["budget"]
        rates = row[where]
        made.add_row(
            row["strategy"],
            row["budget"],
            f"{row['experts']:,}",
            f"{rates['token_resident_rate']:.4f}",
            f"{rates['hit_rate']:.4f}",
            f"{rates['misses_per_token']:.2f}",
            f"{row['score']:,.6g}",
            "" if row["gap"] is None else f"{row['gap'] * 100:.2f}%",
        )
    console().print(made)
