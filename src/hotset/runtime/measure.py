"""Decode times of a loaded model, whole and in parts: what `hotset bench` compares its prediction with.

Knows one loaded model and one prompt. The whole is a greedy decode, forward passes of one token each. The parts come
from passes through the same model under the same conditions (what the caches hold, which threads are awake), in turn
with the whole so that a busy machine is busy for both, but never from the whole itself: in them each token gets the
picks of another one, of which a quarter or three quarters are kept and the rest turned into "no expert". Seconds per
pass are a line in the number of experts computed; its slope prices an expert, where it meets zero is all that is not an
expert, and what it says of the whole is an extrapolation.

Not one part at a time: a pass without experts finds attention's weights in the caches, and a layer's experts computed
away from the model find nothing displaced either. Both are faster than in a decode (by a tenth of it, once).
"""

from __future__ import annotations

import inspect
import itertools
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

KEPT = (0.25, 0.75)
"""Shares of the picks in the passes that the parts come from: apart, and enough that caches are those of a decode."""


@dataclass(frozen=True)
class DecodeTimes:
    """Medians over rounds of each round's mean seconds: means add up, and a busy moment spoils one round only."""

    seconds_per_token: float
    non_expert_seconds: float
    """Per token, everything but experts, the dispatch around them included."""
    hit_seconds: float | None
    """Per resident expert computed, or None where there was none. With the arena in host memory that of a miss."""
    miss_seconds: float | None
    """Per expert computed from host memory, round trips not included, or None where there was none."""
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
    model: Any,
    input_ids: torch.Tensor,
    tokens: torch.Tensor,
    trace: Trace,
    *,
    rounds: int,
    round_trip_seconds: float = 0.0,
) -> DecodeTimes:
    """Time the decode that `record_decode` recorded, whole and in parts, `rounds` times in turn.

    tokens, trace: from `record_decode`. round_trip_seconds: what a layer with a miss pays besides its experts, known
    from elsewhere; it is no part of any price here. Raises ModelError on fewer than two tokens or no round.
    """
    if len(tokens) < 2 or rounds < 1:
        raise ModelError(f"{len(tokens)} tokens, {rounds} rounds: wanted at least 2 and 1")
    runtime = model.hotset
    recorded = trace.expert_ids[:, trace.phase == DECODE].astype(np.int64)
    picks = np.roll(recorded, recorded.shape[1] // 2, axis=1)
    real = picks >= 0
    hit = real & np.take_along_axis(runtime.store.residency.mask()[:, None], np.maximum(picks, 0), axis=2)
    miss = real & ~hit
    # one memory, one price: where the arena is host memory too, a hit is read like a miss
    kinds = [kind for kind in ((real,) if runtime.device.type == "cpu" else (hit, miss)) if kind.any()]
    random = np.random.default_rng(0).random(picks.shape)
    kept, seconds_of, whole = [], [], list[float]()
    for shares in itertools.product(KEPT, repeat=len(kinds)):
        kept.append([kind & (random < share) for kind, share in zip(kinds, shares, strict=True)])
        seconds_of.append(list[float]())
    # the experts interface skips ids from num_experts on
    thinned = [
        torch.from_numpy(np.where(np.any(k, axis=0), picks, runtime.num_experts)).to(runtime.device) for k in kept
    ]
    for number in range(rounds + 1):
        for ids, seconds in [(None, whole), *zip(thinned, seconds_of, strict=True)]:
            mean = statistics.fmean(_timed_decode(model, input_ids, tokens, ids))
            if number:  # the first round warms up
                seconds.append(mean)
    per_token = [[float(kind.sum()) / picks.shape[1] for kind in kinds_kept] for kinds_kept in kept]
    trips = [float((miss & np.any(k, axis=0)).any(axis=2).sum()) / picks.shape[1] for k in kept]
    medians = [statistics.median(s) - t * round_trip_seconds for s, t in zip(seconds_of, trips, strict=True)]
    non_expert, prices = _line(np.array(per_token), np.array(medians))
    return DecodeTimes(
        seconds_per_token=statistics.median(whole),
        non_expert_seconds=non_expert,
        hit_seconds=prices[0] if hit.any() else None,
        miss_seconds=prices[-1] if miss.any() else None,
        spread=(min(whole), max(whole)),
        tokens=len(tokens),
        rounds=rounds,
    )


def _line(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, list[float]]:
    """(seconds at no count, seconds per count of each kind), by least squares: counts [N, kinds], seconds [N].

    A kind whose price comes out below 0 drowns in the noise (experts of a tiny model): 0, and the others anew.
    """
    used = list(range(counts.shape[1]))
    while True:
        found = np.linalg.lstsq(np.column_stack([np.ones(len(seconds)), counts[:, used]]), seconds)[0]
        below = [kind for kind, price in zip(used, found[1:], strict=True) if price < 0]
        if not below:
            break
        used.remove(below[0])
    priced = dict(zip(used, found[1:].tolist(), strict=True))
    return float(found[0]), [priced.get(kind, 0.0) for kind in range(counts.shape[1])]


def _timed_decode(model: Any, input_ids: torch.Tensor, tokens: torch.Tensor, picks: torch.Tensor | None) -> list[float]:
    """Seconds of each one-token pass of a decode that is fed `tokens`. picks [L, T, K]: instead of the tokens' own."""
    seconds: list[float] = []
    calls = [0] * len(model.hotset.layers)

    def change(row: int, ids: torch.Tensor) -> torch.Tensor:
        calls[row] += 1
        if picks is None or calls[row] == 1:  # the first call is the prompt's
            return ids
        return picks[row, calls[row] - 2, None]

    with _picks_through(model.hotset, change):
        for _ in _decode(model, input_ids, len(tokens), tokens, seconds):
            pass
    return seconds


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
