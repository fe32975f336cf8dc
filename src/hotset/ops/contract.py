"""The contract of `route_shed` and `split_by_residency`, and the one place that checks their arguments.

Knows shapes, dtypes, kinds of array and the arithmetic that every implementation must follow; knows no
implementation. Imports neither torch nor mlx: an array of theirs is recognised through the module that made it.

Axis letters: T tokens, R picks per token (the router's top-k), E experts of the layer.

**route_shed(indices [T, R], scores [T, R], slot_table [E]) -> slots, mix, miss_ids, miss_scores, each [T, R]**

- indices: uint32, int32 or int64. scores: float32. slot_table: int32, the arena slot of each expert, negative = not
  resident. 1 <= R <= 64, E >= 1, T >= 0. All three C-contiguous, of one kind of array, on one device.
- A pick is *kept* where 0 <= id < E and slot_table[id] >= 0; every other pick is a *miss*, an id outside [0, E) too.
- `slots` uint32: a kept pick's slot. A miss carries the row's first kept slot (0 where none is kept), so that a
  kernel that gathers by slot reads something valid and needs no change.
- `mix` float32: a kept pick's score * ratio; a miss has +0.
- `miss_ids` int32 and `miss_scores` float32: the row's misses, packed to the front by descending score, equal scores in
  the order of the picks; then -1 and +0. `miss_ids` shows an id outside int32's range as the nearest int32 (never
  wrapped, so that it cannot look like an expert). A padded pick -1 is a miss whose id reads -1: whoever needs the
  number of misses counts the picks that are not kept.

**Arithmetic**, the same bits everywhere:

    sum_all  = ((+0 + s[0]) + s[1]) + ...           every pick, ascending r
    sum_kept = the same over the kept picks
    ratio    = 1                                     where the row has no miss, or sum_kept == 0
             = sum_all / sum_kept                    elsewhere
    mix      = s * ratio

in float32, round to nearest even, one rounding per operation: no fused multiply-add, no reassociation, no wider
accumulator, subnormal numbers not flushed. What follows from it:

- A row without a miss passes through: mix is scores, bit for bit (NaN apart, see below).
- Where sum_kept == 0 the kept picks carry no mass that could be scaled: mix is their scores (in general all zero) and
  no NaN is made of finite scores.
- Infinity, NaN and negative scores are not refused; they go through the arithmetic above as IEEE 754 says.
- Where no score is negative, sum_kept is a normal number and ratio is finite, the row keeps its mass: mix sums to
  sum_all within a few roundings. Where the kept mass is less than about 2^-128 of the whole, ratio overflows and mix
  is infinite: bound the kept mass (`hotset.ops.ShedPolicy`).
- The order of misses: +inf first, -0 and +0 equal, -inf last of the numbers, NaN after every number.
- Any NaN in `mix` or `miss_scores` is the one with bits 0x7FC00000, since machines differ in the NaN that they make.
  -0 in `miss_scores` stays -0.

**split_by_residency(indices, scores, slot_table) -> gpu_slots, gpu_weights, cpu_ids, cpu_weights, each [T, R]**

Exact mode: nothing is dropped, nothing is rescaled, nothing moves to another position, so that a token's picks can be
added up in one fixed order wherever they were computed. A kept pick has its slot and its score in `gpu_slots` uint32
and `gpu_weights` float32; a miss has its id and its score in `cpu_ids` int32 and `cpu_weights` float32. The other
side holds the row's first kept slot (0 where none) with weight +0, and id -1 with weight +0. An id outside [0, E)
names no expert (padding, or expert parallelism's sentinel): it has weight +0 on both sides and cpu id -1. Scores are
copied, never computed with.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import numpy as np

from hotset.errors import OpsError

MAX_PICKS = 64
CANONICAL_NAN_BITS = 0x7FC0_0000
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

INDEX_DTYPES = ("uint32", "int32", "int64")

Kind = Literal["numpy", "torch", "mlx"]


class ShedRouting(NamedTuple):
    """What `route_shed` returns: four arrays [T, R] of the kind that was given (see the module's head)."""

    slots: Any
    """[T, R] uint32 slot of each kept pick; of a miss the row's first kept slot, 0 where none is kept."""
    mix: Any
    """[T, R] float32 weight of each pick; +0 for a miss."""
    miss_ids: Any
    """[T, R] int32 missed expert ids by descending score, then -1."""
    miss_scores: Any
    """[T, R] float32 their scores, then +0."""


class SplitRouting(NamedTuple):
    """What `split_by_residency` returns: four arrays [T, R] of the kind that was given (see the module's head)."""

    gpu_slots: Any
    """[T, R] uint32 slot of each resident pick; elsewhere the row's first kept slot, 0 where none is kept."""
    gpu_weights: Any
    """[T, R] float32 score of each resident pick, +0 elsewhere."""
    cpu_ids: Any
    """[T, R] int32 id of each pick that is not resident, -1 elsewhere."""
    cpu_weights: Any
    """[T, R] float32 score of each pick that is not resident, +0 elsewhere."""


class Arguments(NamedTuple):
    """What a checked call is about: enough to choose an implementation."""

    kind: Kind
    device: str
    """"cpu", "cuda:0", "mps:0", ...; an mlx array has no device of its own: "mlx"."""


def check_arguments(where: str, indices: Any, scores: Any, slot_table: Any) -> Arguments:
    """Hold the arguments against the contract. Raises OpsError: what, got, wanted, what to do."""
    if _is_fine_numpy(indices, scores, slot_table):
        return _NUMPY
    kind = _kind(where, "indices", indices)
    named = (("indices", indices), ("scores", scores), ("slot_table", slot_table))
    for name, array in named[1:]:
        other = _kind(where, name, array)
        if other != kind:
            raise OpsError(f"{where}: {name} is a {other} array but indices a {kind} one: pass all three of one kind")
    if indices.ndim != 2:
        raise OpsError(f"{where}: indices has shape {_shape(indices)}: wanted [T, R]")
    if scores.ndim != 2 or _shape(scores) != _shape(indices):
        raise OpsError(f"{where}: scores has shape {_shape(scores)}: wanted that of indices, {_shape(indices)}")
    if slot_table.ndim != 1 or slot_table.shape[0] == 0:
        raise OpsError(
            f"{where}: slot_table has shape {_shape(slot_table)}: wanted [E], the row of one layer, E at least 1"
        )
    if not 1 <= indices.shape[1] <= MAX_PICKS:
        raise OpsError(f"{where}: indices has {indices.shape[1]} picks a token (R): wanted 1 to {MAX_PICKS}")
    if (got := _dtype(indices)) not in INDEX_DTYPES:
        raise OpsError(f"{where}: indices has dtype {got}: wanted {', '.join(INDEX_DTYPES)}; convert it first")
    if (got := _dtype(scores)) != "float32":
        raise OpsError(f"{where}: scores has dtype {got}: wanted float32, the only one with a defined result")
    if (got := _dtype(slot_table)) != "int32":
        raise OpsError(f"{where}: slot_table has dtype {got}: wanted int32, as Residency.slot_table() has it")
    if kind == "numpy":
        for name, array in named:
            if not (array.flags.c_contiguous and array.flags.aligned):
                raise OpsError(
                    f"{where}: {name} has strides {array.strides} for shape {array.shape}: wanted C-contiguous; "
                    f"pass np.ascontiguousarray({name})"
                )
        return _NUMPY
    if kind == "torch":
        return _check_torch(where, named)
    return _MLX


def name_kind(array: Any) -> Kind | None:
    """Which library made this array, or None. Imports none of them."""
    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and isinstance(array, mlx.array):
        return "mlx"
    return None


_NUMPY = Arguments("numpy", "cpu")
_MLX = Arguments("mlx", "mlx")


_INDEX_TYPES = frozenset(map(np.dtype, INDEX_DTYPES))
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)


