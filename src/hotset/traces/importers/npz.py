"""NumPy archives of routing: `ids` [T, L, K] with `doc` [T] and `num_experts`, the layout in which research dumps come.

Arrays: ids (integers, -1 or absent = no pick), doc [T] (rows of one document are contiguous), num_experts (number), and
where present layers [L] (the model's own layer numbers), weights [T, L, K], phase [T] or the text "decode"/"prefill" in
the file name, doc_repetitive [N] or [T] (kept in metadata as `repetitive_sequences`), doc_dataset with dataset_names.
Pickled arrays are refused.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import DECODE, PREFILL, Trace
from hotset.errors import TraceError


def read(path: Path) -> Trace:
    """Read one archive. Raises TraceError: no archive, an array missing, or what `Trace.from_arrays` refuses."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, NDArray[Any]] = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, ValueError, EOFError):
        raise TraceError(f"{path}: not a NumPy .npz archive of plain arrays") from None
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror or problem}") from None
    for name in ("ids", "doc", "num_experts"):
        if name not in arrays:
            raise TraceError(
                f"{path}: no array {name!r} (it has: {', '.join(sorted(arrays))}): wanted ids, doc, num_experts"
            )
    ids, doc = arrays["ids"], arrays["doc"]
    if ids.ndim != 3 or doc.shape != ids.shape[:1]:
        raise TraceError(f"{path}: ids has shape {ids.shape} and doc {doc.shape}: wanted [T, L, K] and [T]")
    starts = np.flatnonzero(np.diff(doc, prepend=doc[:1] - 1))
    if len(np.unique(doc[starts])) != len(starts):
        raise TraceError(f"{path}: rows of one document are not contiguous")
    phase = arrays.get("phase")
    if phase is None:
        phase = np.full(len(doc), DECODE if "decode" in path.stem else PREFILL, np.uint8)
    metadata: dict[str, Any] = {"model": path.stem, "sequence_source": _sources(arrays, doc[starts], path.stem)}
    if "doc_repetitive" in arrays:
        metadata["repetitive_sequences"] = np.flatnonzero(_per_document(arrays["doc_repetitive"], doc, starts)).tolist()
    weights = arrays.get("weights")
    try:
        return Trace.from_arrays(
            np.ascontiguousarray(ids.transpose(1, 0, 2).astype(np.int16)),
            num_experts=int(arrays["num_experts"]),
            sequence_start=starts,
            weights=None if weights is None else np.ascontiguousarray(weights.transpose(1, 0, 2)),
            phase=phase,
            layer_ids=arrays.get("layers"),
            metadata=metadata,
        )
    except TraceError as problem:
        raise TraceError(f"{path}: {problem}") from None


def _per_document(values: NDArray[Any], doc: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[Any]:
    """[N] one value per document, from an array per document (indexed by its number or in order) or per token."""
    if len(values) == len(doc):
        return values[starts]
    return values[doc[starts]] if len(values) > int(doc.max()) else values


def _sources(arrays: dict[str, NDArray[Any]], documents: NDArray[Any], stem: str) -> list[str]:
    if "doc_dataset" not in arrays or "dataset_names" not in arrays:
        return [stem] * len(documents)
    dataset = arrays["doc_dataset"]
    index = dataset[documents] if len(dataset) > int(documents.max()) else dataset
    return [str(arrays["dataset_names"][int(i)]) for i in index]
