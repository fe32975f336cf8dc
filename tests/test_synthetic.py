"""Made-up traces are what their arguments say, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

import hotset
from hotset import Trace
from hotset.errors import TraceError
from hotset.traces.synthetic import synthetic_trace


def made(**changes: float) -> Trace:
    arguments: dict[str, float] = {"num_layers": 3, "num_experts": 16, "top_k": 3, "num_tokens": 4000, **changes}
    return synthetic_trace(**arguments)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_trace() -> None:
    assert made(seed=4).fingerprint == made(seed=4).fingerprint
    assert made(seed=4).fingerprint != made(seed=5).fingerprint


def test_a_small_trace_is_known_by_heart() -> None:
    # the generator promises the same picks on every machine
    ids = synthetic_trace(num_layers=1, num_experts=6, top_k=2, num_tokens=4, seed=1).expert_ids
    assert ids.tolist() == [[[3, 2], [2, 0], [0, 2], [0, 2]]]


def test_skew_makes_some_experts_hotter() -> None:
    flat, steep = (made(skew=s, affinity=0.0, num_tokens=20000).counts for s in (0.0, 1.5))
    assert flat.max() / flat.mean() < 1.1
    assert steep.max() / steep.mean() > 2.5


def test_communities_fire_together() -> None:
    def pair_share(affinity: float) -> float:
        trace = made(affinity=affinity, skew=0.0, num_communities=4)
        together = hotset.build_coactivation_matrix(trace).astype(float)
        for layer in together:
            np.fill_diagonal(layer, 0)
        top = np.sort(together.reshape(3, -1), axis=1)[:, -50:]
        return float(top.sum() / together.sum())

    assert pair_share(0.95) > 1.5 * pair_share(0.0)


def test_drift_puts_domains_in_order() -> None:
    in_order = made(drift=1.0, num_sequences=40).metadata["sequence_source"]
    assert in_order == sorted(in_order)
    assert made(drift=0.0, num_sequences=40).metadata["sequence_source"] != in_order


def test_all_experts_can_be_picked_at_once() -> None:
    assert (np.sort(made(top_k=16, skew=3.0, num_tokens=50).expert_ids, axis=2) == np.arange(16)).all()


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 17}, {"num_tokens": 0}, {"affinity": 1.5}, {"drift": -1}, {"skew": -1}, {"num_sequences": 5000}],
)
def test_arguments_that_make_no_trace_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(TraceError):
        made(**changes)
