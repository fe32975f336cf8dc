"""Files: written under a temporary name and renamed, read memory-mapped. The only module that knows the byte layout.

Everything hotset writes for itself is safetensors or JSON; no pickle is ever written or read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
T = TypeVar("T")

_MAX_HEADER_BYTES = 100 * 1024 * 1024


class FileFormatError(ValueError):
    """The file is not what its reader expects. Callers wrap it in the error of their own noun."""


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed onto it when the block ends well, removed when it does not.

    Ctrl-C and a full disk leave the old file, or none, never half of a new one.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False, default=jsonable) + "\n", encoding="utf-8")


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    """Write one safetensors file, atomically. Each metadata value is stored as its JSON text."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    texts = {key: json.dumps(value, default=jsonable) for key, value in metadata.items()}
    with atomic_path(path) as temporary:
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata=texts)
        except SafetensorError as problem:  # its writer reports a full disk this way
            raise FileFormatError(f"{path}: cannot be written: {problem}") from None


@contextlib.contextmanager
def writing_parts(
    path: str | Path, arrays: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, Any]
) -> Iterator[Callable[[str, int, NDArray[Any]], None]]:
    """Write a safetensors file that is too large to hold, atomically: `write(name, index, part)`
    puts one entry of an array.

    arrays: name -> (safetensors' name of its dtype, shape, bytes of one part, which is an entry of the first axis).
    Parts may be written in any order and from several threads. Raises OSError as usual.
    """
    header: dict[str, Any] = {"__metadata__": {k: json.dumps(v, default=jsonable) for k, v in metadata.items()}}
    starts, end = {}, 0
    for name, (dtype, shape, part_bytes) in arrays.items():
        starts[name] = end
        end += shape[0] * part_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, temporary.open("wb", buffering=0) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)

        def write(name: str, index: int, part: NDArray[Any]) -> None:
            size, data = arrays[name][2], np.ascontiguousarray(part).data.cast("B")
            assert len(data) == size, f"{name}[{index}] has {len(data)} bytes, wanted {size}"
            at = 8 + len(text) + starts[name] + index * size
            while data:
                done = os.pwrite(stream.fileno(), data, at)
                data, at = data[done:], at + done

        yield write


@dataclass(frozen=True)
class ArrayFile:
    """A safetensors file as read: arrays are read-only views of the mapped file."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any]

    def take(self, name: str, dtype: type, ndim: int) -> NDArray[Any]:
        """The named array. Raises FileFormatError unless it is there with that dtype and rank."""
        if name not in self.arrays:
            raise FileFormatError(f"{self.path}: no array {name!r} in it (it has: {', '.join(sorted(self.arrays))})")
        array = self.arrays[name]
        if array.dtype != np.dtype(dtype) or array.ndim != ndim:
            raise FileFormatError(
                f"{self.path}: {name} is {array.dtype} of rank {array.ndim}, wanted {np.dtype(dtype)} of rank {ndim}"
            )
        return array

    def take_optional(self, name: str, dtype: type, ndim: int) -> NDArray[Any] | None:
        """The same, or None where the file does not have it."""
        return self.take(name, dtype, ndim) if name in self.arrays else None


def read_fully(descriptor: int, array: NDArray[Any], start: int) -> bool:
    """Fill a contiguous array from the file's bytes at `start`. False where the file ends before. OSError as usual."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        got = os.preadv(descriptor, [view], start)
        if got == 0:
            return False
        view, start = view[got:], start + got
    return True


def read_header(path: str | Path) -> tuple[dict[str, Any], dict[str, str], int, int]:
    """(entries by tensor name, metadata texts, offset of the data, bytes of the file) of a safetensors file.

    Raises FileFormatError where it is not one or is cut short within its header, OSError as usual.
    """
    target = Path(path)
    size = target.stat().st_size
    with target.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise FileFormatError(f"{target}: cut short: {size} bytes is too short for a safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise FileFormatError(
                f"{target}: cut short, or not a safetensors file: {size} bytes do not hold its header"
            )
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError:
            raise FileFormatError(f"{target}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise FileFormatError(f"{target}: not a safetensors file (its header is not a JSON object)")
    texts: dict[str, str] = header.pop("__metadata__", {})
    return header, texts, 8 + header_bytes, size


def read_arrays(path: str | Path) -> ArrayFile:
    """Map one safetensors file. Raises FileFormatError where it is not one or is cut short, OSError as usual."""
    target = Path(path)
    header, texts, data_start, size = read_header(target)
    mapped = np.memmap(target, np.uint8, "r") if size > data_start else np.empty(size, np.uint8)
    arrays = {name: _view(target, mapped, data_start, size, name, entry) for name, entry in header.items()}
    metadata = {key: _json_or_text(value) for key, value in texts.items()}
    return ArrayFile(target, arrays, metadata)


def _view(
    path: Path, mapped: NDArray[np.uint8], data_start: int, size: int, name: str, entry: Mapping[str, Any]
) -> NDArray[Any]:
    try:
        dtype, shape, (begin, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise FileFormatError(f"{path}: the header entry of {name!r} is malformed") from None
    if dtype is None:
        raise FileFormatError(f"{path}: {name} has dtype {entry['dtype']}, which hotset does not read")
    if data_start + end > size:
        raise FileFormatError(f"{path}: cut short: {name} ends at byte {data_start + end}, the file has {size}")
    if end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise FileFormatError(f"{path}: {name} has {end - begin} bytes, which does not fit {dtype} {list(shape)}")
    raw = mapped[data_start + begin : data_start + end]
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    array: NDArray[Any] = np.asarray(raw).view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


def wrap_format_errors(error: Callable[[str], Exception], read: Callable[[], T]) -> T:
    """Run `read`; turn FileFormatError and OSError into `error(one line)`."""
    try:
        return read()
    except FileFormatError as problem:
        raise error(str(problem)) from None
    except OSError as problem:
        raise error(f"{problem.filename}: {problem.strerror}") from None


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def jsonable(value: Any) -> Any:
    """`json.dumps(default=...)` for NumPy scalars and arrays and for paths."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not go into JSON")
