"""Predicted beside measured: decode time of a model at several budgets. What `hotset bench` shows.

The prediction is replay of a recorded decode under the plan, priced by the cost model. Two things that no Machine can
know are measured on the model, by passes with fewer experts than the decode that is predicted: what a pass takes
without its experts, and the time of one expert where it lives (`runtime.measure`). docs/cost-model.md says what follows
from that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotset.core import DECODE, Machine, Plan, Trace
from hotset.errors import BudgetError
from hotset.planning.api import plan as make_plan
from hotset.simulation.replay import replay
from hotset.units import format_share, parse_share

DEFAULT_BUDGETS = ("25%", "50%", "100%")


@dataclass(frozen=True)
class BenchRow:
    """One budget. Seconds are per decoded token."""

    budget: str
    gpu_experts: int
    hit_rate: float
    """Predicted, of the decode."""
    predicted: float
    measured: float
    error: float
    """predicted / measured - 1."""
    spread: tuple[float, float]
    """Least and most of the rounds' measured seconds."""
    parts: dict[str, float]
    """Of the prediction."""
    hit_seconds: float | None
    miss_seconds: float | None
    predicted_by_machine: float | None
    """The same from the Machine's own rates alone, nothing measured on the model; None without a Machine."""


def bench(
    model: str | Path,
    *,
    plans: Sequence[Plan | str | Path] = (),
    budgets: Sequence[str | float] = (),
    prompt: str = "The quick brown fox jumps over the lazy dog.",
    new_tokens: int = 24,
    rounds: int = 7,
    machine: Machine | None = None,
    device: str = "auto",
    dtype: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> list[BenchRow]:
    """Decode at each plan and each budget, predicted and measured, one loaded model at a time.

    budgets: shares of the experts; their plans hold the experts that this very decode picks most. Without plans or
    budgets: 25 %, 50 %, 100 %. machine: for its round trip, and for the prediction without measurements on the model.

    Raises what `hotset.load` raises, and BudgetError.
    """
    import torch

    from hotset.models.checkpoint import resolve_model_folder
    from hotset.runtime.measure import measure_decode, record_decode
    from hotset.runtime.runtime import load

    if not plans and not budgets:
        budgets = DEFAULT_BUDGETS
    folder = resolve_model_folder(model)
    cases: list[tuple[str, Plan | None]] = []
    for item in plans:
        given = item if isinstance(item, Plan) else Plan.open(item)
        cases.append((str(given.budget.get("asked", "the plan")), given))
    trace: Trace | None = None
    rows = []
    for share in [parse_share(b) for b in budgets]:
        if share == 0.0:
            raise BudgetError("budget 0 % has nothing in the arena: give a share above 0")
        cases.append((format_share(share), None))
    for label, chosen in cases:
        if chosen is None and trace is None:
            say("recording the decode")
            loaded = load(folder, device=device, dtype=dtype)
            trace, _ = record_decode(loaded, _encode(folder, loaded, prompt), new_tokens)
            del loaded
            gc.collect()
        if chosen is None:
            assert trace is not None
            chosen = make_plan(trace, fraction=float(parse_share(label.replace(" ", ""))))
        say(f"measuring at {label}")
        loaded = load(folder, plan=chosen, device=device, dtype=dtype)
        inputs = _encode(folder, loaded, prompt)
        with torch.inference_mode():
            here, tokens = record_decode(loaded, inputs, new_tokens)
        own = _machine_of(loaded, machine)
        times = measure_decode(loaded, inputs, tokens, here, rounds=rounds, round_trip_seconds=own.round_trip_seconds)
        del loaded
        gc.collect()
        mask = chosen.gpu_experts_mask
        own = _priced_by_model(here, own, times.hit_seconds, times.miss_seconds)
        decode = _decode_only(here)
        told = replay(decode, "static", plan=mask, machine=own, non_expert_seconds=times.non_expert_seconds)
        parts = told.seconds["decode"]
        alone = None if machine is None else replay(decode, "static", plan=mask, machine=machine)
        rows.append(
            BenchRow(
                budget=label,
                gpu_experts=int(mask.sum()),
                hit_rate=told.hit_rate,
                predicted=parts["total"],
                measured=times.seconds_per_token,
                error=parts["total"] / times.seconds_per_token - 1.0,
                spread=times.spread,
                parts=parts,
                hit_seconds=times.hit_seconds,
                miss_seconds=times.miss_seconds,
                predicted_by_machine=None if alone is None else alone.seconds["decode"]["total"],
            )
        )
    return rows


def _machine_of(loaded: Any, machine: Machine | None) -> Machine:
    """Whose round trip is taken: the given Machine's where the model runs on such a device."""
    device: Literal["cuda", "cpu"] = "cuda" if loaded.hotset.device.type == "cuda" else "cpu"
    if machine is None or machine.device != device:
        machine = Machine.open("rtx-4090")
    return machine if device == "cuda" else replace(machine, device=device, round_trip_seconds=0.0)


def _priced_by_model(trace: Trace, machine: Machine, hit_seconds: float | None, miss_seconds: float | None) -> Machine:
    """A Machine whose rates give the measured time of one expert; launches are part of that time."""
    assert trace.expert_bytes is not None
    size = float(trace.expert_bytes.mean())
    # of a tiny model an expert may drown in the noise of all else: then it takes no time worth predicting
    hit, miss = (max(seconds or 0.0, 1e-9) for seconds in (hit_seconds, miss_seconds))
    return replace(
        machine,
        name="as measured on the model",
        source="hotset bench",
        host_read_bytes_per_second=size / (hit if miss_seconds is None else miss),
        gpu_read_bytes_per_second=size / (miss if hit_seconds is None else hit) if machine.device == "cuda" else None,
        launch_seconds=0.0,
    )


def _decode_only(trace: Trace) -> Trace:
    """The decode tokens of a recording."""
    these = trace.phase == DECODE
    return Trace.from_arrays(
        np.ascontiguousarray(trace.expert_ids[:, these]),
        num_experts=trace.num_experts,
        phase=trace.phase[these],
        layer_ids=trace.layer_ids,
        expert_bytes=trace.expert_bytes,
        metadata=trace.metadata,
    )


def _encode(folder: Path, loaded: Any, prompt: str) -> Any:
    """[1, n] prompt ids; a model without a tokenizer gets the prompt's bytes, folded into its vocabulary."""
    import torch

    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        from hotset.runtime.generation import load_tokenizer

        ids = load_tokenizer(folder)(prompt)["input_ids"]
    else:
        ids = [byte % loaded.config.vocab_size for byte in prompt.encode()]
    return torch.tensor([ids], device=loaded.device)
