"""What a plan says about itself: rates in sample and held out, bytes per tier, warnings.

Knows nothing of how the placement was found. Everything is JSON-able.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core import Counts, Trace
from hotset.planning.measures import Measured, measure

FEW_PICKS = 20
"""Picks per expert of a layer below which its frequencies are mostly noise: a relative error of about 1 / sqrt(20)."""


def rates(measured: Measured, trace: Trace) -> dict[str, Any]:
    """A placement's figures on one trace."""
    return {
        "documents": trace.num_sequences,
        "tokens": trace.num_tokens,
        "hit_rate": measured.hit_rate,
        "token_resident_rate": measured.token_resident_rate,
        "misses_per_token": measured.misses_per_token(trace.num_tokens),
    }


def rates_on(mask: NDArray[np.bool_], trace: Trace) -> dict[str, Any]:
    """The same, measured here."""
    return rates(measure(mask, trace), trace)


def selected_score_hit_rate(mask: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Share of all scores that the placement selects."""
    total = float(scores.sum())
    return float(scores[mask].sum()) / total if total else 0.0


def few_picks_warning(counts: NDArray[np.float64], layer_ids: NDArray[np.int32]) -> list[str]:
    """A sentence where layers saw under 20 picks per expert, else nothing."""
    thin = counts.mean(axis=1) < FEW_PICKS
    if not thin.any():
        return []
    least = float(counts.mean(axis=1).min())
    named = ", ".join(str(int(layer)) for layer in layer_ids[thin][:8]) + (", ..." if thin.sum() > 8 else "")
    return [
        f"{int(thin.sum())} of {len(counts)} layers saw under {FEW_PICKS} picks per expert (layer {named}; fewest "
        f"{least:.1f}): the plan may follow noise, record more tokens"
    ]


def tier_bytes(
    mask: NDArray[np.bool_], source: Trace | Counts, context_length: int | None
) -> tuple[dict[str, Any], list[str]]:
    """({"gpu": {...}, "host": {...}}, notes): bytes of each tier, None where the trace does not say.

    Arena overhead: slots of a layer are as large as its largest resident expert, and every layer has a slot table of
    one int32 per expert. KV cache: metadata `kv_bytes_per_token` times the context length.
    """
    sizes = source.expert_bytes
    notes: list[str] = []
    per_token = source.metadata.get("kv_bytes_per_token")
    cache = None
    if context_length is not None:
        if isinstance(per_token, int | float):
            cache = int(per_token * context_length)
        else:
            notes.append("the trace does not say how large the KV cache of a token is: it is not in the sum of bytes")
    other = source.metadata.get("non_expert_bytes")
    gpu: dict[str, Any] = {
        "experts": None,
        "non_expert": int(other) if isinstance(other, int | float) else None,
        "kv_cache": cache,
        "arena_overhead": None,
        "total": None,
    }
    host: dict[str, Any] = {"experts": None}
    if sizes is not None:
        resident = int(sizes[mask].sum())
        slots = np.where(mask, sizes, 0).max(axis=1) * mask.sum(axis=1)
        gpu["experts"] = resident
        gpu["arena_overhead"] = int(slots.sum()) - resident + 4 * mask.size
        gpu["total"] = sum(v for v in gpu.values() if v is not None)
        host["experts"] = int(sizes.sum()) - resident
    return {"gpu": gpu, "host": host, "context_length": context_length}, notes
