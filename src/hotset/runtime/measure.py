"""Decode times of a loaded model, whole and in parts: what `hotset bench` compares its prediction with.

Knows one loaded model and one prompt. The parts are measured apart from the whole, in turn with it, so that a busy
machine is busy for both:
  whole      forward passes of a greedy decode, one token each
  without    the same passes with every pick turned into "no expert": all that is not an expert, the dispatch included
  hits       the experts interface alone, fed the recorded picks that are resident, the others turned into "no expert"
  misses     the same with the picks that are not resident
  dispatch   the same with no pick at all, to be taken off the last two
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core import DECODE, PREFILL, Trace
from hotset.errors import ModelError


@dataclass(frozen=True)
class DecodeTimes:
    """Medians over rounds of each round's mean seconds: means add up, and a busy moment spoils one round only."""

    seconds_per_token: float
    non_expert_seconds: float
    """Per token, everything but experts."""
    hit_seconds: float | None
    """Per resident expert computed, or None where there was none."""
    miss_seconds: float | None
    """Per expert computed from host memory, round trips included, or None where there was none."""
    spread: tuple[float, float]
    """Least and most of the rounds' seconds_per_token."""
    tokens: int
    rounds: int


def record_decode(model: Any, input_ids: torch.Tensor, new_tokens: int) -> tuple[Trace, torch.Tensor]:
    """(routing of a greedy decode, its tokens [new_tokens]). Residency does not change either.

    model: as `hotset.load` gives it. input_ids: [1, n] on the model's device.
    """
    runtime = model.hotset
    seen: list[list[NDArray[np.int64]]] = [[] for _ in runtime.layers]

    def keep(row: int, ids: torch.Tensor) -> torch.Tensor:
        seen[row].append(ids.detach().cpu().numpy())
        return ids

    with _picks_through(runtime, keep):
        tokens = torch.stack(list(_decode(model, input_ids, new_tokens, None, None)))
    ids = np.stack([np.concatenate(calls) for calls in seen])
    phase = np.full(ids.shape[1], DECODE, np.uint8)
    phase[: input_ids.shape[1]] = PREFILL
    sizes = np.array([[fmt.expert_bytes] * runtime.num_experts for fmt in runtime.store.formats], np.int64)
    trace = Trace.from_arrays(
        np.where((ids >= 0) & (ids < runtime.num_experts), ids, -1),
        num_experts=runtime.num_experts,
        phase=phase,
        layer_ids=[layer.layer_id for layer in runtime.layers],
        expert_bytes=sizes,
        metadata={"non_expert_bytes": runtime.non_expert_bytes},
    )
    return trace, tokens


def measure_decode(
    model: Any, input_ids: torch.Tensor, tokens: torch.Tensor, trace: Trace, *, rounds: int
) -> DecodeTimes:
    """Time the decode that `record_decode` recorded, whole and in parts, `rounds` times in turn.

    tokens, trace: from `record_decode`. Raises ModelError on fewer than two tokens or no round.
    """
    if len(tokens) < 2 or rounds < 1:
        raise ModelError(f"{len(tokens)} tokens, {rounds} rounds: wanted at least 2 and 1")
    runtime = model.hotset
    picks = torch.from_numpy(trace.expert_ids[:, trace.phase == DECODE].astype(np.int64))
    resident = torch.from_numpy(runtime.store.residency.mask())
    rows = torch.arange(len(picks))[:, None, None]
    hit = resident[rows, picks.clamp(min=0)] & (picks >= 0)
    miss = ~resident[rows, picks.clamp(min=0)] & (picks >= 0)
    nobody = runtime.num_experts  # the experts interface skips ids from num_experts on
    only = {
        "hits": torch.where(hit, picks, nobody),
        "misses": torch.where(miss, picks, nobody),
        "dispatch": torch.full_like(picks, nobody),
    }
    hidden = _hidden_like(model, runtime)
    times: dict[str, list[float]] = {name: [] for name in ("whole", "without", *only)}
    for number in range(rounds + 1):
        found = {name: list[float]() for name in times}
        for _ in _decode(model, input_ids, len(tokens), tokens, found["whole"]):
            pass
        with _picks_through(runtime, lambda _row, ids: torch.full_like(ids, nobody)):
            for _ in _decode(model, input_ids, len(tokens), tokens, found["without"]):
                pass
        for name, ids in only.items():
            found[name] = _dispatch_alone(runtime, hidden, ids.to(hidden.device))
        if number:  # the first round warms up
            for name in times:
                times[name].append(statistics.fmean(found[name]))
    median = {name: statistics.median(values) for name, values in times.items()}
    hits_per_token, misses_per_token = (float(m.sum()) / picks.shape[1] for m in (hit, miss))
    return DecodeTimes(
        seconds_per_token=median["whole"],
        non_expert_seconds=median["without"],
        hit_seconds=_each(median["hits"] - median["dispatch"], hits_per_token),
        miss_seconds=_each(median["misses"] - median["dispatch"], misses_per_token),
        spread=(min(times["whole"]), max(times["whole"])),
        tokens=len(tokens),
        rounds=rounds,
    )


