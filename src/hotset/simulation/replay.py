"""`hotset.replay`: what a residency policy would have done on a recorded trace, and what it would have cost.

Drives the policy, tracker, rebalancer and residency objects of the runtime over recorded routing; only the clock (the
cost model) and the mover of bytes (none: a move is committed at once) differ. Knows nothing of models or tensors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.core import DECODE, PREFILL, Counts, Machine, Plan, Trace, as_expert_bytes
from hotset.errors import PolicyError
from hotset.machines.cost import CostModel
from hotset.policies import Policy, Setting, make_policy, policy_entry
from hotset.residency import Residency
from hotset.units import parse_share

DEFAULT_PREFILL_CHUNK = 512
SERIES_POINTS = 60

_BLOCK_TOKENS = 8192
"""Tokens replayed between two counts: their scratch arrays stay in the cache."""

Start = Literal["warm", "cold"]


@dataclass(frozen=True)
class Replay:
    """One policy over one trace. Rates are shares, bytes and seconds are means per counted token."""

    policy: str
    experts_per_layer: list[int]
    pooled: bool
    hit_rate: float
    """Share of picks whose expert was resident when its turn came."""
    token_resident_rate: float
    """Share of (token, layer) pairs with all picks hits."""
    loads_per_token: float
    """Experts promoted, all layers together."""
    load_bytes_per_token: float | None
    """Their bytes, or None where the trace does not say sizes."""
    seconds: dict[str, dict[str, float]]
    """"prefill" and "decode", where they occur: mean seconds per token and their parts (`machines.cost.Parts`).
    Empty without a machine or without sizes."""
    tokens: int
    """Counted tokens."""
    hit_rate_per_layer: list[float]
    domains: dict[str, dict[str, float]]
    """Per sequence_source of the trace: tokens, hit_rate, token_resident_rate, loads_per_token."""
    series: dict[str, list[float]]
    """Over the counted tokens in order: "token" (end of each stretch), "hit_rate", "loads_per_token"."""
    settings: dict[str, Any] = field(default_factory=dict)
    gap_closed: float | None = None
    """Share of the way from static to Belady, in hit rate, with the same slots; None where either was not replayed."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


@dataclass(frozen=True)
class _Job:
    trace: Trace
    policy: str
    slots: NDArray[np.int64]
    pool_slots: int | None
    mask: NDArray[np.bool_]
    hotness: NDArray[np.float64]
    machine: Machine | None
    cost: CostModel | None
    start: Start
    skip: int
    prefill_chunk: int
    prompt_start: bool
    options: Mapping[str, Any]


