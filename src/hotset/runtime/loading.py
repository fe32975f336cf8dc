"""From a checkpoint folder to a Transformers model whose experts hotset owns.

The skeleton is built on the meta device, the experts' parameters are taken out of it, everything else is loaded by
Transformers itself, and each expert is read on its own through Transformers' conversion mapping, so stored names and
layouts (one tensor per expert, fused, renamed) are its business and no whole-layer tensor is made on the way.

Uses three functions of Transformers that are not public (checked with 5.24): `get_model_conversion_mapping`,
`convert_and_load_state_dict_in_model` and `PreTrainedModel._finalize_model_loading`. Knows nothing of tiers.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset.errors import CheckpointError, ModelError, OpsError, UnsupportedModelError
from hotset.kernels import ExpertWeights, LayerSpec
from hotset.kernels.modules import spec_of
from hotset.models.checkpoint import Checkpoint, TensorEntry
from hotset.models.experts import ExpertLayer, find_expert_layers, model_class_of
from hotset.runtime.quantised import LazyFloats, QuantisedEntry, StoredMatrix, logical_checkpoint
from hotset.units import format_bytes

DIRECT_ALIGNMENT = 4096
"""Bytes: no device that Linux knows wants more of O_DIRECT's offsets and addresses than a page."""
BOUNCE_BYTES = 2 << 20
"""Per reading thread, outside of the host memory that experts get; a whole matrix could be a hundred times that."""
DIRECT_BELOW_SHARE = 0.25
"""Of a checkpoint. With room for 5 % in the page cache O_DIRECT decoded 1.3 times as fast (median of 8 pairs); what the
page cache does hold it reads 8 times as fast, so about a quarter of hits makes up for that."""
_DTYPE_NAMES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass
class Skeleton:
    """A model without its experts, and where to read them."""

    model: Any
    """The Transformers model: everything but the experts loaded; the experts modules hold no expert parameters."""
    layers: list[ExpertLayer]
    """In row order; `parameters` are meta tensors of the shapes and dtypes that the experts will have."""
    reader: ExpertReader
    non_expert_bytes: int
    """Bytes of all parameters and buffers of the model but the experts."""