def _each(seconds: float, count: float) -> float | None:
    return max(0.0, seconds) / count if count else None


@torch.inference_mode()
def _decode(
    model: Any, input_ids: torch.Tensor, new_tokens: int, forced: torch.Tensor | None, times: list[float] | None
) -> Iterator[torch.Tensor]:
    """The prompt, then `new_tokens` passes of one token each; yields the token that each pass was fed.

    forced: feed these instead of the greedy choice. times: seconds of each one-token pass are added.
    """
    cuda = model.hotset.device.type == "cuda"
    # the argument was renamed in Transformers 5.24
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(input_ids=input_ids, use_cache=True)
    token = out.logits[0, -1].argmax()
    for index in range(new_tokens):
        if forced is not None:
            token = forced[index]
        begin = time.perf_counter()
        out = model(input_ids=token.reshape(1, 1), use_cache=True, **{cache: out.past_key_values})
        if cuda:
            torch.cuda.synchronize()
        if times is not None:
            times.append(time.perf_counter() - begin)
        yield token
        token = out.logits[0, -1].argmax()


@torch.inference_mode()
def _dispatch_alone(runtime: Any, hidden: torch.Tensor, picks: torch.Tensor) -> list[float]:
    """Seconds per token of all layers' experts interfaces, called one after the other. picks: [L, T, K]."""
    cuda = runtime.device.type == "cuda"
    gate = torch.full((1, picks.shape[2]), 1.0 / picks.shape[2], dtype=hidden.dtype, device=hidden.device)
    dispatches = [layer.module.hotset_layer for layer in runtime.layers]
    seconds = []
    for token in range(picks.shape[1]):
        begin = time.perf_counter()
        for row, dispatch in enumerate(dispatches):
            dispatch(hidden, picks[row, token : token + 1], gate)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


@contextmanager
def _picks_through(runtime: Any, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While it lasts, every layer's picks [T, K] go through `change(row, ids)`."""
    before = [layer.module.hotset_layer for layer in runtime.layers]
    try:
        for row, layer in enumerate(runtime.layers):
            layer.module.hotset_layer = _Through(before[row], row, change)
        yield
    finally:
        for layer, dispatch in zip(runtime.layers, before, strict=True):
            layer.module.hotset_layer = dispatch


class _Through:
    """A layer's dispatch behind a change of its picks."""

    def __init__(self, inner: Any, row: int, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.inner, self.row, self.change = inner, row, change

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden, self.change(self.row, ids), gate)
        return out


def _hidden_like(model: Any, runtime: Any) -> torch.Tensor:
    """[1, H] small random input of the experts' type and device."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, embedding.shape[1], generator=generator) * 0.1
    return values.to(device=runtime.device, dtype=embedding.dtype)
