"""A call of the kernels, its arguments checked.

Knows: shapes, types and refusals that every implementation shares. Does not know: experts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset.errors import OpsError
from hotset.kernels.formats import Buffer, LayerSpec, as_buffer, is_torch
from hotset.kernels.threads import available_threads

_REAL = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Checked arguments of a call: tokens [T, H], ids [T, K], weights [T, K] (None: the picks' own rows are wanted)."""

    tokens: Buffer
    ids: Buffer
    weights: Buffer | None
    threads: int

    @staticmethod
    def of(spec: LayerSpec, layer: int, tokens: Any, ids: Any, weights: Any, threads: int | None) -> Call:
        """Raises OpsError for wrong shapes, types or threads. layer: its number, for messages."""
        rows = as_buffer("tokens", tokens)
        if rows.kind not in _REAL or len(rows.shape) != 2 or rows.shape[1] != spec.hidden:
            wanted = f"fp32, fp16 or bf16 [T, {spec.hidden}]"
            raise OpsError(f"tokens of layer {layer} are {rows.kind} {list(rows.shape)}: wanted {wanted}")
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


def bad_id(spec: LayerSpec, layer: int, expert: int) -> OpsError:
    """What to raise for an id out of range."""
    count = spec.num_experts
    return OpsError(f"ids of layer {layer} hold {expert}: wanted 0 to {count - 1}, or -1 or {count} for no pick")


def check_out(call: Call, out: Any, kind: str | None = None) -> Buffer:
    """`out` as the [T, H] that a call writes; kind: its type, default the tokens'. Raises OpsError where it is not."""
    rows, kind = as_buffer("out", out), kind or call.tokens.kind
    writeable = out.is_contiguous() if is_torch(out) else out.flags.c_contiguous and out.flags.writeable
    if rows.shape != call.tokens.shape or rows.kind != kind or not writeable:
        wanted = f"{kind} {list(call.tokens.shape)}, contiguous and writeable"
        raise OpsError(f"out is {rows.kind} {list(rows.shape)}: wanted {wanted}")
    return rows


def empty_like(tokens: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An uninitialised array, or a tensor where `tokens` is one, in the tokens' type or the one named."""
    if is_torch(tokens):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else tokens.dtype)
    return np.empty(shape, dtype or tokens.dtype)
