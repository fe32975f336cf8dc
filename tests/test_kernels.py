"""Host expert kernels: every format against a float64 loop, the same bits however a call is run, refusals."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotset.errors import BackendError, ExpertNotOnHost, OpsError
from hotset.kernels import (
    FORMATS,
    Activation,
    CompiledLayer,
    ExpertLayer,
    ExpertWeights,
    LayerSpec,
    dequantise,
    native,
    quantise,
    reference,
)
from hotset.kernels import threads as threads_module
from hotset.kernels.call import Call
from hotset.kernels.formats import (
    as_array,
    as_buffer,
    float_to_fp8,
    float_to_numbers,
    fp8_to_float,
    numbers_to_float,
    quantise_matrix,
)
from hotset.kernels.torch_layer import TorchLayer

try:
    native.library()
    NO_COMPILER = ""
except BackendError as problem:  # pragma: no cover
    NO_COMPILER = str(problem)
compiled = pytest.mark.skipif(bool(NO_COMPILER), reason=f"no compiled kernels here: {NO_COMPILER}")

GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
DEEPSEEK_V4 = Activation("silu", limit=10.0)

# relative error of a whole layer (Frobenius) that a format's arithmetic may cost: float32 sums; bfloat16 activations
# between the matrices (2^-9 each way); activations in 8 bits per 32 k's twice over
TOLERANCE = {"fp32": 2e-6, "fp16": 2e-6, "bf16": 8e-3, "fp8_block128": 8e-3, "fp8_channel": 8e-3, "mxfp8": 8e-3}
TOLERANCE_INT = 2.5e-2


ZERO_POINTS = ["int4_g32 with zeros", "int4_g128 with zeros"]
VARIANTS = [*FORMATS, *ZERO_POINTS]


def spec_of(variant: str, *sizes: int, **options: Any) -> LayerSpec:
    """The spec of one of VARIANTS; sizes: experts, hidden, intermediate."""
    name, _, zeros = variant.partition(" with ")
    return LayerSpec(name, *sizes, zero_points=bool(zeros), **options)


def tolerance(name: str) -> float:
    return TOLERANCE.get(name, TOLERANCE_INT)


def made_up(spec: LayerSpec, seed: int = 0) -> list[ExpertWeights]:
    """One expert each, of a size that keeps activations near 1."""
    rng = np.random.default_rng(seed)
    bias = spec.bias != "none"
    return [
        quantise(
            spec,
            rng.normal(size=(spec.first_rows, spec.hidden)) / math.sqrt(spec.hidden),
            rng.normal(size=(spec.hidden, spec.intermediate)) / math.sqrt(spec.intermediate),
            rng.normal(size=spec.first_rows) if bias else None,
            rng.normal(size=spec.hidden) if bias else None,
        )
        for _ in range(spec.num_experts)
    ]


def routed(
    spec: LayerSpec, num_tokens: int, top_k: int, seed: int = 1
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(tokens [T, H] float32, of values that bfloat16 holds exactly; ids [T, K]; weights [T, K])."""
    rng = np.random.default_rng(seed)
    tokens = numbers_to_float(float_to_numbers(rng.normal(size=(num_tokens, spec.hidden)), "bf16"), "bf16")
    ids = np.argsort(rng.random((num_tokens, spec.num_experts)), axis=1)[:, :top_k].astype(np.int64)
    return tokens, ids, rng.random((num_tokens, top_k)).astype(np.float32)


def filled(kind: type[ExpertLayer], spec: LayerSpec, experts: list[ExpertWeights]) -> ExpertLayer:
    made = kind(spec, 7)
    for e, weights in enumerate(experts):
        made.put(e, weights)
    return made


