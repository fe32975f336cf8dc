"""What a token costs on a Machine: the one cost model of planning, replay and bench. docs/cost-model.md explains it.

Knows bytes, counts and the Machine's rates. Does not know routing: callers count hits, misses and moves. Everything is
linear in those counts, so arrays of any shape (per token, per layer, per expert) go through unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.core import Machine
from hotset.errors import MachineError

Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Parts:
    """Seconds by what they are spent on; each an array of the shape that was asked about. `link` runs in the
    background and costs time only where it shows up in `stall`."""

    non_expert: Seconds
    gpu: Seconds
    """Experts computed in the arena."""
    cpu: Seconds
    """Experts computed from host memory."""
    round_trip: Seconds
    link: Seconds
    """Time the link is busy with moves."""
    stall: Seconds
    """The part of `link` that the token waits for."""

    @property
    def total(self) -> Seconds:
        return self.non_expert + self.gpu + self.cpu + self.round_trip + self.stall

    def mean(self) -> dict[str, float]:
        """Mean seconds per entry, part by part, and their total. All 0 where there is no entry."""
        names = ("non_expert", "gpu", "cpu", "round_trip", "link", "stall", "total")
        return {name: float(np.mean(getattr(self, name))) if np.size(self.total) else 0.0 for name in names}


@dataclass(frozen=True)
class CostModel:
    """The Machine's prices.

    on_miss: "compute" = an expert that is not resident is computed on the CPU from host memory; "fetch" = its bytes
    cross the link first, the token waits, and the GPU computes it. non_expert_bytes: weights outside the experts that
    every step reads (attention, dense layers, head), resident in the arena's memory. non_expert_seconds: a measured
    time for everything that is not an expert, instead of the estimate from bytes.

    Raises MachineError: "fetch" on a machine without a link, or both non-expert figures given.
    """

    machine: Machine
    on_miss: Literal["compute", "fetch"] = "compute"
    non_expert_bytes: int | None = None
    non_expert_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.on_miss not in ("compute", "fetch"):
            raise MachineError(f"on_miss is {self.on_miss!r}: wanted compute or fetch")
        if self.on_miss == "fetch" and self.machine.device != "cuda":
            raise MachineError(f"machine {self.machine.name!r} has no link to fetch over: use on_miss='compute'")
        if self.non_expert_bytes is not None and self.non_expert_seconds is not None:
            raise MachineError("both non_expert_bytes and non_expert_seconds are given: wanted at most one")

    @property
    def arena_read_bytes_per_second(self) -> float:
        """Rate at which resident experts are read: GPU memory, or host memory where the arena is there."""
        if self.machine.device == "cpu":
            return self.machine.host_read_bytes_per_second
        assert self.machine.gpu_read_bytes_per_second is not None
        return self.machine.gpu_read_bytes_per_second

    @property
    def move_bytes_per_second(self) -> float:
        """Rate of promotions. Without a link a move is a copy within host memory: each byte is read and written."""
        if self.machine.device == "cpu":
            return self.machine.host_read_bytes_per_second / 2
        assert self.machine.host_to_device_bytes_per_second is not None
        return self.machine.host_to_device_bytes_per_second

    def hit_seconds(self, expert_bytes: ArrayLike) -> Seconds:
        """One pick of a resident expert of that size."""
        return np.asarray(expert_bytes) / self.arena_read_bytes_per_second + self.machine.launch_seconds

    def miss_seconds(self, expert_bytes: ArrayLike) -> Seconds:
        """One pick of an expert that is not resident, without the layer's round trip."""
        sizes = np.asarray(expert_bytes)
        if self.on_miss == "fetch":
            return sizes / self.move_bytes_per_second + self.hit_seconds(sizes)
        launch = self.machine.launch_seconds if self.machine.device == "cpu" else 0.0
        return sizes / self.machine.host_read_bytes_per_second + launch

    def saved_seconds_per_hit(self, expert_bytes: ArrayLike) -> Seconds:
        """What a hit saves over a miss, without the round trip: the worth of one pick in a decode-time objective."""
        return self.miss_seconds(expert_bytes) - self.hit_seconds(expert_bytes)

    @property
    def saved_seconds_per_resident_token(self) -> float:
        """What a layer saves when all picks of a token are resident: its host round trip."""
        return self.machine.round_trip_seconds if self.on_miss == "compute" else 0.0

    def break_even_gain(self, horizon_tokens: float) -> float:
        """Rise in activation probability from which a promotion pays for its transfer within `horizon_tokens`.

        A swap that raises the hit probability of one slot by p saves p * horizon * (b / host - b / arena) seconds and
        keeps the link busy for b / link: the size b cancels. 0 where nothing is to be saved but hits still count.
        """
        saved = 1 / self.machine.host_read_bytes_per_second - 1 / self.arena_read_bytes_per_second
        if self.on_miss == "fetch":
            saved = 1 / self.move_bytes_per_second
        return 0.0 if saved <= 0 else 1 / (self.move_bytes_per_second * saved * horizon_tokens)

    def parts(
        self,
        *,
        hits: ArrayLike,
        hit_bytes: ArrayLike,
        misses: ArrayLike,
        miss_bytes: ArrayLike,
        round_trips: ArrayLike,
        load_bytes: ArrayLike,
        steps: ArrayLike = 1.0,
    ) -> Parts:
        """Seconds for those counts, which broadcast against each other.

        hits, misses: experts computed in the arena and from host memory. round_trips: layers with at least one miss.
        load_bytes: bytes promoted. steps: forward passes, fractions allowed (a prefill chunk shared by its tokens).
        """
        m = self.machine
        hit_count, hit_size, miss_count, miss_size, trips, loaded, passes = np.broadcast_arrays(
            *(np.asarray(x, np.float64) for x in (hits, hit_bytes, misses, miss_bytes, round_trips, load_bytes, steps))
        )
        non_expert = passes * self._non_expert_seconds_per_step
        if self.on_miss == "fetch":
            # every miss crosses the link once, whether the policy keeps it or not; prefetched experts come on top
            gpu = (hit_size + miss_size) / self.arena_read_bytes_per_second
            gpu = gpu + (hit_count + miss_count) * m.launch_seconds
            link = np.maximum(loaded, miss_size) / self.move_bytes_per_second
            zero = np.zeros_like(gpu)
            return Parts(non_expert, gpu, zero, zero, link, link)
        gpu = hit_size / self.arena_read_bytes_per_second + hit_count * m.launch_seconds
        cpu = miss_size / m.host_read_bytes_per_second
        if m.device == "cpu":
            cpu = cpu + miss_count * m.launch_seconds
        round_trip = trips * m.round_trip_seconds
        link = loaded / self.move_bytes_per_second
        # a CUDA copy engine moves bytes while the token computes; on the CPU the same cores do both
        hidden = non_expert + gpu + cpu + round_trip if m.device == "cuda" else np.zeros_like(gpu)
        return Parts(non_expert, gpu, cpu, round_trip, link, np.maximum(0.0, link - hidden))

    def prefill_seconds(
        self,
        tokens: ArrayLike,
        *,
        expert_bytes: float,
        expert_flops: float,
        num_experts: int,
        top_k: int,
        missing: float,
    ) -> tuple[Seconds, Seconds]:
        """(computed on the host, streamed to the GPU): one layer's missing experts for a chunk of that many tokens.

        missing: experts of the layer that are not resident. expert_flops: of one token through one expert. Every
        expert is taken to be picked equally often. docs/cost-model.md has the formula. Raises MachineError where the
        machine has no link or no host_flops_per_second.
        """
        m = self.machine
        if m.device != "cuda" or m.host_flops_per_second is None:
            raise MachineError(
                f"machine {m.name!r} has no {'link' if m.device != 'cuda' else 'host_flops_per_second'}: "
                "measure it with `hotset probe`"
            )
        count = np.asarray(tokens, np.float64)
        picked = missing * (1.0 - (1.0 - min(top_k / num_experts, 1.0)) ** count)
        rows = count * top_k * missing / num_experts
        reading = picked * expert_bytes / m.host_read_bytes_per_second
        host = np.maximum(reading, rows * expert_flops / m.host_flops_per_second) + m.round_trip_seconds
        # through page-locked staging, which the host reads and writes while the expert before is on the link
        copy = expert_bytes / min(self.move_bytes_per_second, m.host_read_bytes_per_second / 2)
        gpu = float(self.hit_seconds(expert_bytes))
        streamed = picked * max(copy, gpu) + min(copy, gpu)
        return host, streamed

    def prefill_threshold(
        self,
        *,
        expert_bytes: float,
        expert_flops: float,
        num_experts: int,
        top_k: int,
        missing: float,
        most: int = 65_536,
    ) -> int | None:
        """Least number of tokens from which on, up to `most`, streaming is predicted to be faster; None = never.

        Arguments and errors as for `prefill_seconds`.
        """
        tokens = np.arange(1, most + 1)
        host, streamed = self.prefill_seconds(
            tokens,
            expert_bytes=expert_bytes,
            expert_flops=expert_flops,
            num_experts=num_experts,
            top_k=top_k,
            missing=missing,
        )
        slower = np.flatnonzero(streamed >= host)
        least = 1 if len(slower) == 0 else int(tokens[slower[-1]]) + 1
        return least if least <= most and missing > 0 else None

    @property
    def _non_expert_seconds_per_step(self) -> float:
        if self.non_expert_seconds is not None:
            return self.non_expert_seconds
        return (self.non_expert_bytes or 0) / self.arena_read_bytes_per_second

    def describe(self) -> dict[str, Any]:
        """JSON-able: the machine's name and source, and the choices above."""
        return {
            "machine": self.machine.name,
            "source": self.machine.source,
            "device": self.machine.device,
            "on_miss": self.on_miss,
            "non_expert_bytes": self.non_expert_bytes,
            "non_expert_seconds": self.non_expert_seconds,
        }
