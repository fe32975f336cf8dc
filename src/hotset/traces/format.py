"""The trace file: safetensors, one file or a folder of shards, written as it goes, mapped when read.

A folder holds `trace-00000.safetensors`, `trace-00001.safetensors`, ... Every shard is a complete small trace with the
same header: whatever shards are there after an interrupt or a full disk are a valid trace. Arrays of a shard:
expert_ids [L, t, K] int16, phase [t] uint8, sequence_start [n] int64 (offsets within the shard; a sequence never
crosses shards), layer_ids [L] int32, and where kept weights [L, t, K] float16, expert_bytes [L, E] int64,
token_ids [t] int32. Metadata: format, version, num_experts, model_fingerprint, trace (free), sequence_source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Trace
from hotset.errors import TraceError
from hotset.storage import ArrayFile, read_arrays, wrap_format_errors, write_arrays
from hotset.traces.importers import import_trace, importer_for

FORMAT = "hotset-trace"
VERSION = 1
SHARD_NAME = "trace-{:05d}.safetensors"
SHARD_GLOB = "trace-[0-9][0-9][0-9][0-9][0-9].safetensors"


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` as one file, by way of a temporary name. Raises TraceError where the disk refuses."""
    target = Path(path)
    if target.is_dir():
        raise TraceError(f"{target} is a folder: give the name of a .safetensors file")
    wrap_format_errors(TraceError, lambda: _write(target, trace))


def open_trace(path: str | Path) -> Trace:
    """Map and validate the trace in a file or in a folder of shards; a foreign file goes to its importer.

    Raises TraceError.
    """
    target = Path(path)
    foreign = importer_for(target)
    if foreign is not None:
        return import_trace(target, foreign)
    if target.is_dir():
        files = sorted(target.glob(SHARD_GLOB))
        if not files:
            raise TraceError(f"{target}: no trace shards ({SHARD_NAME.format(0)}, ...) in this folder")
        expected = [SHARD_NAME.format(i) for i in range(len(files))]
        missing = sorted(set(expected) - {f.name for f in files})
        if missing:
            raise TraceError(f"{target}: shard {missing[0]} is missing although later ones are there")
    else:
        files = [target]
    shards = [wrap_format_errors(TraceError, lambda f=f: _read_shard(f)) for f in files]  # type: ignore[misc]
    trace = _join(shards)
    try:
        trace.validate()
    except TraceError as problem:
        raise TraceError(f"{target}: {problem}") from None
    return trace


def _write(path: Path, trace: Trace) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "expert_ids": trace.expert_ids,
        "phase": trace.phase,
        "sequence_start": trace.sequence_start,
        "layer_ids": trace.layer_ids,
    }
    if trace.weights is not None:
        arrays["weights"] = trace.weights
    if trace.expert_bytes is not None:
        arrays["expert_bytes"] = trace.expert_bytes
    if trace.token_ids is not None:
        arrays["token_ids"] = trace.token_ids
    free = dict(trace.metadata)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "num_experts": trace.num_experts,
        "model_fingerprint": trace.model_fingerprint,
        "sequence_source": free.pop("sequence_source", None),
        "trace": free,
    }
    write_arrays(path, arrays, metadata)


def _read_shard(path: Path) -> tuple[ArrayFile, Trace]:
    file = read_arrays(path)
    if file.metadata.get("format") != FORMAT:
        raise TraceError(f"{path}: a safetensors file, but not a hotset trace: make one with `hotset record`")
    if file.metadata.get("version") != VERSION:
        raise TraceError(f"{path}: trace version {file.metadata.get('version')}, this hotset reads {VERSION}")
    num_experts = file.metadata.get("num_experts")
    if not isinstance(num_experts, int) or num_experts < 1:
        raise TraceError(f"{path}: num_experts is {num_experts!r}: wanted a positive integer")
    weights = file.take_optional("weights", np.float16, 3)
    free = file.metadata.get("trace") or {}
    source = file.metadata.get("sequence_source")
    metadata = {**free, **({} if source is None else {"sequence_source": source})}
    expert_bytes = file.take_optional("expert_bytes", np.int64, 2)
    layer_ids = file.take("layer_ids", np.int32, 1)
    if expert_bytes is not None and expert_bytes.shape != (len(layer_ids), num_experts):
        raise TraceError(
            f"{path}: expert_bytes has shape {expert_bytes.shape}, wanted ({len(layer_ids)}, {num_experts})"
        )
    return file, Trace(
        id_shards=(file.take("expert_ids", np.int16, 3),),
        num_experts=num_experts,
        sequence_start=file.take("sequence_start", np.int64, 1),
        phase=file.take("phase", np.uint8, 1),
        layer_ids=layer_ids,
        weight_shards=None if weights is None else (weights,),
        expert_bytes=expert_bytes,
        token_ids=file.take_optional("token_ids", np.int32, 1),
        model_fingerprint=file.metadata.get("model_fingerprint"),
        metadata=metadata,
    )


def _join(shards: Sequence[tuple[ArrayFile, Trace]]) -> Trace:
    if len(shards) == 1:
        return shards[0][1]
    first = shards[0][1]
    for file, trace in shards[1:]:
        same = (
            trace.num_experts == first.num_experts
            and trace.top_k == first.top_k
            and np.array_equal(trace.layer_ids, first.layer_ids)
            and trace.model_fingerprint == first.model_fingerprint
            and (trace.weight_shards is None) == (first.weight_shards is None)
            and (trace.token_ids is None) == (first.token_ids is None)
        )
        if not same:
            raise TraceError(f"{file.path}: this shard is of another recording than {shards[0][0].path.name}")
    traces = [trace for _, trace in shards]
    offsets = np.cumsum([0, *(t.num_tokens for t in traces[:-1])])
    return Trace(
        id_shards=tuple(t.id_shards[0] for t in traces),
        num_experts=first.num_experts,
        sequence_start=np.concatenate([t.sequence_start + o for t, o in zip(traces, offsets, strict=True)]),
        phase=np.concatenate([t.phase for t in traces]),
        layer_ids=first.layer_ids,
        weight_shards=None
        if first.weight_shards is None
        else tuple(t.weight_shards[0] for t in traces if t.weight_shards is not None),
        expert_bytes=first.expert_bytes,
        token_ids=None
        if first.token_ids is None
        else np.concatenate([t.token_ids for t in traces if t.token_ids is not None]),
        model_fingerprint=first.model_fingerprint,
        metadata=_joined_metadata(traces),
    )


def _joined_metadata(traces: Sequence[Trace]) -> Mapping[str, Any]:
    metadata = dict(traces[0].metadata)
    sources = [t.metadata.get("sequence_source") for t in traces]
    if all(isinstance(s, list) for s in sources):
        metadata["sequence_source"] = [name for s in sources for name in s or []]
    return metadata