def load_skeleton(folder: Path, *, dtype: torch.dtype | str, device: torch.device) -> Skeleton:
    """Build the model and load all but its experts onto `device`.

    dtype: a torch dtype, or "auto" for that of the config (else of the checkpoint).
    Raises UnsupportedModelError (no experts interface, quantised checkpoint), CheckpointError (tensors missing).
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    checkpoint = stored = Checkpoint.open(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as problem:
        raise ModelError(f"{folder}: Transformers cannot read its config: {str(problem).splitlines()[0]}") from None
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised is not None:
            checkpoint = logical_checkpoint(stored, quantised if isinstance(quantised, dict) else quantised.to_dict())
            del part.quantization_config  # the modules are ordinary ones
    wanted_dtype = _resolve_dtype(dtype, config, checkpoint)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = wanted_dtype  # a tower is built in the dtype of its own config
    model_class = model_class_of(config)
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(wanted_dtype, False, False, False):
            stack.enter_context(context)
        model = model_class(copy.deepcopy(config))
    model.tie_weights(recompute_mapping=False)  # left out above; experts may be tied too
    layers = find_expert_layers(model)
    if not model._can_set_experts_implementation():
        raise UnsupportedModelError(f"{model_class.__name__} does not let its experts implementation be set")

    mapping: list[Any] = get_model_conversion_mapping(model)
    reader = ExpertReader(checkpoint, model, layers, mapping, fingerprint=stored.fingerprint)
    taken_out = [module for layer in layers for module in layer.modules]
    names = list(layers[0].parameters)
    owned = {f"{path}.{name}" for layer in layers for path in (layer.name, *layer.twins) for name in names}
    model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in owned}
    for module in taken_out:
        for name in names:
            delattr(module, name)
            # Transformers initialises what it did not load, here and from the block around (Qwen3-Omni): it skips this
            placeholder = torch.empty(0)
            placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(module, name, placeholder)
        module._is_hf_initialized = True  # type: ignore[assignment]
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=wanted_dtype,
        dtype_plan=model._get_dtype_plan(wanted_dtype),
        weight_mapping=mapping,
    )
    info, _ = convert_and_load_state_dict_in_model(model, reader.non_expert_slices(), load_config)
    reader.place_by_products(model, info, device, wanted_dtype)
    for name, stored, wanted in sorted(info.mismatched_keys):
        raise CheckpointError(f"{folder}: {name} is stored as {tuple(stored)}, the model wants {tuple(wanted)}")
    for name, why in sorted(info.conversion_errors.items()):
        raise CheckpointError(f"{folder}: Transformers cannot convert {name}: {why.splitlines()[-1]}")
    info = model_class._finalize_model_loading(model, load_config, info)
    for module in taken_out:
        for name in names:
            delattr(module, name)
    missing = sorted(getattr(info, "missing_keys", ()))
    if missing:
        raise CheckpointError(f"{folder}: the checkpoint lacks {missing[0]!r} (and {len(missing) - 1} more tensors)")
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    tensors = {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    return Skeleton(model, layers, reader, sum(t.numel() * t.element_size() for t in tensors.values()))


def _resolve_dtype(dtype: torch.dtype | str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ModelError(f'dtype {dtype!r} is unknown: wanted "auto", "float32", "bfloat16" or "float16"')
        return found
    configured = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    stored = {entry.dtype for entry in checkpoint.tensors.values()} & _DTYPE_NAMES.keys()
    return _DTYPE_NAMES[min(stored)] if stored else torch.float32


@dataclass
class _Recipe:
    """How to make one expert parameter of one layer from stored tensors."""

    converter: Any
    """Transformers' WeightConverter, or None where the stored tensor is the parameter."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Source pattern -> stored tensor names, in the natural order of their numbers."""

    @property
    def per_expert(self) -> bool:
        """Whether one expert can be made from its own stored tensors alone."""
        return self.converter is None or _works_per_expert(self.converter)

    def plain(self) -> tuple[list[str], int] | None:
        """(source patterns, axis) where one expert's stored tensors, side by side along the axis, are the parameter.

        So it is where the converter only stacks experts and concatenates, as in nearly every family.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        if self.converter is None:
            return list(self.sources), 0
        if not all(type(op) in (MergeModulelist, Concatenate) for op in self.converter.operations):
            return None
        joins = [op.dim - 1 for op in self.converter.operations if type(op) is Concatenate]
        if not self.per_expert or len(joins) > 1:
            return None
        return [p for p in self.converter.source_patterns if p in self.sources], joins[0] if joins else 0

    def parts(
        self, pieces: dict[str, torch.Tensor], target: str, shape: torch.Size, config: Any
    ) -> tuple[list[torch.Tensor], int]:
        """(tensors to lay side by side, along which axis), from one expert's stored tensors by source pattern.

        shape: the parameter's for one expert. Where laying side by side is all there is to do, the converter's two
        copies are spared; otherwise it runs as for a layer that has this expert alone.
        """
        from transformers.core_model_loading import MergeModulelist

        plain = self.plain()
        if plain is not None:
            return [pieces[pattern] for pattern in plain[0]], plain[1]
        stacks = any(type(op) is MergeModulelist for op in self.converter.operations)
        stacked = {pattern: [piece if stacks else piece[None]] for pattern, piece in pieces.items()}
        made = _convert(self.converter, stacked, target, _Shapes({target: torch.Size((1, *shape))}), config)
        return [made[target].squeeze(0)], 0


def _works_per_expert(converter: Any) -> bool:
    """Whether no operation of the converter looks across experts, which lie along axis 0, or makes several tensors."""
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

    def within_expert(op: Any) -> bool:
        if type(op) is MergeModulelist:
            return bool(op.dim == 0)
        if type(op) in (Concatenate, Interleave):
            return bool(op.dim >= 1)
        return type(op) is Transpose and min(op.dim0, op.dim1) >= 1

    return len(converter.target_patterns) == 1 and all(map(within_expert, converter.operations))


def _convert(
    converter: Any, sources: Mapping[str, list[torch.Tensor]], target: str, model: Any, config: Any
) -> dict[str, torch.Tensor]:
    """Run a WeightConverter as Transformers does. sources: by source pattern. -> full parameter name -> tensor."""
    ready = copy.deepcopy(converter)
    for pattern, tensors in sources.items():
        for tensor in tensors:
            ready.add_tensor(target, pattern, pattern, tensor)
    made = ready.convert(target, model=model, config=config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _Shapes:
    """Stands in for the model where a converter asks it for a parameter's shape or dtype."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


