"""`hotset`: the commands, one module each. Adding a command is one file with `register(app)` and one line below."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from hotset.cli.common import note
from hotset.errors import HotsetError

# in the order of the pipeline, which is the order of `hotset --help`
COMMANDS: tuple[str, ...] = (
    "record",
    "plan",
    "show",
    "report",
    "run",
    "demo",
    "replay",
    "probe",
    "bench",
    "models",
)


def build_app() -> typer.Typer:
    """The Typer application with every command registered."""
    app = typer.Typer(
        name="hotset",
        help="Decide which experts of a Mixture-of-Experts model live in GPU memory, and run the model that way.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def _root(
        version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    ) -> None:
        if version:
            from hotset import __version__

            print(__version__)
            raise typer.Exit

    for name in COMMANDS:
        import_module(f"hotset.cli.{name}").register(app)
    return app


def main() -> None:
    """Entry point: exit code 0, 1 for an error in the input, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        build_app()()
    except HotsetError as problem:
        note(f"error: {problem}")
        sys.exit(1)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