def replay(
    trace: Trace,
    policy: str = "ema",
    *,
    experts_per_layer: int | Sequence[int] | None = None,
    fraction: float | str | None = None,
    plan: Plan | NDArray[np.bool_] | None = None,
    prior: Counts | Trace | None = None,
    initial: Literal["plan", "empty"] = "plan",
    pooled: bool = False,
    machine: Machine | str | None = None,
    on_miss: Literal["compute", "fetch"] = "compute",
    expert_bytes: ArrayLike | None = None,
    non_expert_seconds: float | None = None,
    start: Start = "warm",
    skip_tokens: int = 0,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    prompt_start: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Replay:
    """Replay `trace` under one policy (a name of `hotset.policies.POLICIES`).

    Slots: `experts_per_layer` (a number or one per layer), or `fraction` of each layer's experts, or those of `plan`.
    plan: residents at the start, and all there is for "static". Without one they are each layer's most frequent experts
    of `prior`, by default of the trace itself (which flatters: give a prior recorded before, or `initial="empty"`).
    pooled: all layers share the slots. machine: a Machine, file or preset, for seconds; on_miss as in the cost model.
    expert_bytes: [L, E], [E] or one number, where the trace does not say sizes.
    non_expert_seconds: per pass, measured; without it, from the trace's non_expert_bytes.
    start: "cold" puts residency and policy back to the start at every sequence, "warm" carries them on.
    skip_tokens: tokens left out of all figures, at the start of the replay (warm) or of each sequence (cold).
    prompt_start: prefill tokens only inform the policy, which rebalances once before the decode that follows ("ema").
    options: settings of the policy.

    Raises PolicyError or MachineError.
    """
    job = _job(
        trace,
        policy,
        experts_per_layer=experts_per_layer,
        fraction=fraction,
        plan=plan,
        prior=prior,
        initial=initial,
        pooled=pooled,
        machine=machine,
        on_miss=on_miss,
        expert_bytes=expert_bytes,
        non_expert_seconds=non_expert_seconds,
        start=start,
        skip_tokens=skip_tokens,
        prefill_chunk=prefill_chunk,
        prompt_start=prompt_start,
        options=options,
    )
    return _run(job)


def replay_sweep(
    trace: Trace,
    policies: Sequence[str],
    budgets: Sequence[Mapping[str, Any]],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> list[Replay]:
    """Every policy at every budget, on all cores; `gap_closed` filled in.

    budgets: each {"experts_per_layer": ...} or {"fraction": ...} or {} (the plan's own slots). options: per policy.
    common: the other arguments of `replay`. "static" and "belady" are replayed where `policies` leaves them out, but
    not returned. Order: budgets outermost.
    """
    for name in policies:
        policy_entry(name)
    wanted = list(dict.fromkeys([*policies, "static", "belady"]))
    jobs = []
    for budget in budgets:
        for name in wanted:
            its = {"prompt_start": False} if name != "ema" else {}
            jobs.append(_job(trace, name, options=(options or {}).get(name), **{**common, **budget, **its}))
    done = 0

    def run(job: _Job) -> Replay:
        nonlocal done
        result = _run(job)
        done += 1
        if progress is not None:
            progress(done, len(jobs))
        return result

    # the compiled loops run without the interpreter's lock, so threads do use all cores
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        results = list(pool.map(run, jobs))
    chosen = []
    for start in range(0, len(results), len(wanted)):
        rates = {r.policy: r.hit_rate for r in results[start : start + len(wanted)]}
        gap = rates["belady"] - rates["static"]
        for result in results[start : start + len(wanted)]:
            if result.policy in policies:
                closed = (result.hit_rate - rates["static"]) / gap if gap > 0 else None
                chosen.append(replace(result, gap_closed=closed))
    return chosen


def without_repetitive(trace: Trace) -> tuple[Trace, int]:
    """(the trace without the sequences its metadata lists as `repetitive_sequences`, how many those were).

    A greedy decode that loops repeats the same experts for ever and makes every policy look better than it is.
    """
    marked = set(trace.metadata.get("repetitive_sequences") or ())
    keep = [i for i in range(trace.num_sequences) if i not in marked]
    if not marked or not keep:
        return trace, 0
    kept = trace.select_sequences(keep)
    metadata = {k: v for k, v in kept.metadata.items() if k != "repetitive_sequences"}
    return replace(kept, metadata=metadata), len(marked)


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options per policy from texts like "ema.hysteresis=0.05". Raises PolicyError."""
    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, rest = text.partition(".")
        key, equals, value = rest.partition("=")
        policy_entry(name)
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or not key:
            raise PolicyError(f"setting {text!r}: wanted POLICY.NAME=NUMBER, such as ema.hysteresis=0.05")
        whole = value.strip().lstrip("-").isdigit()
        options.setdefault(name, {})[key.strip().replace("-", "_")] = int(number) if whole else number
    return options


def _job(
    trace: Trace,
    policy: str,
    *,
    experts_per_layer: int | Sequence[int] | None = None,
    fraction: float | str | None = None,
    plan: Plan | NDArray[np.bool_] | None = None,
    prior: Counts | Trace | None = None,
    initial: Literal["plan", "empty"] = "plan",
    pooled: bool = False,
    machine: Machine | str | None = None,
    on_miss: Literal["compute", "fetch"] = "compute",
    expert_bytes: ArrayLike | None = None,
    non_expert_seconds: float | None = None,
    start: Start = "warm",
    skip_tokens: int = 0,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    prompt_start: bool = False,
    options: Mapping[str, Any] | None = None,
) -> _Job:
    from hotset.adaptation.tracker import top_per_layer

    policy_entry(policy)
    if expert_bytes is not None:
        if trace.expert_bytes is not None:
            raise PolicyError("expert_bytes is given, but the trace says its own sizes")
        trace = replace(trace, expert_bytes=as_expert_bytes(expert_bytes, trace.num_layers, trace.num_experts))
    shape = (trace.num_layers, trace.num_experts)
    if start not in ("warm", "cold") or initial not in ("plan", "empty"):
        raise PolicyError(f"start {start!r}, initial {initial!r}: wanted warm or cold, plan or empty")
    if skip_tokens < 0 or prefill_chunk < 1:
        raise PolicyError(f"skip_tokens {skip_tokens}, prefill_chunk {prefill_chunk}: wanted 0 or more, 1 or more")
    if prompt_start and policy != "ema":
        raise PolicyError(f"prompt_start informs a hotness tracker: policy {policy} has none, use ema")
    if experts_per_layer is not None and fraction is not None:
        raise PolicyError("experts_per_layer and fraction are both given: wanted one")
    mask = None
    if plan is not None:
        mask = plan.gpu_experts_mask if isinstance(plan, Plan) else np.asarray(plan)
        if mask.shape != shape or mask.dtype != np.bool_:
            raise PolicyError(f"the plan is {mask.dtype} {mask.shape}: this trace wants bool {shape}")
        if isinstance(plan, Plan) and plan.layer_ids.tolist() != trace.layer_ids.tolist():
            raise PolicyError(f"the plan is for layers {plan.layer_ids.tolist()}, the trace {trace.layer_ids.tolist()}")
    if experts_per_layer is not None:
        slots = np.array(np.broadcast_to(np.asarray(experts_per_layer, np.int64), shape[:1]))
    elif fraction is not None:
        slots = np.full(shape[0], round(parse_share(fraction) * shape[1]), np.int64)
    elif mask is not None:
        slots = mask.sum(axis=1)
    else:
        raise PolicyError("replay needs a number of slots: experts_per_layer, fraction, or a plan")
    if (slots < 0).any() or (slots > shape[1]).any():
        raise PolicyError(f"experts_per_layer {slots.tolist()}: wanted 0 to {shape[1]}")
    hotness, counts = _prior(trace, prior, mask, initial)
    if initial == "empty":
        mask = np.zeros(shape, np.bool_)
    elif mask is None:
        mask = top_per_layer(counts, slots)
    if (mask.sum(axis=1) > slots).any() and not pooled:
        raise PolicyError(f"the plan holds {mask.sum(axis=1).tolist()} experts per layer, more than {slots.tolist()}")
    if isinstance(machine, str):
        machine = Machine.open(machine)
    cost = None
    if machine is not None:
        non_expert = trace.metadata.get("non_expert_bytes")
        if non_expert is None or non_expert_seconds is not None:
            cost = CostModel(machine, on_miss, non_expert_seconds=non_expert_seconds)
        else:
            cost = CostModel(machine, on_miss, non_expert_bytes=int(non_expert))
    return _Job(
        trace,
        policy,
        slots,
        int(slots.sum()) if pooled else None,
        mask,
        hotness,
        machine,
        cost,
        start,
        skip_tokens,
        prefill_chunk,
        prompt_start,
        dict(options or {}),
    )


def _prior(
    trace: Trace, prior: Counts | Trace | None, mask: NDArray[np.bool_] | None, initial: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(activation probability [L, E] to start from, counts [L, E])."""
    shape = (trace.num_layers, trace.num_experts)
    if initial == "empty":
        return np.zeros(shape), np.zeros(shape)
    if prior is None and mask is not None:
        # a plan without its counts says only that its experts are the hotter ones
        held = mask.sum(axis=1, keepdims=True)
        return np.where(mask, trace.top_k / np.maximum(held, trace.top_k), 0.0), mask.astype(np.float64)
    source = trace if prior is None else prior
    counts = (source.counts if isinstance(source, Trace) else source.activation_freq).astype(np.float64)
    if counts.shape != shape:
        raise PolicyError(f"the prior has shape {counts.shape}: this trace wants {shape}")
    busiest = counts.sum(axis=1).max() / trace.top_k
    return counts / max(busiest, 1.0), counts


def _run(job: _Job) -> Replay:
    from hotset.simulation.tally import empty_tally

    trace = job.trace
    num_layers, num_experts, num_tokens = trace.num_layers, trace.num_experts, trace.num_tokens
    sizes = trace.expert_bytes
    expert_bytes = np.ones((num_layers, num_experts), np.int64) if sizes is None else np.array(sizes, np.int64)
    if job.pool_slots is None:
        residency = Residency(num_experts, job.slots, initial_mask=job.mask)
    else:
        residency = Residency.pooled(num_experts, num_layers, job.pool_slots, initial_mask=job.mask)
    counter = _Counter(empty_tally(num_tokens, num_layers), _counted(job), _chunks(job), expert_bytes, num_layers)
    together = job.pool_slots is not None or policy_entry(job.policy).coupled
    first = True
    for segment in trace.sequence_slices() if job.start == "cold" else [slice(0, num_tokens)]:
        if not first:
            residency.restart(job.mask)
        first = False
        future = trace.expert_ids[:, segment]
        setting = Setting(residency, expert_bytes, trace.top_k, job.hotness, job.machine, future)
        policy = make_policy(job.policy, setting, job.options)
        for part, prompt in _parts(job, segment):
            if prompt:
                _start_from_prompt(policy, trace, part, counter)
            elif together:
                _replay_rows(policy, trace, part, counter, 0, num_layers)
            else:
                for row in range(num_layers):
                    _replay_rows(policy, trace, part, counter, row, row + 1)
    return _summary(job, counter)


@dataclass
class _Counter:
    tally: Any
    counted: NDArray[np.bool_]
    chunk: NDArray[np.int64]
    expert_bytes: NDArray[np.int64]
    num_layers: int

    def __post_init__(self) -> None:
        self.read = np.full(self.expert_bytes.shape, -1, np.int64)
        self.missed = np.full(self.num_layers, -1, np.int64)


def _replay_rows(policy: Policy, trace: Trace, part: slice, counter: _Counter, first: int, stop: int) -> None:
    """Serve tokens `part` of rows first..stop, counting block by block."""
    from hotset.simulation.tally import add_block

    for begin in range(part.start, part.stop, _BLOCK_TOKENS):
        ids = np.ascontiguousarray(trace.expert_ids[first:stop, begin : min(begin + _BLOCK_TOKENS, part.stop)])
        served = np.empty(ids.shape, np.uint8)
        loads, load_bytes = np.zeros(ids.shape[:2], np.int32), np.zeros(ids.shape[:2], np.int64)
        policy.replay(first, _writeable(ids), served, loads, load_bytes)
        add_block(
            counter.tally,
            first,
            begin,
            _writeable(ids),
            served,
            loads,
            load_bytes,
            counter.expert_bytes,
            counter.counted,
            counter.chunk,
            counter.read,
            counter.missed,
        )


def _start_from_prompt(policy: Policy, trace: Trace, part: slice, counter: _Counter) -> None:
    """Prefill with the residency as it is, then one rebalance from the prompt's routing."""
    from hotset.adaptation.rebalancer import Rebalancer
    from hotset.simulation.tally import add_block

    assert isinstance(policy, Rebalancer)
    ids = np.ascontiguousarray(trace.expert_ids[:, part])
    table = policy.residency.slot_table()
    rows = np.arange(trace.num_layers)[:, None, None]
    served = np.where(ids < 0, 0, np.where(table[rows, np.maximum(ids, 0)] >= 0, 2, 1)).astype(np.uint8)
    loads, load_bytes = np.zeros(ids.shape[:2], np.int32), np.zeros(ids.shape[:2], np.int64)
    counts = np.zeros(counter.expert_bytes.shape, np.int64)
    for row in range(trace.num_layers):
        counts[row] = np.bincount(ids[row].ravel().astype(np.int64) + 1, minlength=trace.num_experts + 1)[1:]
    policy.start_decode(counts, ids.shape[1])
    for swap in policy.rebalance():
        _, move = policy.residency.begin(swap)
        policy.residency.publish(move)
        loads[swap.row, -1] += 1
        load_bytes[swap.row, -1] += counter.expert_bytes[swap.row, swap.expert]
    add_block(
        counter.tally,
        0,
        part.start,
        _writeable(ids),
        served,
        loads,
        load_bytes,
        counter.expert_bytes,
        counter.counted,
        counter.chunk,
        counter.read,
        counter.missed,
    )


def _writeable(ids: NDArray[np.int16]) -> NDArray[np.int16]:
    """The same ids in an array that numba types alike whether the trace is mapped or in memory."""
    return ids if ids.flags.writeable else ids.copy()


def _parts(job: _Job, segment: slice) -> Iterator[tuple[slice, bool]]:
    """(token range, whether it is a prompt that only informs) in order."""
    if not job.prompt_start:
        yield segment, False
        return
    phase = job.trace.phase[segment]
    starts = np.zeros(len(phase), np.bool_)
    starts[job.trace.sequence_start[_within(job.trace.sequence_start, segment)] - segment.start] = True
    edges = np.flatnonzero(np.diff(phase.astype(np.int8), prepend=-1) != 0)
    cuts = sorted({*edges.tolist(), *np.flatnonzero(starts).tolist(), len(phase)})
    for begin, stop in itertools.pairwise(cuts):
        yield slice(segment.start + begin, segment.start + stop), bool(phase[begin] == PREFILL)


def _within(starts: NDArray[np.int64], segment: slice) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = (starts >= segment.start) & (starts < segment.stop)
    return inside


def _counted(job: _Job) -> NDArray[np.bool_]:
    counted = np.ones(job.trace.num_tokens, np.bool_)
    if job.start == "warm":
        counted[: job.skip] = False
    else:
        for part in job.trace.sequence_slices():
            counted[part.start : min(part.start + job.skip, part.stop)] = False
    if not counted.any():
        raise PolicyError(f"skip_tokens {job.skip} leaves no token of {job.trace.num_tokens} to count")
    return counted


def _chunks(job: _Job) -> NDArray[np.int64]:
    """[T] number of each prefill token's chunk, -1 for decode tokens. A chunk never crosses sequences."""
    trace = job.trace
    chunk = np.full(trace.num_tokens, -1, np.int64)
    number = 0
    for part in trace.sequence_slices():
        tokens = part.start + np.flatnonzero(trace.phase[part] == PREFILL)
        if len(tokens):
            own = np.arange(len(tokens)) // job.prefill_chunk
            chunk[tokens] = number + own
            number += int(own[-1]) + 1
    return chunk


def _summary(job: _Job, counter: _Counter) -> Replay:
    trace, tally, counted = job.trace, counter.tally, counter.counted
    picks, routed = int(tally.picks.sum()), int(tally.routed_rows.sum())
    tokens = int(counted.sum())
    known = trace.expert_bytes is not None
    return Replay(
        policy=job.policy,
        experts_per_layer=job.slots.tolist(),
        pooled=job.pool_slots is not None,
        hit_rate=_ratio(tally.hits.sum(), picks),
        token_resident_rate=_ratio(tally.resident_rows.sum(), routed),
        loads_per_token=_ratio(tally.loads.sum(), tokens),
        load_bytes_per_token=_ratio(tally.load_bytes.sum(), tokens) if known else None,
        seconds=_seconds(job, counter) if known and job.cost is not None else {},
        tokens=tokens,
        hit_rate_per_layer=(tally.row_hits / np.maximum(tally.row_picks, 1)).tolist(),
        domains=_domains(job, counter),
        series=_series(counter),
        settings={
            "start": job.start,
            "skip_tokens": job.skip,
            "prefill_chunk": job.prefill_chunk,
            "prompt_start": job.prompt_start,
            "options": dict(job.options),
            "cost": None if job.cost is None else job.cost.describe(),
        },
    )


def _seconds(job: _Job, counter: _Counter) -> dict[str, dict[str, float]]:
    tally, phase = counter.tally, job.trace.phase
    assert job.cost is not None
    found = {}
    for name, value in (("prefill", PREFILL), ("decode", DECODE)):
        these = counter.counted & (phase == value)
        if not these.any():
            continue
        if value == DECODE:
            units, count = np.flatnonzero(these), None
        else:
            # whole chunks are priced, then shared out among their tokens
            numbers, units = np.unique(counter.chunk[these], return_inverse=True)
            count = len(numbers)

        def per_unit(sums: NDArray[Any], units: Any = units, these: Any = these, count: Any = count) -> NDArray[Any]:
            return sums[units] if count is None else np.bincount(units, weights=sums[these], minlength=count)

        parts = job.cost.parts(
            hits=per_unit(tally.hit_reads),
            hit_bytes=per_unit(tally.hit_bytes),
            misses=per_unit(tally.miss_reads),
            miss_bytes=per_unit(tally.miss_bytes),
            round_trips=per_unit(tally.round_trips),
            load_bytes=per_unit(tally.load_bytes),
        )
        per_token = np.size(parts.total) / int(these.sum())
        found[name] = {part: seconds * per_token for part, seconds in parts.mean().items()}
    return found


def _domains(job: _Job, counter: _Counter) -> dict[str, dict[str, float]]:
    source = job.trace.metadata.get("sequence_source")
    if not isinstance(source, list) or len(source) != job.trace.num_sequences:
        return {}
    names = sorted(set(source))
    index = {name: i for i, name in enumerate(names)}
    domain = np.array([index[name] for name in source])[job.trace.sequence_of_token]
    tally, found = counter.tally, {}
    for i, name in enumerate(names):
        these = (domain == i) & counter.counted
        if these.any():
            found[str(name)] = {
                "tokens": int(these.sum()),
                "hit_rate": _ratio(tally.hits[these].sum(), tally.picks[these].sum()),
                "token_resident_rate": _ratio(tally.resident_rows[these].sum(), tally.routed_rows[these].sum()),
                "loads_per_token": _ratio(tally.loads[these].sum(), these.sum()),
            }
    return found


def _series(counter: _Counter) -> dict[str, list[float]]:
    tokens = np.flatnonzero(counter.counted)
    stretches = [s for s in np.array_split(tokens, min(SERIES_POINTS, len(tokens))) if len(s)]
    tally = counter.tally
    return {
        "token": [int(s[-1]) + 1 for s in stretches],
        "hit_rate": [_ratio(tally.hits[s].sum(), tally.picks[s].sum()) for s in stretches],
        "loads_per_token": [_ratio(tally.loads[s].sum(), len(s)) for s in stretches],
    }


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
