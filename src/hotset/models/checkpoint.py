"""A Hugging Face checkpoint folder, looked at without loading it: which file holds which tensor, and how large.

Knows safetensors headers and the index file. Knows nothing of model classes, torch or tensor values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hotset.errors import CheckpointError, ModelError
from hotset.storage import FileFormatError, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FINGERPRINT_SAMPLES = 256
_FINGERPRINT_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: where its bytes are and what they mean."""

    name: str
    file: Path
    dtype: str
    """safetensors' own name, such as "BF16"."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of one model. Build it with `Checkpoint.open`, which checks every file's header and size."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @staticmethod
    def open(folder: str | Path) -> Checkpoint:
        """Read the index and all headers of the checkpoint in `folder`.

        Raises CheckpointError: no safetensors weights, a shard missing, cut short or malformed, or a tensor that the
        index promises and its shard lacks.
        """
        root = Path(folder)
        index = root / INDEX_NAME
        if index.exists():
            weight_map = _read_weight_map(index)
            tensors: dict[str, TensorEntry] = {}
            for name in sorted(set(weight_map.values())):
                tensors.update({entry.name: entry for entry in _read_header(root / name)})
            lacking = sorted(set(weight_map) - set(tensors))
            if lacking:
                raise CheckpointError(
                    f"{root / weight_map[lacking[0]]}: lacks tensor {lacking[0]!r}, which {INDEX_NAME} says is there"
                )
        elif (root / SINGLE_NAME).exists():
            tensors = {entry.name: entry for entry in _read_header(root / SINGLE_NAME)}
        else:
            raise CheckpointError(f"{root}: no {SINGLE_NAME} or {INDEX_NAME} in it: wanted a safetensors checkpoint")
        return Checkpoint(root, tensors)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell one model from another, whatever its sharding.

        Hashes every tensor's name, dtype and shape and the first 64 bytes of 256 of them, so a fine-tuned copy of the
        same architecture differs while reading stays a matter of milliseconds.
        """
        names = sorted(self.tensors)
        digest = hashlib.sha256()
        for name in names:
            entry = self.tensors[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        step = max(1, len(names) // _FINGERPRINT_SAMPLES)
        for name in names[::step]:
            entry = self.tensors[name]
            with entry.file.open("rb", buffering=0) as stream:
                stream.seek(entry.start)
                digest.update(stream.read(min(_FINGERPRINT_SAMPLE_BYTES, entry.num_bytes)))
        return digest.hexdigest()[:16]


def resolve_model_folder(model: str | Path) -> Path:
    """The local folder of a model: `model` itself, or the hub's snapshot of that name in the local cache or fetched.

    Raises ModelError where it is neither a folder nor a model that huggingface_hub can give.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder}: no config.json in it: wanted a Hugging Face model folder")
        return folder
    name = str(model)
    if folder.is_file() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"{name}: no such model folder, and not a hub name like owner/model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise ModelError(f"{name}: no such folder here, and the hub did not give it: {reason}") from None


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{index}: not a checkpoint index (no weight_map in it)") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: its weight_map is empty")
    return weight_map


def _read_header(path: Path) -> Iterator[TensorEntry]:
    try:
        header, _, data_start, size = read_header(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: shard is missing: fetch the checkpoint again, or this file of it") from None
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    except FileFormatError as problem:
        raise CheckpointError(str(problem)) from None
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: the header entry of {name!r} is malformed: fetch it again") from None
        if data_start + end > size:
            raise CheckpointError(
                f"{path}: cut short: {name} ends at byte {data_start + end} and the file has {size}: fetch it again"
            )
        yield TensorEntry(name, path, dtype, shape, data_start + begin, end - begin)
