"""Routing recorded while a model serves: what passes through dispatch anyway, written as a trace.

A sequence is one row of one `generate`: its prompt and the tokens decoded after it, by thread. Padding and steps after
a sequence's end are left out. Knows no tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core import DECODE, PREFILL
from hotset.errors import ModelError
from hotset.traces.writer import TraceWriter


@dataclass
class Forward:
    """What one forward pass left behind: its inputs' shape, and each MoE layer's routing."""

    batch: int
    width: int
    is_decode: bool
    continues: bool
    """The cache held tokens already: this pass goes on with the same sequences."""
    input_ids: torch.Tensor | None
    """[B, W], or None where embeddings went in."""
    attention_mask: torch.Tensor | None
    started: float
    picks: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    """(row, ids [B * W, K]) of each layer."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """[B * W, K] of each layer; only where somebody records."""


@dataclass
class _Open:
    """Sequences of one thread that are still growing: lists of one array per forward pass."""

    ids: list[NDArray[np.int16]]
    """[L, B, W, K] each."""
    weights: list[NDArray[np.float16]]
    keep: list[NDArray[np.bool_]]
    """[B, W] each: real tokens."""
    phase: list[int]
    ended: NDArray[np.bool_]
    """[B]"""


class ServingRecorder:
    """Collects forward passes and hands complete sequences to the writer. A context manager; leaving it writes all."""

    def __init__(self, writer: TraceWriter, eos_ids: Sequence[int], num_experts: int) -> None:
        self.writer = writer
        self.num_experts = num_experts
        self._eos = torch.tensor(list(eos_ids), dtype=torch.long)
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._on_exit: Any = None

    def on_exit(self, call: Any) -> ServingRecorder:
        """`call` when recording ends. Returns this."""
        self._on_exit = call
        return self

    def add(self, forward: Forward) -> None:
        """One forward pass of the calling thread is done. Raises ModelError where a layer routed other tokens."""
        tokens = forward.batch * forward.width
        for row, picks in forward.picks:
            if len(picks) != tokens:
                raise ModelError(f"MoE layer {row} routed {len(picks)} tokens of {tokens}: it cannot be recorded")
        order = sorted(range(len(forward.picks)), key=lambda i: forward.picks[i][0])
        shape = (len(order), forward.batch, forward.width, -1)
        routed = np.stack([forward.picks[i][1] for i in order])  # one array first: a call per layer would be dear
        real = (routed >= 0) & (routed < self.num_experts)
        ids: NDArray[np.int16] = np.where(real, routed, -1).astype(np.int16).reshape(shape)
        stacked = torch.stack([forward.weights[i] for i in order]).to(torch.float16).cpu().numpy()
        weights = stacked.reshape(shape)
        thread = threading.get_ident()
        opened = self._open.get(thread)
        if opened is None or not forward.continues or len(opened.ended) != forward.batch:
            self._finish(self._open.pop(thread, None))
            opened = _Open([], [], [], [], np.zeros(forward.batch, np.bool_))
            self._open[thread] = opened
        keep = np.ones((forward.batch, forward.width), np.bool_)
        mask = forward.attention_mask
        if mask is not None and mask.ndim == 2 and not forward.is_decode:
            keep = mask[:, -forward.width :].cpu().numpy().astype(np.bool_)
        if forward.is_decode and forward.input_ids is not None:
            opened.ended |= torch.isin(forward.input_ids[:, 0].cpu(), self._eos).numpy()
            keep &= ~opened.ended[:, None]
        opened.ids.append(ids)
        opened.weights.append(weights)
        opened.keep.append(keep)
        opened.phase += [DECODE if forward.is_decode else PREFILL] * forward.width

    def _finish(self, opened: _Open | None) -> None:
        if opened is None:
            return
        ids, weights = np.concatenate(opened.ids, axis=2), np.concatenate(opened.weights, axis=2)
        keep, phase = np.concatenate(opened.keep, axis=1), np.array(opened.phase, np.uint8)
        with self._lock:
            for index in range(ids.shape[1]):
                real = keep[index]
                self.writer.add_sequence(
                    ids[:, index, real], phase=phase[real], source="serving", weights=weights[:, index, real]
                )

    def close(self) -> None:
        """Write what is complete so far, growing sequences included. Again is harmless."""
        for thread in list(self._open):
            self._finish(self._open.pop(thread, None))
        self.writer.flush()
        if self._on_exit is not None:
            self._on_exit()

    def __enter__(self) -> ServingRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
