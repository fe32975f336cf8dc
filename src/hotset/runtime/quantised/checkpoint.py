"""A quantised checkpoint as it looks without its quantisation: one entry per matrix, read as floats or as stored.

Knows the registry of layouts and how parts are read. Does not know: models, experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.errors import CheckpointError, UnsupportedModelError
from hotset.models.checkpoint import Checkpoint, TensorEntry
from hotset.runtime.quantised.awq import Awq
from hotset.runtime.quantised.contract import Layout, StoredMatrix
from hotset.runtime.quantised.gptq import Gptq
from hotset.runtime.quantised.mxfp4_fused import FusedMxfp4
from hotset.runtime.quantised.pack_quantized import PackQuantized
from hotset.runtime.quantised.scaled import Scaled
from hotset.storage import read_fully

LAYOUTS: tuple[Layout, ...] = (Scaled(), FusedMxfp4(), PackQuantized(), Gptq(), Awq())
METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq")
"""quant_method of checkpoints whose layouts are above."""
_IGNORED = (".input_scale", ".activation_scale", ".weight_shape", ".output_scale", ".k_scale", ".v_scale")
"""Endings of what goes with a quantised matrix and is about activations: hotset's are quantised anew or not at all."""
_CODES = ("F8_E4M3", "F8_E5M2", "F4")
"""Tensors of these types mean nothing without scales: unchecked, Transformers would take the codes for numbers."""
_SCALE_NAMES = ", ".join(f"X{ending}" for ending in Scaled.parts["scale"])
_NUMPY: dict[str, type] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "I64": np.int64, "I8": np.int8,
    "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "F4": np.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class QuantisedEntry(TensorEntry):
    """One matrix of floats that is stored otherwise. dtype is "F32", what `floats` gives; its file is that
    of its first part."""

    layout: Layout
    parts: Mapping[str, TensorEntry]
    config: Mapping[str, Any]

    def matrix(self, expert: int | None = None) -> StoredMatrix:
        """As stored. expert: of a fused entry. Raises CheckpointError, with this entry's name."""
        arrays = {part: _read(entry, expert) for part, entry in self.parts.items()}
        try:
            return self.layout.matrix(arrays, {part: entry.dtype for part, entry in self.parts.items()}, self.config)
        except CheckpointError as problem:
            raise CheckpointError(f"{self.file}: {self.name}: {problem}") from None

    def floats(self, expert: int | None = None) -> torch.Tensor:
        """float32, in the shape that the model wants; of a fused entry one expert's, or all."""
        if self.layout.is_fused and expert is None:
            return torch.stack([self.floats(one) for one in range(self.shape[0])])
        values = self.matrix(expert).floats()
        return values.T.contiguous() if self.layout.is_transposed else values


class LazyFloats:
    """Reads like a safetensors slice of the floats."""

    def __init__(self, entry: QuantisedEntry) -> None:
        self._entry = entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        entry = self._entry
        if entry.layout.is_fused and isinstance(index, slice) and index.stop == (index.start or 0) + 1:
            return entry.floats(index.start or 0)[None]
        return entry.floats()[index]

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype


def logical_checkpoint(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with a `QuantisedEntry` in place of the parts of each matrix. config: its quantization_config.

    Raises UnsupportedModelError where the method is none of METHODS, or nothing in the checkpoint fits a layout;
    CheckpointError where a weight of codes has no scales.
    """
    method = str(config.get("quant_method", ""))
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: quantised by {method or 'an unnamed method'!r}: hotset reads {', '.join(METHODS)}"
        )
    tensors = dict(checkpoint.tensors)
    found = 0
    for name in checkpoint.tensors:
        for layout in LAYOUTS:
            parts = _parts(layout, name, checkpoint.tensors)
            if parts is None or not layout.claims(parts):
                continue
            first = next(iter(layout.parts))
            base = name.removesuffix(_ending(name, layout.parts[first]))
            for entry in parts.values():
                tensors.pop(entry.name, None)
            for ending in _IGNORED:
                tensors.pop(f"{base}{ending}", None)
            logical, shape = base + layout.logical_suffix, layout.shape(parts, config)
            size = 4 * int(np.prod(shape))
            tensors[logical] = QuantisedEntry(
                logical, parts[first].file, "F32", shape, parts[first].start, size, layout, parts, config
            )
            found += 1
            break
    for entry in tensors.values():
        is_integer_weight = entry.dtype in ("I8", "U8") and entry.name.endswith(".weight")
        if not isinstance(entry, QuantisedEntry) and (entry.dtype in _CODES or is_integer_weight):
            raise CheckpointError(
                f"{entry.file}: {entry.name} is {entry.dtype} {list(entry.shape)} and has no scales beside it that "
                f"hotset knows ({_SCALE_NAMES}): the checkpoint is incomplete, or of a layout that is not read"
            )
    if not found:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: quantised by {method!r}, but no tensor of it is laid out as "
            f"{', '.join(layout.name for layout in LAYOUTS)}"
        )
    return Checkpoint(checkpoint.folder, tensors)


def _ending(name: str, endings: tuple[str, ...]) -> str:
    return next((ending for ending in endings if name.endswith(ending)), "")


def _parts(layout: Layout, name: str, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry] | None:
    """The layout's parts of the matrix that `name` is the first part of, or None."""
    first, *others = layout.parts
    ending = _ending(name, layout.parts[first])
    if not ending:
        return None
    base, parts = name.removesuffix(ending), {first: tensors[name]}
    for part in others:
        there = [tensors[base + ending] for ending in layout.parts[part] if base + ending in tensors]
        if there:
            parts[part] = there[0]
        elif part not in layout.optional:
            return None
    return parts


def _read(entry: TensorEntry, expert: int | None) -> NDArray[Any]:
    """The tensor's values, or those of one expert of a fused one."""
    dtype = np.dtype(_NUMPY[entry.dtype])
    shape = entry.shape if expert is None else entry.shape[1:]
    values = np.empty(shape, dtype)
    start = entry.start + (0 if expert is None else expert * values.nbytes)
    try:
        with entry.file.open("rb", buffering=0) as stream:
            if not read_fully(stream.fileno(), values, start):
                raise CheckpointError(f"{entry.file}: cut short while it was read: {entry.name} is incomplete")
    except OSError as problem:
        raise CheckpointError(f"{entry.file}: {problem.strerror} while reading {entry.name}") from None
    return values
