"""Moves while serving: the tracker and rebalancer that replay uses, and the store that moves the bytes.

Runs between tokens, on the thread that has just finished a forward pass. Knows picks and budgets; the decisions are
`adaptation/`'s, the two phases and the restoring of bytes the store's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotset.adaptation.rebalancer import DEFAULT_HYSTERESIS, DEFAULT_MAX_MOVES, Rebalancer
from hotset.adaptation.tracker import DEFAULT_DECAY, DEFAULT_FAST_DECAY, DEFAULT_FAST_WEIGHT, EmaHotnessTracker
from hotset.core import Machine
from hotset.errors import CheckpointError, PolicyError, ResidencyError
from hotset.residency import ABSENT, Swap
from hotset.runtime.copy_policy import RestoreSource
from hotset.runtime.store import ExpertStore

logger = logging.getLogger("hotset.runtime")


@dataclass(frozen=True)
class Adaptation:
    """Settings of moves while serving; the defaults are the tracker's and the rebalancer's own."""

    decay: float = DEFAULT_DECAY
    fast_decay: float = DEFAULT_FAST_DECAY
    fast_weight: float = DEFAULT_FAST_WEIGHT
    hysteresis: float = DEFAULT_HYSTERESIS
    max_moves: int = DEFAULT_MAX_MOVES
    """Most moves per layer and forward pass."""
    max_bytes_per_token: int | None = None
    """Most bytes moved, both ways and all layers together, per token of a forward pass."""
    min_dwell: int = 0
    """Tokens for which a newly loaded expert stays."""
    machine: Machine | None = None
    """With it, a move must also pay for its transfer."""
    restore: Literal["slot", "checkpoint", "none"] = "slot"
    """Whence a demoted expert gets its host copy back, where host copies are skipped."""
    automatic: bool = True
    """Move after every forward pass; else only when `rebalance` is called."""

    @property
    def restore_source(self) -> RestoreSource | None:
        """None for "none"."""
        return None if self.restore == "none" else self.restore


@dataclass
class MoveStatistics:
    """Sums since the start."""

    promotions: int = 0
    demotions: int = 0
    failed: int = 0
    """Reads or copies that failed; the old residency stayed."""
    deferred: int = 0
    """Proposals dropped: an expert in use, or the bytes per token spent."""
    bytes: int = 0
    """Moved, both ways."""
    seconds: float = 0.0
    """Spent deciding and moving, between tokens."""
    last_failure: str | None = field(default=None)


class Adapter:
    """Observes picks and moves experts. One per model; any thread may call it."""

    def __init__(self, store: ExpertStore, settings: Adaptation) -> None:
        self.store = store
        self.settings = settings
        self.statistics = MoveStatistics()
        residency = store.residency
        self._layer_bytes = [fmt.expert_bytes for fmt in store.formats]
        dearest = max(store.move_bytes(row, swaps=True) for row in range(residency.num_layers))
        if settings.max_bytes_per_token is not None and settings.max_bytes_per_token < dearest:
            raise PolicyError(
                f"max_bytes_per_token {settings.max_bytes_per_token} is below the {dearest} bytes of one swap: "
                "nothing could ever move"
            )
        self.tracker = EmaHotnessTracker(
            residency.num_layers,
            residency.num_experts,
            decay=settings.decay,
            fast_decay=settings.fast_decay,
            fast_weight=settings.fast_weight,
            layer_ids=[layer.layer_id for layer in store.layers],
        )
        self.rebalancer = Rebalancer(
            self.tracker,
            residency,
            hysteresis=settings.hysteresis,
            max_moves=settings.max_moves,
            min_dwell=settings.min_dwell,
            expert_bytes=np.repeat(np.array(self._layer_bytes, np.int64)[:, None], residency.num_experts, axis=1),
            machine=settings.machine,
        )
        self._is_warm = False
        self._first_row = 0

    def after_forward(self, picks: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """One forward pass is done. picks: (row, ids [T, K]) of its layers, ids outside 0..E-1 are no picks."""
        if not picks:
            return
        started = time.perf_counter()
        with self.store.moving:
            if not self._is_warm:
                self._warm_start(picks[0][1].shape[1])
            allowed = self.settings.max_bytes_per_token
            left = None if allowed is None else allowed * len(picks[0][1])
            # no layer is always the first to spend the bytes
            self._first_row = (self._first_row + 1) % len(picks)
            for row, ids in [*picks[self._first_row :], *picks[: self._first_row]]:
                valid = np.where((ids >= 0) & (ids < self.store.residency.num_experts), ids, ABSENT).astype(np.int16)
                if self.settings.automatic:
                    left = self._move(self.rebalancer.finish(row, valid), left)
                else:
                    self.tracker.observe_row(row, valid)
            self.statistics.seconds += time.perf_counter() - started

    def rebalance(self, *, max_moves: int | None = None, max_bytes: int | None = None) -> int:
        """Move until no expert away is hotter, by the margin, than a resident of its layer. Returns moves made.

        max_bytes: most bytes of promoted experts. From any thread, also while others generate.
        """
        started = time.perf_counter()
        with self.store.moving:
            before = self.statistics.promotions
            self._move(self.rebalancer.rebalance(max_moves=max_moves, max_bytes=max_bytes), None)
            self.statistics.seconds += time.perf_counter() - started
            return self.statistics.promotions - before

    def _warm_start(self, top_k: int) -> None:
        """The plan's residents start at the average activation rate, the others at 0: the plan counts at first."""
        residency = self.store.residency
        self.tracker.set_hotness(residency.mask().astype(np.float64) * (top_k / residency.num_experts))
        self._is_warm = True

    def _move(self, swaps: Iterable[Swap], bytes_left: int | None) -> int | None:
        counts = self.statistics
        for swap in swaps:
            cost = self.store.move_bytes(swap.row, swaps=swap.victim != ABSENT)
            if bytes_left is not None and cost > bytes_left:
                counts.deferred += 1
                continue
            try:
                moved = self.store.promote(swap.row, swap.expert, swap.victim)
            except ResidencyError:  # in use by another thread's token
                counts.deferred += 1
                continue
            except (CheckpointError, OSError, RuntimeError) as problem:
                counts.failed += 1
                counts.last_failure = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
                layer = self.store.layers[swap.row].layer_id
                logger.warning("move of expert %d of layer %d failed: %s", swap.expert, layer, counts.last_failure)
                continue
            counts.promotions += 1
            counts.demotions += swap.victim != ABSENT
            counts.bytes += moved
            bytes_left = None if bytes_left is None else bytes_left - moved
        return bytes_left
