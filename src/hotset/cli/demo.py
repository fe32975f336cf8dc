"""`hotset demo`: record, plan and run a small real model, and compare with the unmodified one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, quiet_transformers, table


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        folder: Path = typer.Argument(
            None, help="Folder with model/, heldout/ and prompts/ in it; default: the source tree's."
        ),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Record, plan and run the demo model, its experts split between two memories, and compare the text."""
        quiet_transformers()
        from hotset.demo import FRACTION, NEW_TOKENS, demo_folder, run_demo
        from hotset.errors import ModelError
        from hotset.reports.demo import print_demo

        result = run_demo(folder or demo_folder(), say=note)
        if as_json:
            print_json(asdict(result))
        else:
            strategies = table("strategy", "held-out hit rate", "held-out token-resident rate", "gap to the bound")
            strategies.title = f"{FRACTION:.0%} of the expert bytes in the arena"
            prompts = table("prompt", "text", "unmodified tokens/s", "split tokens/s")
            prompts.title = f"{NEW_TOKENS} tokens, greedy"
            print_demo(console(), result, strategies, prompts)
        if not result.all_same:
            raise ModelError("the split model's text differs from the unmodified model's: this should not happen")
