"""What a running model counts: picks, hits, whole tokens and time, prefill and decode apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Phase = Literal["prefill", "decode"]


@dataclass
class PhaseStatistics:
    """Sums over the calls of one phase. A routed token is counted once per MoE layer."""

    seconds: float = 0.0
    tokens: int = 0
    routed_tokens: int = 0
    picks: int = 0
    hits: int = 0
    resident_tokens: int = 0

    def count(self, slots: NDArray[np.int32], valid: NDArray[np.bool_]) -> None:
        """Add one layer's call: slots [T, K] of the picks (-1 = not in the arena), valid [T, K] = a real pick."""
        hit = (slots >= 0) & valid
        routed = valid.any(axis=1)  # a token that the layer did not route counts nowhere
        self.routed_tokens += int(np.count_nonzero(routed))
        self.picks += int(np.count_nonzero(valid))
        self.hits += int(np.count_nonzero(hit))
        self.resident_tokens += int(np.count_nonzero((hit == valid).all(axis=1) & routed))

    @property
    def hit_rate(self) -> float | None:
        """Share of picks that found their expert in the arena, or None before the first."""
        return self.hits / self.picks if self.picks else None

    @property
    def token_resident_rate(self) -> float | None:
        """Share of (token, layer) pairs with all picks in the arena, or None before the first."""
        return self.resident_tokens / self.routed_tokens if self.routed_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens through the model per second spent in its forward passes, or None before the first."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def to_json(self) -> dict[str, float | int | None]:
        """All sums and rates."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "picks": self.picks,
            "hits": self.hits,
            "hit_rate": self.hit_rate,
            "token_resident_rate": self.token_resident_rate,
        }


def merged(*parts: PhaseStatistics) -> PhaseStatistics:
    """The sum of several phases."""
    total = PhaseStatistics()
    for part in parts:
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total
