"""One layer's experts on the host, and the one contract by which they are computed.

Knows: what a call looks like (shapes, types, refusals), which experts are present, and the compiled implementation.
Does not know: residency policy, where bytes come from, models. Other implementations (`torch_layer.py`) subclass
`ExpertLayer`.
"""

from __future__ import annotations

import abc
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.errors import ExpertNotOnHost, OpsError
from hotset.kernels import native
from hotset.kernels.formats import (
    FORMATS,
    NUMBERS,
    Buffer,
    ExpertWeights,
    Floats,
    LayerSpec,
    as_array,
    as_buffer,
    checked_weights,
    is_torch,
    numbers_to_float,
)

_NEVER_LOADED = "none was loaded"
_REAL = ("fp32", "fp16", "bf16")
_ID_BYTES = {"int64": 8, "int32": 4, "int16": 2}


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Checked arguments of a call: tokens [T, H], ids [T, K], weights [T, K] (None: the picks' own rows are wanted)."""

    tokens: Buffer
    ids: Buffer
    weights: Buffer | None
    threads: int


class ExpertLayer(abc.ABC):
    """The routed experts of one layer, some of them perhaps absent.

    `moe` computes; `put`, `drop`, `unpack` move experts in and out while other threads compute: a call sees the experts
    that were there when it began, and their bytes stay alive until it ends.
    """

    def __init__(self, spec: LayerSpec, layer: int = 0) -> None:
        self.spec = spec
        self.layer = layer
        """The model's own number of this layer, for messages."""
        self._why: dict[int, str] = {}
        self._change = threading.Lock()

    # -- experts ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def has(self, expert: int) -> bool:
        """Whether this expert can be computed here."""

    @abc.abstractmethod
    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Checks and takes a copy of an expert, replacing one that was there.

        Raises OpsError: shapes or types that the spec does not say, scales that are NaN or infinite, NaN among FP8
        weights.
        """

    @abc.abstractmethod
    def unpack(self, expert: int) -> ExpertWeights:
        """The expert as it was put, byte for byte: NumPy arrays of the shapes in `ExpertWeights`, transposed ones
        transposed again.

        Raises ExpertNotOnHost.
        """

    @abc.abstractmethod
    def _take(self, expert: int) -> None:
        """Forgets an expert that is present."""

    def drop(self, expert: int, why: str) -> None:
        """Forgets an expert's bytes; `why` ("lives in GPU slot 3") goes into the error of who asks for it. Raises
        ExpertNotOnHost if absent."""
        with self._change:
            self._require(expert)
            self._why[expert] = why
            self._take(expert)

    @property
    def experts(self) -> list[int]:
        """Those present, ascending."""
        return [e for e in range(self.spec.num_experts) if self.has(e)]

    def _require(self, expert: int) -> None:
        self._require_known(expert)
        if not self.has(expert):
            raise self._absent(expert)

    def _require_known(self, expert: int) -> None:
        if not 0 <= expert < self.spec.num_experts:
            raise OpsError(f"layer {self.layer} has no expert {expert}: wanted 0 to {self.spec.num_experts - 1}")

    def _absent(self, expert: int) -> ExpertNotOnHost:
        return ExpertNotOnHost(self.layer, expert, self._why.get(expert, _NEVER_LOADED))

    # -- computing -------------------------------------------------------------------------------------------------

    def moe(self, tokens: Any, ids: Any, weights: Any, *, out: Any = None, threads: int | None = None) -> Any:
        """The layer's output: [T, H] sum over each token's picks, in the router's order, of weight times expert(token).

        tokens: [T, H] float32, float16 or bfloat16 (np.uint16 bits, or a torch tensor). ids: [T, K] int64, int32 or
        int16; -1 and num_experts are no pick and add nothing. weights: [T, K] float32, float16 or bfloat16. out: [T, H]
        in the tokens' type, contiguous, written and returned; default a new one. A torch tensor in gives a torch tensor
        out. threads: default `available_threads()`. Sums are float32; only the result is rounded to the tokens' type.

        Raises OpsError for wrong arguments, ExpertNotOnHost where a pick's expert is absent (nothing is computed then).
        """
        call = self._checked(tokens, ids, weights, threads)
        result = _empty_like(tokens, call.tokens.shape) if out is None else out
        rows = as_buffer("out", result)
        if rows.shape != call.tokens.shape or rows.kind != call.tokens.kind or not _is_writeable(result):
            wanted = f"{call.tokens.kind} {list(call.tokens.shape)}, contiguous and writeable"
            raise OpsError(f"out is {rows.kind} {list(rows.shape)}: wanted {wanted}")
        self._run(call, rows)
        return result

    def picks(self, tokens: Any, ids: Any, *, threads: int | None = None) -> Any:
        """Each pick's own output, unweighted: [T, K, H] float32, zero where there is no pick. Arguments and errors as
        for `moe`.

        For whoever combines picks of several tiers in one order.
        """
        call = self._checked(tokens, ids, None, threads)
        rows = _empty_like(tokens, (*call.ids.shape, self.spec.hidden), "float32")
        self._run(call, as_buffer("picks", rows))
        return rows

    @abc.abstractmethod
    def _run(self, call: Call, out: Buffer) -> None:
        """Fills `out`: [T, H] in the tokens' type, or [T, K, H] float32 where the call has no weights. Raises as `moe`
        does."""

    def _checked(self, tokens: Any, ids: Any, weights: Any, threads: int | None) -> Call:
        rows = as_buffer("tokens", tokens)
        if rows.kind not in _REAL or len(rows.shape) != 2 or rows.shape[1] != self.spec.hidden:
            wanted = f"fp32, fp16 or bf16 [T, {self.spec.hidden}]"
            raise OpsError(f"tokens of layer {self.layer} are {rows.kind} {list(rows.shape)}: wanted {wanted}")
        picks = as_buffer("ids", ids)
        if picks.kind not in ("int64", "int32", "int16") or len(picks.shape) != 2 or picks.shape[0] != rows.shape[0]:
            raise OpsError(
                f"ids are {picks.kind} {list(picks.shape)}: wanted int64, int32 or int16 [{rows.shape[0]}, K]"
            )
        mass = None
        if weights is not None:
            mass = as_buffer("weights", weights)
            if mass.kind not in _REAL or mass.shape != picks.shape:
                wanted = f"fp32, fp16 or bf16 {list(picks.shape)}, as ids"
                raise OpsError(f"weights are {mass.kind} {list(mass.shape)}: wanted {wanted}")
        if threads is not None and threads < 1:
            raise OpsError(f"threads is {threads}: wanted 1 or more, or None for all allowed cores")
        return Call(rows, picks, mass, threads or available_threads())

    def _check_ids(self, call: Call, has: Callable[[int], bool]) -> None:
        """Raises for the first id, in order, that is out of range or whose expert is absent."""
        ids = as_array("ids", call.ids.owner)[0]
        for expert in ids.reshape(-1)[np.sort(np.unique(ids, return_index=True)[1])].tolist():
            if expert in (-1, self.spec.num_experts):
                continue
            if not 0 <= expert < self.spec.num_experts:
                raise self._bad_id(expert)
            if not has(expert):
                raise self._absent(expert)

    def _bad_id(self, expert: int) -> OpsError:
        count = self.spec.num_experts
        return OpsError(
            f"ids of layer {self.layer} hold {expert}: wanted 0 to {count - 1}, or -1 or {count} for no pick"
        )


class CompiledLayer(ExpertLayer):
    """Experts packed for, and computed by, the compiled kernels.

    Bits depend on neither the number of threads nor the other tokens of a call. Integer and 4-bit formats quantise
    activations to 8 bits per token and 32 k's (a relative error of about 0.5 % of a dot product, tested); bfloat16 and
    FP8 weights meet bfloat16 activations, float16 and float32 weights float32 ones.

    torch_from_tokens: calls of that many tokens or more are computed by torch from unpacked experts, where that wins (a
    machine with AMX: see `hotset.kernels.measure_crossover`). Raises BackendError where the kernels cannot be compiled.
    """

    def __init__(self, spec: LayerSpec, layer: int = 0, *, torch_from_tokens: int | None = None) -> None:
        super().__init__(spec, layer)
        self.torch_from_tokens = torch_from_tokens
        self._moe = native.library().handle.hotset_moe
        self._c_layer = native.CLayer.of(spec)
        self._flip = 0x80808080 if spec.format == "int8" else 0
        # replaced, never changed: a call keeps the one that it began with
        self._present: tuple[NDArray[np.uint64], tuple[NDArray[np.uint8] | None, ...]] = (
            np.zeros(spec.num_experts, np.uint64),
            (None,) * spec.num_experts,
        )

    def has(self, expert: int) -> bool:
        return self._present[1][expert] is not None

    def put(self, expert: int, weights: ExpertWeights) -> None:
        packed = native.buffer(self.spec.layout.expert_bytes)
        self.pack(weights, packed)
        self.put_packed(expert, packed)

    def pack(self, weights: ExpertWeights, packed: NDArray[np.uint8]) -> None:
        """Packs an expert into `packed`, [spec.layout.expert_bytes] bytes of the caller's. Raises OpsError as `put`
        does."""
        self._check_packed(packed)
        layout = self.spec.layout
        parts = checked_weights(self.spec, weights)
        if self.spec.kind.code == FORMATS["mxfp8"].code and any(
            native.has_fp8_nan(np.ascontiguousarray(data)) for data, _, _ in parts
        ):
            raise OpsError(
                f"an FP8 weight of layer {self.layer} is NaN: the checkpoint is damaged, or not {self.spec.format}"
            )
        for matrix, (data, scales, bias) in zip((layout.first, layout.second), parts, strict=True):
            native.pack(packed, data, matrix, self._flip)
            rows = matrix.source_row
            there = rows >= 0
            if scales is not None:
                to = packed[matrix.scales_at :][: len(rows) * matrix.groups * scales.itemsize].view(scales.dtype)
                by_panel = np.where(there[:, None], scales[rows], scales.dtype.type(0)).reshape(
                    matrix.panels, -1, matrix.groups
                )
                to.reshape(matrix.panels, matrix.groups, -1)[:] = by_panel.transpose(0, 2, 1)
            if bias is not None:
                values = np.where(there, numbers_to_float(bias, self.spec.bias)[rows], np.float32(0))
                packed[matrix.bias_at :][: len(rows) * 4].view(np.float32)[:] = values

    def put_packed(self, expert: int, packed: NDArray[np.uint8]) -> None:
        """Takes a packed expert without copying: the bytes must stay as they are until it is dropped."""
        self._check_packed(packed)
        self._require_known(expert)
        with self._change:
            self._set(expert, packed)

    def packed(self, expert: int) -> NDArray[np.uint8]:
        """The packed bytes of an expert that is present. Raises ExpertNotOnHost."""
        self._require(expert)
        found = self._present[1][expert]
        if found is None:
            raise self._absent(expert)
        return found

    def unpack(self, expert: int) -> ExpertWeights:
        return self._unpack(self.packed(expert))

    def _unpack(self, packed: NDArray[np.uint8] | None) -> ExpertWeights:
        assert packed is not None, "ids are checked before experts are unpacked"
        spec, layout = self.spec, self.spec.layout
        parts: dict[str, Any] = {}
        for name, matrix in (("gate_up", layout.first), ("down", layout.second)):
            data: NDArray[Any] = native.unpack(packed, matrix, self._flip).view(spec.kind.dtype)
            parts[name] = np.ascontiguousarray(data.T) if spec.transposed else data
            order = np.flatnonzero(matrix.source_row >= 0)
            to_row = matrix.source_row[order]
            if matrix.scales_at >= 0:
                dtype = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "e8m0": np.uint8}[spec.scale_number]
                count = len(matrix.source_row) * matrix.groups * np.dtype(dtype).itemsize
                by_panel = packed[matrix.scales_at :][:count].view(dtype).reshape(matrix.panels, matrix.groups, -1)
                scales = np.empty((matrix.rows, matrix.groups), dtype)
                scales[to_row] = by_panel.transpose(0, 2, 1).reshape(-1, matrix.groups)[order]
                if spec.kind.scales == "row":
                    scales = scales[:, 0]
                elif spec.kind.scales == "block":
                    scales = np.ascontiguousarray(scales[:: spec.kind.group])
                parts[f"{name}_scale"] = scales
            if matrix.bias_at >= 0:
                bias = np.empty(matrix.rows, np.float32)
                bias[to_row] = packed[matrix.bias_at :][: len(matrix.source_row) * 4].view(np.float32)[order]
                parts[f"{name}_bias"] = _exact(bias, spec.bias)
        return ExpertWeights(**parts)

    def _take(self, expert: int) -> None:
        self._set(expert, None)

    def _set(self, expert: int, packed: NDArray[np.uint8] | None) -> None:
        addresses, buffers = self._present  # held until the call ends: another thread may drop an expert meanwhile
        addresses = addresses.copy()
        addresses[expert] = 0 if packed is None else packed.ctypes.data
        self._present = (addresses, (*buffers[:expert], packed, *buffers[expert + 1 :]))

    def _check_packed(self, packed: NDArray[np.uint8]) -> None:
        size = self.spec.layout.expert_bytes
        if (
            packed.dtype != np.uint8
            or packed.shape != (size,)
            or not packed.flags.c_contiguous
            or packed.ctypes.data % 64
        ):
            wanted = f"{size} contiguous bytes on a multiple of 64"
            raise OpsError(f"a packed expert is {packed.dtype} {list(packed.shape)}: wanted {wanted}")

    def _run(self, call: Call, out: Buffer) -> None:
        addresses, buffers = self._present  # held until the call ends: another thread may drop an expert meanwhile
        num_tokens, top_k = call.ids.shape
        if self.torch_from_tokens is not None and num_tokens >= self.torch_from_tokens:
            from hotset.kernels.torch_layer import compute

            self._check_ids(call, lambda expert: buffers[expert] is not None)
            compute(self.spec, lambda expert: self._unpack(buffers[expert]), call, out)
            return
        weights = call.weights
        request = native.CCall(
            addresses.__array_interface__["data"][0],
            call.tokens.address,
            call.ids.address,
            weights.address if weights else None,
            out.address if weights else None,
            None if weights else out.address,
            num_tokens,
            top_k,
            _ID_BYTES[call.ids.kind],
            NUMBERS[call.tokens.kind],
            NUMBERS[weights.kind] if weights else 0,
            NUMBERS[out.kind],
            call.threads,
            0,
        )
        status = self._moe(self._c_layer, request)
        if status == native.ABSENT:
            raise self._absent(request.bad_id)
        if status == native.BAD_ID:
            raise self._bad_id(request.bad_id)
        if status == native.NO_MEMORY:
            raise MemoryError(f"no scratch memory for {num_tokens} tokens x {top_k} picks in layer {self.layer}")


def available_threads() -> int:
    """Threads the kernels use: `HOTSET_KERNEL_THREADS`, else the cores this process may run on (affinity, cgroup quota
    rounded up), as it was when first asked."""
    named = os.environ.get("HOTSET_KERNEL_THREADS")
    if named is not None:
        if not named.isdigit() or int(named) < 1:
            raise OpsError(f"HOTSET_KERNEL_THREADS is {named!r}: wanted a number of threads, 1 or more")
        return int(named)
    return _allowed_cores()


@lru_cache(maxsize=1)
def _allowed_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, -(-quota[0] // quota[1])))


def cgroup_quota(membership: Path, root: Path) -> tuple[int, int] | None:
    """(microseconds of CPU, of time) that the tightest cgroup around this process allows, v2 or v1; None = no limit."""
    found: list[tuple[int, int]] = []
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        base = root if not controllers else root / controllers
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            found += _quota_of(folder)
            if folder == base:
                break
    return min(found, key=lambda q: q[0] / q[1]) if found else None


def _quota_of(folder: Path) -> list[tuple[int, int]]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    return [(int(quota), int(period))] if quota not in ("max", "-1") else []


def _exact(bias: Floats, number: str) -> NDArray[Any]:
    """float32 back to the number type it came from, without rounding."""
    if number == "bf16":
        return (bias.view(np.uint32) >> 16).astype(np.uint16)
    return bias.astype(np.float16) if number == "fp16" else bias


def _is_writeable(value: Any) -> bool:
    return bool(value.is_contiguous() if is_torch(value) else value.flags.c_contiguous and value.flags.writeable)


def _empty_like(tokens: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    if is_torch(tokens):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else tokens.dtype)
    return np.empty(shape, dtype or tokens.dtype)
