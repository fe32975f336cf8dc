"""What a running model counts, by hand."""

from __future__ import annotations

import numpy as np

from hotset.runtime.statistics import PhaseStatistics


def test_rates_by_hand_and_a_token_without_picks_counts_nowhere() -> None:
    counted = PhaseStatistics()
    slots = np.array([[0, 1], [2, -1], [-1, -1], [0, 5]], np.int32)
    valid = np.array([[True, True], [True, True], [False, False], [True, False]])
    counted.count(slots, valid)
    assert (counted.routed_tokens, counted.picks, counted.hits, counted.resident_tokens) == (3, 5, 4, 2)
    assert counted.hit_rate == 4 / 5
    assert counted.token_resident_rate == 2 / 3
    assert counted.tokens_per_second is None
