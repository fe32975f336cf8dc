"""`hotset report PLAN TRACE`: pictures of a plan, as one page or as a PNG."""

from __future__ import annotations

from pathlib import Path

import typer

from hotset.cli.common import note


def register(app: typer.Typer) -> None:
    @app.command()
    def report(
        plan: Path = typer.Argument(help="A plan."),
        trace: Path = typer.Argument(help="A trace of the same model."),
        output: Path = typer.Option(Path("report.html"), "-o", "--output", help="The page, one .html file."),
        png: Path | None = typer.Option(None, help="Also draw the main pictures here (needs the plots extra)."),
        shed_quality: Path | None = typer.Option(
            None, help="Also draw this record of what shedding costs (bench_shed_quality.py --output)."
        ),
        layer: list[int] = typer.Option([], help="Layers whose co-activation to show; give it several times."),
    ) -> None:
        """Draw a plan over a trace: heat map, curves with the proven bound, layers, co-activation, shedding."""
        import hotset
        from hotset.reports.data import report_data
        from hotset.reports.html import save_html
        from hotset.reports.shed_quality import read_shed_quality

        data = report_data(
            hotset.Plan.open(plan),
            hotset.Trace.open(trace),
            layers=layer or None,
            shed_quality=read_shed_quality(shed_quality) if shed_quality is not None else None,
        )
        save_html(data, output)
        note(f"page written to {output}")
        if png is not None:
            from hotset.reports.png import save_png

            save_png(data, png)
            note(f"picture written to {png}")
