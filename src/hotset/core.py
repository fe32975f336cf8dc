"""The nouns: Trace, Counts, Plan, Machine, Move. Frozen dataclasses over NumPy arrays that import nobody.

Axis letters, here and everywhere: L MoE layers, E experts, K top-k, T tokens, S slots, N sequences (documents),
H hidden, F expert intermediate. Row l of every [L, ...] array is MoE layer number `layer_ids[l]` of the model: dense
layers have no row.

Arrays handed to these classes are not copied where they need no conversion and must not be changed afterwards.
`Trace.open`, `Trace.save`, `Plan.open` and so on hand over to `hotset.traces.format`, `hotset.planning.format` and
`hotset.machines.format` when called: the only places where this module looks upwards.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.errors import PlanError, TraceError

PREFILL = 0
DECODE = 1

MAX_EXPERTS = np.iinfo(np.int16).max

_BLOCK_TOKENS = 16_384
"""Tokens a pass over a trace looks at together: small enough for the cache, large enough for vector code."""


class Tier(enum.StrEnum):
    """Where an expert's bytes live."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded routing of one model over some sequences.

    Build one with `Trace.from_arrays` or `Trace.open`; both validate. Fields hold the shards as recorded; use
    `expert_ids`, `layer(l)` and `layer_weights(l)` to read them.
    """

    id_shards: tuple[NDArray[np.int16], ...]
    """Each [L, t, K] expert ids, -1 = no pick (padding, or a token the layer did not route); t sums to T."""
    num_experts: int
    sequence_start: NDArray[np.int64]
    """[N] offset of each sequence's first token, ascending, the first 0."""
    phase: NDArray[np.uint8]
    """[T] 0 prefill, 1 decode."""
    layer_ids: NDArray[np.int32]
    """[L] the model's own number of each row."""
    weight_shards: tuple[NDArray[np.float16], ...] | None = None
    """Each [L, t, K] gate mass as the model used it, or None."""
    expert_bytes: NDArray[np.int64] | None = None
    """[L, E] bytes of each expert as the model stores it, or None."""
    token_ids: NDArray[np.int32] | None = None
    """[T] the tokens themselves, only where the user asked to keep them."""
    model_fingerprint: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free, JSON-able. Known keys: model, model_type, non_expert_bytes, kv_bytes_per_token, sequence_source [N]."""

    @staticmethod
    def from_arrays(
        expert_ids: ArrayLike,
        *,
        num_experts: int,
        sequence_start: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        phase: ArrayLike | None = None,
        layer_ids: ArrayLike | None = None,
        expert_bytes: ArrayLike | None = None,
        token_ids: ArrayLike | None = None,
        model_fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trace:
        """A validated trace from arrays.

        expert_ids: [L, T, K] integers in [-1, num_experts), no id twice in one token's picks.
        sequence_start: [N] first token of each sequence, or [N + 1] with T at the end; default one sequence.
        weights: [L, T, K] gate mass, or None. phase: [T] 0 or 1, default prefill. layer_ids: [L], default 0..L-1.
        expert_bytes: [L, E], [E] or one number, or None. token_ids: [T] or None.

        Raises TraceError: what is wrong, where, what was wanted.
        """
        ids = _as_integer_array("expert_ids", expert_ids, 3, "[L, T, K]")
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts is {num_experts}: wanted 1 to {MAX_EXPERTS}")
        num_layers, num_tokens, top_k = ids.shape
        if ids.dtype != np.int16 and ids.size:
            _check_id_range(int(ids.min()), int(ids.max()), num_experts)
        mass = None
        if weights is not None:
            mass = np.asarray(weights)
            if mass.shape != ids.shape:
                raise TraceError(f"weights have shape {mass.shape}: wanted that of expert_ids, {ids.shape}")
            mass = mass.astype(np.float16, copy=False)
        starts = (
            np.zeros(min(1, num_tokens), np.int64)
            if sequence_start is None
            else _as_integer_array("sequence_start", sequence_start, 1, "[N]").astype(np.int64)
        )
        if len(starts) and starts[-1] == num_tokens:
            starts = starts[:-1]
        trace = Trace(
            id_shards=(ids.astype(np.int16, copy=False),),
            num_experts=int(num_experts),
            sequence_start=starts,
            phase=np.zeros(num_tokens, np.uint8)
            if phase is None
            else _as_integer_array("phase", phase, 1, "[T]").astype(np.uint8),
            layer_ids=np.arange(num_layers, dtype=np.int32)
            if layer_ids is None
            else _as_integer_array("layer_ids", layer_ids, 1, "[L]").astype(np.int32),
            weight_shards=None if mass is None else (mass,),
            expert_bytes=as_expert_bytes(expert_bytes, num_layers, num_experts),
            token_ids=None
            if token_ids is None
            else _as_integer_array("token_ids", token_ids, 1, "[T]").astype(np.int32),
            model_fingerprint=model_fingerprint,
            metadata=dict(metadata or {}),
        )
        trace.validate()
        if top_k > num_experts:
            raise TraceError(f"top-k is {top_k} but the layer has only {num_experts} experts")
        return trace

    @staticmethod
    def open(path: str | Path) -> Trace:
        """Read a trace file or folder, memory-mapped. Raises TraceError, each fault with its own message."""
        from hotset.traces.format import open_trace

        return open_trace(path)

    def save(self, path: str | Path) -> None:
        """Write to `path` (one .safetensors file), by way of a temporary name."""
        from hotset.traces.format import save_trace

        save_trace(self, path)

    # -- shape ---------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.phase)

    @property
    def top_k(self) -> int:
        return int(self.id_shards[0].shape[2]) if self.id_shards else 0

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_start)

    @cached_property
    def expert_ids(self) -> NDArray[np.int16]:
        """[L, T, K]. Of several shards this makes one array in memory: prefer `layer` for large traces."""
        if len(self.id_shards) == 1:
            return self.id_shards[0]
        return np.concatenate(self.id_shards, axis=1)

    @cached_property
    def weights(self) -> NDArray[np.float16] | None:
        """[L, T, K] gate mass, or None."""
        if self.weight_shards is None or len(self.weight_shards) == 1:
            return None if self.weight_shards is None else self.weight_shards[0]
        return np.concatenate(self.weight_shards, axis=1)

    def layer(self, row: int) -> NDArray[np.int16]:
        """[T, K] expert ids of one row, contiguous; a view where the trace has one shard."""
        if len(self.id_shards) == 1:
            return np.ascontiguousarray(self.id_shards[0][row])
        return np.concatenate([shard[row] for shard in self.id_shards])

    def layer_weights(self, row: int) -> NDArray[np.float16] | None:
        """[T, K] gate mass of one row, or None."""
        if self.weight_shards is None:
            return None
        if len(self.weight_shards) == 1:
            return np.ascontiguousarray(self.weight_shards[0][row])
        return np.concatenate([shard[row] for shard in self.weight_shards])

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[L, E] times each expert was picked."""
        counts = np.zeros((self.num_layers, self.num_experts), np.int64)
        for shard in self.id_shards:
            for row in range(self.num_layers):
                for start in range(0, shard.shape[1], _BLOCK_TOKENS):
                    block = shard[row, start : start + _BLOCK_TOKENS].ravel()
                    counts[row] += np.bincount(block.astype(np.int64) + 1, minlength=self.num_experts + 1)[1:]
        return counts

    def to_counts(self) -> Counts:
        """The same as activation counts: what is left when tokens are forgotten."""
        return Counts(
            activation_freq=self.counts,
            layer_ids=self.layer_ids,
            expert_bytes=self.expert_bytes,
            model_fingerprint=self.model_fingerprint,
            metadata=self.metadata,
        )

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell two recordings apart (ids, sequence offsets and phases; not weights)."""
        digest = hashlib.sha256(f"{self.num_layers} {self.num_experts} {self.num_tokens} {self.top_k}".encode())
        for row in range(self.num_layers):
            for shard in self.id_shards:
                digest.update(np.ascontiguousarray(shard[row]).data)
        digest.update(self.sequence_start.tobytes())
        digest.update(self.phase.tobytes())
        return digest.hexdigest()[:16]

    # -- sequences -----------------------------------------------------------------------------------------

    @property
    def sequence_stop(self) -> NDArray[np.int64]:
        """[N] offset just after each sequence's last token."""
        return np.append(self.sequence_start[1:], self.num_tokens).astype(np.int64)

    def sequence_slices(self) -> Iterator[slice]:
        """Token ranges of the sequences, in order."""
        for start, stop in zip(self.sequence_start, self.sequence_stop, strict=True):
            yield slice(int(start), int(stop))

    @cached_property
    def sequence_of_token(self) -> NDArray[np.int32]:
        """[T] index of the sequence that each token belongs to."""
        lengths = self.sequence_stop - self.sequence_start
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), lengths)

    def select_sequences(self, sequences: ArrayLike) -> Trace:
        """The trace of the given sequences, in the given order. Raises TraceError on an index that is not there."""
        chosen = np.atleast_1d(np.asarray(sequences, np.int64))
        if len(chosen) == 0:
            raise TraceError("no sequence selected: a trace needs at least one")
        if chosen.min() < 0 or chosen.max() >= self.num_sequences:
            raise TraceError(
                f"sequence {int(chosen.max() if chosen.max() >= self.num_sequences else chosen.min())} is not in "
                f"this trace, which has {self.num_sequences}"
            )
        starts, stops = self.sequence_start[chosen], self.sequence_stop[chosen]
        lengths = stops - starts
        new_starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        tokens = np.arange(int(lengths.sum())) + np.repeat(starts - new_starts, lengths)
        metadata = dict(self.metadata)
        source = metadata.get("sequence_source")
        if isinstance(source, Sequence) and len(source) == self.num_sequences:
            metadata["sequence_source"] = [source[int(i)] for i in chosen]
        return replace(
            self,
            id_shards=(np.stack([self.layer(row)[tokens] for row in range(self.num_layers)]),),
            weight_shards=None
            if self.weight_shards is None
            else (np.stack([w[tokens] for w in map(self.layer_weights, range(self.num_layers)) if w is not None]),),
            sequence_start=new_starts,
            phase=self.phase[tokens],
            token_ids=None if self.token_ids is None else self.token_ids[tokens],
            metadata=metadata,
        )

    def split(self, holdout: float = 1 / 3, seed: int = 0) -> tuple[Trace, Trace]:
        """(planning part, held-out part), split by whole sequences, never by token.

        The sequences are shuffled by `numpy.random.default_rng(seed)`; the last `round(N * holdout)` of them, at
        least one, are held out. Raises TraceError where there are fewer than two sequences.
        """
        if not 0.0 < holdout < 1.0:
            raise TraceError(f"holdout is {holdout}: wanted a share strictly between 0 and 1")
        if self.num_sequences < 2:
            raise TraceError("the trace has one sequence, so nothing can be held out by document: record more")
        order = np.random.default_rng(seed).permutation(self.num_sequences)
        held = min(max(1, round(self.num_sequences * holdout)), self.num_sequences - 1)
        return self.select_sequences(np.sort(order[:-held])), self.select_sequences(np.sort(order[-held:]))

    # -- checks --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise TraceError unless everything holds that the fields' descriptions say."""
        num_layers, num_tokens = self.num_layers, self.num_tokens
        if num_layers == 0 or num_tokens == 0 or self.top_k == 0:
            raise TraceError(
                f"the trace is empty ({num_layers} layers, {num_tokens} tokens, top-{self.top_k}): "
                "record at least one token of one MoE layer"
            )
        if len(np.unique(self.layer_ids)) != num_layers or (self.layer_ids < 0).any():
            raise TraceError(f"layer_ids {self.layer_ids.tolist()} repeat or are negative: wanted distinct layers")
        if sum(shard.shape[1] for shard in self.id_shards) != num_tokens:
            raise TraceError(f"expert_ids and phase disagree: phase has {num_tokens} tokens")
        for shard in self.id_shards:
            if shard.ndim != 3 or shard.shape[0] != num_layers or shard.shape[2] != self.top_k:
                raise TraceError(f"expert_ids have shape {shard.shape}: wanted [{num_layers}, T, {self.top_k}]")
        if self.weight_shards is not None and [w.shape for w in self.weight_shards] != [
            s.shape for s in self.id_shards
        ]:
            raise TraceError("weights and expert_ids disagree in shape")
        starts = self.sequence_start
        if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= num_tokens:
            raise TraceError(
                f"sequence_start must ascend strictly from 0 and end below T = {num_tokens}: got {_short(starts)}"
            )
        if len(self.phase) and self.phase.max() > DECODE:
            raise TraceError(f"phase has the value {int(self.phase.max())}: wanted 0 (prefill) or 1 (decode)")
        if self.token_ids is not None and len(self.token_ids) != num_tokens:
            raise TraceError(f"token_ids has {len(self.token_ids)} entries: wanted one per token, {num_tokens}")
        self._validate_ids()

    def _validate_ids(self) -> None:
        for shard_start, shard in self._shards_with_offset():
            for row in range(self.num_layers):
                for start in range(0, shard.shape[1], _BLOCK_TOKENS):
                    # [K, t]: comparing columns this way is a handful of vector passes per block
                    block = np.ascontiguousarray(shard[row, start : start + _BLOCK_TOKENS].T)
                    _check_id_range(
                        int(block.min()),
                        int(block.max()),
                        self.num_experts,
                        f" in layer {self.layer_ids[row]}",
                    )
                    for k in range(1, self.top_k):
                        same = (block[:k] == block[k]) & (block[k] >= 0)
                        if same.any():
                            token = int(np.argmax(same.any(axis=0)))
                            raise TraceError(
                                f"token {shard_start + start + token} of layer {self.layer_ids[row]} picks expert "
                                f"{int(block[k, token])} twice: wanted K different experts (-1 for no pick)"
                            )

    def _shards_with_offset(self) -> Iterator[tuple[int, NDArray[np.int16]]]:
        start = 0
        for shard in self.id_shards:
            yield start, shard
            start += shard.shape[1]