class ExpertReader:
    """Reads single experts out of a checkpoint: `read_into(row, expert, target)`.

    Each shard is opened once and read by pread, so that the page cache is not counted as this process's memory. What
    is stored as the model wants it goes from the file straight into its place. Where Transformers' converter mixes
    experts, or makes several parameters at once (ERNIE-VL: text and image experts from one list), a layer is converted
    as a whole and kept until another layer is asked for. Several threads may read at once.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        layers: list[ExpertLayer],
        mapping: list[Any],
        *,
        fingerprint: str | None = None,
    ) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self.checkpoint = checkpoint
        self.fingerprint = checkpoint.fingerprint if fingerprint is None else fingerprint
        """The model's, by what is stored."""
        self.reads = "through the page cache"
        """How experts are read, with the reason, for the report."""
        self._direct = 0
        self._bounce = threading.local()
        self._files: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._converting = threading.Lock()
        self._layers = layers
        self._config = model.config
        self._recipes: list[dict[str, _Recipe]] = [{} for _ in layers]
        self._non_expert: list[str] = []
        self._whole: tuple[int, dict[str, torch.Tensor]] = (-1, {})
        targets = {
            f"{module}.{name}": (row, name)
            for row, layer in enumerate(layers)
            for module in (layer.name, *layer.twins)
            for name in layer.parameters
        }
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        state = dict(model.state_dict())
        for stored in sorted(checkpoint.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
            if target not in targets:
                self._non_expert.append(stored)
                continue
            row, name = targets[target]
            recipe = self._recipes[row].setdefault(name, _Recipe(by_pattern[pattern] if pattern else None))
            recipe.sources.setdefault(pattern or stored, []).append(stored)
        self._check_complete()

    @property
    def layout(self) -> str:
        """How the checkpoint holds experts: "one by one", "fused", or "by layer" where they cannot be read singly."""
        recipes = list(self._recipes[0].values())
        if not all(recipe.per_expert for recipe in recipes):
            return "by layer"
        singly = all(len(x) == self._layers[0].num_experts for recipe in recipes for x in recipe.sources.values())
        return "one by one" if singly else "fused"

    def non_expert_slices(self) -> dict[str, Any]:
        """Stored name -> lazy slice of every tensor that is no expert's."""
        return {name: self._slice(name) for name in self._non_expert}

    def choose_reads(self, page_cache_bytes: int | None) -> None:
        """Read past the page cache (O_DIRECT) where it could hold but a small share of the checkpoint.

        page_cache_bytes: memory that it could take; None where unknown. Call it before the first read.
        """
        files = sorted({entry.file for entry in self.checkpoint.tensors.values()})
        stored = sum(file.stat().st_size for file in files)
        if page_cache_bytes is None:
            self.reads += ": how much memory it may take is unknown"
            return
        held = f"it could hold {format_bytes(max(0, page_cache_bytes))} of {format_bytes(stored)}"
        if page_cache_bytes >= stored * DIRECT_BELOW_SHARE:
            self.reads += f": {held}"
            return
        flag = getattr(os, "O_DIRECT", 0)  # Linux has it
        try:
            descriptor = os.open(files[0], os.O_RDONLY | os.O_CLOEXEC | flag)
            try:
                os.preadv(descriptor, [mmap.mmap(-1, DIRECT_ALIGNMENT)], 0)
            finally:
                os.close(descriptor)
        except OSError as problem:
            self.reads += f": {held}, but its file system has no O_DIRECT ({problem.strerror})"
            return
        if flag:
            self._direct = flag
            self.reads = f"past the page cache (O_DIRECT): {held}"

    @property
    def reads_single_experts(self) -> bool:
        """False where a layer must be converted as a whole to get at one expert: too dear to do while serving."""
        return all(recipe.per_expert for recipes in self._recipes for recipe in recipes.values())

    def read_into(self, row: int, expert: int, target: Mapping[str, torch.Tensor]) -> None:
        """Read one expert's parameters into `target`: name -> tensor [...] of any dtype, on any device.

        Raises CheckpointError where what is stored does not have the parameter's shape, or cannot be read.
        """
        for name in self._layers[row].parameters:
            self._read_parameter(row, expert, name, target[name])

    def _read_parameter(self, row: int, expert: int, name: str, target: torch.Tensor) -> None:
        layer, recipe = self._layers[row], self._recipes[row][name]
        what = f"expert {expert} of layer {layer.layer_id}: {name}"
        if not recipe.per_expert:
            self._place([self._whole_layer(row)[f"{layer.name}.{name}"][expert]], 0, target, what)
            return
        runs = self._runs(row, name, expert, target)
        if runs is not None:
            self._read_runs(runs, target)
            return
        pieces = {
            pattern: self._slice(stored[expert])[...]
            if len(stored) == layer.num_experts
            else self._slice(stored[0])[expert : expert + 1].squeeze(0)
            for pattern, stored in recipe.sources.items()
        }
        shape = layer.parameters[name].shape[1:]
        parts, dim = recipe.parts(pieces, f"{layer.name}.{name}", shape, self._config)
        self._place(parts, dim, target, what)

    def quantised_specs(self) -> list[LayerSpec | None]:
        """By row: the spec where the experts are stored in a format that the kernels compute and can be handed over as
        they are, else None: they are read as floats. Raises CheckpointError: matrices of a layer in different formats.
        """
        return [self._quantised_spec(row) for row in range(len(self._layers))]

    def _quantised_spec(self, row: int) -> LayerSpec | None:
        layer = self._layers[row]
        matrices = [name for name, shape in layer.parameters.items() if shape.ndim == 3]
        kinds = set()
        for name in matrices:
            found = self._quantised_entries(row, name, 0)
            if found is None:
                return None
            kinds |= {entry.matrix(expert).kind for entry, expert in found}
        if len(kinds) != 1:
            raise CheckpointError(
                f"{self.checkpoint.folder}: layer {layer.layer_id} has experts in several formats "
                f"({', '.join(sorted(kind[0] for kind in kinds))}): use expert_format='float'"
            )
        ((name, scales, has_zeros),) = kinds
        try:
            spec = spec_of(layer.module, layer.parameters)
        except OpsError:
            return None
        return replace(spec, format=name, scale_number=scales, zero_points=has_zeros, transposed=False)

    def read_stored(self, row: int, expert: int) -> ExpertWeights:
        """One expert's quantised weights as they are stored; where they are, `quantised_specs` says.

        Raises CheckpointError: it is not stored so, or cannot be read.
        """
        layer, parts = self._layers[row], dict[str, Any]()
        for name, parameter in layer.parameters.items():
            what = f"{self.checkpoint.folder}: expert {expert} of layer {layer.layer_id}: {name}"
            part = "down" if name.startswith("down") else "gate_up"
            if parameter.ndim == 2:
                target = torch.empty(parameter.shape[1:], dtype=parameter.dtype)
                self._read_parameter(row, expert, name, target)
                parts[f"{part}_bias"] = target
                continue
            entries = self._quantised_entries(row, name, expert)
            if entries is None:
                raise CheckpointError(
                    f"{what} is not stored quantised as the layer's first expert is: use expert_format='float'"
                )
            matrix = StoredMatrix.stack([entry.matrix(which) for entry, which in entries], what)
            parts[part], parts[f"{part}_scale"] = matrix.codes, matrix.scales
            if matrix.zeros is not None:
                parts[f"{part}_zero"] = matrix.zeros
        return ExpertWeights(**parts)

    def _quantised_entries(self, row: int, name: str, expert: int) -> list[tuple[QuantisedEntry, int | None]] | None:
        """What lies under each other to make the expert's matrix, and which one of a fused entry; None where it is not
        stored so."""
        recipe, found = self._recipes[row][name], []
        plain = recipe.plain()
        if plain is None or (plain[1] != 0 and len(plain[0]) > 1):
            return None
        for pattern in plain[0]:
            stored = recipe.sources[pattern]
            is_fused = len(stored) != self._layers[row].num_experts
            entry = self.checkpoint.tensors[stored[0] if is_fused else stored[expert]]
            is_transposed = bool(getattr(self._layers[row].module, "is_transposed", False))
            if not isinstance(entry, QuantisedEntry) or entry.layout.is_transposed != is_transposed:
                return None
            if is_fused != entry.layout.is_fused:
                return None
            found.append((entry, expert if is_fused else None))
        return found

    def place_by_products(self, model: Any, info: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Give the model the other parameters that an expert converter makes, which Transformers has not seen."""
        from transformers.core_model_loading import set_param_for_module

        for row, recipes in enumerate(self._recipes):
            if all(recipe.per_expert for recipe in recipes.values()):
                continue
            ours = {f"{self._layers[row].name}.{name}" for name in recipes}
            for name, tensor in self._whole_layer(row).items():
                if name not in ours:
                    set_param_for_module(model, name, tensor.to(device, dtype), info, None)  # type: ignore[arg-type]

    def _whole_layer(self, row: int) -> dict[str, torch.Tensor]:
        """Every parameter that the layer's converters make when run over all experts, by full name."""
        with self._converting:
            if self._whole[0] == row:
                return self._whole[1]
            made: dict[str, torch.Tensor] = {}
            for name, recipe in self._recipes[row].items():
                if not recipe.per_expert:
                    made |= self._convert_layer(f"{self._layers[row].name}.{name}", recipe, row)
            self._whole = (row, made)
            return made

    def _runs(
        self, row: int, name: str, expert: int, target: torch.Tensor
    ) -> list[tuple[TensorEntry, int, int]] | None:
        """[(stored tensor, first byte in its file, bytes)] that in this order are the target's bytes, or None."""
        plain = self._recipes[row][name].plain()
        if plain is None or target.device.type != "cpu" or not target.is_contiguous():
            return None
        patterns, axis = plain
        if axis != 0 and len(patterns) > 1:
            return None
        layer, runs, length = self._layers[row], [], 0
        for pattern in patterns:
            stored = self._recipes[row][name].sources[pattern]
            is_fused = len(stored) != layer.num_experts
            entry = self.checkpoint.tensors[stored[0] if is_fused else stored[expert]]
            shape = entry.shape[1:] if is_fused else entry.shape
            if isinstance(entry, QuantisedEntry):
                return None
            if _DTYPE_NAMES.get(entry.dtype) != target.dtype or tuple(shape[1:]) != tuple(target.shape[1:]):
                return None
            size = entry.num_bytes // entry.shape[0] if is_fused else entry.num_bytes
            runs.append((entry, entry.start + (expert * size if is_fused else 0), size))
            length += size
        return runs if length == target.numel() * target.element_size() else None

    def _read_runs(self, runs: list[tuple[TensorEntry, int, int]], target: torch.Tensor) -> None:
        bytes_of: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
        view, done = memoryview(bytes_of), 0
        for entry, start, size in runs:
            end = done + size
            try:
                descriptor = self._descriptor(entry.file)
                while done < end:
                    got = self._pread(descriptor, view[done:end], start + size - (end - done))
                    if got == 0:
                        raise CheckpointError(f"{entry.file}: cut short while it was read: {entry.name} is incomplete")
                    done += got
            except OSError as problem:
                raise CheckpointError(f"{entry.file}: {problem.strerror} while reading {entry.name}") from None

    def _pread(self, descriptor: int, into: memoryview, at: int) -> int:
        """Like os.preadv into one buffer; O_DIRECT wants whole blocks at aligned addresses, so it reads beside."""
        if not self._direct:
            return os.preadv(descriptor, [into], at)
        if not hasattr(self._bounce, "block"):
            self._bounce.block = mmap.mmap(-1, BOUNCE_BYTES)
        skip = at % DIRECT_ALIGNMENT
        want = min(-(-(skip + len(into)) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT, BOUNCE_BYTES)
        got = os.preadv(descriptor, [memoryview(self._bounce.block)[:want]], at - skip) - skip
        got = max(0, min(got, len(into)))
        block = np.frombuffer(self._bounce.block, np.uint8)
        np.asarray(into)[:got] = block[skip : skip + got]  # NumPy lets the other threads run meanwhile
        return got

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC | self._direct)
                weakref.finalize(self, os.close, self._descriptors[file])
            return self._descriptors[file]

    def _convert_layer(self, target: str, recipe: _Recipe, row: int) -> dict[str, torch.Tensor]:
        layer, folder = self._layers[row], self.checkpoint.folder
        shapes = {f"{layer.name}.{name}": parameter.shape for name, parameter in layer.parameters.items()}
        sources = {pattern: [self._slice(x)[...] for x in stored] for pattern, stored in recipe.sources.items()}
        try:
            made = _convert(recipe.converter, sources, target, _Shapes(shapes), self._config)
        except (RuntimeError, ValueError, LookupError) as problem:
            raise CheckpointError(f"{folder}: Transformers cannot convert {target}: {problem}") from None
        if made[target].shape != shapes[target]:
            raise CheckpointError(
                f"{folder}: {target} is stored as {tuple(made[target].shape)}, the model wants "
                f"{tuple(shapes[target])}: is it complete?"
            )
        return made

    def _place(self, parts: list[torch.Tensor], dim: int, target: torch.Tensor, what: str) -> None:
        start = 0
        for part in parts:
            room = target.narrow(dim, start, min(part.shape[dim], target.shape[dim] - start))
            if room.shape != part.shape:
                break
            room.copy_(part)
            start += part.shape[dim]
        if start != target.shape[dim]:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {what} is stored as {[tuple(part.shape) for part in parts]}, "
                f"the model wants {tuple(target.shape)}"
            )

    def _check_complete(self) -> None:
        for layer, recipes in zip(self._layers, self._recipes, strict=True):
            for name in layer.parameters:
                if name not in recipes:
                    raise CheckpointError(
                        f"{self.checkpoint.folder}: no stored tensor for {layer.name}.{name}: is it complete?"
                    )
                if not recipes[name].per_expert:
                    continue
                counts = {len(stored) for stored in recipes[name].sources.values()}
                if not counts <= {1, layer.num_experts} or len(counts) != 1:
                    raise CheckpointError(
                        f"{self.checkpoint.folder}: layer {layer.layer_id} has {sorted(counts)} stored tensors for "
                        f"{name}: wanted one per expert ({layer.num_experts}) or one in all"
                    )

    def _slice(self, name: str) -> Any:
        from safetensors import safe_open

        entry = self.checkpoint.tensors[name]
        if isinstance(entry, QuantisedEntry):
            return LazyFloats(entry)
        opened = self._files.get(entry.file)
        if opened is None:
            opened = self._files[entry.file] = safe_open(entry.file, framework="pt", device="cpu", backend="pread")
        return opened.get_slice(name)
