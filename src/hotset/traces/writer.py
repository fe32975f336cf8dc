"""Writes a trace as it is recorded: shard by shard, so that memory stays flat and whatever stops it loses little.

A shard is written when its sequences fill `shard_bytes`, under a temporary name, then renamed; what is in the folder is
a valid trace at every moment. Closing, Ctrl-C and errors flush the sequences that are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Trace
from hotset.errors import TraceError
from hotset.traces.format import SHARD_GLOB, SHARD_NAME, save_trace

DEFAULT_SHARD_BYTES = 64 * 1024 * 1024


class TraceWriter:
    """Append sequences; read the result with `Trace.open(folder)`.

    folder: made if absent; refused where it already holds a trace, unless overwrite. layer_ids: [L] the model's own
    numbers. expert_bytes: [L, E] or None. Raises TraceError.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_experts: int,
        layer_ids: NDArray[np.int32],
        expert_bytes: NDArray[np.int64] | None = None,
        model_fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.num_experts = num_experts
        self.layer_ids = layer_ids
        self.expert_bytes = expert_bytes
        self.model_fingerprint = model_fingerprint
        self.metadata = dict(metadata or {})
        self.shard_bytes = shard_bytes
        self.num_sequences = 0
        self.num_tokens = 0
        self.saved_sequences = 0
        self._shards = 0
        self._pending: list[_Sequence] = []
        self._pending_bytes = 0
        prepare_folder(self.folder, overwrite=overwrite)

    def add_sequence(
        self,
        expert_ids: NDArray[np.int16],
        *,
        phase: NDArray[np.uint8],
        source: str,
        weights: NDArray[np.float16] | None = None,
        token_ids: NDArray[np.int32] | None = None,
    ) -> None:
        """Append one sequence: expert_ids [L, t, K], phase [t], weights [L, t, K], token_ids [t]; t = 0 is skipped."""
        if expert_ids.shape[1] == 0:
            return
        sequence = _Sequence(expert_ids, phase, source, weights, token_ids)
        self._pending.append(sequence)
        self._pending_bytes += expert_ids.nbytes + (0 if weights is None else weights.nbytes)
        self.num_sequences += 1
        self.num_tokens += expert_ids.shape[1]
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the pending sequences as the next shard. Raises TraceError where the disk refuses them."""
        if not self._pending:
            return
        path = self.folder / SHARD_NAME.format(self._shards)
        try:
            save_trace(self._pending_trace(), path)
        except TraceError as problem:
            raise TraceError(
                f"{problem}; {self.saved_sequences} of {self.num_sequences} sequences are safe in {self.folder}"
            ) from None
        self._shards += 1
        self.saved_sequences = self.num_sequences
        self._pending, self._pending_bytes = [], 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not (isinstance(problem, TraceError) and self._pending):  # after a refused write there is no room for more
            self.flush()

    def _pending_trace(self) -> Trace:
        lengths = [s.expert_ids.shape[1] for s in self._pending]
        has_weights = self._pending[0].weights is not None
        has_tokens = self._pending[0].token_ids is not None
        return Trace(
            id_shards=(np.concatenate([s.expert_ids for s in self._pending], axis=1),),
            num_experts=self.num_experts,
            sequence_start=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
            phase=np.concatenate([s.phase for s in self._pending]),
            layer_ids=self.layer_ids,
            weight_shards=(np.concatenate([s.weights for s in self._pending if s.weights is not None], axis=1),)
            if has_weights
            else None,
            expert_bytes=self.expert_bytes,
            token_ids=np.concatenate([s.token_ids for s in self._pending if s.token_ids is not None])
            if has_tokens
            else None,
            model_fingerprint=self.model_fingerprint,
            metadata={**self.metadata, "sequence_source": [s.source for s in self._pending]},
        )


class _Sequence:
    __slots__ = ("expert_ids", "phase", "source", "token_ids", "weights")

    def __init__(
        self,
        expert_ids: NDArray[np.int16],
        phase: NDArray[np.uint8],
        source: str,
        weights: NDArray[np.float16] | None,
        token_ids: NDArray[np.int32] | None,
    ) -> None:
        self.expert_ids = expert_ids
        self.phase = phase
        self.source = source
        self.weights = weights
        self.token_ids = token_ids


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make the folder and see that it holds no trace yet; with overwrite, remove that trace's shards.

    Raises TraceError: a file in its place, an earlier trace in it, or the system's refusal.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise TraceError(f"{folder}: a file of that name is in the way: give a folder for the trace") from None
    except OSError as problem:
        raise TraceError(f"{folder}: {problem.strerror}") from None
    earlier = sorted(folder.glob(SHARD_GLOB))
    if earlier and not overwrite:
        raise TraceError(f"{folder}: already holds a trace: give another folder, or --overwrite to replace it")
    for shard in earlier:
        shard.unlink()
