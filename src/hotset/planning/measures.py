"""How a placement fares on tokens: hit rate, token-resident rate, co-activation. Blocks of bounded memory.

Knows nothing of plans' budgets or objectives. A pick of -1 (padding, a token the layer did not route) counts nowhere;
a (token, layer) pair without any pick is neither resident nor missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.core import Plan, Trace
from hotset.errors import PlanError, TraceError
from hotset.planning.threads import on_threads

_BLOCK_TOKENS = 1 << 18
"""Tokens whose co-activations one thread counts together."""

_COUNTED_TOKENS = 1 << 20
"""Tokens whose hits one thread counts together: less than threads cost is not worth sharing, and sums fit 32 bits."""

Traces = Trace | Sequence[Trace] | ArrayLike


@dataclass(frozen=True)
class Measured:
    """Counts over some tokens, each [L]."""

    picks: NDArray[np.int64]
    hits: NDArray[np.int64]
    routed: NDArray[np.int64]
    """(token, layer) pairs with at least one pick."""
    resident: NDArray[np.int64]
    """... all of whose picks hit."""

    @property
    def hit_rate(self) -> float:
        return _share(self.hits, self.picks)

    @property
    def token_resident_rate(self) -> float:
        return _share(self.resident, self.routed)

    def misses_per_token(self, num_tokens: int) -> float:
        """Misses of one token summed over the layers."""
        return float((self.picks - self.hits).sum() / num_tokens) if num_tokens else 0.0

    def score(self, hit_value: float, resident_value: float) -> float:
        return float(hit_value * int(self.hits.sum()) + resident_value * int(self.resident.sum()))


def gpu_hit_rate(mask: ArrayLike | Plan, traces: Traces) -> float:
    """Share of picks whose expert is resident, over all layers and tokens.

    mask: [L, E] bool, or a Plan. traces: a Trace, several, or ids [L, T, K] (torch tensors too).
    Raises PlanError where mask and trace differ in shape, TraceError on ids that a trace would refuse.
    """
    return measure(mask, traces).hit_rate


def token_resident_rate(mask: ArrayLike | Plan, traces: Traces) -> float:
    """Share of (token, layer) pairs all of whose picks are resident: those that pay no round trip to the host.

    Arguments and errors as `gpu_hit_rate`.
    """
    return measure(mask, traces).token_resident_rate


def measure(mask: ArrayLike | Plan, traces: Traces) -> Measured:
    """Picks, hits, routed and resident pairs per layer."""
    from hotset.planning.loops import count_hits, frozen, pick_table

    resident = as_mask(mask)
    totals = np.zeros((4, resident.shape[0]), np.int64)
    tables = [pick_table(row) for row in resident]
    blocks: list[tuple[int, NDArray[np.int16]]] = []
    for trace in as_traces(traces, resident.shape[1]):
        if (trace.num_layers, trace.num_experts) != resident.shape:
            raise PlanError(
                f"mask has shape {resident.shape}, the trace {trace.num_layers} layers of {trace.num_experts} experts"
            )
        for shard in trace.id_shards:
            for start in range(0, shard.shape[1], _COUNTED_TOKENS):
                blocks += [(row, layer[start : start + _COUNTED_TOKENS]) for row, layer in enumerate(shard)]

    def count(block: tuple[int, NDArray[np.int16]]) -> tuple[int, int, int, int]:
        row, ids = block
        both, routed, whole = count_hits(ids.shape[1])(frozen(ids).view(np.uint16), tables[row])
        return int(both) & 0xFFFFFFFF, int(both) >> 32, routed, whole

    for (row, _), counted in zip(blocks, on_threads(count, blocks), strict=True):
        totals[:, row] += counted
    return Measured(*totals)


def build_coactivation_matrix(traces: Traces, num_experts: int | None = None) -> Any:
    """[L, E, E] int64: tokens in which two experts of a layer fire together; an expert's own picks on the diagonal.

    traces: a Trace or several of one shape, or ids [L, T, K]; of ids [T, K] the result is [E, E], as kt-kernel's users
    know it. num_experts: E, needed where ids are given as an array. torch in gives torch out.
    Raises TraceError as a trace would, and where num_experts is missing or differs.
    """
    if isinstance(traces, Trace):
        several = [traces]
    elif isinstance(traces, Sequence) and traces and all(isinstance(t, Trace) for t in traces):
        several = [t for t in traces if isinstance(t, Trace)]
    else:
        if num_experts is None:
            raise TraceError("num_experts is missing: ids alone do not say how many experts a layer has")
        ids = to_numpy(traces)
        one_layer = ids.ndim == 2
        trace = Trace.from_arrays(ids[None] if one_layer else ids, num_experts=num_experts)
        together = build_coactivation_matrix(trace)
        together = together[0] if one_layer else together
        if is_torch(traces):
            import torch

            return torch.from_numpy(together)
        return together
    experts, num_layers = several[0].num_experts, several[0].num_layers
    for trace in several:
        if trace.num_experts != experts or trace.num_layers != num_layers or num_experts not in (None, experts):
            raise TraceError(
                f"co-activation of {num_layers} layers of {num_experts or experts} experts was asked for, a trace has "
                f"{trace.num_layers} of {trace.num_experts}"
            )
    return np.stack([sum(layer_coactivation(trace, row) for trace in several) for row in range(num_layers)])


def layer_coactivation(trace: Trace, row: int) -> NDArray[np.int64]:
    """[E, E] the same of one layer."""
    from hotset.planning.loops import coactivation, frozen

    blocks = [s[row, i : i + _BLOCK_TOKENS] for s in trace.id_shards for i in range(0, s.shape[1], _BLOCK_TOKENS)]

    def count(block: NDArray[np.int16]) -> NDArray[np.int64]:
        together = np.zeros((trace.num_experts, trace.num_experts), np.int64)
        coactivation(frozen(block), together)
        return together

    together = np.sum(on_threads(count, blocks), axis=0)
    # pairs were counted once, in the order in which they were picked
    symmetric: NDArray[np.int64] = together + together.T
    np.fill_diagonal(symmetric, np.diagonal(together))
    return symmetric


def as_mask(mask: ArrayLike | Plan) -> NDArray[np.bool_]:
    """[L, E] bool from a Plan, an array or a torch tensor. Raises PlanError."""
    table = mask.gpu_experts_mask if isinstance(mask, Plan) else to_numpy(mask)
    if table.ndim != 2 or table.dtype != np.bool_:
        raise PlanError(f"mask is {table.dtype} {table.shape}: wanted bool [L, E]")
    return np.asarray(table, np.bool_)


def as_traces(traces: Traces, num_experts: int) -> Iterator[Trace]:
    """Each trace of what a user passed. Raises TraceError where there is none."""
    if isinstance(traces, Trace):
        yield traces
        return
    several = list(traces) if isinstance(traces, Sequence) else []
    if isinstance(traces, Sequence) and not several:
        raise TraceError("no trace given: wanted at least one")
    if several and all(isinstance(t, Trace) for t in several):
        for trace in several:
            assert isinstance(trace, Trace)
            yield trace
    else:
        yield Trace.from_arrays(to_numpy(traces) if is_torch(traces) else traces, num_experts=num_experts)  # type: ignore[arg-type]


def is_torch(value: Any) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    return type(value).__module__.split(".")[0] == "torch"


def to_numpy(value: Any) -> NDArray[Any]:
    """A NumPy array of an array-like or of a torch tensor on any device."""
    if is_torch(value):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        array: NDArray[Any] = tensor.numpy()
        return array
    return np.asarray(value)


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0
