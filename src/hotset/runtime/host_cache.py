"""Bounded host memory in front of the checkpoint: a fixed number of buffers, filled by parallel reads of whole experts.

What replay calls the tier below: a `Residency` of its own (home = disk), run by the demand policies of `policies/`, so
a policy's hit rate here is the one that replay predicts. Knows nothing of the arena. Buffers are allocated when first
used and then kept: fresh pages cost more than the read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from hotset.core import Tier
from hotset.errors import BudgetError, PolicyError
from hotset.policies import Setting, make_policy
from hotset.residency import ABSENT, Residency
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertTensors
from hotset.runtime.memory import allocate_host, buffer_bytes

DEFAULT_POLICY = "lfu-aged"
AGING_REQUESTS_PER_EXPERT = 4
"""Of lfu-aged here. A host cache holds a small share of a model and starts empty: on recorded traces quick fading won
at every size (gpt-oss-20b decode, a quarter of the experts: hit rate .660, .580 at 64 and .610 by lru; see LOG.md)."""
DEFAULT_READERS = 4
CACHE_POLICIES = ("lru", "lfu", "lfu-aged")
"""The policies that load every miss: a miss must pass through host memory to be computed at all."""


@dataclass
class CacheStatistics:
    """Sums since the start."""

    hits: int = 0
    """Announced experts that were in memory or on their way."""
    misses: int = 0
    loads: int = 0
    read_bytes: int = 0
    failures: int = 0
    stalls: int = 0
    """Times that compute waited for a read, or for a buffer to come free."""
    stall_seconds: float = 0.0


def policy_options(policy: str, num_experts: int) -> dict[str, int]:
    """Options with which the host cache makes its policy."""
    return {"aging_interval": AGING_REQUESTS_PER_EXPERT * num_experts} if policy == "lfu-aged" else {}


class HostCache:
    """Host buffers for some of L layers' experts, held in the rows' `formats`.

    read: reads one expert into a buffer; called from `readers` threads at once; reads: how it does, for the report.
    budget_bytes: most bytes of buffers.
    Layers of one size share all buffers; where sizes differ, each layer gets its share of the budget.

    Raises BudgetError where the budget holds no buffer per layer (or at all), PolicyError on another policy.
    """

    def __init__(
        self,
        formats: Sequence[ExpertFormat],
        read: Callable[[int, int, ExpertTensors], None],
        budget_bytes: int,
        *,
        policy: str = DEFAULT_POLICY,
        readers: int = DEFAULT_READERS,
        reads: str = "",
    ) -> None:
        if policy not in CACHE_POLICIES:
            raise PolicyError(f"host cache policy {policy!r}: wanted one of {', '.join(CACHE_POLICIES)}")
        self.formats = list(formats)
        self.budget_bytes = budget_bytes
        self.policy_name = policy
        self.reads = reads
        self.statistics = CacheStatistics()
        num_layers, num_experts = len(self.formats), self.formats[0].layer.num_experts
        self._shapes = [fmt.host_shapes for fmt in self.formats]
        self._sizes = [buffer_bytes(shapes) for shapes in self._shapes]
        smallest = sum(self._sizes) if len(set(map(str, self._shapes))) > 1 else self._sizes[0]
        if budget_bytes < smallest:
            raise BudgetError(
                f"{budget_bytes} bytes of host memory hold no expert of each size ({smallest} bytes): give more"
            )
        if len(set(map(str, self._shapes))) == 1:
            count = min(budget_bytes // self._sizes[0], num_layers * num_experts)
            self.residency = Residency.pooled(num_experts, num_layers, count, home=Tier.DISK)
        else:
            counts = [min(budget_bytes // sum(self._sizes), num_experts)] * num_layers
            self.residency = Residency(num_experts, counts, home=Tier.DISK)
        self._read = read
        self._buffers: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._changed = threading.Condition(self.residency.lock)
        self._loading: dict[tuple[int, int], Future[None]] = {}
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="hotset-read")
        shape = (num_layers, num_experts)
        sizes = np.repeat(np.array(self._sizes, np.int64)[:, None], num_experts, axis=1)
        setting = Setting(self.residency, sizes, 1, np.zeros(shape), None, np.empty((num_layers, 0, 1), np.int16))
        self._policy = make_policy(policy, setting, policy_options(policy, num_experts))

    # -- compute's side ------------------------------------------------------------------------------------

    def announce(self, row: int, experts: Sequence[int]) -> None:
        """One request for each expert: hits are noted first, so that no miss evicts them; reads start at once."""
        with self._changed:
            here = [self._is_here(row, expert) for expert in experts]
            self.statistics.hits += sum(here)
            self.statistics.misses += len(here) - sum(here)
            for expert, is_hit in zip(experts, here, strict=True):
                if is_hit:
                    self._policy.request(row, expert)
            for expert, is_hit in zip(experts, here, strict=True):
                if not is_hit:
                    self._start_read(row, expert)

    def holds(self, row: int, expert: int) -> bool:
        """Whether the expert's bytes are in memory now."""
        return self.residency.slot(row, expert) != ABSENT

    def acquire(self, row: int, expert: int) -> ExpertTensors:
        """The expert's buffer, locked until `release`; waits while it is being read.

        A caller that waits holds none (else two callers could wait for each other's buffers). Raises what the read
        raised.
        """
        started = 0.0
        while True:
            with self._changed:
                slot = self.residency.acquire(row, expert)
                if slot != ABSENT:
                    if started:
                        self.statistics.stall_seconds += time.perf_counter() - started
                    return self._buffers[self._place(row, slot)]
                if not started:
                    started = time.perf_counter()
                    self.statistics.stalls += 1
                reading = self._loading.get((row, expert)) or self._start_read(row, expert)
                if reading is None:  # every buffer is in use or being filled
                    self._changed.wait()
                    continue
            reading.result()

    def acquire_ready(self, row: int, expert: int) -> ExpertTensors | None:
        """The expert's buffer, locked until `release`, or None where it is not in memory now."""
        with self._changed:
            slot = self.residency.acquire(row, expert)
            return None if slot == ABSENT else self._buffers[self._place(row, slot)]

    def release(self, row: int, expert: int) -> None:
        """Undo one `acquire`."""
        with self._changed:
            self.residency.release(row, expert)
            self._changed.notify_all()

    def drop(self, row: int, expert: int) -> None:
        """Forget the expert's copy, if it has one that nobody uses."""
        with self._changed:
            a = self.residency.arrays
            if a.table[row, expert] != ABSENT and a.users[row, expert] == 0:
                self.residency.evict(row, expert)
                self._changed.notify_all()

    # -- the disk's side -----------------------------------------------------------------------------------

    def _is_here(self, row: int, expert: int) -> bool:
        a = self.residency.arrays
        return bool(a.table[row, expert] != ABSENT or a.claims[row, expert] != ABSENT)

    def _start_read(self, row: int, expert: int) -> Future[None] | None:
        swap = self._policy.request(row, expert)
        if swap is None:
            return None
        _, move = self.residency.begin(swap)
        place = self._place(row, move.slot)
        if place not in self._buffers:
            self._buffers[place] = allocate_host(self._shapes[row])

        def read() -> None:
            try:
                self._read(row, expert, self._buffers[place])
            except BaseException:
                with self._changed:
                    self.residency.abort(move)
                    self.statistics.failures += 1
                    self._end_read(row, expert)
                raise
            with self._changed:
                self.residency.publish(move)
                self.statistics.loads += 1
                self.statistics.read_bytes += self.formats[row].expert_bytes
                self._end_read(row, expert)

        future = self._readers.submit(read)
        self._loading[row, expert] = future
        return future

    def _end_read(self, row: int, expert: int) -> None:
        del self._loading[row, expert]
        self._changed.notify_all()

    def _place(self, row: int, slot: int) -> tuple[int, int]:
        return int(self.residency.arrays.group[row]), slot

    # -- account -------------------------------------------------------------------------------------------

    @property
    def num_buffers(self) -> int:
        """Experts that fit."""
        return int(self.residency.arrays.slots.sum())

    @property
    def num_held(self) -> int:
        """Experts in memory now."""
        return int(self.residency.mask().sum())

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers allocated so far."""
        groups = self.residency.arrays.group.tolist()
        with self._changed:
            return sum(self._sizes[groups.index(group)] for group, _ in self._buffers)

    def report(self) -> dict[str, int | str]:
        """What the cache is; `statistics` is what it did."""
        size = {"budget_bytes": self.budget_bytes, "buffers": self.num_buffers}
        return {"policy": self.policy_name, **size, "reads": self.reads}

    def check_integrity(self) -> None:
        """Assert Residency's account and that the buffers stay within the budget."""
        self.residency.check_integrity()
        assert self.held_bytes <= self.budget_bytes, "host cache holds more than its budget"

    def close(self) -> None:
        """End the reading threads; reads under way finish."""
        self._readers.shutdown(wait=True)
