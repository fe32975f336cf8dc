"""kt-kernel's functions over frequency tables, and the rates of a mask."""

from __future__ import annotations

import numpy as np
import pytest

import hotset
from hotset import Trace
from hotset.errors import BudgetError, PlanError, TraceError

TABLE = np.array([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])


def test_the_hottest_experts_over_all_layers_are_taken() -> None:
    mask = hotset.generate_gpu_experts_masks(TABLE, 3)
    assert mask.tolist() == [[False, True, False, True], [False, False, True, False]]


def test_a_count_outside_the_range_is_clamped() -> None:
    assert not hotset.generate_gpu_experts_masks(TABLE, -2).any()
    assert hotset.generate_gpu_experts_masks(TABLE, 9).all()


def test_the_report_names_the_selected_share() -> None:
    mask, report = hotset.generate_gpu_experts_masks(TABLE, 3, return_report=True)
    assert report["selected_score_hit_rate"] == pytest.approx(2.2 / 3.3)
    assert report["per_layer_counts"] == [2, 1]
    assert report["actual_num_gpu_experts"] == int(mask.sum()) == 3


def test_the_same_mask_comes_from_the_planning_call() -> None:
    mask, report = hotset.plan_gpu_expert_placement(TABLE, 4, "uniform", max_experts_per_layer=2)
    assert report["per_layer_counts"] == [2, 2]
    assert mask.sum() == 4


def test_torch_in_gives_torch_out() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        table = torch.tensor([[1, 5, 3, 8], [2, 4, 9, 1]]).to(dtype)
        mask = hotset.generate_gpu_experts_masks(table, 3)
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"
        assert mask.tolist() == [[False, True, False, True], [False, False, True, False]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[1.0, np.nan]], "nan: wanted a finite count"),
        ([[1.0, np.inf]], "inf: wanted a finite count"),
        ([[1.0, -1.0]], "a count is never negative"),
        ([1.0, 2.0], r"wanted \[L, E\]"),
        (np.zeros((0, 4)), "neither of them 0"),
        ([["a", "b"]], "wanted integers or floats"),
    ],
)
def test_a_wrong_table_is_refused(table: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        hotset.generate_gpu_experts_masks(table, 1)


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(PlanError, match="ragged"):
        hotset.generate_gpu_experts_masks([[1, 2], [3]], 1)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(BudgetError, match="below the 4 that the minimum"):
        hotset.generate_gpu_experts_masks(TABLE, 3, min_experts_per_layer=2)
    with pytest.raises(BudgetError, match=r"num_gpu_experts is 1\.5"):
        hotset.generate_gpu_experts_masks(TABLE, 1.5)  # type: ignore[arg-type]


def test_rates_are_counted_by_hand() -> None:
    ids = np.array([[[0, 1], [0, 2], [2, -1], [-1, -1]], [[0, 1], [1, 2], [0, 1], [0, -1]]])
    mask = np.array([[True, True, False], [True, False, False]])
    # layer 0: picks 5, hits 3, tokens routed 3, resident 1; layer 1: picks 7, hits 3, routed 4, resident 1
    assert hotset.gpu_hit_rate(mask, ids) == 6 / 12
    assert hotset.token_resident_rate(mask, ids) == 2 / 7
    trace = Trace.from_arrays(ids, num_experts=3)
    assert hotset.token_resident_rate(mask, trace) == 2 / 7
    assert hotset.gpu_hit_rate(mask, [trace, trace]) == 6 / 12


def test_co_activation_is_counted_by_hand() -> None:
    ids = [[[0, 1], [1, 0], [1, 2], [2, -1]]]
    by_hand = [[2, 2, 0], [2, 3, 1], [0, 1, 2]]
    assert hotset.build_coactivation_matrix(ids, 3).tolist() == [by_hand]
    assert hotset.build_coactivation_matrix(ids[0], 3).tolist() == by_hand
    trace = Trace.from_arrays(ids, num_experts=3)
    assert hotset.build_coactivation_matrix([trace, trace])[0].tolist() == (2 * np.array(by_hand)).tolist()
    torch = pytest.importorskip("torch")
    made = hotset.build_coactivation_matrix(torch.tensor(ids[0]), 3)
    assert isinstance(made, torch.Tensor)
    assert made.tolist() == by_hand


def test_co_activation_of_shapes_that_differ_is_refused() -> None:
    with pytest.raises(TraceError, match="num_experts is missing"):
        hotset.build_coactivation_matrix([[[0, 1]]])
    with pytest.raises(TraceError, match="out of range"):
        hotset.build_coactivation_matrix([[[0, 5]]], 3)
    one, other = (Trace.from_arrays([[[0, 1]]], num_experts=e) for e in (3, 4))
    with pytest.raises(TraceError, match="a trace has 1 of 4"):
        hotset.build_coactivation_matrix([one, other])


def test_co_activation_is_that_of_the_indicator_product() -> None:
    ids = np.argsort(np.random.default_rng(0).random((2, 50, 9)), axis=2)[:, :, :3]
    indicator = np.zeros((2, 50, 9), np.int64)
    np.put_along_axis(indicator, ids, 1, axis=2)
    assert np.array_equal(hotset.build_coactivation_matrix(ids, 9), indicator.transpose(0, 2, 1) @ indicator)


def test_rates_accept_torch() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[[0, 1], [0, 2]]])
    mask = torch.tensor([[True, True, False]])
    assert hotset.gpu_hit_rate(mask, ids) == 3 / 4
    assert hotset.token_resident_rate(mask, ids) == 1 / 2


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match="wanted bool"):
        hotset.gpu_hit_rate(np.ones((1, 3)), [[[0, 1]]])
    with pytest.raises(PlanError, match="mask has shape"):
        hotset.gpu_hit_rate(np.ones((2, 3), bool), [[[0, 1]]])
    with pytest.raises(TraceError, match="no trace given"):
        hotset.gpu_hit_rate(np.ones((2, 3), bool), [])
