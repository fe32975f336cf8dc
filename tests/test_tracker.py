"""The tracker: averages by hand, lazily decayed against the plain formula, however the tokens are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotset import EmaHotnessTracker, Trace
from hotset.adaptation import loops
from hotset.errors import PolicyError


def reference(ids: NDArray[Any], decay: float, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """[E] the plain formula in float64: every expert decays at every routed token. ids [T, K]."""
    average = start.astype(np.float64).copy()
    for picks in ids.tolist():
        picked = [e for e in picks if e >= 0]
        if picked:
            average *= decay
            average[picked] += 1.0 - decay
    return average


def blended(ids: NDArray[Any], num_experts: int, decay: float, fast: float, weight: float) -> NDArray[np.float64]:
    zeros = np.zeros(num_experts)
    return (1 - weight) * reference(ids, decay, zeros) + weight * reference(ids, fast, zeros)


def random_picks(rng: np.random.Generator, tokens: int, experts: int, top_k: int, no_pick: float) -> NDArray[np.int64]:
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    ids[rng.random(ids.shape) < no_pick] = -1
    return ids


def test_an_average_by_hand() -> None:
    tracker = EmaHotnessTracker(1, 3, decay=0.5, fast_decay=0.5, fast_weight=0.0)
    tracker.observe(0, np.array([0, 1]))
    assert tracker.hotness().tolist() == [[0.5, 0.5, 0.0]]
    tracker.observe(0, np.array([1, 2]))
    assert tracker.hotness().tolist() == [[0.25, 0.75, 0.5]]


def test_two_averages_blend_by_the_fast_weight() -> None:
    tracker = EmaHotnessTracker(1, 2, decay=0.75, fast_decay=0.5, fast_weight=0.4)
    tracker.observe(0, np.array([1]))
    assert tracker.hotness()[0] == pytest.approx([0.0, 0.6 * 0.25 + 0.4 * 0.5])


def test_no_pick_is_skipped_and_a_token_without_any_does_not_decay() -> None:
    tracker = EmaHotnessTracker(1, 3, decay=0.5, fast_decay=0.5, fast_weight=0.0)
    tracker.observe(0, np.array([[0, -1], [-1, -1], [-1, -1]]))
    assert tracker.hotness().tolist() == [[0.5, 0.0, 0.0]]


@pytest.mark.parametrize(("decay", "fast", "weight"), [(0.97, 0.97, 0.0), (0.995, 0.9, 0.2), (0.6, 0.5, 1.0)])
def test_lazy_decay_equals_the_plain_formula_over_a_hundred_thousand_tokens(
    decay: float, fast: float, weight: float
) -> None:
    rng = np.random.default_rng(0)
    ids = random_picks(rng, 100_000, 8, 2, 0.05)
    tracker = EmaHotnessTracker(1, 8, decay=decay, fast_decay=fast, fast_weight=weight)
    position = 0
    while position < len(ids):
        step = int(rng.choice([1, 1, 2, 37, 4096]))
        tracker.observe_batch({0: ids[position : position + step]})
        position += step
    assert np.abs(tracker.hotness()[0] - blended(ids, 8, decay, fast, weight)).max() < 1e-6
    assert tracker.arrays.scale.max() <= loops.RESCALE_ABOVE  # it did not outgrow what is rescaled


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_split_into_batches_gives_the_same_averages(seed: int, cuts: list[int]) -> None:
    ids = random_picks(np.random.default_rng(seed), 200, 6, 3, 0.2)
    whole, parts = EmaHotnessTracker(2, 6), EmaHotnessTracker(2, 6)
    whole.observe_batch({0: ids, 1: ids[::-1]})
    edges = sorted({0, *cuts, 200})
    for start, stop in itertools.pairwise(edges):
        parts.observe_batch({1: ids[::-1][start:stop], 0: ids[start:stop]})
    assert np.abs(parts.hotness() - whole.hotness()).max() < 1e-14


def test_a_real_trace_equals_the_plain_formula(real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace("esft-law-prefill")
    tracker = EmaHotnessTracker(trace.num_layers, trace.num_experts, layer_ids=trace.layer_ids)
    tracker.observe_batch({int(layer): trace.layer(row) for row, layer in enumerate(trace.layer_ids)})
    for row in (0, 12, 25):
        expected = blended(trace.layer(row), 64, *tracker.arrays.decay, tracker.arrays.fast_weight[0])
        assert np.abs(tracker.hotness()[row] - expected).max() < 1e-9


def test_the_first_mask_after_a_warm_start_is_frequency_top_k(real_trace: Callable[[str], Trace]) -> None:
    counts = real_trace("esft-intent-prefill").counts
    tracker = EmaHotnessTracker(*counts.shape)
    tracker.warm_start(counts, top_k=6)
    expected = np.zeros(counts.size, np.bool_)
    expected[np.argsort(-counts.ravel(), kind="stable")[:400]] = True
    assert (tracker.mask(400).ravel() == expected).all()
    per_layer = tracker.mask(experts_per_layer=16)
    for row in range(len(counts)):
        assert set(np.flatnonzero(per_layer[row])) == set(np.argsort(-counts[row], kind="stable")[:16])


def test_a_warm_start_is_a_probability_and_ties_go_to_the_lower_index() -> None:
    tracker = EmaHotnessTracker(2, 4)
    tracker.warm_start([[2, 2, 0, 0], [4, 1, 2, 1]], top_k=2)  # the busiest layer saw 4 tokens
    assert tracker.hotness() == pytest.approx(np.array([[0.5, 0.5, 0, 0], [1.0, 0.25, 0.5, 0.25]]))
    assert tracker.mask(experts_per_layer=[1, 2]).tolist() == [[True, False, False, False], [True, False, True, False]]
    assert tracker.mask(3).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert tracker.mask(0).sum() == 0
    assert tracker.mask(8).all()


def test_torch_and_numpy_ids_of_any_integer_type_count_alike() -> None:
    torch = pytest.importorskip("torch")
    ids = np.array([[0, 2], [2, 1], [1, 3]])
    expected = EmaHotnessTracker(1, 4)
    expected.observe(0, ids)
    for same in (ids.astype(np.int16), ids.astype(np.int32), ids.astype(np.uint8), ids.tolist(), torch.tensor(ids)):
        tracker = EmaHotnessTracker(1, 4)
        tracker.observe(0, same)
        assert (tracker.hotness() == expected.hotness()).all()


def test_a_saved_tracker_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ids = random_picks(rng, 300, 5, 2, 0.1)
    tracker = EmaHotnessTracker(2, 5, decay=0.9, fast_decay=0.8, fast_weight=0.3, layer_ids=[3, 7])
    tracker.observe_batch({3: ids[:200], 7: ids[:100]})
    tracker.save(tmp_path / "state.safetensors")
    again = EmaHotnessTracker.open(tmp_path / "state.safetensors")
    for one in (tracker, again):
        one.observe_batch({3: ids[200:], 7: ids[100:]})
    assert (again.hotness() == tracker.hotness()).all()
    assert again.layer_ids.tolist() == [3, 7]


def test_wrong_settings_and_observations_are_refused_and_count_nothing(tmp_path: Path) -> None:
    tracker = EmaHotnessTracker(2, 4, layer_ids=[5, 6])
    (tmp_path / "other.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: EmaHotnessTracker(0, 4), "wanted at least one of each"),
        (lambda: EmaHotnessTracker(1, 4, decay=1.0), "decay is 1.0"),
        (lambda: EmaHotnessTracker(1, 4, decay=0.9, fast_decay=0.95), "fast_decay is 0.95"),
        (lambda: EmaHotnessTracker(1, 4, fast_weight=-0.1), "fast_weight is -0.1"),
        (lambda: EmaHotnessTracker(2, 4, layer_ids=[1, 1]), "do not name 2 distinct layers"),
        (lambda: tracker.observe(0, [1]), "layer 0 is not tracked"),
        (lambda: tracker.observe(5, [1, 4]), "expert id 4 of layer 5 is out of range"),
        (lambda: tracker.observe(5, [1, -2]), "expert id -2 of layer 5"),
        (lambda: tracker.observe(5, [1.0]), "dtype float64"),
        (lambda: tracker.observe(5, [[[1]]]), r"shape \(1, 1, 1\)"),
        (lambda: tracker.warm_start(np.ones((2, 3)), 1), "has shape"),
        (lambda: tracker.warm_start(np.full((2, 4), np.nan), 1), "NaN"),
        (lambda: tracker.warm_start(np.ones((2, 4)), 0), "top_k is 0"),
        (lambda: tracker.mask(), "exactly one"),
        (lambda: tracker.mask(9), "wanted 0 to 8"),
        (lambda: tracker.mask(experts_per_layer=5), "wanted 0 to 4"),
        (lambda: tracker.mask(experts_per_layer=[1, 2, 3]), "one per layer"),
        (lambda: EmaHotnessTracker.open(tmp_path / "other.safetensors"), "not a tracker state"),
        (lambda: EmaHotnessTracker.open(tmp_path / "absent.safetensors"), "No such file"),
    ]
    for call, said in cases:
        with pytest.raises(PolicyError, match=said):
            call()
    assert not tracker.hotness().any()