def error(got: NDArray[Any], wanted: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


class LayerContract:
    """What every implementation does. Subclasses name it."""

    kind: type[ExpertLayer]
    looser: ClassVar[dict[str, float]] = {}
    """tolerances of an implementation that rounds more often than float32 sums need"""

    def tolerance(self, name: str) -> float:
        return self.looser.get(name, tolerance(name))

    @pytest.mark.parametrize("name", VARIANTS)
    @pytest.mark.parametrize(
        ("num_experts", "hidden", "intermediate", "num_tokens", "top_k"),
        [(4, 256, 96, 3, 2), (3, 100, 50, 9, 3), (1, 131, 33, 1, 1), (2, 31, 7, 4, 2), (6, 288, 160, 40, 2)],
        ids=["aligned", "odd shapes, all experts", "one expert", "less than a block", "tiles"],
    )
    def test_a_layer_equals_the_loop_in_float64(
        self, name: str, num_experts: int, hidden: int, intermediate: int, num_tokens: int, top_k: int
    ) -> None:
        spec = spec_of(name, num_experts, hidden, intermediate)
        experts = made_up(spec)
        tokens, ids, weights = routed(spec, num_tokens, top_k)
        got = filled(self.kind, spec, experts).moe(tokens, ids, weights)
        assert error(got, reference.moe(spec, experts, tokens, ids, weights)) < self.tolerance(name)

    @pytest.mark.parametrize("name", ["bf16", "mxfp4", "int8", "int4_g32 with zeros"])
    @pytest.mark.parametrize(
        "options",
        [
            {"activation": GPT_OSS, "interleaved": True, "bias": "bf16"},
            {"activation": DEEPSEEK_V4, "bias": "fp32"},
            {"activation": Activation("relu2"), "gated": False},
            {"activation": Activation("gelu_tanh")},
            {"activation": Activation("gelu"), "gated": False, "bias": "fp16"},
        ],
        ids=["gpt-oss", "deepseek-v4", "relu2 without gate", "gelu_tanh", "gelu without gate"],
    )
    def test_gates_biases_and_orders_of_rows(self, name: str, options: dict[str, Any]) -> None:
        spec = spec_of(name, 3, 96, 72, **options)
        experts = made_up(spec)
        tokens, ids, weights = routed(spec, 5, 2)
        tokens *= 6.0  # beyond the clamps
        got = filled(self.kind, spec, experts).moe(tokens, ids, weights)
        assert error(got, reference.moe(spec, experts, tokens, ids, weights)) < self.tolerance(name)

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
    def test_transposed_weights_compute_the_same(self, name: str) -> None:
        plain = LayerSpec(name, 2, 70, 45)
        turned = dataclasses.replace(plain, transposed=True)
        experts = made_up(plain)
        views = [ExpertWeights(np.ascontiguousarray(e.gate_up.T), np.ascontiguousarray(e.down.T)) for e in experts]
        call = routed(plain, 4, 2)
        a, b = filled(self.kind, plain, experts), filled(self.kind, turned, views)
        np.testing.assert_array_equal(a.moe(*call), b.moe(*call))
        np.testing.assert_array_equal(b.unpack(1).gate_up, views[1].gate_up)

    @pytest.mark.parametrize("name", VARIANTS)
    @pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (131, 45)])
    def test_an_expert_comes_back_byte_for_byte(self, name: str, hidden: int, intermediate: int) -> None:
        numbers = FORMATS[name.split()[0]].scale_numbers
        spec = spec_of(name, 2, hidden, intermediate, bias="bf16", interleaved=True, scale_number=numbers[-1])
        experts = made_up(spec)
        made = filled(self.kind, spec, experts)
        for e, stored in enumerate(experts):
            back = made.unpack(e)
            for field in dataclasses.fields(ExpertWeights):
                wanted, got = getattr(stored, field.name), getattr(back, field.name)
                assert (wanted is None) == (got is None)
                if wanted is not None:
                    assert got.dtype == wanted.dtype
                    np.testing.assert_array_equal(got, wanted)

    def test_no_tokens_give_no_rows(self) -> None:
        spec = LayerSpec("bf16", 2, 64, 32)
        made = self.kind(spec)
        out = made.moe(np.empty((0, 64), np.float32), np.empty((0, 2), np.int64), np.empty((0, 2), np.float32))
        assert out.shape == (0, 64)

    def test_picks_of_no_expert_add_nothing(self) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        experts = made_up(spec)
        made = filled(self.kind, spec, experts)
        tokens, _, _ = routed(spec, 3, 2)
        ids = np.array([[1, -1], [3, 2], [-1, 3]])
        weights = np.full((3, 2), 0.5, np.float32)
        got = made.moe(tokens, ids, weights)
        assert error(got[:2], reference.moe(spec, experts, tokens, ids, weights)[:2]) < 2e-6
        assert not got[2].any()

    def test_picks_are_each_experts_own_row(self) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        experts = made_up(spec)
        tokens, ids, _ = routed(spec, 4, 2)
        ids[1, 0] = -1
        rows = filled(self.kind, spec, experts).picks(tokens, ids)
        assert rows.shape == (4, 2, 40)
        assert not rows[1, 0].any()
        np.testing.assert_allclose(
            rows[2, 1], reference.expert(spec, experts[ids[2, 1]], tokens[2]), rtol=1e-4, atol=1e-5
        )

    def test_an_absent_expert_is_named_and_nothing_is_computed(self) -> None:
        spec = LayerSpec("bf16", 3, 64, 32)
        made = filled(self.kind, spec, made_up(spec))
        made.drop(1, "lives in GPU slot 4")
        tokens, _, _ = routed(spec, 1, 2)
        out = np.full_like(tokens, 5.0)
        with pytest.raises(
            ExpertNotOnHost, match=r"expert 1 of layer 7 has no host copy: lives in GPU slot 4"
        ) as caught:
            made.moe(tokens, np.array([[0, 1]]), np.ones((1, 2), np.float32), out=out)
        assert (caught.value.layer, caught.value.expert) == (7, 1)
        assert (out == 5.0).all()
        assert made.experts == [0, 2]
        made.moe(tokens, np.array([[0, 2]]), np.ones((1, 2), np.float32))
        for ask in (made.unpack, lambda e: made.drop(e, "again")):
            with pytest.raises(ExpertNotOnHost):
                ask(1)

    def test_an_expert_never_loaded_says_so(self) -> None:
        spec = LayerSpec("bf16", 3, 64, 32)
        with pytest.raises(ExpertNotOnHost, match="none was loaded"):
            self.kind(spec).moe(np.zeros((1, 64), np.float32), np.array([[2]]), np.ones((1, 1), np.float32))

    @pytest.mark.parametrize("bad", [-2, 4, 2**40, -(2**40)])
    def test_an_id_out_of_range_is_refused(self, bad: int) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        made = filled(self.kind, spec, made_up(spec))
        with pytest.raises(OpsError, match="ids of layer 7"):
            made.moe(np.zeros((1, 40), np.float32), np.array([[0, bad]]), np.ones((1, 2), np.float32))

    @pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16])
    def test_ids_may_be_narrow(self, dtype: type) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        made = filled(self.kind, spec, made_up(spec))
        tokens, ids, weights = routed(spec, 3, 2)
        np.testing.assert_array_equal(made.moe(tokens, ids.astype(dtype), weights), made.moe(tokens, ids, weights))

    @pytest.mark.parametrize("number", ["fp32", "fp16", "bf16"])
    def test_the_result_is_rounded_to_the_tokens_type(self, number: str) -> None:
        spec = LayerSpec("fp32", 3, 47, 24)
        experts = made_up(spec)
        made = filled(self.kind, spec, experts)
        tokens, ids, weights = routed(spec, 3, 2)
        exact = made.moe(tokens, ids, weights)
        stored = float_to_numbers(tokens, number)
        got = made.moe(stored, ids, float_to_numbers(weights, "fp32"))
        assert got.dtype == stored.dtype
        eps = {"fp32": 0, "fp16": 2.0**-10, "bf16": 2.0**-8}[number]  # the tokens themselves are rounded for fp16
        np.testing.assert_allclose(numbers_to_float(got, number), exact, rtol=eps, atol=4 * eps)

    def test_torch_tensors_in_give_a_torch_tensor_out(self) -> None:
        torch = pytest.importorskip("torch")
        spec = LayerSpec("bf16", 3, 64, 32, bias="bf16")
        experts = made_up(spec)
        from_numpy = filled(self.kind, spec, experts)
        bits = [
            ExpertWeights(
                *(
                    None if a is None else torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
                    for a in (e.gate_up, e.down, None, None, e.gate_up_bias, e.down_bias)
                )
            )
            for e in experts
        ]
        from_torch = filled(self.kind, spec, bits)
        tokens, ids, weights = routed(spec, 3, 2)
        got = from_torch.moe(torch.from_numpy(tokens).bfloat16(), torch.from_numpy(ids), torch.from_numpy(weights))
        assert got.dtype == torch.bfloat16
        wanted = from_numpy.moe(float_to_numbers(tokens, "bf16"), ids, weights)
        np.testing.assert_array_equal(as_array("got", got)[0], wanted)
        rows = from_torch.picks(torch.from_numpy(tokens), torch.from_numpy(ids))
        assert rows.dtype == torch.float32
        assert tuple(rows.shape) == (3, 2, 64)

    def test_out_is_written_in_place(self) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        made = filled(self.kind, spec, made_up(spec))
        tokens, ids, weights = routed(spec, 3, 2)
        out = np.empty_like(tokens)
        assert made.moe(tokens, ids, weights, out=out) is out
        np.testing.assert_array_equal(out, made.moe(tokens, ids, weights))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": np.zeros((2, 41), np.float32)}, r"tokens of layer 7 are fp32 \[2, 41\]: wanted"),
            ({"tokens": np.zeros((2, 40))}, "tokens of layer 7 are float64"),
            ({"tokens": [[0.0] * 40] * 2}, "tokens is a list"),
            ({"ids": np.zeros((3, 1), np.int64)}, r"ids are int64 \[3, 1\]: wanted"),
            ({"ids": np.zeros((2, 1), np.float32)}, "ids are fp32"),
            ({"weights": np.zeros((2, 2), np.float32)}, r"weights are fp32 \[2, 2\]: wanted"),
            ({"out": np.zeros((2, 40), np.float16)}, r"out is fp16 \[2, 40\]: wanted fp32"),
            ({"out": np.zeros((40, 2), np.float32).T}, "contiguous and writeable"),
            ({"threads": 0}, "threads is 0"),
        ],
    )
    def test_wrong_arguments_are_refused(self, change: dict[str, Any], message: str) -> None:
        spec = LayerSpec("fp32", 3, 40, 24)
        made = filled(self.kind, spec, made_up(spec))
        good: dict[str, Any] = {
            "tokens": np.zeros((2, 40), np.float32),
            "ids": np.zeros((2, 1), np.int64),
            "weights": np.ones((2, 1), np.float32),
        }
        made.moe(**good)
        with pytest.raises(OpsError, match=message):
            made.moe(**{**good, **change})

    @pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.scales != "none"])
    @pytest.mark.parametrize("matrix", ["gate_up", "down"])
    def test_scales_that_are_no_numbers_are_refused_at_load(self, name: str, matrix: str) -> None:
        spec = LayerSpec(name, 2, 160, 130)
        (good, _) = made_up(spec)
        bad_values = [255] if spec.scale_number == "e8m0" else [np.nan, np.inf, -np.inf]
        for value in bad_values:
            scales = getattr(good, f"{matrix}_scale").copy()
            scales[(-1,) * scales.ndim] = value
            with pytest.raises(OpsError, match=rf"{matrix}_scale \[.*\] is NaN or infinite"):
                self.kind(spec, 7).put(0, dataclasses.replace(good, **{f"{matrix}_scale": scales}))

    @pytest.mark.parametrize("matrix", ["gate_up", "down"])
    def test_zero_points_that_do_not_fit_are_refused(self, matrix: str) -> None:
        spec = spec_of("int4_g32 with zeros", 2, 64, 33)
        good, name = made_up(spec)[0], f"{matrix}_zero"
        zeros = getattr(good, name)
        assert zeros.shape == getattr(good, f"{matrix}_scale").shape
        above = zeros.copy()
        above[2, 1] = 16
        for value, message in (
            (above, rf"{name} \[2, 1\] is 16: wanted 0 to 15"),
            (zeros.astype(np.int8), rf"{name} is int8 .*: wanted uint8"),
            (zeros[1:], rf"{name} is uint8 .*: wanted uint8 \[{len(zeros)}, 2\]"),
            (None, f"{name} is missing, but the layer has them"),
        ):
            with pytest.raises(OpsError, match=message):
                self.kind(spec, 7).put(0, dataclasses.replace(good, **{name: value}))
        with pytest.raises(OpsError, match="_zero is there, but the layer has none"):
            self.kind(dataclasses.replace(spec, zero_points=False), 7).put(0, good)

    @pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel", "mxfp8"])
    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_fp8_weights_that_are_nan_are_refused_at_load(self, name: str, code: int) -> None:
        spec = LayerSpec(name, 2, 61, 33)
        good = made_up(spec)[0]
        for place in ((0, 0), (-1, -1)):
            down = good.down.copy()
            down[place] = code
            with pytest.raises(OpsError, match="FP8 weight of layer 7 is NaN"):
                self.kind(spec, 7).put(0, dataclasses.replace(good, down=down))

    def test_weights_of_other_shapes_or_types_are_refused(self) -> None:
        spec = LayerSpec("int8", 2, 64, 32)
        made = self.kind(spec)
        good = made_up(spec)[0]
        for change, message in (
            ({"gate_up": good.gate_up[1:]}, r"gate_up has shape \[63, 64\]: wanted \[64, 64\]"),
            ({"down": good.down.astype(np.float32)}, "down is fp32: wanted int8"),
            ({"down_scale": None}, "down_scale is missing"),
            ({"down_scale": good.down_scale[1:]}, "down_scale is fp32"),
            ({"down_bias": np.zeros(64, np.float32)}, "down_bias is there"),
        ):
            with pytest.raises(OpsError, match=message):
                made.put(0, dataclasses.replace(good, **change))
        with pytest.raises(OpsError, match="no expert 2"):
            made.put(2, good)
        assert made.experts == []


