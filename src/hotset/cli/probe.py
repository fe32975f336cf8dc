"""`hotset probe`: measure this machine, for plans and predictions."""

from __future__ import annotations

from pathlib import Path

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, table


def register(app: typer.Typer) -> None:
    @app.command()
    def probe(
        name: str | None = typer.Option(None, help="Name of the machine. [default: its host name]"),
        threads: int | None = typer.Option(None, help="Threads that read host memory together. [default: all]"),
        expert_bytes: str = typer.Option("9437184", help="Size of a disk read: one expert, such as 9MiB."),
        folder: Path = typer.Option(Path(), help="Folder on the disk to measure; needs 256 MiB for a moment."),
        repeats: int = typer.Option(7, help="Repeats of every measurement; the median counts."),
        output: Path | None = typer.Option(None, "-o", "--output", help="Write the machine here (.json)."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Measure bandwidths and fixed costs of this machine: memory, disk, and where there is one GPU and link."""
        from hotset.kernels import describe
        from hotset.machines.format import machine_to_json
        from hotset.machines.probe import probe as measure
        from hotset.units import format_bytes, format_seconds, parse_bytes

        machine = measure(
            name=name,
            threads=threads,
            expert_bytes=parse_bytes(expert_bytes),
            folder=folder,
            repeats=repeats,
            progress=lambda what: note(f"measuring {what} ..."),
        )
        if output is not None:
            machine.save(output)
            note(f"machine written to {output}")
        if as_json:
            print_json(machine_to_json(machine))
            return
        shown = table("measured", "median", "least", "most", title=f"{machine.name} ({machine.details['processor']})")
        for key, spread in machine.details["measured"].items():
            if "median" in spread:
                per_second = key.endswith("_per_second")
                values = [spread[s] for s in ("median", "min", "max")]
                cells = [f"{format_bytes(v)}/s" if per_second else format_seconds(v) for v in values]
                if key == "host_flops_per_second":
                    cells = [f"{v / 1e9:,.0f} GFLOP/s" for v in values]
                what = key.removesuffix("_bytes_per_second").removesuffix("_seconds").replace("_", " ")
                shown.add_row("host arithmetic" if "flops" in key else what, *cells)
        console().print(shown)
        print(describe().line())
        if machine.device == "cpu":
            note("note: no CUDA device here: the arena is host memory, so a hit costs the same read as a miss")
