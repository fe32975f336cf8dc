"""The remapping contract: the reference against arithmetic of its own, every backend against the reference."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from hotset import Trace
from hotset.errors import OpsError
from hotset.ops import ShedRouting, available_backends, route_shed, split_by_residency

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        # read once, when the kernel's module is imported
        os.environ["TRITON_INTERPRET"] = "1"

NAN_BITS = 0x7FC0_0000
F32 = np.float32
I32 = np.iinfo(np.int32)

Case = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.int32]]

SPECIAL_SCORES = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0, -1.0, 1.1754944e-38], np.float32
)


def bits(array: Any) -> NDArray[np.int32]:
    return np.asarray(array).view(np.int32)


def same_bits(got: Any, wanted: Any) -> None:
    """All fields equal as integers, dtypes and shapes too."""
    for name, g, w in zip(wanted._fields, got, wanted, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.dtype, g.shape) == (w.dtype, w.shape), name
        wrong = np.argwhere(bits(g) != bits(w))
        assert len(wrong) == 0, f"{name} at {wrong[0]}: {g[tuple(wrong[0])]} is not {w[tuple(wrong[0])]}"


def one_row(ids: list[int], scores: list[float], table: list[int], backend: str = "reference") -> ShedRouting:
    return route_shed(np.array([ids], np.int32), np.array([scores], np.float32), np.array(table, np.int32), backend)


# -- the contract by hand, and against a second statement of it --------------------------------------------------------


def test_a_shed_picks_mass_goes_to_the_kept_ones() -> None:
    # experts 0 and 2 are resident, in slots 5 and 1; 1 and 3 are missed, with half of the mass
    routed = one_row([0, 1, 2, 3], [0.25, 0.125, 0.25, 0.375], [5, -1, 1, -1])
    assert routed.slots.tolist() == [[5, 5, 1, 5]]
    assert routed.mix.tolist() == [[0.5, 0.0, 0.5, 0.0]]
    assert routed.miss_ids.tolist() == [[3, 1, -1, -1]]
    assert routed.miss_scores.tolist() == [[0.375, 0.125, 0.0, 0.0]]
    assert [a.dtype for a in routed] == [np.uint32, np.float32, np.int32, np.float32]


def test_a_shed_pick_before_the_first_kept_one_carries_that_ones_slot() -> None:
    assert one_row([1, 0], [0.5, 0.5], [7, -1]).slots.tolist() == [[7, 7]]


def test_nothing_kept_gives_slot_0_and_no_weight() -> None:
    routed = one_row([0, 1], [0.25, 0.75], [-1, -1])
    assert routed.slots.tolist() == [[0, 0]]
    assert bits(routed.mix).tolist() == [[0, 0]]
    assert routed.miss_ids.tolist() == [[1, 0]]
    assert routed.miss_scores.tolist() == [[0.75, 0.25]]


def test_a_row_without_a_miss_passes_through_bit_for_bit() -> None:
    scores = [np.inf, 1e-45, -0.0, 3e38]
    routed = one_row([0, 1, 2, 3], scores, [3, 2, 1, 0])
    assert bits(routed.mix).tolist() == [bits(np.array(scores, np.float32)).tolist()]
    assert routed.miss_ids.tolist() == [[-1] * 4]


def test_kept_picks_without_mass_stay_without_mass_and_make_no_nan() -> None:
    routed = one_row([0, 1, 2], [0.0, 1.0, -0.0], [0, -1, 1])
    assert bits(routed.mix).tolist() == [[0, 0, I32.min]]


def test_equal_scores_stay_in_the_order_of_the_picks_and_minus_zero_equals_zero() -> None:
    routed = one_row([4, 3, 2, 1, 0], [0.5, -0.0, 0.5, 0.0, 0.5], [-1] * 5)
    assert routed.miss_ids.tolist() == [[4, 2, 0, 3, 1]]
    assert bits(routed.miss_scores)[0, 3:].tolist() == [I32.min, 0]


def test_nan_comes_after_every_other_miss_and_has_one_bit_pattern() -> None:
    nan = np.array([0xFFC0_1234, 0x7F80_0001], np.uint32).view(np.float32)
    routed = one_row([0, 1, 2, 3, 4], [nan[0], -np.inf, nan[1], np.inf, 0.0], [-1] * 5)
    assert routed.miss_ids.tolist() == [[3, 4, 1, 0, 2]]
    assert bits(routed.miss_scores)[0, 3:].tolist() == [NAN_BITS, NAN_BITS]


def test_nan_in_a_kept_score_reaches_the_row_only_where_something_was_shed() -> None:
    nan = float("nan")
    assert bits(one_row([0, 1], [nan, 0.5], [0, 1]).mix).tolist() == [[NAN_BITS, bits(F32(0.5)).item()]]
    assert bits(one_row([0, 1, 2], [nan, 0.5, 0.5], [0, 1, -1]).mix).tolist() == [[NAN_BITS, NAN_BITS, 0]]


def test_an_id_outside_the_layer_is_a_miss_shown_as_the_nearest_int32() -> None:
    table, scores = np.array([3, -1], np.int32), np.array([[0.5, 0.25, 0.25]], np.float32)
    for dtype, outside, shown in (
        (np.int32, -1, -1),
        (np.int32, 2, 2),
        (np.uint32, 2**32 - 1, I32.max),
        (np.uint32, 2**31, I32.max),
        (np.int64, 2**32 + 1, I32.max),  # its low half would read as expert 1
        (np.int64, -(2**40), I32.min),
    ):
        routed = route_shed(np.array([[0, outside, 1]], dtype), scores, table, "reference")
        assert routed.miss_ids.tolist() == [[shown, 1, -1]]
        assert routed.mix.tolist() == [[1.0, 0.0, 0.0]]


def test_sums_run_upwards_one_rounding_at_a_time() -> None:
    # 2**24 + 1 rounds back to 2**24: upwards the two ones are lost, any other order keeps them
    routed = one_row([0, 1, 2, 3], [2.0**24, 1.0, 1.0, 2.0**24], [0, -1, -1, -1])
    assert routed.mix[0, 0] == 2.0**25


@cache
def kernel_sum_example() -> Case:
    rng = np.random.default_rng(7)
    return make_case(rng, 300, 8, 32, 0.5, specials=0.3)


def test_the_reference_equals_double_precision_rounded_after_every_operation() -> None:
    # a float32 operation done in float64 and rounded once more is the correctly rounded one (Figueroa 1995)
    def f32(value: float) -> float:
        return ctypes.c_float(value).value

    indices, scores, table = kernel_sum_example()
    routed = route_shed(indices, scores, table, "reference")
    for t in range(len(indices)):
        picks = list(zip(indices[t].tolist(), scores[t].tolist(), strict=True))
        kept = [0 <= i < len(table) and table[i] >= 0 for i, _ in picks]
        all_, some = 0.0, 0.0
        for (_, s), k in zip(picks, kept, strict=True):
            all_ = f32(all_ + s)
            some = f32(some + s) if k else some
        ratio = 1.0 if all(kept) or some == 0 else f32(all_ / some)
        mix = [f32(s * ratio) if k else 0.0 for (_, s), k in zip(picks, kept, strict=True)]
        np.testing.assert_array_equal(routed.mix[t], np.array(mix, np.float32))
        # misses by repeated selection of the largest, NaN last
        left = [p for p, k in zip(picks, kept, strict=True) if not k]
        for place in range(len(left)):
            best = left[0]
            for pick in left[1:]:
                if (best[1] != best[1] and pick[1] == pick[1]) or pick[1] > best[1]:
                    best = pick
            left.remove(best) if best[1] == best[1] else left.pop(0)
            assert routed.miss_ids[t, place] == min(max(best[0], I32.min), I32.max)
            np.testing.assert_array_equal(routed.miss_scores[t, place], F32(best[1]))


# -- made-up cases -----------------------------------------------------------------------------------------------------


def make_case(
    rng: np.random.Generator,
    num_tokens: int,
    num_picks: int,
    num_experts: int,
    share: float,
    dtype: Any = np.uint32,
    specials: float = 0.0,
) -> Case:
    """Softmax-like scores in descending order for half of the rows; `specials` = share of odd ids and scores."""
    indices = rng.integers(0, num_experts, (num_tokens, num_picks)).astype(dtype)
    scores = rng.random((num_tokens, num_picks)).astype(np.float32) + F32(0.01)
    scores[::2] = -np.sort(-scores[::2], axis=1)
    scores /= scores.sum(axis=1, keepdims=True)
    odd = rng.random(indices.shape) < specials / 4
    limits = np.iinfo(dtype)
    indices[odd] = rng.choice(np.array([limits.min, limits.max, num_experts, limits.max - 1], dtype), odd.sum())
    odd = rng.random(indices.shape) < specials
    scores[odd] = rng.choice(SPECIAL_SCORES, odd.sum())
    table = np.full(num_experts, -1, np.int32)
    resident = rng.permutation(num_experts)[: round(share * num_experts)]
    table[resident] = rng.permutation(len(resident))
    return indices, scores, table


TOKENS = (1, 4, 33, 4096)
PICKS = (1, 2, 4, 6, 8, 10, 64)
EXPERTS = (8, 32, 256, 512, 1024)
SHARES = (0.0, 0.3, 0.7, 1.0)


@cache
def grid_case(num_tokens: int, num_picks: int, num_experts: int, share: float) -> tuple[Case, ShedRouting]:
    rng = np.random.default_rng([num_tokens, num_picks, num_experts, round(share * 10)])
    case = make_case(rng, num_tokens, num_picks, num_experts, share, specials=0.02)
    return case, route_shed(*case, backend="reference")


def grid(num_tokens: Iterable[int], num_experts: Iterable[int] = EXPERTS) -> Iterator[tuple[Case, ShedRouting]]:
    for shape in product(num_tokens, PICKS, num_experts, SHARES):
        yield grid_case(*shape)


ids_32 = st.one_of(st.integers(-2, 9), st.sampled_from([I32.min, I32.max]))
ids_64 = st.one_of(ids_32, st.sampled_from([2**31, 2**32 + 1, -(2**31) - 1, 2**63 - 1, -(2**63)]))
ids_u32 = st.one_of(st.integers(0, 9), st.sampled_from([2**31, 2**31 - 1, 2**32 - 1]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # few values of R, since the Numba kernel is compiled for each
    shape = (draw(st.integers(0, 4)), draw(st.sampled_from([1, 4, 8])))
    dtype, ids = draw(st.sampled_from([(np.uint32, ids_u32), (np.int32, ids_32), (np.int64, ids_64)]))
    a_few = st.sampled_from(SPECIAL_SCORES.tolist())
    scores = st.one_of(st.floats(width=32), st.floats(0, 1, width=32), a_few)
    table = draw(arrays(np.int32, draw(st.integers(1, 8)), elements=st.integers(-2, 9)))
    return draw(arrays(dtype, shape, elements=ids)), draw(arrays(np.float32, shape, elements=scores)), table


# -- what every backend has to do --------------------------------------------------------------------------------------


class RouteShedContract:
    """Same bits as the reference, whatever comes in; conservation; refusals."""

    backend: ClassVar[str]
    quick_tokens: ClassVar[tuple[int, ...]] = TOKENS[:3]
    quick_experts: ClassVar[tuple[int, ...]] = EXPERTS

    @pytest.fixture(autouse=True)
    def _available(self) -> None:
        missing = available_backends()[self.backend]
        if missing:
            pytest.skip(f"backend {self.backend}: {missing}")

    @staticmethod
    def to_native(array: NDArray[Any]) -> Any:
        return array

    def route(self, case: Case) -> ShedRouting:
        return route_shed(*map(self.to_native, case), backend=self.backend)

    def test_equals_the_reference_for_every_small_shape(self) -> None:
        for case, wanted in grid(self.quick_tokens, self.quick_experts):
            same_bits(self.route(case), wanted)

    @pytest.mark.parametrize(("num_picks", "num_experts", "share"), [(8, 256, 0.7), (4, 32, 0.3), (10, 512, 0.0)])
    def test_equals_the_reference_for_a_prefill(self, num_picks: int, num_experts: int, share: float) -> None:
        case, wanted = grid_case(4096, num_picks, num_experts, share)
        same_bits(self.route(case), wanted)

    @pytest.mark.slow
    def test_equals_the_reference_for_every_shape(self) -> None:
        for case, wanted in grid(TOKENS):
            same_bits(self.route(case), wanted)

    # every subclass is an executor of its own; examples are derandomised, so no database mixes them up
    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.differing_executors])
    @given(case=cases())
    def test_equals_the_reference_for_odd_ids_and_scores(self, case: Case) -> None:
        same_bits(self.route(case), route_shed(*case, backend="reference"))
        split = split_by_residency(*map(self.to_native, case), backend=self.backend)
        same_bits(split, split_by_residency(*case, backend="reference"))

    @pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
    def test_takes_each_index_dtype(self, dtype: Any) -> None:
        case = make_case(np.random.default_rng(3), 40, 4, 32, 0.5, dtype, specials=0.3)
        same_bits(self.route(case), route_shed(*case, backend="reference"))

    @pytest.mark.parametrize("name", ["gpt-oss-20b-decode-weights", "esft-intent-prefill", "esft-law-prefill"])
    def test_equals_the_reference_on_recorded_routing(self, real_trace: Callable[[str], Trace], name: str) -> None:
        trace = real_trace(name)
        for row, share in ((0, 0.3), (trace.num_layers // 2, 0.7)):
            weights = trace.layer_weights(row)
            assert weights is not None
            hot = np.argsort(-trace.counts[row], kind="stable")[: round(share * trace.num_experts)]
            table = np.full(trace.num_experts, -1, np.int32)
            table[hot] = np.arange(len(hot))
            case = (trace.layer(row)[:600].astype(np.int32), weights[:600].astype(np.float32), table)
            wanted = route_shed(*case, backend="reference")
            assert (wanted.miss_ids[:, 0] >= 0).any()
            same_bits(self.route(case), wanted)

    def test_no_token_gives_empty_arrays(self) -> None:
        case = (np.empty((0, 4), np.uint32), np.empty((0, 4), np.float32), np.zeros(8, np.int32))
        routed = self.route(case)
        assert [tuple(a.shape) for a in routed] == [(0, 4)] * 4
        same_bits(routed, route_shed(*case, backend="reference"))

    def test_leaves_its_inputs_alone_and_takes_read_only_ones(self) -> None:
        case = make_case(np.random.default_rng(5), 9, 4, 8, 0.5)
        before = [a.copy() for a in case]
        for array in case:
            array.flags.writeable = False
        same_bits(self.route(case), route_shed(*before, backend="reference"))
        assert all((bits(a) == bits(b)).all() for a, b in zip(case, before, strict=True))

    @pytest.mark.parametrize("num_picks", [1, 4, 8, 10, 64])
    def test_a_rows_mass_stays_with_the_kept_picks(self, num_picks: int) -> None:
        indices, scores, table = make_case(np.random.default_rng(11), 500, num_picks, 32, 0.5)
        mix = np.asarray(self.route((indices, scores, table)).mix).astype(np.float64).sum(axis=1)
        kept = (table[indices] >= 0).any(axis=1)
        mass = scores.astype(np.float64).sum(axis=1)
        assert kept.any()
        assert (np.abs(mix - mass)[kept] <= 1e-6 * mass[kept]).all()
        assert (mix[~kept] == 0).all()

    def test_every_pick_is_kept_or_reported(self) -> None:
        indices, scores, table = make_case(np.random.default_rng(13), 300, 8, 32, 0.5)
        routed = ShedRouting(*map(np.asarray, self.route((indices, scores, table))))
        for t in range(len(indices)):
            missed = routed.miss_ids[t][routed.miss_ids[t] >= 0].tolist()
            kept = [i for i in indices[t].tolist() if table[i] >= 0]
            assert sorted(missed + kept) == sorted(indices[t].tolist())
            assert [routed.slots[t, r] for r, i in enumerate(indices[t]) if table[i] >= 0] == [table[i] for i in kept]

    # -- refusals ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"indices": np.zeros((2, 4), np.int16)}, "indices has dtype int16: wanted uint32, int32, int64"),
            ({"indices": np.zeros((2, 4), np.float32)}, "indices has dtype float32"),
            ({"scores": np.zeros((2, 4), np.float16)}, "scores has dtype float16: wanted float32"),
            ({"slot_table": np.zeros(8, np.int64)}, "slot_table has dtype int64: wanted int32"),
            ({"indices": np.zeros(4, np.int32)}, r"indices has shape \(4,\): wanted \[T, R\]"),
            ({"scores": np.zeros((2, 3), np.float32)}, r"scores has shape \(2, 3\): wanted that of indices, \(2, 4\)"),
            ({"scores": np.zeros(4, np.float32)}, r"scores has shape \(4,\)"),
            ({"slot_table": np.zeros((2, 8), np.int32)}, r"slot_table has shape \(2, 8\): wanted \[E\]"),
            ({"slot_table": np.zeros(0, np.int32)}, r"slot_table has shape \(0,\): wanted \[E\]"),
            (
                {"indices": np.zeros((2, 65), np.int32), "scores": np.zeros((2, 65), np.float32)},
                "65 picks a token .R.: wanted 1 to 64",
            ),
            (
                {"indices": np.zeros((2, 0), np.int32), "scores": np.zeros((2, 0), np.float32)},
                "0 picks a token .R.: wanted 1 to 64",
            ),
        ],
    )
    def test_refuses_what_the_contract_does_not_cover(self, change: dict[str, Any], message: str) -> None:
        good = {
            "indices": np.zeros((2, 4), np.int32),
            "scores": np.zeros((2, 4), np.float32),
            "slot_table": np.zeros(8, np.int32),
        }
        given_arrays = {name: self.to_native(array) for name, array in (good | change).items()}
        for function in (route_shed, split_by_residency):
            with pytest.raises(OpsError, match=message) as caught:
                function(**given_arrays, backend=self.backend)
            assert "\n" not in str(caught.value)


class TestReference(RouteShedContract):
    backend = "reference"


class TestNumpy(RouteShedContract):
    backend = "numpy"


class TestNumba(RouteShedContract):
    backend = "numba"


class TorchTensors(RouteShedContract):
    """The same with torch tensors in and out."""

    @staticmethod
    def to_native(array: NDArray[Any]) -> Any:
        torch = pytest.importorskip("torch")
        return torch.from_numpy(array.copy())

    def test_gives_torch_for_torch(self) -> None:
        torch = pytest.importorskip("torch")
        case = make_case(np.random.default_rng(1), 4, 4, 8, 0.5)
        routed = self.route(case)
        assert [a.dtype for a in routed] == [torch.uint32, torch.float32, torch.int32, torch.float32]
        split = split_by_residency(*map(self.to_native, case), backend=self.backend)
        assert [a.dtype for a in split] == [torch.uint32, torch.float32, torch.int32, torch.float32]


class TestTorch(TorchTensors):
    backend = "torch"


# the interpreter divides by zero and overflows as the contract says, with NumPy's warnings
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
class TestTriton(TorchTensors):
    backend = "triton"
    # the interpreter takes 60 ms a case; the slow test has them all
    quick_tokens = (33,)
    quick_experts = (8, 256)


class TestNumbaOnTorch(TorchTensors):
    backend = "numba"


class TestMlx(RouteShedContract):
    backend = "mlx"

    @staticmethod
    def to_native(array: NDArray[Any]) -> Any:
        mx = pytest.importorskip("mlx.core")
        return mx.array(array)

    def test_gives_mlx_for_mlx(self) -> None:
        mx = pytest.importorskip("mlx.core")
        routed = self.route(make_case(np.random.default_rng(1), 4, 4, 8, 0.5))
        assert [a.dtype for a in routed] == [mx.uint32, mx.float32, mx.int32, mx.float32]
