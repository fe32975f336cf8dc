"""Every strategy keeps the budget, the limits and the order of ties; each does what its name says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import hotset
from hotset import Counts, Plan, Trace
from hotset.cli.plan import DEFAULT_STRATEGY as cli_default
from hotset.cli.plan import STRATEGY_HELP
from hotset.errors import BudgetError, PlanError, TraceError
from hotset.planning.api import DEFAULT_STRATEGY as api_default
from hotset.planning.compare import compare
from hotset.planning.strategies import STRATEGIES

# three layers x four experts x top-2; layer 2 never picks expert 3
IDS = np.array(
    [
        [[0, 1], [0, 1], [0, 2], [3, 1], [0, 1]],
        [[2, 3], [2, 3], [2, 1], [2, 3], [0, 3]],
        [[0, 1], [0, 2], [0, 1], [1, 2], [0, 1]],
    ]
)
SIZES = np.array([[3, 3, 3, 3], [2, 2, 4, 4], [5, 1, 5, 1]])


def small_trace(sizes: NDArray[np.int64] | None = None) -> Trace:
    return Trace.from_arrays(IDS, num_experts=4, sequence_start=[0, 2, 4], layer_ids=[1, 2, 5], expert_bytes=sizes)


def skewed_trace(seed: int, sizes: NDArray[np.int64] | None = None) -> Trace:
    rng = np.random.default_rng(seed)
    weight = rng.random((4, 8)) ** 3
    weight[:, 6] = 0  # an expert that is never picked
    keys = rng.random((4, 60, 8)) ** (1 / np.maximum(weight[:, None], 1e-12))
    ids = np.argsort(-keys, axis=2)[:, :, :2]
    return Trace.from_arrays(ids, num_experts=8, sequence_start=[0, 20, 40], expert_bytes=sizes)


class StrategyContract:
    """What every strategy promises. Subclasses name one."""

    strategy: str

    def make(self, source: Trace | Counts, **arguments: object) -> Plan:
        return hotset.plan(source, strategy=self.strategy, **arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("experts", range(13))
    def test_an_expert_budget_is_used_in_full(self, experts: int) -> None:
        assert self.make(small_trace(), experts=experts).num_gpu_experts == experts

    @pytest.mark.parametrize("size", [0, 1, 7, 15, 20, 33, 36])
    def test_a_byte_budget_is_never_exceeded(self, size: int) -> None:
        made = self.make(small_trace(SIZES), gpu_memory_bytes=size)
        assert made.gpu_bytes is not None
        assert made.gpu_bytes <= size
        assert size < 36 or made.num_gpu_experts == 12

    def test_limits_per_layer_hold(self) -> None:
        for seed in range(3):
            made = self.make(skewed_trace(seed), experts=12, min_experts_per_layer=2, max_experts_per_layer=4)
            each = made.gpu_experts_mask.sum(axis=1)
            assert made.num_gpu_experts == 12
            assert (each >= 2).all()
            assert (each <= 4).all()

    def test_limits_per_layer_hold_with_unequal_sizes(self) -> None:
        made = self.make(small_trace(SIZES), gpu_memory_bytes=11, min_experts_per_layer=1, max_experts_per_layer=2)
        each = made.gpu_experts_mask.sum(axis=1)
        assert (each >= 1).all()
        assert (each <= 2).all()

    def test_experts_per_layer_are_met_exactly(self) -> None:
        assert self.make(small_trace(), experts_per_layer=2).gpu_experts_mask.sum(axis=1).tolist() == [2, 2, 2]
        assert self.make(small_trace(), experts_per_layer=[0, 4, 1]).gpu_experts_mask.sum(axis=1).tolist() == [0, 4, 1]

    @pytest.mark.parametrize("sizes", [None, SIZES])
    def test_no_unpicked_expert_is_taken_while_a_picked_one_is_left_out(self, sizes: NDArray[np.int64] | None) -> None:
        for share in (0.3, 0.6, 0.9, 1.0):
            trace = small_trace(sizes)
            mask = self.make(trace, fraction=share).gpu_experts_mask
            unpicked = trace.counts == 0
            assert not (mask & unpicked).any() or mask[~unpicked].all()

    def test_the_same_input_gives_the_same_plan(self) -> None:
        first, second = (self.make(skewed_trace(1), experts=9) for _ in range(2))
        assert np.array_equal(first.gpu_experts_mask, second.gpu_experts_mask)
        assert (first.score, first.bound) == (second.score, second.bound)

    def test_the_score_is_that_of_the_mask_and_within_the_bound(self) -> None:
        trace = skewed_trace(2)
        for objective in ("hit-rate", "whole-token", (1.0, 3.0)):
            made = self.make(trace, experts=10, objective=objective)
            hits = made.gpu_experts_mask[np.arange(4)[:, None, None], trace.expert_ids]
            wanted = {"hit-rate": hits.sum(), "whole-token": hits.all(axis=2).sum()}.get(
                str(objective), hits.sum() + 3 * hits.all(axis=2).sum()
            )
            assert made.score == wanted
            assert made.bound is None or made.bound >= made.score

    def test_counts_alone_are_enough(self) -> None:
        made = self.make(skewed_trace(3).to_counts(), experts=9)
        assert made.num_gpu_experts == 9
        assert made.objective == "hit-rate"
        assert any("counts do not say" in sentence for sentence in made.report["notes"])

    def test_tokens_without_picks_are_accepted(self) -> None:
        ids = np.array([[[0, 1], [-1, -1], [1, -1], [-1, 1]]])
        made = self.make(Trace.from_arrays(ids, num_experts=3), experts=1, objective="whole-token")
        assert made.num_gpu_experts == 1

    def test_no_budget_and_everything_are_placements_too(self) -> None:
        assert not self.make(small_trace(), experts=0).gpu_experts_mask.any()
        assert self.make(small_trace(), fraction=1.0).gpu_experts_mask.all()
        assert self.make(small_trace(), fraction=1.0).score == 15


class TestFrequency(StrategyContract):
    strategy = "frequency"

    def test_takes_the_hottest_wherever_they_are_and_breaks_ties_by_layer_then_expert(self) -> None:
        # counts: [4 4 1 1] [1 1 4 4] [4 4 2 0]
        mask = self.make(small_trace(), experts=5).gpu_experts_mask
        assert mask.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]]

    def test_among_equals_the_residents_of_the_previous_plan_stay(self) -> None:
        before = self.make(small_trace(), experts_per_layer=[0, 0, 2])
        after = self.make(small_trace(), experts=3, previous=before)
        assert after.gpu_experts_mask.astype(int).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
        assert after.report["moves"] == {"to_gpu": 1, "to_host": 0}


class TestUniform(StrategyContract):
    strategy = "uniform"

    def test_gives_every_layer_the_same(self) -> None:
        assert self.make(small_trace(), experts=6).gpu_experts_mask.sum(axis=1).tolist() == [2, 2, 2]
        # the two left over go to the hottest experts that are left: 2 of layer 5, then 2 of layer 1
        mask = self.make(small_trace(), experts=8).gpu_experts_mask
        assert mask.astype(int).tolist() == [[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0]]


class TestFrontLoading(StrategyContract):
    strategy = "front-loading"

    def test_fills_whole_layers_from_the_first(self) -> None:
        mask = self.make(small_trace(), experts=6).gpu_experts_mask
        assert mask.astype(int).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]


class TestRandom(StrategyContract):
    strategy = "random"

    def test_depends_on_the_seed_alone(self) -> None:
        trace = skewed_trace(0)
        masks = [self.make(trace, experts=10, seed=s).gpu_experts_mask for s in range(5)]
        assert len({mask.tobytes() for mask in masks}) == 5


def test_a_plan_on_part_of_the_documents_reports_on_the_others() -> None:
    made = hotset.plan(small_trace(), experts=6, strategy="uniform", holdout=1 / 3)
    assert made.report["in_sample"]["documents"] == 2
    assert made.report["held_out"]["documents"] == 1
    planned, held = small_trace().split(1 / 3, 0)
    assert made.trace_fingerprint == planned.fingerprint
    assert made.report["held_out"]["hit_rate"] == hotset.gpu_hit_rate(made, held)
    uniform = hotset.plan(planned, experts=6, strategy="uniform")
    assert made.report["held_out"]["uniform"]["hit_rate"] == hotset.gpu_hit_rate(uniform, held)
    best = hotset.plan(held, experts=6, strategy="certified")
    assert made.report["held_out"]["best_static"]["token_resident_rate"] == hotset.token_resident_rate(best, held)


def test_the_report_counts_bytes_of_each_tier() -> None:
    trace = Trace.from_arrays(
        IDS,
        num_experts=4,
        expert_bytes=SIZES,
        metadata={"non_expert_bytes": 1000, "kv_bytes_per_token": 7},
    )
    made = hotset.plan(trace, experts_per_layer=[2, 2, 0], strategy="frequency", context_length=10)
    # layer 1: experts 0, 1 of 3 bytes; layer 2: 2, 3 of 4; three slot tables of four int32
    assert made.report["bytes"] == {
        "gpu": {"experts": 14, "non_expert": 1000, "kv_cache": 70, "arena_overhead": 48, "total": 1132},
        "host": {"experts": int(SIZES.sum()) - 14},
        "context_length": 10,
    }
    # slots are as large as the layer's largest resident: experts 0 (5 bytes) and 1 (1 byte) take two slots of 5
    made = hotset.plan(trace, experts_per_layer=[0, 0, 2], strategy="frequency")
    assert made.report["bytes"]["gpu"]["arena_overhead"] == 48 + 4


def test_a_context_without_known_cache_size_is_said_and_left_out() -> None:
    made = hotset.plan(small_trace(SIZES), experts=3, strategy="frequency", context_length=10)
    assert made.report["bytes"]["gpu"]["kv_cache"] is None
    assert any("KV cache" in sentence for sentence in made.report["notes"])


def test_layers_with_few_picks_are_warned_about() -> None:
    # 5 tokens x 2 picks over 4 experts: 2.5 picks per expert, far below 20
    notes = hotset.plan(small_trace(), experts=3, strategy="frequency").report["notes"]
    assert any("3 of 3 layers saw under 20 picks per expert" in sentence for sentence in notes)
    many = Trace.from_arrays(np.tile(IDS, (1, 8, 1)), num_experts=4)
    assert hotset.plan(many, experts=3, strategy="frequency").report["notes"] == []


def test_a_comparison_has_a_row_for_each_strategy_and_budget() -> None:
    rows = compare(small_trace(), ["certified", "frequency"], ["25%", "50%"], holdout=1 / 3)
    assert [(r["budget"], r["strategy"]) for r in rows] == [
        ("25.0 %", "certified"),
        ("25.0 %", "frequency"),
        ("50.0 %", "certified"),
        ("50.0 %", "frequency"),
    ]
    planned, held = small_trace().split(1 / 3, 0)
    for row in rows:
        alone = hotset.plan(planned, fraction=row["budget"].replace(" ", ""), strategy=row["strategy"])
        assert row["score"] == alone.score
        assert row["held_out"]["hit_rate"] == hotset.gpu_hit_rate(alone, held)
        assert row["bound"] >= row["score"]
    assert {r["strategy"] for r in compare(small_trace(), ["all"], ["25%"])} == set(STRATEGIES)


@pytest.mark.parametrize("budget", ["12", "x%", "5 parsecs", ""])
def test_a_budget_of_a_comparison_has_a_unit(budget: str) -> None:
    with pytest.raises(BudgetError):
        compare(small_trace(), ["frequency"], [budget])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "magic"}, "strategy 'magic' is unknown: choose one of"),
        ({"objective": "speed"}, "objective 'speed' is unknown: choose hit-rate"),
        ({"objective": (1.0, -1.0)}, "neither below 0"),
        ({"objective": (0, 0)}, "worth nothing"),
        ({"objective": (1, 2, 3)}, "not a name or two numbers"),
        ({"objective": (float("nan"), 1)}, "two finite values"),
        ({"objective": "decode-time"}, "decode-time needs a machine"),
        ({"previous_scores": np.ones((3, 4))}, "certified does not look at previous_scores"),
        ({"context_length": -1}, "context_length is -1"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"alpha": float("nan")}, "alpha is nan"),
        (
            {"strategy": "layer-balanced", "previous_scores": np.ones((2, 2))},
            r"previous_scores has shape \(2, 2\): wanted that of the counts",
        ),
        ({"strategy": "layer-balanced", "previous_scores": np.full((3, 4), np.nan)}, "not finite numbers"),
        ({"strategy": "layer-balanced", "previous_scores": -np.ones((3, 4))}, "not finite numbers of 0 or more"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        hotset.plan(small_trace(), experts=1, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_previous_plan_of_another_model_is_refused() -> None:
    before = hotset.plan(skewed_trace(0), experts=1, strategy="uniform")
    with pytest.raises(PlanError, match="the previous plan is for"):
        hotset.plan(small_trace(), experts=1, previous=before)


def test_holdout_needs_tokens() -> None:
    with pytest.raises(PlanError, match="holdout needs tokens"):
        hotset.plan(small_trace().to_counts(), experts=1, holdout=0.5)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        hotset.plan(small_trace(), experts=1, budget=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[[0, 4]]], "expert id 4 .* out of range"),
        ([[[0, -2]]], "expert id -2 .* out of range"),
        ([[[1, 1]]], "picks expert 1 twice"),
        ([[[0, 1], [2]]], "ragged"),
        ([[0, 1]], r"wanted \[L, T, K\]"),
        (np.zeros((1, 0, 2), int), "the trace is empty"),
    ],
)
def test_wrong_ids_are_refused(ids: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        hotset.gpu_hit_rate(np.ones((1, 4), bool), ids)  # type: ignore[arg-type]


class TestCertified(StrategyContract):
    strategy = "certified"

    def test_completes_tokens_where_frequency_scatters(self) -> None:
        # whole tokens by hand: layer 1 {0,1} 3 of 5, layer 2 {2,3} 3 of 5, layer 5 {0,1} 3 of 5
        made = self.make(small_trace(), experts=4)
        assert made.score == 6
        assert made.bound == 6
        assert made.gap == 0

    def test_counts_for_hit_rate_are_solved_exactly(self) -> None:
        made = self.make(skewed_trace(3).to_counts(), experts=9, objective="hit-rate")
        assert not any("hit rate instead" in sentence for sentence in made.report["notes"])
        assert made.bound == made.score


class TestLayerBalanced(StrategyContract):
    strategy = "layer-balanced"

    def test_scores_are_smoothed_over_windows(self) -> None:
        # new counts of layer 1: [4 4 1 1]; half of the old weight on expert 2 puts it first: .5 * 1 + .5 * 20 = 10.5
        before = np.zeros((3, 4))
        before[0, 2] = 20
        mask = self.make(small_trace(), experts=1, previous_scores=before, alpha=0.5).gpu_experts_mask
        assert mask.astype(int).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
        assert self.make(small_trace(), experts=1, previous_scores=before, alpha=1.0).gpu_experts_mask[0, 0]

    def test_an_expert_seen_in_an_earlier_window_counts_as_picked(self) -> None:
        before = np.zeros((3, 4))
        before[2, 3] = 10  # never picked in this window
        assert self.make(small_trace(), experts=1, previous_scores=before, alpha=0.1).gpu_experts_mask[2, 3]


class TestCoverage(StrategyContract):
    strategy = "coverage"

    def test_completes_the_set_with_most_tokens_per_added_expert(self) -> None:
        # three tokens each: layer 1 {0,1}, layer 2 {2,3}, layer 5 {0,1}; the lower layers first
        mask = self.make(small_trace(), experts=4).gpu_experts_mask
        assert mask.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
        # then one more expert completes one more token: layer 1 {0,1} + 2 covers {0,2}
        assert self.make(small_trace(), experts=7).score == 10

    def test_counts_alone_give_frequency_and_a_note(self) -> None:
        made = self.make(skewed_trace(3).to_counts(), experts=9)
        frequency = hotset.plan(skewed_trace(3).to_counts(), experts=9, strategy="frequency")
        assert np.array_equal(made.gpu_experts_mask, frequency.gpu_experts_mask)
        assert any("coverage needs tokens" in sentence for sentence in made.report["notes"])


class TestCluster(StrategyContract):
    strategy = "cluster"

    def test_grows_from_the_hottest_by_co_firing(self) -> None:
        # expert 0 is hottest with 6 picks; 3 fires with it twice, 1 never although it is picked more often than 3
        ids = [[[0, 2], [0, 2], [0, 3], [0, 3], [0, 3], [0, 2], [1, 4], [1, 4], [1, 4], [1, 4]]]
        mask = self.make(Trace.from_arrays(ids, num_experts=5), experts=3).gpu_experts_mask
        assert mask.astype(int).tolist() == [[1, 0, 1, 1, 0]]

    def test_counts_alone_give_frequency_and_a_note(self) -> None:
        made = self.make(skewed_trace(3).to_counts(), experts=9)
        frequency = hotset.plan(skewed_trace(3).to_counts(), experts=9, strategy="frequency")
        assert np.array_equal(made.gpu_experts_mask, frequency.gpu_experts_mask)
        assert any("cluster needs tokens" in sentence for sentence in made.report["notes"])


def test_every_strategy_has_a_contract() -> None:
    assert {case.strategy for case in StrategyContract.__subclasses__()} == set(STRATEGIES)


def test_help_names_every_strategy() -> None:
    assert all(name in STRATEGY_HELP for name in STRATEGIES)
    assert cli_default == api_default
