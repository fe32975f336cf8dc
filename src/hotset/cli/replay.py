"""`hotset replay TRACE`: what any residency policy would have done on a recorded trace, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli.common import JSON_HELP, console, loading_bar, note, print_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from hotset.simulation.replay import Replay

PARTS = ("non_expert", "gpu", "cpu", "round_trip", "stall")


def register(app: typer.Typer) -> None:
    @app.command()
    def replay(
        trace: Path = typer.Argument(help="A trace: hotset's own file or folder, or a foreign record it can import."),
        policy: str = typer.Option("static,lru,ema,belady", help="Policies, comma-separated; `all` for every one."),
        budget: str | None = typer.Option(None, help="Shares of each layer, such as 10%,25%,50%. [default: 25%]"),
        experts_per_layer: str | None = typer.Option(None, help="Slots of each layer instead, such as 8,16."),
        plan: Path | None = typer.Option(None, help="Start from this plan; without a budget, with its slots."),
        prior: Path | None = typer.Option(None, help="Trace recorded before: what policies know at the start."),
        initial: str = typer.Option("plan", help="plan, or empty: start with no expert resident."),
        pooled: bool = typer.Option(False, "--pooled", help="All layers share one pool of slots."),
        machine: str | None = typer.Option(None, help="Machine file or preset: predicts seconds."),
        on_miss: str = typer.Option("compute", help="compute misses on the CPU, or fetch them over the link."),
        expert_bytes: str | None = typer.Option(None, help="Size of one expert, where the trace does not say it."),
        start: str = typer.Option("warm", help="warm, or cold: every sequence starts from the beginning."),
        skip_tokens: int = typer.Option(0, help="Warm-up: tokens left out of all figures."),
        prefill_chunk: int = typer.Option(512, help="Prompt tokens that share one pass over the weights."),
        prompt_start: bool = typer.Option(False, "--prompt-start", help="ema: prompts set the residency."),
        setting: list[str] = typer.Option([], "--set", help="Policy setting, such as ema.hysteresis=0.05; repeatable."),
        keep_repetitive: bool = typer.Option(
            False, "--keep-repetitive", help="Keep sequences that the trace marks as looping greedy decodes."
        ),
        plot: Path | None = typer.Option(None, help="Write a picture (.png, .svg, .pdf)."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Replay a trace under residency policies: hit rate, traffic and predicted time, against the offline bound."""
        import hotset
        from hotset.policies import POLICIES
        from hotset.reports.replay import save_plot
        from hotset.simulation.replay import parse_settings, replay_sweep, without_repetitive
        from hotset.units import parse_bytes

        source = hotset.Trace.open(trace)
        if not keep_repetitive:
            source, left_out = without_repetitive(source)
            if left_out:
                note(f"note: {left_out} sequences marked as repetitive are left out (--keep-repetitive keeps them)")
        budgets: list[dict[str, Any]]
        if experts_per_layer is not None:
            budgets = [{"experts_per_layer": int(n)} for n in _numbers(experts_per_layer)]
            if budget is not None:
                raise typer.BadParameter("give --budget or --experts-per-layer, not both")
        elif budget is not None or plan is None:
            budgets = [{"fraction": share.strip()} for share in (budget or "25%").split(",")]
        else:
            budgets = [{}]
        if plan is None and prior is None and initial == "plan":
            note("note: the starting plan is the most frequent experts of this very trace, which flatters `static`")
        names = list(POLICIES) if policy == "all" else [name.strip() for name in policy.split(",")]
        with loading_bar("replaying") as progress:
            results = replay_sweep(
                source,
                names,
                budgets,
                plan=None if plan is None else hotset.Plan.open(plan),
                prior=None if prior is None else hotset.Trace.open(prior),
                initial=initial,
                pooled=pooled,
                machine=None if machine is None else hotset.Machine.open(machine),
                on_miss=on_miss,
                expert_bytes=None if expert_bytes is None else parse_bytes(expert_bytes),
                start=start,
                skip_tokens=skip_tokens,
                prefill_chunk=prefill_chunk,
                prompt_start=prompt_start,
                options=parse_settings(setting),
                progress=progress,
            )
        if machine is not None and not any(result.seconds for result in results):
            note("note: no seconds are predicted: the trace does not say expert sizes, and --expert-bytes is not given")
        if plot is not None:
            save_plot(results, plot)
            note(f"plot written to {plot}")
        if as_json:
            print_json([result.to_json() for result in results])
        else:
            _print_tables(console(), results)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--experts-per-layer {text!r}: wanted whole numbers such as 8,16") from None


def _print_tables(console: Console, results: Sequence[Replay]) -> None:
    """One row per budget and policy; then seconds by part, and the domains, where there are any."""
    from hotset.reports.replay import budget_of
    from hotset.units import format_bytes, format_seconds, format_share

    rates = table("slots", "policy", "hit rate", "token resident", "of the gap", "loads/token", "bytes/token")
    for result in results:
        size = result.load_bytes_per_token
        rates.add_row(
            budget_of(result),
            result.policy,
            format_share(result.hit_rate),
            format_share(result.token_resident_rate),
            "-" if result.gap_closed is None else format_share(result.gap_closed),
            f"{result.loads_per_token:.3g}",
            "-" if size is None else format_bytes(size),
        )
    console.print(rates)
    if any(r.seconds for r in results):
        times = table("slots", "policy", "phase", "s/token", *PARTS, "link busy")
        for result in results:
            for phase, seconds in result.seconds.items():
                cells = [format_seconds(seconds[part]) for part in ("total", *PARTS, "link")]
                times.add_row(budget_of(result), result.policy, phase, *cells)
        console.print(times)
    names = list(dict.fromkeys(name for r in results for name in r.domains))
    if len(names) > 1:
        domains = table("slots", "policy", *names, title="hit rate by domain")
        for result in results:
            shares = [format_share(result.domains[n]["hit_rate"]) if n in result.domains else "-" for n in names]
            domains.add_row(budget_of(result), result.policy, *shares)
        console.print(domains)
