"""Experts quantised at load, and the file that keeps them: made once per model and format, read back ever after.

Knows: how a float expert becomes a quantised one of `hotset.kernels`, and the file's names. Plain rounding per row or
group, as `hotset.kernels.quantise` says. The file is safetensors: for layer n the tensors `layers.n.gate_up`,
`.gate_up_scale`, `.down`, ... of `hotset.kernels.ExpertWeights`, each [E, ...], so that one expert is a few short runs
of bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset.core import Plan
from hotset.errors import CheckpointError
from hotset.kernels import ExpertWeights, LayerSpec, available_threads
from hotset.kernels.build import cache_directory
from hotset.kernels.formats import as_array, quantise_matrix
from hotset.kernels.modules import expert_weights
from hotset.models.experts import ExpertLayer
from hotset.runtime.expert_formats.contract import ExpertSource, ExpertTensors, parameter_shapes
from hotset.runtime.expert_formats.scratch import scratch_expert
from hotset.runtime.expert_formats.stored import stored_shapes
from hotset.storage import FileFormatError, read_fully, read_header, writing_parts

logger = logging.getLogger("hotset.runtime")

VERSION = 1
"""Of the file: rises when the rounding or the names change."""
_DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_NUMPY = {"U8": np.uint8, "I8": np.int8, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def quantised_file(format_name: str, fingerprint: str, plan: object) -> Path:
    """Where a model's quantised experts are kept: beside the plan where that is a file, else in the cache directory."""
    name = f"{fingerprint}.{format_name}.safetensors"
    if isinstance(plan, str | Path) and not isinstance(plan, Plan):
        return Path(plan).with_name(f"{Path(plan).name.removesuffix('.safetensors')}.{name}")
    return cache_directory().with_name("experts") / name


class QuantisedExperts:
    """An `ExpertSource` of experts quantised from another's floats.

    specs: per row, quantised. The file is made first if it is not there, or not of these specs and this model.
    progress: called with (experts done, experts in all) meanwhile. Raises CheckpointError (the file cannot be written
    or is damaged; what the source raised).
    """

    def __init__(
        self,
        source: ExpertSource,
        layers: Sequence[ExpertLayer],
        specs: Sequence[LayerSpec],
        path: Path,
        fingerprint: str,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.source = source
        self.layers = list(layers)
        self.specs = list(specs)
        self.path = path
        self._shapes = [stored_shapes(spec) for spec in specs]
        arrays = dict(self._arrays())
        metadata = {"hotset_experts": VERSION, "format": specs[0].format, "model_fingerprint": fingerprint}
        self.was_there = self._is_there(arrays, metadata)
        if not self.was_there:
            logger.info("quantising experts to %s into %s", specs[0].format, path)
            self._make(arrays, metadata, progress)
        header, _, data_start, _ = read_header(path)
        self._starts = {name: data_start + entry["data_offsets"][0] for name, entry in header.items()}
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, row: int, expert: int, target: ExpertTensors) -> None:
        """The floats, as the checkpoint has them."""
        self.source.read_into(row, expert, target)

    def read_stored(self, row: int, expert: int) -> ExpertWeights:
        """From the file. Raises CheckpointError."""
        parts = {}
        for part, (shape, dtype) in self._shapes[row].items():
            values = np.empty(shape, _NUMPY[_DTYPES[dtype]])
            name = f"layers.{self.layers[row].layer_id}.{part}"
            if not read_fully(self._descriptor, values, self._starts[name] + expert * values.nbytes):
                raise CheckpointError(f"{self.path}: cut short within {name}: delete it, it is made again")
            parts[part] = values
        return ExpertWeights(**parts)

    def _arrays(self) -> Iterator[tuple[str, tuple[str, list[int], int]]]:
        for layer, shapes in zip(self.layers, self._shapes, strict=True):
            for part, (shape, dtype) in shapes.items():
                size = shape.numel() * dtype.itemsize
                yield f"layers.{layer.layer_id}.{part}", (_DTYPES[dtype], [layer.num_experts, *shape], size)

    def _is_there(self, arrays: dict[str, tuple[str, list[int], int]], metadata: dict[str, Any]) -> bool:
        try:
            header, texts, _, _ = read_header(self.path)
        except (OSError, FileFormatError):
            return False
        same = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        return same == {name: (dtype, shape) for name, (dtype, shape, _) in arrays.items()} and all(
            texts.get(key) in (str(value), f'"{value}"') for key, value in metadata.items()
        )

    def _make(
        self,
        arrays: dict[str, tuple[str, list[int], int]],
        metadata: dict[str, Any],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        wanted = [(row, expert) for row, layer in enumerate(self.layers) for expert in range(layer.num_experts)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (
                writing_parts(self.path, arrays, metadata) as write,
                ThreadPoolExecutor(available_threads(), thread_name_prefix="hotset-quantise") as workers,
            ):
                tasks = [workers.submit(self._make_one, row, expert, write) for row, expert in wanted]
                with contextlib.ExitStack() as stack:
                    stack.callback(workers.shutdown, wait=True, cancel_futures=True)  # on Ctrl-C too
                    for done, task in enumerate(as_completed(tasks), start=1):
                        task.result()
                        if progress is not None:
                            progress(done, len(wanted))
        except OSError as problem:
            raise CheckpointError(f"{self.path}: cannot be written: {problem.strerror}") from None

    def _make_one(self, row: int, expert: int, write: Callable[[str, int, Any], None]) -> None:
        scratch = scratch_expert(parameter_shapes(self.layers[row]))
        self.source.read_into(row, expert, scratch)
        weights, spec = expert_weights(scratch), self.specs[row]
        is_transposed = bool(getattr(self.layers[row].module, "is_transposed", False))
        for name in ("gate_up", "down"):
            tensor = getattr(weights, name).float()
            values = (tensor.T.contiguous() if is_transposed else tensor).numpy()
            if not np.isfinite(values).all():
                layer = self.layers[row].layer_id
                raise CheckpointError(f"expert {expert} of layer {layer} has weights that are NaN or infinite")
            codes, scales = quantise_matrix(spec, values)
            assert scales is not None, "only formats with scales are quantised to"
            at = f"layers.{self.layers[row].layer_id}.{name}"
            write(at, expert, codes)
            write(f"{at}_scale", expert, scales)
            if spec.bias != "none":
                write(f"{at}_bias", expert, as_array(name, getattr(weights, f"{name}_bias"))[0])
