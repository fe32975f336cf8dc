"""Routing made up for tests and benchmarks, seeded: skewed popularity, experts that fire together, domains that drift.

Not a model of any real router. Each layer has communities of experts; a token belongs to one community per layer and
draws most of its picks there, the others by the layer's popularity (Zipf). A sequence belongs to a domain, which
prefers some communities; domains are mixed evenly or come one after the other. `hotset` learns nothing from these.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hotset.core import DECODE, Trace
from hotset.errors import TraceError


def synthetic_trace(
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    num_sequences: int | None = None,
    skew: float = 0.8,
    num_communities: int = 8,
    affinity: float = 0.8,
    num_domains: int = 4,
    drift: float = 0.0,
    expert_bytes: int | None = None,
    seed: int = 0,
) -> Trace:
    """A trace of decode tokens, the same for the same arguments on every machine.

    skew: exponent of the Zipf popularity within a layer, 0 = even. num_communities: groups of experts per layer.
    affinity: share of picks drawn within the token's community. num_domains: kinds of sequences, each with
    communities of its own taste. drift: 0 = domains shuffled, 1 = one after the other; between, that share in order.
    num_sequences: documents of equal length, default one per 256 tokens.

    Raises TraceError on arguments that make no trace.
    """
    if not 1 <= top_k <= num_experts or min(num_layers, num_tokens, num_communities, num_domains) < 1:
        raise TraceError(
            f"{num_layers} layers x {num_experts} experts x top-{top_k}, {num_tokens} tokens, {num_communities} "
            f"communities, {num_domains} domains: wanted at least one of each, and top-k within the experts"
        )
    if not (0 <= affinity <= 1 and 0 <= drift <= 1) or skew < 0:
        raise TraceError(f"affinity {affinity} and drift {drift} are shares of 0 to 1, skew {skew} is 0 or more")
    documents = num_sequences or max(1, num_tokens // 256)
    if documents > num_tokens:
        raise TraceError(f"{documents} sequences of {num_tokens} tokens: a sequence has at least one token")
    starts = np.linspace(0, num_tokens, documents + 1).astype(np.int64)
    domain = _domains(np.random.default_rng([seed, 0]), documents, num_domains, drift)
    domain_of_token = np.repeat(domain, np.diff(starts)).astype(np.int32)
    ids = np.empty((num_layers, num_tokens, top_k), np.int16)

    def make(row: int) -> None:
        from hotset.traces.synthetic_loops import draw_picks

        rng = np.random.default_rng([seed, 1, row])
        popularity, members = _layer_tables(rng, num_experts, num_communities, skew)
        taste = rng.dirichlet(np.full(num_communities, 0.5), num_domains)
        draw_picks(
            ids[row],
            domain_of_token,
            np.cumsum(taste, axis=1),
            np.cumsum(popularity),
            np.cumsum(members, axis=1),
            affinity,
            np.uint64(rng.integers(1, 2**63)),
        )

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(make, range(num_layers)))
    return Trace.from_arrays(
        ids,
        num_experts=num_experts,
        sequence_start=starts[:-1],
        phase=np.full(num_tokens, DECODE, np.uint8),
        expert_bytes=expert_bytes,
        metadata={"model": f"synthetic, seed {seed}", "sequence_source": [f"domain {int(d)}" for d in domain]},
    )


def _domains(rng: np.random.Generator, documents: int, num_domains: int, drift: float) -> NDArray[np.int64]:
    """[N] domain of each sequence: in order, with the share 1 - drift of the sequences shuffled among themselves."""
    domain = np.arange(documents) * num_domains // documents
    loose = np.flatnonzero(rng.random(documents) >= drift)
    domain[loose] = domain[rng.permutation(loose)]
    return domain


def _layer_tables(
    rng: np.random.Generator, num_experts: int, num_communities: int, skew: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([E] popularity, [C, E] popularity within each community), each summing to 1; communities overlap a little."""
    popularity = (1.0 + rng.permutation(num_experts)) ** -skew
    home = rng.integers(num_communities, size=num_experts)
    inside = (home[None, :] == np.arange(num_communities)[:, None]) | (
        rng.random((num_communities, num_experts)) < 0.05
    )
    members = np.where(inside, popularity, 1e-3 * popularity)
    return popularity / popularity.sum(), members / members.sum(axis=1, keepdims=True)