@dataclass(frozen=True, eq=False)
class Counts:
    """Activation counts where tokens are not known (a statistics dump, an importance matrix)."""

    activation_freq: NDArray[np.int64] | NDArray[np.float64]
    """[L, E] times (or smoothed times) each expert was picked, finite, not negative."""
    layer_ids: NDArray[np.int32]
    expert_bytes: NDArray[np.int64] | None = None
    model_fingerprint: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_array(
        activation_freq: ArrayLike,
        *,
        layer_ids: ArrayLike | None = None,
        expert_bytes: ArrayLike | None = None,
        model_fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Counts:
        """Validated counts. Raises TraceError on a wrong rank, NaN, infinity or a negative count."""
        freq = np.asarray(activation_freq)
        if freq.ndim != 2 or freq.size == 0:
            raise TraceError(f"activation_freq has shape {freq.shape}: wanted [L, E], neither of them 0")
        if freq.dtype.kind not in "iuf":
            raise TraceError(f"activation_freq has dtype {freq.dtype}: wanted integers or floats")
        freq = freq.astype(np.float64 if freq.dtype.kind == "f" else np.int64, copy=False)
        if not np.isfinite(freq).all():
            row, expert = map(int, np.argwhere(~np.isfinite(freq))[0])
            raise TraceError(f"activation_freq[{row}, {expert}] is {freq[row, expert]}: wanted a finite count")
        if (freq < 0).any():
            row, expert = map(int, np.argwhere(freq < 0)[0])
            raise TraceError(f"activation_freq[{row}, {expert}] is {freq[row, expert]}: a count is never negative")
        num_layers, num_experts = freq.shape
        numbers = np.arange(num_layers, dtype=np.int32)
        if layer_ids is not None:
            numbers = _as_integer_array("layer_ids", layer_ids, 1, "[L]").astype(np.int32)
            if len(numbers) != num_layers or len(np.unique(numbers)) != num_layers:
                raise TraceError(f"layer_ids {numbers.tolist()} do not name {num_layers} distinct layers")
        return Counts(
            activation_freq=freq,
            layer_ids=numbers,
            expert_bytes=as_expert_bytes(expert_bytes, num_layers, num_experts),
            model_fingerprint=model_fingerprint,
            metadata=dict(metadata or {}),
        )

    @property
    def num_layers(self) -> int:
        return int(self.activation_freq.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.activation_freq.shape[1])


@dataclass(frozen=True, eq=False)
class Plan:
    """Which experts live in GPU memory, and how good that is known to be."""

    gpu_experts_mask: NDArray[np.bool_]
    """[L, E] True = in GPU memory."""
    layer_ids: NDArray[np.int32]
    strategy: str
    objective: str
    """What `score` counts, e.g. "hit-rate" (picks) or "whole-token" (fully resident (token, layer) pairs)."""
    budget: Mapping[str, Any]
    """The budget as asked for and as resolved: {"asked": "...", "experts": int | None, "bytes": int | None}."""
    score: float
    bound: float | None = None
    """Proven upper bound on `score` for any plan within the budget on the same trace, or None."""
    trace_fingerprint: str | None = None
    model_fingerprint: str | None = None
    expert_bytes: NDArray[np.int64] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able measurements and notes; `report["notes"]` is a list of sentences for the user."""

    def __post_init__(self) -> None:
        mask = self.gpu_experts_mask
        if mask.ndim != 2 or mask.dtype != np.bool_:
            raise PlanError(f"gpu_experts_mask is {mask.dtype} {mask.shape}: wanted bool [L, E]")
        if len(self.layer_ids) != mask.shape[0]:
            raise PlanError(f"plan has {mask.shape[0]} rows but {len(self.layer_ids)} layer_ids")
        if self.expert_bytes is not None and self.expert_bytes.shape != mask.shape:
            raise PlanError(f"expert_bytes have shape {self.expert_bytes.shape}: wanted the mask's {mask.shape}")

    @staticmethod
    def open(path: str | Path) -> Plan:
        """Read a plan file. Raises PlanError."""
        from hotset.planning.format import open_plan

        return open_plan(path)

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, by way of a temporary name."""
        from hotset.planning.format import save_plan

        save_plan(self, path)

    @property
    def gap(self) -> float | None:
        """1 - score / bound: at most this share of the optimum is missing. None where no bound is proven."""
        if self.bound is None:
            return None
        return 0.0 if self.bound <= 0 else max(0.0, 1.0 - self.score / self.bound)

    @property
    def num_layers(self) -> int:
        return int(self.gpu_experts_mask.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.gpu_experts_mask.shape[1])

    @property
    def num_gpu_experts(self) -> int:
        return int(self.gpu_experts_mask.sum())

    @property
    def gpu_bytes(self) -> int | None:
        """Bytes of the resident experts, or None where sizes are unknown."""
        return None if self.expert_bytes is None else int(self.expert_bytes[self.gpu_experts_mask].sum())


@dataclass(frozen=True)
class Machine:
    """What moving and computing costs here. Bandwidths in bytes per second, fixed costs in seconds, sizes in bytes.

    Measured by `hotset probe`, or a preset from data sheets; `source` says which. A rate that does not exist here
    (a link without a GPU) is None.
    """

    name: str
    source: str
    device: Literal["cuda", "cpu"]
    """Where the arena is: "cpu" = a second arena in host memory, on a machine without a GPU."""
    host_read_bytes_per_second: float
    host_threads: int
    gpu_read_bytes_per_second: float | None
    host_to_device_bytes_per_second: float | None
    device_to_host_bytes_per_second: float | None
    disk_read_bytes_per_second: float | None
    round_trip_seconds: float
    """Fixed cost of leaving the GPU for the host and coming back, once per layer with at least one miss."""
    launch_seconds: float
    """Fixed cost of starting one expert's computation."""
    host_memory_bytes: int
    gpu_memory_bytes: int | None
    host_flops_per_second: float | None = None
    """Of the compiled kernels on bfloat16 experts at 32 rows each, a multiply-add being two: long chunks are bound by
    arithmetic. None where nobody measured it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Spread of the measurements, kernel crossovers, sources of preset figures; JSON-able."""

    @staticmethod
    def open(path: str | Path) -> Machine:
        """Read a machine JSON file, or take a preset by name. Raises MachineError."""
        from hotset.machines.format import open_machine

        return open_machine(path)

    def save(self, path: str | Path) -> None:
        """Write JSON, by way of a temporary name."""
        from hotset.machines.format import save_machine

        save_machine(self, path)


@dataclass(frozen=True)
class Move:
    """One expert changes tier. `row` is the trace's row, not the model's layer number."""

    row: int
    expert: int
    source: Tier
    target: Tier
    slot: int = -1
    """Arena slot that is filled (towards the GPU) or freed (away from it)."""


def as_expert_bytes(expert_bytes: ArrayLike | None, num_layers: int, num_experts: int) -> NDArray[np.int64] | None:
    """[L, E] bytes from one number, [E] or [L, E]; None stays None. Raises TraceError on a size of 0 or less."""
    if expert_bytes is None:
        return None
    sizes = np.asarray(expert_bytes)
    if sizes.dtype.kind not in "iu":
        raise TraceError(f"expert_bytes has dtype {sizes.dtype}: wanted whole bytes")
    if sizes.shape not in ((), (num_experts,), (num_layers, num_experts)):
        raise TraceError(
            f"expert_bytes has shape {sizes.shape}: wanted [{num_layers}, {num_experts}], [{num_experts}] or a number"
        )
    if (sizes <= 0).any():
        raise TraceError("expert_bytes has a size of 0 or below: every expert takes space")
    return np.array(np.broadcast_to(sizes, (num_layers, num_experts)), np.int64)


def _as_integer_array(name: str, value: ArrayLike, ndim: int, shape: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise TraceError(f"{name} is ragged: wanted a rectangular array {shape}") from None
    if array.ndim != ndim:
        raise TraceError(f"{name} has shape {array.shape}: wanted {shape}")
    if array.dtype.kind not in "iu":
        raise TraceError(f"{name} has dtype {array.dtype}: wanted integers")
    return array


def _check_id_range(low: int, high: int, num_experts: int, where: str = "") -> None:
    if low < -1 or high >= num_experts:
        bad = low if low < -1 else high
        raise TraceError(f"expert id {bad}{where} is out of range: wanted 0 to {num_experts - 1}, or -1 for no pick")


def _short(values: NDArray[np.int64]) -> str:
    return str(values.tolist() if len(values) <= 8 else [*values[:4].tolist(), "...", *values[-2:].tolist()])
