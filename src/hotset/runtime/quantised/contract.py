"""What a layout must say, and the matrix that it gives."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.errors import CheckpointError
from hotset.kernels.formats import FORMATS
from hotset.kernels.torch_layer import tensor_of_bits
from hotset.models.checkpoint import TensorEntry
from hotset.runtime.expert_formats.stored import float_values

Arrays = Mapping[str, NDArray[Any]]
"""Part -> its stored values; bfloat16 as np.uint16, FP8 and E8M0 as np.uint8."""
FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""safetensors' dtypes of scales -> the kernels' names."""
EXPONENTS = ("U8", "F8_E8M0")


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """[N, K] in a format of `hotset.kernels.formats.FORMATS`: codes, scales and zeros as `ExpertWeights` has them."""

    format: str
    scale_number: str
    k: int
    codes: NDArray[Any]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None = None

    @property
    def kind(self) -> tuple[str, str, bool]:
        """(format, number type of the scales, whether there are zeros): the same for all experts of a layer."""
        return self.format, self.scale_number, self.zeros is not None

    def floats(self) -> torch.Tensor:
        """[N, K] float32 values."""
        scales = tensor_of_bits(np.ascontiguousarray(self.scales))
        zeros = None if self.zeros is None else torch.from_numpy(self.zeros)
        codes = torch.from_numpy(np.ascontiguousarray(self.codes))
        return float_values(FORMATS[self.format], self.scale_number, codes, scales, zeros, self.k)

    @staticmethod
    def stack(matrices: Sequence[StoredMatrix], what: str) -> StoredMatrix:
        """The rows of several under each other. Raises CheckpointError where they do not fit."""
        first = matrices[0]
        if len(matrices) == 1:
            return first
        if len({(m.kind, m.k) for m in matrices}) != 1:
            raise CheckpointError(f"{what}: its parts are {', '.join(m.format for m in matrices)}: wanted one format")
        if FORMATS[first.format].scales == "block" and any(len(m.codes) % 128 for m in matrices[:-1]):
            raise CheckpointError(
                f"{what}: parts of {[len(m.codes) for m in matrices]} rows do not join on blocks of 128: "
                "use expert_format='float'"
            )
        return StoredMatrix(
            first.format,
            first.scale_number,
            first.k,
            np.concatenate([m.codes for m in matrices]),
            np.concatenate([m.scales for m in matrices]),
            None if first.zeros is None else np.concatenate([m.zeros for m in matrices if m.zeros is not None]),
        )


class Layout(abc.ABC):
    """How a checkpoint stores one matrix [N, K], or a fused one of all experts [E, ...], in several tensors."""

    name: ClassVar[str]
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    """Part -> what its tensor's name may end with. The first part names the matrix."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Parts that may be missing."""
    logical_suffix: ClassVar[str] = ".weight"
    """Takes the place of the first part's ending."""
    is_fused: ClassVar[bool] = False
    """Every part has an axis [E] in front; `matrix` is asked for one expert's."""
    is_transposed: ClassVar[bool] = False
    """The model wants [K, N]."""

    @abc.abstractmethod
    def claims(self, entries: Mapping[str, TensorEntry]) -> bool:
        """Whether these parts, whose names fit, are of this layout."""

    @abc.abstractmethod
    def shape(self, entries: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> tuple[int, ...]:
        """Of the floats: [N, K], or [E, ...]. config: the checkpoint's quantization_config."""

    @abc.abstractmethod
    def matrix(self, arrays: Arrays, dtypes: Mapping[str, str], config: Mapping[str, Any]) -> StoredMatrix:
        """One matrix. dtypes: safetensors' names by part. config: the checkpoint's quantization_config.

        Raises CheckpointError (one line, without the tensor's name) where it cannot be handed over as it is.
        """


def int4_matrix(
    codes: NDArray[np.uint8], scales: NDArray[Any], scale_number: str, zeros: NDArray[np.uint8] | None
) -> StoredMatrix:
    """From codes [N, K / 2] (low nibble first), scales and zeros [N, groups] of any group size that 32 divides.

    Larger groups are groups of 32 or 128 that share a scale: nothing is rounded.
    """
    k, groups = codes.shape[1] * 2, scales.shape[1]
    size = k // groups if groups else 0
    if not groups or k % groups or size % 32:
        raise CheckpointError(f"int4 groups of {k}/{groups} weights: wanted a multiple of 32")
    unit = 128 if size % 128 == 0 else 32
    repeated = [None if x is None else np.repeat(x, size // unit, axis=1) for x in (scales, zeros)]
    assert repeated[0] is not None
    return StoredMatrix(f"int4_g{unit}", scale_number, k, codes, repeated[0], repeated[1])


def nibbles(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[..., n] 32-bit words -> [..., 8 n] their nibbles, lowest first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    found = (words.view(np.uint32)[..., None] >> shifts) & 15
    return found.reshape(*words.shape[:-1], -1).astype(np.uint8)


def pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K] nibbles -> [N, K / 2] bytes, low nibble first."""
    joined: NDArray[np.uint8] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return joined
