"""`hotset show FILE`: what is in a trace or a plan."""

from __future__ import annotations

from pathlib import Path

import typer

from hotset.cli.common import JSON_HELP, console, print_json


def register(app: typer.Typer) -> None:
    @app.command()
    def show(
        file: Path = typer.Argument(help="A trace or a plan."),
        trace: Path | None = typer.Option(None, help="With a plan: the trace whose heat to draw under it."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Print a trace or a plan: sizes, counts per layer, and a heat map of layers x experts."""
        from hotset.core import Plan, Trace
        from hotset.reports.text import open_either, plan_summary, print_plan, print_trace, trace_summary

        found = open_either(file)
        if isinstance(found, Plan):
            counts = None if trace is None else Trace.open(trace).counts
            if as_json:
                print_json(plan_summary(found))
            else:
                print_plan(console(), found, counts)
        elif as_json:
            print_json(trace_summary(found))
        else:
            print_trace(console(), found)