@compiled
class TestCompiledLayer(LayerContract):
    kind = CompiledLayer


TORCH_ROUNDS = {"fp16": 2e-3, "bf16": 1.6e-2}


class TestTorchLayer(LayerContract):
    kind = TorchLayer
    looser = TORCH_ROUNDS

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")


@compiled
class TestTorchFromPacked(LayerContract):
    """Long calls by torch on experts that lie packed."""

    kind = staticmethod(lambda spec, layer=0: CompiledLayer(spec, layer, torch_from_tokens=0))  # type: ignore[assignment]
    looser = TORCH_ROUNDS

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")


@compiled
@pytest.mark.parametrize("name", VARIANTS)
class TestBits:
    """The same input gives the same bits."""

    def test_whatever_the_number_of_threads(self, name: str) -> None:
        spec = spec_of(name, 6, 288, 160)
        made = filled(CompiledLayer, spec, made_up(spec))
        for num_tokens in (1, 50):
            call = routed(spec, num_tokens, 3)
            one = made.moe(*call, threads=1)
            for threads in (2, 3, 8):
                np.testing.assert_array_equal(made.moe(*call, threads=threads), one)

    def test_from_four_python_threads_at_once(self, name: str) -> None:
        spec = spec_of(name, 6, 160, 96)
        made = filled(CompiledLayer, spec, made_up(spec))
        calls = [routed(spec, t, 3, seed=t) for t in (1, 3, 7, 20)]
        wanted = [made.moe(*call) for call in calls]
        wrong: list[int] = []

        def work(i: int) -> None:
            wrong.extend(i for _ in range(20) if not np.array_equal(made.moe(*calls[i]), wanted[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_whatever_other_tokens_are_in_the_call(self, name: str) -> None:
        spec = spec_of(name, 4, 160, 96)
        made = filled(CompiledLayer, spec, made_up(spec))
        tokens, ids, weights = routed(spec, 30, 2)
        together = made.moe(tokens, ids, weights)
        alone = [made.moe(tokens[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(30)]
        np.testing.assert_array_equal(together, np.concatenate(alone))


@compiled
def test_calls_longer_than_one_pass_are_the_same_token_by_token() -> None:
    spec = LayerSpec("bf16", 4, 64, 32)
    made = filled(CompiledLayer, spec, made_up(spec))
    tokens, ids, weights = routed(spec, 2100, 2)
    together = made.moe(tokens, ids, weights)
    for part in (slice(1000, 1100), slice(2047, 2049)):
        np.testing.assert_array_equal(together[part], made.moe(tokens[part], ids[part], weights[part]))


@compiled
def test_a_wide_k_is_summed_in_chunks_without_changing_bits() -> None:
    spec = LayerSpec("int8", 2, 2048 + 96, 40)
    made = filled(CompiledLayer, spec, made_up(spec))
    tokens, ids, weights = routed(spec, 20, 2)
    together = made.moe(tokens, ids, weights)
    np.testing.assert_array_equal(together[3:4], made.moe(tokens[3:4], ids[3:4], weights[3:4]))
    assert (
        error(together, reference.moe(spec, [made.unpack(e) for e in range(2)], tokens, ids, weights)) < TOLERANCE_INT
    )


@compiled
def test_experts_come_and_go_while_others_are_computed() -> None:
    spec = LayerSpec("bf16", 3, 64, 32)
    experts = made_up(spec)
    made = filled(CompiledLayer, spec, experts)
    tokens, _, weights = routed(spec, 2, 2)
    ids = np.array([[0, 1], [1, 0]])
    wanted = made.moe(tokens, ids, weights)
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            made.drop(2, "moved")
            made.put(2, experts[2])

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(200):
            np.testing.assert_array_equal(made.moe(tokens, ids, weights), wanted)
    finally:
        stop.set()
        mover.join()


@compiled
def test_a_packed_expert_can_be_adopted_without_a_copy() -> None:
    spec = LayerSpec("mxfp4", 2, 64, 32)
    experts = made_up(spec)
    one, two = CompiledLayer(spec), CompiledLayer(spec)
    one.put(0, experts[0])
    two.put_packed(0, one.packed(0))
    assert two.packed(0) is one.packed(0)
    np.testing.assert_array_equal(two.unpack(0).gate_up, experts[0].gate_up)
    with pytest.raises(OpsError, match="a packed expert is uint8"):
        two.put_packed(1, np.zeros(3, np.uint8))


def packed_by_hand(spec: LayerSpec, weights: ExpertWeights) -> list[NDArray[np.uint8]]:
    """Both matrices' bytes as csrc/moe.cpp describes the layout: word i of block r of panel p holds bytes 4i..4i+3 of
    its 16 rows, and all panels' blocks r follow each other."""
    out = []
    for matrix, stored in ((spec.layout.first, weights.gate_up), (spec.layout.second, weights.down)):
        rows = np.ascontiguousarray(stored.T if spec.transposed else stored).view(np.uint8)
        padded = np.zeros((matrix.rows + 1, matrix.words * 4), np.uint8)  # the last row is the padding
        padded[:-1, : rows.shape[1]] = rows
        if spec.format == "int8":
            padded[:-1, : -(-rows.shape[1] // 4) * 4] ^= 0x80
        panels = padded[matrix.source_row].reshape(matrix.panels, 4, 16, matrix.words, 4)
        out.append(panels.transpose(1, 0, 3, 2, 4).reshape(-1))
    return out


@compiled
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (131, 45), (70, 200)])
@pytest.mark.parametrize(
    ("name", "order"),
    [(n, o) for n in ("fp32", "bf16", "int8", "mxfp4") for o in ("as stored", "every second column of a wider array")]
    + [("fp32", "transposed"), ("bf16", "transposed")],
)
def test_packed_bytes_are_the_layout_by_hand(name: str, order: str, hidden: int, intermediate: int) -> None:
    spec = LayerSpec(name, 1, hidden, intermediate, transposed=order == "transposed")
    weights = made_up(spec)[0]
    given_weights = weights
    if order.startswith("every second"):
        wide = {m: np.repeat(getattr(weights, m), 2, axis=1)[:, ::2] for m in ("gate_up", "down")}
        given_weights = dataclasses.replace(weights, **wide)
    packed = native.buffer(spec.layout.expert_bytes)
    CompiledLayer(spec).kernel.pack(given_weights, packed)
    for matrix, wanted in zip((spec.layout.first, spec.layout.second), packed_by_hand(spec, weights), strict=True):
        np.testing.assert_array_equal(packed[matrix.data_at :][: len(wanted)], wanted)


@compiled
@pytest.mark.parametrize("name", ["bf16", "fp32", "int4_g32", "int4_g32 with zeros"])
@pytest.mark.parametrize("hidden", [70, 128])
def test_picks_added_in_several_calls_or_combined_later_have_the_bits_of_one_call(name: str, hidden: int) -> None:
    spec = spec_of(name, 5, hidden, 40)
    made = filled(CompiledLayer, spec, made_up(spec))
    tokens, ids, weights = routed(spec, 7, 3)
    ids = np.sort(ids, axis=1)
    in_one = made.moe(tokens, ids, weights)
    kernel, out = made.kernel, as_buffer("out", np.zeros_like(in_one))
    addresses = np.array([made.packed(e).ctypes.data for e in range(5)], np.uint64)
    for some in ([0, 1], [2], [3, 4]):
        call = Call.of(spec, 0, tokens, np.where(np.isin(ids, some), ids, -1), weights, None)
        kernel.run(addresses, call, out, accumulate=True)
    np.testing.assert_array_equal(out.owner, in_one)
    rows = as_buffer("picks", made.picks(tokens, ids))
    combined = as_buffer("out", np.empty_like(in_one))
    kernel.combine(Call.of(spec, 0, tokens, ids, weights, None), rows, combined)
    np.testing.assert_array_equal(combined.owner, in_one)


@compiled
@pytest.mark.parametrize("name", ["bf16", "int8", "mxfp4", "int4_g32 with zeros", "fp8_block128"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite_spoils_its_own_row_only(name: str, value: float) -> None:
    spec = spec_of(name, 2, 70, 40)
    made = filled(CompiledLayer, spec, made_up(spec))
    tokens, ids, weights = routed(spec, 3, 2)
    clean = made.moe(tokens, ids, weights)
    tokens[1, 5] = value
    got = made.moe(tokens, ids, weights)
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
    assert not np.isfinite(got[1]).all()


@compiled
@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.integers(1, 5),
    st.integers(1, 140),
    st.integers(1, 90),
    st.integers(0, 15),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_shape_agrees_with_the_loop(
    name: str, num_experts: int, hidden: int, intermediate: int, num_tokens: int, gated: bool, random: Any
) -> None:
    spec = spec_of(name, num_experts, hidden, intermediate, gated=gated)
    experts = made_up(spec, random.randrange(1000))
    tokens, ids, weights = routed(spec, num_tokens, random.randint(1, num_experts), random.randrange(1000))
    got = filled(CompiledLayer, spec, experts).moe(tokens, ids, weights)
    wanted = reference.moe(spec, experts, tokens, ids, weights)
    # with few k's the error of one rounded activation is not averaged away: bounded by the sizes of what is summed
    assert np.abs(got - wanted).max(initial=0) <= 4 * tolerance(name) * max(1.0, np.abs(wanted).max(initial=0))


@compiled
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("int8", 1.2e-2),
        ("int4_g32", 1.2e-2),
        ("int4_g32 with zeros", 1.2e-2),
        ("mxfp4", 1.2e-2),
        ("bf16", 4e-3),
        ("fp8_block128", 4e-3),
    ],
)
def test_the_error_on_a_real_shape_is_as_documented(name: str, bound: float) -> None:
    spec = spec_of(name, 2, 2048, 768)
    experts = made_up(spec)
    tokens, ids, weights = routed(spec, 1, 2)
    got = filled(CompiledLayer, spec, experts).moe(tokens, ids, weights)
    assert error(got, reference.moe(spec, experts, tokens, ids, weights)) < bound


class TestFormats:
    """Numbers by hand."""

    def test_e4m3_codes(self) -> None:
        codes = np.array([0x00, 0x01, 0x08, 0x38, 0x39, 0x7E, 0xB8, 0x81], np.uint8)
        values = [0, 2.0**-9, 2.0**-6, 1.0, 1.125, 448.0, -1.0, -(2.0**-9)]
        np.testing.assert_array_equal(fp8_to_float(codes), values)
        np.testing.assert_array_equal(float_to_fp8(np.array(values[1:])), codes[1:])
        assert np.isnan(fp8_to_float(np.array([0x7F, 0xFF], np.uint8))).all()

    def test_int4_nibbles_are_low_first_and_offset_by_8(self) -> None:
        spec = LayerSpec("int4_g32", 1, 2, 1, gated=False)
        stored = ExpertWeights(
            np.array([[0x1F]], np.uint8),
            np.array([[0x08], [0x09]], np.uint8),
            np.array([[0.5]], np.float32),
            np.array([[2.0], [2.0]], np.float32),
        )
        first, second, _, _ = dequantise(spec, stored)
        np.testing.assert_array_equal(first, [[3.5, -3.5]])
        np.testing.assert_array_equal(second, [[0.0], [2.0]])

    def test_zero_points_are_subtracted_before_the_scale_multiplies(self) -> None:
        spec = spec_of("int4_g32 with zeros", 1, 34, 1, gated=False)
        codes = np.full((1, 17), 0x5F, np.uint8)
        stored = ExpertWeights(
            codes,
            np.zeros((34, 1), np.uint8),
            np.array([[0.5, 2.0]], np.float32),
            np.ones((34, 1), np.float32),
            gate_up_zero=np.array([[0, 15]], np.uint8),
            down_zero=np.full((34, 1), 3, np.uint8),
        )
        first, second, _, _ = dequantise(spec, stored)
        np.testing.assert_array_equal(first, [[7.5, 2.5] * 16 + [0.0, -20.0]])
        assert (second == -3).all()

    @pytest.mark.parametrize("name", ["int4_g32", "int4_g128"])
    def test_a_zero_of_8_everywhere_is_the_symmetric_format_bit_for_bit(self, name: str) -> None:
        plain = LayerSpec(name, 2, 160, 72)
        experts = made_up(plain)
        zeros = [
            dataclasses.replace(
                e,
                gate_up_zero=np.full(e.gate_up_scale.shape, 8, np.uint8),
                down_zero=np.full(e.down_scale.shape, 8, np.uint8),
            )
            for e in experts
        ]
        with_zeros = dataclasses.replace(plain, zero_points=True)
        np.testing.assert_array_equal(dequantise(with_zeros, zeros[0])[0], dequantise(plain, experts[0])[0])
        if not NO_COMPILER:
            call = routed(plain, 9, 2)
            one, two = filled(CompiledLayer, plain, experts), filled(CompiledLayer, with_zeros, zeros)
            np.testing.assert_array_equal(one.moe(*call), two.moe(*call))

    def test_values_on_one_side_of_0_are_nearer_with_zero_points(self) -> None:
        values = np.random.default_rng(0).uniform(0, 1, (64, 64)), np.random.default_rng(1).uniform(0, 1, (64, 32))
        errors = []
        for name in ("int4_g32", "int4_g32 with zeros"):
            spec = spec_of(name, 1, 64, 32)
            errors.append(np.abs(dequantise(spec, quantise(spec, *values))[0] - values[0]).max())
        assert errors[1] <= 1 / 30 + 1e-6 < errors[0]  # half a step of 1/15, of 1/7

    def test_a_matrix_alone_has_no_place_for_zero_points(self) -> None:
        with pytest.raises(OpsError, match="a matrix alone is quantised without zero points"):
            quantise_matrix(spec_of("int4_g32 with zeros", 1, 64, 32), np.ones((1, 64), np.float32))

    def test_mxfp4_codes_and_scales(self) -> None:
        spec = LayerSpec("mxfp4", 1, 2, 1, gated=False)
        stored = ExpertWeights(
            np.array([[0xF1]], np.uint8),
            np.array([[0x07], [0x0A]], np.uint8),
            np.array([[128]], np.uint8),
            np.array([[126], [127]], np.uint8),
        )
        first, second, _, _ = dequantise(spec, stored)
        np.testing.assert_array_equal(first, [[1.0, -12.0]])
        np.testing.assert_array_equal(second, [[3.0], [-1.0]])

    def test_fp8_blocks_scale_128_rows_by_128_columns(self) -> None:
        spec = LayerSpec("fp8_block128", 1, 130, 65)  # first matrix: 130 x 130
        ones = np.full((130, 130), 0x38, np.uint8)
        scales = np.array([[1, 2], [3, 4]], np.float32)
        first, _, _, _ = dequantise(
            spec, ExpertWeights(ones, np.full((130, 65), 0x38, np.uint8), scales, np.ones((2, 1), np.float32))
        )
        assert (first[127, 127], first[127, 128], first[128, 127], first[129, 129]) == (1, 2, 3, 4)

    def test_gpt_oss_blocks_have_three_axes(self) -> None:
        pytest.importorskip("torch")
        spec = LayerSpec("mxfp4", 1, 64, 32)
        weights = made_up(spec)[0]
        blocks = dataclasses.replace(
            weights, gate_up=weights.gate_up.reshape(64, 2, 16), down=weights.down.reshape(64, 1, 16)
        )
        call = routed(spec, 2, 1)
        np.testing.assert_array_equal(
            filled(TorchLayer, spec, [blocks]).moe(*call), filled(TorchLayer, spec, [weights]).moe(*call)
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"format": "int3"}, "weight format 'int3' is unknown"),
            ({"hidden": 0}, "hidden is 0"),
            ({"format": "int8", "transposed": True}, "transposed int8"),
            ({"gated": False, "interleaved": True}, "without a gate"),
            ({"gated": False, "activation": Activation(limit=3.0)}, "belong to a gate"),
            ({"format": "mxfp4", "scale_number": "fp32"}, "mxfp4 scales in fp32"),
            ({"bias": "fp8"}, "biases in 'fp8'"),
            ({"format": "mxfp4", "zero_points": True}, "mxfp4 has no zero points"),
            ({"zero_points": True}, "bf16 has no zero points"),
        ],
    )
    def test_specs_that_do_not_fit_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OpsError, match=message):
            LayerSpec(**{"format": "bf16", "num_experts": 2, "hidden": 8, "intermediate": 8, **options})

    def test_activations_that_do_not_exist_are_refused(self) -> None:
        for options, message in (
            ({"kind": "tanh"}, "'tanh' is unknown"),
            ({"kind": "relu", "alpha": 2.0}, "has no alpha"),
            ({"limit": 0.0}, "limit is 0.0"),
        ):
            with pytest.raises(OpsError, match=message):
                Activation(**options)  # type: ignore[arg-type]

    def test_packed_sizes_are_stored_sizes_where_nothing_is_odd(self) -> None:
        layout = LayerSpec("bf16", 1, 256, 64).layout
        assert layout.expert_bytes == layout.stored_bytes == 3 * 256 * 64 * 2
        four_bit = LayerSpec("mxfp4", 1, 256, 64).layout
        assert four_bit.expert_bytes == four_bit.stored_bytes == 3 * 256 * 64 // 2 + 3 * 256 * 64 // 32

    def test_a_zero_point_is_half_a_byte_stored_and_a_byte_packed(self) -> None:
        plain = LayerSpec("int4_g32", 1, 256, 64).layout
        zeros = spec_of("int4_g32 with zeros", 1, 256, 64).layout
        assert zeros.stored_bytes - plain.stored_bytes == 3 * 256 * 64 // 32 // 2
        assert zeros.expert_bytes - plain.expert_bytes == 3 * 256 * 64 // 32
        odd = [spec_of(n, 1, 3, 1, gated=False).layout.stored_bytes for n in ("int4_g32", "int4_g32 with zeros")]
        assert odd[1] - odd[0] == 1 + 2  # 1 zero, and 3


class TestThreads:
    def test_the_environment_names_the_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTSET_KERNEL_THREADS", "3")
        assert threads_module.available_threads() == 3
        monkeypatch.setenv("HOTSET_KERNEL_THREADS", "none")
        with pytest.raises(OpsError, match="HOTSET_KERNEL_THREADS is 'none'"):
            threads_module.available_threads()

    def test_torch_says_how_many_where_it_is_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        monkeypatch.delenv("HOTSET_KERNEL_THREADS", raising=False)
        monkeypatch.setattr(threads_module, "_allowed_cores", lambda: 4)
        for threads, used in ((1, 1), (3, 3), (9, 4)):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert threads_module.available_threads() == used

    def test_torchs_own_threads_compute_if_as_many_are_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(threads_module, "_gomp_parallel", lambda: 1234)
        assert [threads_module.torch_team(threads) for threads in (1, 2, 3)] == [None, 1234, None]

    @compiled
    def test_torchs_threads_give_the_same_bits_and_a_forked_child_does_not_wait_for_them(self) -> None:
        torch = pytest.importorskip("torch")
        if "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux":
            pytest.skip("torch runs on no OpenMP that the kernels can share")
        script = """
import os, signal, time, numpy as np, torch
from hotset.kernels import threads
from tests.test_kernels import CompiledLayer, LayerSpec, filled, made_up, routed
torch.set_num_threads(2)
assert threads.torch_team(2) is not None
spec = LayerSpec("bf16", 6, 288, 160)
layer, call = filled(CompiledLayer, spec, made_up(spec)), routed(spec, 50, 3)
alone = layer.moe(*call, threads=1)
for rest in (0, 0, .1, 0, .1):  # torch's threads asleep: the kernels' own
    time.sleep(rest)
    assert np.array_equal(layer.moe(*call, threads=2), alone)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if np.array_equal(layer.moe(*call, threads=2), alone) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
        root = Path(__file__).parents[1]
        subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=120)

    def test_a_cgroup_quota_is_found_wherever_it_is_set(self, tmp_path: Any) -> None:
        membership = tmp_path / "cgroup"
        membership.write_text("0::/a/b\n")
        inner = tmp_path / "root" / "a" / "b"
        inner.mkdir(parents=True)
        (inner / "cpu.max").write_text("max 100000\n")
        root = tmp_path / "root"
        assert threads_module.cgroup_quota(membership, root) is None
        (inner.parent / "cpu.max").write_text("150000 100000\n")
        assert threads_module.cgroup_quota(membership, root) == (150000, 100000)
        membership.write_text("4:cpu,cpuacct:/c\n0::/a/b\n")
        old = root / "cpu,cpuacct" / "c"
        old.mkdir(parents=True)
        (old / "cpu.cfs_quota_us").write_text("50000\n")
        (old / "cpu.cfs_period_us").write_text("100000\n")
        assert threads_module.cgroup_quota(membership, root) == (50000, 100000)
