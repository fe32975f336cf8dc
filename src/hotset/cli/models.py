"""`hotset models`: which Mixture-of-Experts families run, as last measured."""

from __future__ import annotations

from dataclasses import asdict

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, table


def register(app: typer.Typer) -> None:
    @app.command()
    def models(
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Print the model families of Transformers and what a run of a tiny random model of each showed."""
        from hotset.models.families import installed_transformers, read_table
        from hotset.reports.models import print_models

        measured_with, rows = read_table()
        installed = installed_transformers()
        if as_json:
            print_json({"transformers": measured_with, "installed": installed, "families": [asdict(r) for r in rows]})
        else:
            print_models(console(), rows, table("model type", "class", "experts", "logits"), measured_with)
        if installed != measured_with:
            found = f"Transformers {installed} is" if installed else "no Transformers is"
            note(f"this table was measured with Transformers {measured_with}, and {found} installed here")
