"""`hotset run MODEL --plan PLAN --prompt ...`: stream text from a model whose experts are split between tiers."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer

from hotset.cli.common import JSON_HELP, loading_bar, note, print_json, quiet_transformers, stderr_console


def register(app: typer.Typer) -> None:
    @app.command()
    def run(
        model: str = typer.Argument(help="Model folder, or a hub name like owner/model."),
        plan: Path = typer.Option(None, help="Plan to run by; without one all experts stay in host memory."),
        prompt: list[str] = typer.Option(..., help="Text to continue; may be given several times."),
        max_new_tokens: int = typer.Option(128, help="Most tokens to decode."),
        temperature: float = typer.Option(None, help="Sample at this temperature instead of greedily."),
        top_p: float = typer.Option(1.0, help="With --temperature: nucleus to sample from."),
        seed: int = typer.Option(0, help="With --temperature: seed."),
        chat: bool = typer.Option(False, "--chat", help="Wrap each prompt in the model's chat template."),
        device: str = typer.Option("auto", help="auto, cuda or cpu (then the arena is a second one in host memory)."),
        dtype: str = typer.Option("auto", help="auto (as the checkpoint says), float32, bfloat16 or float16."),
        host_memory: str = typer.Option(
            None, help="Most memory the process may take, like 12GiB; experts beyond it stay on disk."
        ),
        host_cache_policy: str = typer.Option("lfu-aged", help="With --host-memory: lfu-aged, lru or lfu."),
        expert_format: str = typer.Option(
            "auto", help="auto (as the checkpoint has them), float, or quantised at load: int8, int4_g32, int4_g128."
        ),
        kernels: str = typer.Option(
            "auto", help="What computes experts on the host: auto, compiled, torch, kt-kernel."
        ),
        keep_mass: float = typer.Option(
            None, help="Skip experts that are not on the GPU where this share of a token's gate mass is kept, like 0.9."
        ),
        adapt: bool = typer.Option(False, "--adapt", help="Move experts between tokens as the workload shifts."),
        max_bytes_per_token: str = typer.Option(None, help="With --adapt: most bytes moved per token, like 64MiB."),
        skip_gpu_expert_cpu_copy: str = typer.Option(
            "auto", help="Whether experts in the arena do without a host copy: auto, on or off."
        ),
        gpu_prefill_token_threshold: str = typer.Option(
            "auto",
            help="Prompts of so many tokens stream missing experts to the GPU: a number, auto (by --machine) or off.",
        ),
        machine: str = typer.Option(None, help="Machine file of `hotset probe`, or a preset; for auto above."),
        record: Path = typer.Option(None, help="Folder to record the routing of this run into, as a trace."),
        prometheus: Path = typer.Option(None, help="File for the final counters in Prometheus' text format."),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        """Run a model by a plan: text on stdout as it is decoded, a summary on stderr."""
        if max_bytes_per_token is not None and not adapt:
            raise typer.BadParameter("--max-bytes-per-token needs --adapt")
        threshold = _threshold(gpu_prefill_token_threshold)
        quiet_transformers()
        import hotset
        from hotset.models.checkpoint import resolve_model_folder
        from hotset.reports.prometheus import prometheus_text
        from hotset.reports.run import print_run
        from hotset.runtime.adapting import Adaptation
        from hotset.runtime.generation import generate_text, load_tokenizer
        from hotset.storage import atomic_path
        from hotset.units import parse_bytes

        folder = resolve_model_folder(model)
        tokenizer = load_tokenizer(folder)
        bound = None if max_bytes_per_token is None else parse_bytes(max_bytes_per_token)
        with loading_bar("loading experts") as progress:
            loaded = hotset.load(
                folder,
                plan=plan,
                device=device,
                dtype=dtype,
                adapt=Adaptation(max_bytes_per_token=bound) if adapt else False,
                skip_gpu_expert_cpu_copy=skip_gpu_expert_cpu_copy,
                host_memory_bytes=host_memory,
                host_cache_policy=host_cache_policy,
                expert_format=expert_format,
                kernels=kernels,
                shed=keep_mass,
                gpu_prefill_token_threshold=threshold,
                machine=machine,
                progress=progress,
            )
        answers = []
        with loaded.hotset.recording(record) if record is not None else contextlib.nullcontext():
            for text in prompt:
                if not as_json:
                    print(text, end="", flush=True)
                answers.append(
                    generate_text(
                        loaded,
                        tokenizer,
                        text,
                        max_new_tokens=max_new_tokens,
                        temperature=temperature,
                        top_p=top_p,
                        seed=seed,
                        chat=chat,
                        on_text=None if as_json else _write,
                    )
                )
                if not as_json:
                    print(flush=True)
        if record is not None:
            note(f"trace written to {record}")
        if prometheus is not None:
            with atomic_path(prometheus) as temporary:
                temporary.write_text(prometheus_text(loaded.hotset_report()), encoding="utf-8")
        if as_json:
            print_json({"answers": [asdict(answer) for answer in answers], "report": loaded.hotset_report()})
        else:
            print_run(stderr_console(), loaded.hotset_report())


def _threshold(text: str) -> int | Literal["auto"] | None:
    if text in ("auto", "off"):
        return "auto" if text == "auto" else None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"prefill threshold {text!r}: wanted 1 or more, auto, off")
    return int(text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
