"""`hotset record MODEL FILE...`: run texts through a model and keep which experts each token was routed to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hotset.cli.common import JSON_HELP, console, note, print_json, quiet_transformers, stderr_console

if TYPE_CHECKING:
    from hotset.traces.recorder import Progress


def register(app: typer.Typer) -> None:
    @app.command()
    def record(
        model: str = typer.Argument(help="Model folder, or a hub name like owner/model."),
        files: list[Path] = typer.Argument(
            help="Text files, or .jsonl files with a prompt, text or messages per line."
        ),
        output: Path = typer.Option(..., "-o", "--output", help="Folder for the trace."),
        prefill: bool = typer.Option(False, "--prefill", help="Teacher-force the texts (the default)."),
        generate: int | None = typer.Option(None, help="Decode this many tokens after each prompt, and record both."),
        temperature: float | None = typer.Option(None, help="Sample at this temperature instead of greedily."),
        top_p: float = typer.Option(1.0, help="With --temperature: nucleus to sample from."),
        seed: int = typer.Option(0, help="With --temperature: seed."),
        batch_size: int = typer.Option(4, help="Sequences that go through the model together."),
        max_tokens: int = typer.Option(1024, help="Longest sequence: texts are cut into windows, prompts at the left."),
        weights: bool = typer.Option(True, "--weights/--no-weights", help="Keep the gate weights."),
        keep_tokens: bool = typer.Option(False, "--keep-tokens", help="Keep the token ids: they tell the texts."),
        device: str = typer.Option("auto", help="auto, cuda or cpu."),
        dtype: str = typer.Option("auto", help="auto (as the checkpoint says), float32, bfloat16 or float16."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace a trace that is in the folder already."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Record which experts a model routes each token of some texts to."""
        if prefill and generate is not None:
            raise typer.BadParameter("--prefill and --generate exclude each other")
        if generate is None and temperature is not None:
            raise typer.BadParameter("--temperature needs --generate")
        quiet_transformers()
        import hotset
        from hotset.reports.text import print_trace, trace_summary
        from hotset.traces.documents import read_documents
        from hotset.traces.recorder import Generation

        decode = None if generate is None else Generation(generate, temperature, top_p, seed)
        documents = list(read_documents(files))
        with _Bar(len(documents), "decoding" if decode else "reading") as show:
            try:
                trace = hotset.record(
                    model,
                    documents,
                    output,
                    generate=decode,
                    batch_size=batch_size,
                    max_tokens=max_tokens,
                    keep_weights=weights,
                    keep_tokens=keep_tokens,
                    device=device,
                    dtype=dtype,
                    overwrite=overwrite,
                    progress=show,
                )
            except KeyboardInterrupt:
                _note_what_is_kept(output)
                raise
        note(f"trace written to {output}")
        if as_json:
            print_json(trace_summary(trace))
        else:
            print_trace(console(), trace)


class _Bar:
    """A bar on stderr: documents, sequences, tokens per second."""

    def __init__(self, documents: int, verb: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = [TextColumn(verb), BarColumn(), MofNCompleteColumn(), TextColumn("documents{task.description}")]
        self._bar = RichProgress(*columns, TimeElapsedColumn(), console=stderr_console())
        self._task = self._bar.add_task("", total=documents)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        rate = progress.tokens / max(progress.seconds, 1e-9)
        text = f", {progress.sequences:,} sequences, {progress.tokens:,} tokens, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=progress.documents, description=text)


def _note_what_is_kept(output: Path) -> None:
    from hotset.core import Trace
    from hotset.errors import TraceError

    try:
        kept = Trace.open(output)
    except TraceError:
        note("interrupted before the first sequence was done: nothing is kept")
    else:
        note(f"interrupted: {kept.num_sequences:,} sequences and {kept.num_tokens:,} tokens are kept in {output}")