def _is_fine_numpy(indices: Any, scores: Any, slot_table: Any) -> bool:
    """The same conditions for NumPy arrays in 1 us instead of 7: this runs once per layer and token."""
    return (
        type(indices) is type(scores) is type(slot_table) is np.ndarray
        and indices.ndim == 2
        and indices.shape == scores.shape
        and slot_table.ndim == 1
        and len(slot_table) > 0
        and 1 <= indices.shape[1] <= MAX_PICKS
        and indices.dtype in _INDEX_TYPES
        and scores.dtype == _FLOAT32
        and slot_table.dtype == _INT32
        and all(array.flags.c_contiguous and array.flags.aligned for array in (indices, scores, slot_table))
    )


def _kind(where: str, name: str, array: Any) -> Kind:
    kind = name_kind(array)
    if kind is None:
        raise OpsError(f"{where}: {name} is a {type(array).__name__}: wanted a NumPy array or a torch tensor")
    return kind


def _check_torch(where: str, named: tuple[tuple[str, Any], ...]) -> Arguments:
    device = named[0][1].device
    for name, tensor in named:
        if tensor.device != device:
            raise OpsError(f"{where}: {name} is on {tensor.device} but indices on {device}: move them to one device")
        if not tensor.is_contiguous():
            raise OpsError(
                f"{where}: {name} has strides {tuple(tensor.stride())} for shape {_shape(tensor)}: wanted contiguous; "
                f"pass {name}.contiguous()"
            )
        if tensor.requires_grad:
            raise OpsError(f"{where}: {name} requires a gradient: remapping is for inference, pass {name}.detach()")
    return Arguments("torch", str(device))


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _dtype(array: Any) -> str:
    if isinstance(array, np.ndarray):
        return array.dtype.name if array.dtype.isnative else str(array.dtype)
    return str(array.dtype).rpartition(".")[2]
