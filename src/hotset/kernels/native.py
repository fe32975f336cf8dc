"""The compiled library as Python functions: structures, pointers, and nothing else.

Knows: the C interface of csrc/moe.cpp. ctypes releases the interpreter lock for the length of every call. Does not
know: formats, experts, when to use the library (`backend.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.kernels import build
from hotset.kernels.formats import NUMBERS, Activation, LayerSpec, MatrixLayout

OK, ABSENT, BAD_ID, NO_MEMORY = range(4)
HUGE_PAGE_BYTES = 2 << 20


class CLayer(ctypes.Structure):
    """HotsetLayer."""

    _fields_ = (
        *((name, c_int64) for name in ("num_experts", "hidden", "intermediate")),
        *((name, c_int32) for name in ("format", "scale_number", "gated", "activation")),
        *((name, c_float) for name in ("alpha", "limit", "up_offset")),
        ("reserved", c_int32),
        *((name, c_int64) for name in ("first_group_steps", "second_group_steps")),
        *((name, c_int64) for name in ("first_scales", "first_zeros", "first_bias", "second_data")),
        *((name, c_int64) for name in ("second_scales", "second_zeros", "second_bias")),
    )

    @staticmethod
    def of(spec: LayerSpec) -> CLayer:
        first, second, act = spec.layout.first, spec.layout.second, spec.activation
        return CLayer(
            spec.num_experts, spec.hidden, spec.intermediate,
            spec.kind.code, NUMBERS[spec.scale_number], int(spec.gated), Activation.KINDS.index(act.kind),
            act.alpha, act.limit, act.up_offset, 0, first.group_steps, second.group_steps,
            first.scales_at, first.zeros_at, first.bias_at, second.data_at,
            second.scales_at, second.zeros_at, second.bias_at,
        )  # fmt: skip


class CCall(ctypes.Structure):
    """HotsetCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("experts", "tokens", "ids", "weights", "out", "picks", "openmp")),
        *((name, c_int64) for name in ("num_tokens", "top_k")),
        *(
            (name, c_int32)
            for name in ["id_bytes", "tokens_number", "weights_number", "out_number", "threads", "bad_id", "accumulate"]
        ),
    )


@lru_cache(maxsize=1)
def library() -> build.Library:
    """The library, compiled on the first call. Raises BackendError as `build.load` does, each time."""
    loaded = build.load()
    handle = loaded.handle
    handle.hotset_moe.argtypes = [POINTER(CLayer), POINTER(CCall)]  # ctypes passes structures by reference
    handle.hotset_moe.restype = c_int32
    handle.hotset_combine.argtypes = [POINTER(CLayer), POINTER(CCall)]
    handle.hotset_combine.restype = None
    handle.hotset_pack.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 6, c_uint32]
    handle.hotset_pack.restype = None
    handle.hotset_unpack.argtypes = handle.hotset_pack.argtypes
    handle.hotset_unpack.restype = None
    handle.hotset_has_fp8_nan.argtypes = [c_void_p, c_int64]
    handle.hotset_has_fp8_nan.restype = c_int32
    handle.hotset_read.argtypes = [c_void_p, c_int64, c_int32, c_int64, c_int32, c_int32]
    handle.hotset_read.restype = c_uint64
    handle.hotset_instructions.restype = c_char_p
    return loaded


def instructions() -> str:
    """The instruction sets that the library uses: "AVX-512 AVX512-BF16 AVX512-VNNI"."""
    return str(library().handle.hotset_instructions().decode())


def pack(packed: NDArray[np.uint8], data: NDArray[Any], layout: MatrixLayout, flip: int) -> None:
    """Writes a stored matrix [N, ...] into its place in `packed`."""
    library().handle.hotset_pack(
        packed.ctypes.data + layout.data_at, data.ctypes.data, layout.source_row.ctypes.data,
        layout.panels, layout.words, layout.row_bytes, data.strides[0], data.strides[1], data.itemsize, flip,
    )  # fmt: skip


def unpack(packed: NDArray[np.uint8], data: NDArray[Any], layout: MatrixLayout, flip: int) -> None:
    """Fills a stored matrix [N, ...], of any strides, from its place in `packed`."""
    library().handle.hotset_unpack(
        packed.ctypes.data + layout.data_at, data.ctypes.data, layout.source_row.ctypes.data,
        layout.panels, layout.words, layout.row_bytes, data.strides[0], data.strides[1], data.itemsize, flip,
    )  # fmt: skip


def has_fp8_nan(codes: NDArray[np.uint8]) -> bool:
    """Whether an E4M3 code in a contiguous array is NaN."""
    return bool(library().handle.hotset_has_fp8_nan(codes.ctypes.data, codes.size))


def read(data: NDArray[np.uint8], *, streams: int, piece: int, ahead: int, threads: int) -> int:
    """Reads all of `data` and returns a digest that depends on every byte: the bandwidth ceiling."""
    return int(library().handle.hotset_read(data.ctypes.data, data.nbytes, streams, piece, ahead, threads))


def buffer(size: int) -> NDArray[np.uint8]:
    """`size` bytes on a multiple of 64, on huge pages as far as whole ones fit. Contents are undefined.

    NumPy asks for huge pages from 4 MiB on; a four-bit expert is smaller, and reading many of them is a walk through
    page tables.
    """
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.empty(size + 64, np.uint8)
        start = -_address(raw) % 64
        return raw[start : start + size]
    mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
    raw = np.frombuffer(mapped, np.uint8)
    start = -_address(raw) % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
        mapped.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return raw[start : start + size]


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
