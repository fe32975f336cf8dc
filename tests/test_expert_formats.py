"""Expert formats: the contract that store and dispatch lean on, each format against a float32 reference, and a model
run in each of them wherever its experts live."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import BackendError, CheckpointError, ModelError, OpsError  # noqa: E402
from hotset.kernels import Backend, ExpertWeights, LayerSpec, backend, dequantise, quantise  # noqa: E402
from hotset.kernels.modules import spec_of  # noqa: E402
from hotset.models.experts import ExpertLayer, run_expert  # noqa: E402
from hotset.runtime.adapting import Adaptation  # noqa: E402
from hotset.runtime.expert_formats import (  # noqa: E402
    Int4Format,
    Int8Format,
    PackedFormat,
    PlainFormat,
    StoredFormat,
    operators,
    torch_packed,
)
from hotset.runtime.expert_formats.choice import choose_formats  # noqa: E402
from hotset.runtime.expert_formats.operators import RowChoice  # noqa: E402
from hotset.runtime.expert_formats.packed import PACKED, measured_crossover  # noqa: E402
from hotset.runtime.expert_formats.plain import WAYS as FLOAT_WAYS  # noqa: E402
from hotset.runtime.memory import allocate_host  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

HAS_COMPILER = backend().name == "compiled"
compiled = pytest.mark.skipif(not HAS_COMPILER, reason=f"no compiled kernels: {backend().reason}")
EXPERTS, HIDDEN, INNER = 4, 64, 32
TOLERANCE = {"fp32": 2e-6, "fp16": 2e-6, "bf16": 8e-3, "int8": 2e-2, "int4_g32": 2e-2, "int4_g128": 2e-2,
             "fp8_block128": 8e-3, "fp8_channel": 8e-3, "mxfp4": 2e-2, "mxfp8": 8e-3}  # fmt: skip
"""Of an output's norm, against float32 arithmetic on the same (dequantised) weights: activations are bfloat16 or 8 bits
in the kernels."""


def make_layer(dtype: Any, model_type: str = "qwen3_moe") -> ExpertLayer:
    """A layer with random parameters, as a model has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_intermediate_size": INNER}
    config = AutoConfig.for_model(
        model_type, vocab_size=16, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    model.requires_grad_(False)
    from hotset.models.experts import find_expert_layers

    (layer,) = find_expert_layers(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters.values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


class Source:
    """Experts of the layer's own parameters, or of quantised weights."""

    def __init__(self, layer: ExpertLayer, stored: list[ExpertWeights] | None = None) -> None:
        self.layer, self.stored = layer, stored

    def read_into(self, row: int, expert: int, target: Any) -> None:
        for name, parameter in self.layer.parameters.items():
            target[name].copy_(parameter[expert])

    def read_stored(self, row: int, expert: int) -> ExpertWeights:
        assert self.stored is not None
        return self.stored[expert]


class FormatContract:
    """What every format must do."""

    dtype: ClassVar[Any] = torch.float32
    model_type = "qwen3_moe"

    def made(self) -> tuple[Any, Source, ExpertLayer]:
        """(format, source of its experts, layer whose module and parameters they stand for)."""
        raise NotImplementedError

    @property
    def tolerance(self) -> float:
        return 1e-6

    def held(self, fmt: Any, source: Source) -> list[Any]:
        tensors = []
        for expert in range(EXPERTS):
            target = allocate_host(fmt.host_shapes)
            fmt.read(source, 0, expert, target)
            tensors.append(target)
        return tensors

    def wanted_rows(self, source: Source, layer: ExpertLayer, expert: int, rows: Any) -> Any:
        """Float32 arithmetic on the values that the expert stands for."""
        weights = {name: parameter[expert].float() for name, parameter in layer.parameters.items()}
        return run_expert(layer.module, rows.float(), weights)

    def test_rows_are_those_of_float32_arithmetic(self) -> None:
        fmt, source, layer = self.made()
        held = self.held(fmt, source)
        rows = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(2)).to(self.dtype)
        for expert in range(EXPERTS):
            got = fmt.expert_rows(layer.module, rows, held[expert]).float()
            wanted = self.wanted_rows(source, layer, expert, rows)
            assert (got - wanted).norm() <= self.tolerance * wanted.norm()

    def test_a_slot_of_another_device_gives_back_the_bytes_and_the_values(self) -> None:
        fmt, source, layer = self.made()
        held = self.held(fmt, source)
        rows = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(2)).to(self.dtype)
        for expert in range(EXPERTS):
            slot = {name: tensor.clone() for name, tensor in fmt.to_device(held[expert]).items()}
            assert {name: (tensor.shape, tensor.dtype) for name, tensor in slot.items()} == dict(fmt.device_shapes)
            back = allocate_host(fmt.host_shapes)
            for tensor in back.values():
                tensor.view(torch.uint8).fill_(255)
            fmt.to_host(slot, back)
            again = fmt.to_device(back)
            assert all(torch.equal(again[n].view(torch.uint8), t.view(torch.uint8)) for n, t in slot.items())
            on_device = fmt.device_rows(layer.module, rows, slot).float()
            wanted = self.wanted_rows(source, layer, expert, rows)
            assert (on_device - wanted).norm() <= max(self.tolerance, 1e-2) * wanted.norm()

    def test_expert_bytes_count_weights_without_padding(self) -> None:
        fmt, _, _ = self.made()
        held = sum(shape.numel() * dtype.itemsize for shape, dtype in fmt.device_shapes.values())
        assert fmt.expert_bytes == held

    def test_an_arena_in_host_memory_holds_what_a_host_buffer_holds(self) -> None:
        fmt, _, _ = self.made()
        assert fmt.slot_shapes(torch.device("cpu")) == fmt.host_shapes
        assert fmt.slot_shapes(torch.device("cuda")) == fmt.device_shapes

    def test_many_at_once_have_the_bits_of_one_by_one(self) -> None:
        fmt, source, _ = self.made()
        if not fmt.computes_together:
            return
        held = dict(enumerate(self.held(fmt, source)))
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn((9, HIDDEN), generator=generator).to(self.dtype)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3].sort().values for _ in range(9)])
        ids[4, 2] = EXPERTS  # no pick
        gate = torch.rand((9, 3), generator=generator)
        together = fmt.moe(hidden, ids, gate, held)
        rows = fmt.rows(hidden, ids, held)
        assert not rows[4, 2].any()
        assert torch.equal(fmt.combine(hidden, ids, gate, rows), together)
        total = torch.zeros((9, HIDDEN))
        for expert, tensors in held.items():
            fmt.moe(hidden, ids.masked_fill(ids != expert, EXPERTS), gate, {expert: tensors}, add_to=total)
        assert torch.equal(total.to(self.dtype), together)


class TestPlainFormat(FormatContract):
    def made(self) -> tuple[Any, Source, ExpertLayer]:
        layer = make_layer(self.dtype, self.model_type)
        return PlainFormat(layer), Source(layer), layer


class TestPlainFormatOfGptOss(TestPlainFormat):
    model_type = "gpt_oss"


@compiled
class TestPackedFloat(FormatContract):
    @property
    def tolerance(self) -> float:
        return TOLERANCE[{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[self.dtype]]

    def made(self) -> tuple[Any, Source, ExpertLayer]:
        layer = make_layer(self.dtype, self.model_type)
        return PackedFormat(layer, spec_of(layer.module)), Source(layer), layer

    def test_reading_takes_one_scratch_for_all_layers_of_a_model(self) -> None:
        layer, places = make_layer(self.dtype, self.model_type), set()

        class Watched(Source):
            def read_into(self, row: int, expert: int, target: Any) -> None:
                places.add(tuple(tensor.data_ptr() for tensor in target.values()))
                super().read_into(row, expert, target)

        for fmt in (PackedFormat(layer, spec_of(layer.module)) for _ in range(3)):
            fmt.read(Watched(layer), 0, 1, allocate_host(fmt.host_shapes))
        assert len(places) == 1


class TestPackedHalf(TestPackedFloat):
    dtype = torch.float16


class TestPackedBfloat(TestPackedFloat):
    dtype = torch.bfloat16


class TestPackedGptOss(TestPackedFloat):
    """Transposed, interleaved, with biases."""

    dtype = torch.bfloat16
    model_type = "gpt_oss"


class TestPackedByTorch(TestPackedBfloat):
    """Unpacked for every call, as many rows are where the CPU has AMX."""

    def made(self) -> tuple[Any, Source, ExpertLayer]:
        layer = make_layer(self.dtype, self.model_type)
        return PackedFormat(layer, spec_of(layer.module), alone_from_rows=1), Source(layer), layer


class TestPackedByTorchGptOss(TestPackedByTorch):
    model_type = "gpt_oss"


class Quantised(FormatContract):
    """Quantised weights made from the layer's parameters; values are compared after dequantising."""

    format = "int8"
    zero_points = False
    kind: ClassVar[Any] = StoredFormat

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.format] if self.kind is PackedFormat else 1e-5

    def made(self) -> tuple[Any, Source, ExpertLayer]:
        layer = make_layer(self.dtype, self.model_type)
        spec = dataclasses.replace(
            spec_of(layer.module), format=self.format, transposed=False, scale_number="", zero_points=self.zero_points
        )
        stored = []
        for expert in range(EXPERTS):
            values = {n: p[expert].float().numpy() for n, p in layer.parameters.items()}
            matrices = [values["gate_up_proj"], values["down_proj"]]
            if self.model_type == "gpt_oss":
                matrices = [m.T for m in matrices]
            first, bias = matrices[0], values.get("gate_up_proj_bias")
            if spec.interleaved:  # `quantise` wants gates first
                first = np.concatenate([first[::2], first[1::2]])
                bias = None if bias is None else np.concatenate([bias[::2], bias[1::2]])
            stored.append(quantise(spec, first, matrices[1], bias, values.get("down_proj_bias")))
        return self.kind(layer, spec), Source(layer, stored), layer

    def wanted_rows(self, source: Source, layer: ExpertLayer, expert: int, rows: Any) -> Any:
        fmt, _, _ = self.made()
        first, second, first_bias, second_bias = dequantise(fmt.spec, source.read_stored(0, expert))
        if fmt.spec.interleaved:
            first = np.stack(np.split(first, 2), 1).reshape(first.shape)
            first_bias = None if first_bias is None else np.stack(np.split(first_bias, 2), 1).reshape(-1)
        matrices = {"gate_up_proj": first, "down_proj": second}
        if self.model_type == "gpt_oss":
            matrices = {name: value.T for name, value in matrices.items()}
        biases = {"gate_up_proj_bias": first_bias, "down_proj_bias": second_bias}
        values = {**matrices, **{name: value for name, value in biases.items() if value is not None}}
        return run_expert(layer.module, rows.float(), {n: torch.from_numpy(v.copy()) for n, v in values.items()})


class TestStoredInt8(Quantised):
    format = "int8"


class TestStoredInt4(Quantised):
    format = "int4_g32"


class TestStoredFp8(Quantised):
    format = "fp8_block128"


class TestStoredMxfp4(Quantised):
    format = "mxfp4"
    model_type = "gpt_oss"


class ForTorch(Quantised):
    """What torch's quantised operators compute, by each of their ways: bfloat16 activations, and for int4 scales."""

    dtype = torch.bfloat16

    @property
    def tolerance(self) -> float:
        return TOLERANCE["bf16"]

    @pytest.mark.parametrize("count", [1, 5, 33])
    def test_every_way_is_near_float32_arithmetic(self, count: int) -> None:
        fmt, source, layer = self.made()
        held = self.held(fmt, source)[1]
        rows = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(4)).to(self.dtype)
        wanted = self.wanted_rows(source, layer, 1, rows)
        seen = []
        for way in fmt.WAYS:
            fmt.choice = RowChoice((way,))
            got = fmt.expert_rows(layer.module, rows, held)
            assert (got - wanted).norm() <= self.tolerance * wanted.norm(), way
            seen.append(got)
        assert not torch.equal(seen[0], seen[2])  # it does change what is done

    def test_gradients_are_refused(self) -> None:
        fmt, source, layer = self.made()
        rows = torch.zeros((1, HIDDEN), dtype=self.dtype, requires_grad=True)
        with pytest.raises(ModelError, match="know no gradients: run under"):
            fmt.expert_rows(layer.module, rows, self.held(fmt, source)[0])


class TestInt8ForTorch(ForTorch):
    kind = Int8Format


class TestInt8ForTorchGptOss(TestInt8ForTorch):
    """Interleaved, with biases."""

    model_type = "gpt_oss"


class TestInt4ForTorch(ForTorch):
    format = "int4_g32"
    kind = Int4Format


class TestInt4ZerosForTorch(TestInt4ForTorch):
    zero_points = True
    model_type = "gpt_oss"


class TestPlainByOtherWays(TestPlainFormat):
    """float16 with the way of each number of rows measured; transposed, with biases."""

    dtype = torch.float16
    model_type = "gpt_oss"

    @property
    def tolerance(self) -> float:
        return 4e-3

    def made(self) -> tuple[Any, Source, ExpertLayer]:
        _, source, layer = super().made()
        return PlainFormat(layer, RowChoice(("swapped",))), source, layer

    @pytest.mark.parametrize("way", FLOAT_WAYS)
    @pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
    def test_every_way_is_near_float32_arithmetic(self, way: str, model_type: str) -> None:
        layer = make_layer(self.dtype, model_type)
        fmt, source = PlainFormat(layer, RowChoice((way,))), Source(layer)
        for count in (1, 4):
            rows = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(4)).to(self.dtype)
            got = fmt.expert_rows(layer.module, rows, self.held(fmt, source)[1])
            wanted = self.wanted_rows(source, layer, 1, rows)
            assert got.dtype == self.dtype
            assert (got.float() - wanted).norm() <= self.tolerance * wanted.norm()
            assert torch.equal(got, run_expert(layer.module, rows, self.held(fmt, source)[1])) or way != "linear"


@compiled
class TestPackedInt8(TestStoredInt8):
    kind = PackedFormat


@compiled
class TestPackedInt4(TestStoredInt4):
    kind = PackedFormat


@compiled
class TestPackedFp8(TestStoredFp8):
    kind = PackedFormat


@compiled
class TestPackedMxfp4(TestStoredMxfp4):
    kind = PackedFormat


# -- a whole model in each format ------------------------------------------------------------------------------

PROMPTS = {1: torch.tensor([[5]]), 7: torch.tensor([[5, 17, 3, 41, 7, 99, 100]])}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kernels": "torch"},
    "bfloat16": {"dtype": "bfloat16", "kernels": "torch"},
    "float32, packed": {"dtype": "float32", "kernels": "compiled"},
    "bfloat16, packed": {"dtype": "bfloat16", "kernels": "compiled"},
    "float16, packed": {"dtype": "float16", "kernels": "compiled"},
    "int8": {"dtype": "float32", "kernels": "torch", "expert_format": "int8"},
    "int8, packed": {"dtype": "float32", "kernels": "compiled", "expert_format": "int8"},
    "int4, packed": {"dtype": "bfloat16", "kernels": "compiled", "expert_format": "int4_g32"},
    "int4, for torch": {"dtype": "bfloat16", "kernels": "torch", "expert_format": "int4_g32"},
    "bfloat16, no compiler": {"dtype": "bfloat16", "kernels": "auto"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 is the least group of int4."""
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("formats"), hidden_size=64, moe_intermediate_size=32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quantised experts go into a folder of the test's own; compiled kernels stay where they are."""
    monkeypatch.setattr("hotset.runtime.quantising.cache_directory", lambda: cache / "kernels")
    monkeypatch.setattr("hotset.runtime.expert_formats.operators.cache_directory", lambda: cache / "kernels")
    monkeypatch.setattr("hotset.runtime.expert_formats.operators._known", {})
    cache = tmp_path_factory.mktemp("cache")
    return cache


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.runtime.expert_formats.choice.backend", lambda: Backend("torch", "no compiler found"))


@pytest.fixture
def changing_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that differ by one row, whatever is faster here, so that a wrong count of rows changes bits."""

    def changing(_question: Any, ways: Any, *_: Any) -> RowChoice:
        return RowChoice(tuple(list(ways)[:3]), (1, 2))

    for module in ("plain", "torch_packed"):
        monkeypatch.setattr(f"hotset.runtime.expert_formats.{module}.fastest_by_rows", changing)


def logits(model: Any, tokens: int) -> Any:
    with torch.inference_mode():
        return model(input_ids=PROMPTS[tokens]).logits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_skipping_the_host_copies_changes_no_bit(
    folder: Path, way: str, share: float, changing_ways: None, request: pytest.FixtureRequest
) -> None:
    ready(way, request)
    rng = np.random.default_rng(1234)
    mask = rng.permuted(np.arange(8)[None].repeat(2, 0), axis=1) < 8 * share
    skipped, kept = (
        hotset.load(folder, plan=mask, device="cpu", skip_gpu_expert_cpu_copy=skip, **WAYS[way])
        for skip in ("on", "off")
    )
    nothing = hotset.load(folder, device="cpu", **WAYS[way])
    for tokens in PROMPTS:
        wanted = logits(nothing, tokens)
        assert torch.equal(logits(skipped, tokens), wanted)
        assert torch.equal(logits(kept, tokens), wanted)
    store, per_expert = skipped.hotset.store, kept.hotset.store.host_bytes // 16
    assert kept.hotset.store.host_bytes - store.host_bytes == mask.sum() * per_expert
    for model in (skipped, kept):
        model.hotset.store.check_integrity()


def ready(way: str, request: pytest.FixtureRequest) -> None:
    """Skip where this machine has not what the way needs; take it away where the way is to do without."""
    if WAYS[way]["kernels"] == "compiled" and not HAS_COMPILER:
        pytest.skip(f"no compiled kernels: {backend().reason}")
    if way.endswith("no compiler"):
        request.getfixturevalue("no_compiler")


@pytest.mark.parametrize(
    ("way", "tolerance"),
    [("float32, packed", 1e-5), ("bfloat16, packed", 0.02), ("int8", 0.02), ("bfloat16, no compiler", 0.02)],
)
def test_logits_are_near_those_of_float32(
    folder: Path, way: str, tolerance: float, request: pytest.FixtureRequest
) -> None:
    ready(way, request)
    plain = hotset.load(folder, device="cpu", dtype="float32")
    other = hotset.load(folder, device="cpu", **WAYS[way])
    for tokens in PROMPTS:
        wanted, got = logits(plain, tokens), logits(other, tokens).float()
        assert (got - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("way", [way for way in WAYS if "packed" in way or "for torch" in way])
def test_text_is_the_same_while_experts_move_and_from_disk(
    folder: Path, way: str, changing_ways: None, request: pytest.FixtureRequest
) -> None:
    ready(way, request)
    options = {**WAYS[way], "device": "cpu"}
    mask = np.zeros((2, 8), np.bool_)
    mask[:, :3] = True
    wanted = text_of(hotset.load(folder, **options))
    moving = hotset.load(folder, plan=mask, adapt=Adaptation(decay=0.9, hysteresis=0.0), **options)
    assert text_of(moving) == wanted
    assert moving.hotset_report()["moves"]["promotions"] > 0
    moving.hotset.store.check_integrity()
    limited = from_disk(folder, options)
    assert limited.hotset.store.cache is not None
    assert text_of(limited) == wanted
    assert limited.hotset_report()["disk"]["loads"] > 0


@compiled
def test_many_tokens_at_once_from_disk_have_the_bits_of_memory(folder: Path) -> None:
    options: dict[str, Any] = {**WAYS["bfloat16, packed"], "device": "cpu"}
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = hotset.load(folder, **options)(input_ids=ids).logits
        got = from_disk(folder, options)(input_ids=ids).logits
    assert torch.equal(got, wanted)


def text_of(model: Any) -> list[int]:
    out = model.generate(PROMPTS[7], max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0].tolist()
    return tokens


def from_disk(folder: Path, options: dict[str, Any], cached: int = 9) -> Any:
    """The model with a host cache of so many of its 16 experts, put in place of what a real budget would give."""
    from hotset.runtime import runtime as runtime_module
    from hotset.runtime.memory import buffer_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_module, "_cache_bytes", lambda formats, *_: cached * buffer_bytes(formats[0].host_shapes))
        return hotset.load(folder, host_memory_bytes="1GiB", **options)


@compiled
class TestManyRowsOfAnExpert:
    """Computed by torch where that is faster, here from 3 rows on: by the rows in the call, and nothing else."""

    IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))

    @pytest.fixture
    def from_three_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hotset.runtime.expert_formats.choice.measured_crossover", lambda *_: 3)

    def test_residency_changes_no_bit(self, folder: Path, from_three_rows: None) -> None:
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu"}
        mask = np.tile(np.arange(8) % 2 == 0, (2, 1))
        nothing = hotset.load(folder, **options)
        assert nothing.hotset_report()["host_compute"]["reason"].endswith(
            "torch from 3 rows of an expert on (measured)"
        )
        others = [hotset.load(folder, plan=mask, skip_gpu_expert_cpu_copy=skip, **options) for skip in ("on", "off")]
        others.append(hotset.load(folder, plan=mask, gpu_prefill_token_threshold=2, **options))
        others.append(from_disk(folder, {**options, "kernels": "compiled"}))  # "auto" does not pack what is on disk
        for fmt in others[-1].hotset.store.formats:
            fmt.alone_from_rows = 3
        by_kernels = hotset.load(folder, kernels="compiled", **options)
        assert {fmt.alone_from_rows for fmt in by_kernels.hotset.store.formats} == {None}
        for ids in (PROMPTS[1], PROMPTS[7], self.IDS[:, :16], self.IDS):
            with torch.inference_mode():
                wanted = nothing(input_ids=ids).logits
                for other in others:
                    assert torch.equal(other(input_ids=ids).logits, wanted)
                plain = by_kernels(input_ids=ids).logits
            assert torch.equal(plain, wanted) is (ids.shape[1] < 3)
            assert (plain - wanted).norm() <= 0.02 * wanted.norm()

    def test_they_are_none_of_those_that_are_computed_together(self, folder: Path, from_three_rows: None) -> None:
        model = hotset.load(folder, dtype="bfloat16", device="cpu")
        dispatch = model.hotset.layers[0].module.hotset_layer
        hidden = torch.randn((4, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
        misses = [(1, torch.tensor([0, 2])), (4, torch.tensor([0, 1, 3])), (6, torch.tensor([3]))]
        together, alone = dispatch._misses_together(hidden, misses)
        assert [(expert, len(rows)) for expert, rows in together] == [(1, 2), (6, 1)]
        assert [expert for expert, _ in alone] == [4]

    @pytest.mark.parametrize(
        ("kernels", "by_torch", "wanted"),
        [
            ([1, 2, 4], [2, 1, 3], 33),
            ([2, 2, 4], [1, 1, 3], 32),
            ([1, 2, 3], [2, 1, 3], None),
            ([1, 1, 1], [2, 2, 2], None),
        ],
    )
    def test_the_crossover_is_where_torch_wins_and_stays_ahead(
        self, monkeypatch: pytest.MonkeyPatch, kernels: list[int], by_torch: list[int], wanted: int | None
    ) -> None:
        seconds = {
            way: dict(zip((32, 64, 128), map(float, times), strict=True))
            for way, times in (("packed", kernels), ("torch", by_torch))
        }
        monkeypatch.setattr(operators, "seconds_by_rows", lambda *_: seconds)
        monkeypatch.setattr("hotset.runtime.expert_formats.packed.has_amx", lambda: True)
        layer = make_layer(torch.bfloat16)
        assert measured_crossover(layer, spec_of(layer.module)) == wanted
        assert measured_crossover(layer, LayerSpec("int8", EXPERTS, HIDDEN, INNER)) is None

    def test_it_is_measured_by_running_both(self, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
        monkeypatch.setattr("hotset.runtime.expert_formats.packed.has_amx", lambda: True)
        layer = make_layer(torch.bfloat16, "gpt_oss")
        found = measured_crossover(layer, spec_of(layer.module))
        (made,) = (own_cache / "operators").iterdir()
        seconds = json.loads(made.read_text())["seconds"]
        assert seconds["packed"].keys() == {"32", "64", "128", "256", "512"}
        assert found is None or found >= 32

    def test_without_amx_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
        monkeypatch.setattr("hotset.runtime.expert_formats.packed.has_amx", lambda: False)
        layer = make_layer(torch.bfloat16)
        assert measured_crossover(layer, spec_of(layer.module)) is None
        assert not (own_cache / "operators").exists()


class TestQuantisedAtLoad:
    def test_the_file_is_made_once_and_read_back(self, folder: Path, own_cache: Path) -> None:
        seen: list[tuple[int, int]] = []
        hotset.load(folder, device="cpu", expert_format="int8", progress=lambda done, total: seen.append((done, total)))
        assert seen == [(i, 16) for i in range(1, 17)] * 2  # quantised, then read
        (made,) = (own_cache / "experts").iterdir()
        before, first = made.stat().st_mtime_ns, logits(hotset.load(folder, device="cpu", expert_format="int8"), 7)
        seen.clear()
        again = hotset.load(folder, device="cpu", expert_format="int8", progress=lambda d, t: seen.append((d, t)))
        assert seen == [(i, 16) for i in range(1, 17)]
        assert made.stat().st_mtime_ns == before
        assert torch.equal(logits(again, 7), first)

    def test_it_lies_beside_the_plan(self, folder: Path, tmp_path: Path, own_cache: Path) -> None:
        plan = tmp_path / "half.safetensors"
        model = hotset.load(folder, device="cpu")
        layer_ids = np.array([layer.layer_id for layer in model.hotset.layers], np.int32)
        mask = np.tile(np.arange(8) < 4, (2, 1))
        hotset.Plan(mask, layer_ids, "by hand", "hit-rate", {}, 0.0).save(plan)
        hotset.load(folder, plan=plan, device="cpu", expert_format="int4_g32")
        (made,) = (path for path in tmp_path.iterdir() if path != plan)
        assert made.name.startswith("half.")
        assert made.name.endswith(".int4_g32.safetensors")
        assert not (own_cache / "experts").exists()

    def test_a_damaged_or_foreign_file_is_made_again(self, folder: Path, own_cache: Path) -> None:
        wanted = logits(hotset.load(folder, device="cpu", expert_format="int8"), 7)
        (made,) = (own_cache / "experts").iterdir()
        made.write_bytes(made.read_bytes()[:100])
        assert torch.equal(logits(hotset.load(folder, device="cpu", expert_format="int8"), 7), wanted)

    def test_a_failure_leaves_no_file(self, folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> Any:
            raise CheckpointError("no more")

        monkeypatch.setattr("hotset.runtime.quantising.quantise_matrix", broken)
        with pytest.raises(CheckpointError, match="no more"):
            hotset.load(folder, device="cpu", expert_format="int8")
        assert list((own_cache / "experts").iterdir()) == []

    def test_weights_that_are_not_finite_are_refused(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        broken = make_checkpoint("qwen3_moe", tmp_path / "nan", hidden_size=64, moe_intermediate_size=32)
        tensors = load_file(broken / "model.safetensors")
        name = next(n for n in tensors if "experts.3" in n)
        tensors[name][0, 0] = float("nan")
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="expert 3 of layer 0 has weights that are NaN or infinite"):
            hotset.load(broken, device="cpu", expert_format="int8")


class TestChoice:
    def test_float32_stays_with_torch_and_says_why(self, folder: Path) -> None:
        compute = hotset.load(folder, device="cpu").hotset_report()["host_compute"]
        assert (compute["format"], compute["kernels"]) == ("float32", "torch")
        assert "eager" in compute["reason"]

    @compiled
    def test_bfloat16_is_computed_by_the_compiled_kernels(self, folder: Path) -> None:
        compute = hotset.load(folder, device="cpu", dtype="bfloat16").hotset_report()["host_compute"]
        assert (compute["format"], compute["kernels"]) == ("bf16, packed", "compiled")
        assert compute["reason"] == backend().reason

    def test_experts_read_from_disk_are_packed_where_most_stay_in_memory_or_if_asked_for(self, folder: Path) -> None:
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu"}
        compute = from_disk(folder, options).hotset_report()["host_compute"]
        assert (compute["format"], compute["kernels"]) == ("bfloat16", "torch")
        assert "56% of them in memory" in compute["reason"]
        if HAS_COMPILER:
            most = from_disk(folder, options, cached=12)
            assert most.hotset_report()["host_compute"]["format"] == "bf16, packed"
            assert text_of(most) == text_of(hotset.load(folder, **options))
            forced = from_disk(folder, {**options, "kernels": "compiled"}).hotset_report()["host_compute"]
            assert forced["format"] == "bf16, packed"

    def test_a_module_that_the_kernels_do_not_compute_stays_with_torch(self) -> None:
        layer = make_layer(torch.bfloat16)
        layer.module._apply_gate = lambda x: x.chunk(2, -1)[0].tanh()
        choice = choose_formats([layer], [None])
        assert isinstance(choice.formats[0], PlainFormat)
        if HAS_COMPILER:
            assert "no activation that the kernels know" in choice.reason
            with pytest.raises(OpsError, match="no activation that the kernels know"):
                choose_formats([layer], [None], kernels="compiled")

    def test_training_stays_with_torch(self, folder: Path) -> None:
        compute = hotset.load(folder, device="cpu", dtype="bfloat16", training=True).hotset_report()["host_compute"]
        assert compute["kernels"] == "torch"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernels": "cuda"}, "kernels is 'cuda': wanted auto, compiled, torch"),
            ({"expert_format": "int3"}, "expert_format is 'int3': wanted auto, float, int8"),
            ({"training": True, "expert_format": "int8"}, "training is refused: quantised experts know no gradients"),
            ({"training": True, "kernels": "compiled"}, "kernels='compiled' and training exclude each other"),
        ],
    )
    def test_refusals(self, folder: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            hotset.load(folder, device="cpu", **options)

    def test_forced_kernels_that_are_not_there_are_an_error(self, no_compiler: None) -> None:
        layer = make_layer(torch.bfloat16)
        with pytest.raises(BackendError, match="asked for, but: no compiler found"):
            choose_formats([layer], [None], kernels="compiled")

    def test_without_a_compiler_the_operators_are_measured_and_shown(
        self, folder: Path, no_compiler: None, changing_ways: None
    ) -> None:
        compute = hotset.load(folder, device="cpu", dtype="bfloat16").hotset_report()["host_compute"]
        assert compute == {
            "format": "bfloat16",
            "kernels": "torch",
            "reason": "no compiler found: linear to 1 row, mv to 2 rows, swapped beyond (measured)",
        }
        model = hotset.load(folder, device="cpu", dtype="bfloat16", expert_format="int4_g32")
        compute = model.hotset_report()["host_compute"]
        assert compute["format"] == "int4_g32, int4pack"
        assert compute["reason"].startswith("no compiler found: int4pack to 1 row, linear to 2 rows, float32 linear")

    def test_float32_and_asked_for_torch_keep_the_eager_bits(self, no_compiler: None) -> None:
        for dtype, kernels in ((torch.float32, "auto"), (torch.bfloat16, "torch")):
            choice = choose_formats([make_layer(dtype)], [None], kernels=kernels)
            assert choice.formats[0].choice is None
            assert "eager" in choice.reason

    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            (LayerSpec("int8", 4, 24, 32), "int8pack wants hidden and intermediate in multiples of 16, not 24, 32"),
            (LayerSpec("int4_g32", 4, 64, 48), r"columns of 32: down is \[64, 48\]"),
            (LayerSpec("int4_g128", 4, 64, 128), r"columns of 128: gate_up is \[256, 64\]"),
            (LayerSpec("int4_g32", 4, 64, 4, gated=False), r"rows in multiples of 16 .*: gate_up is \[4, 64\]"),
            (LayerSpec("mxfp4", 4, 64, 32), "torch has no operator for mxfp4"),
            (LayerSpec("fp8_block128", 4, 64, 32), "torch has no operator for fp8_block128"),
        ],
    )
    def test_what_the_operators_do_not_take_is_dequantised_for_every_call(self, spec: LayerSpec, reason: str) -> None:
        choice = choose_formats([make_layer(torch.bfloat16)], [spec], kernels="torch")
        assert type(choice.formats[0]) is StoredFormat
        assert re.search(f"asked for: dequantised for every call, for .*{reason}", choice.reason)

    def test_a_float32_model_keeps_float32_arithmetic(self) -> None:
        spec = LayerSpec("int8", EXPERTS, HIDDEN, INNER)
        choice = choose_formats([make_layer(torch.float32)], [spec], kernels="torch")
        assert type(choice.formats[0]) is StoredFormat
        assert "a float32 model keeps float32 arithmetic" in choice.reason

    def test_an_operator_that_is_wrong_here_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(x: Any, *_: Any) -> Any:
            return torch.ones((len(x), 64))

        monkeypatch.setattr(torch, "_weight_int8pack_mm", wrong)
        torch_packed._int8pack_problem.cache_clear()
        try:
            assert "int8pack is off by" in Int8Format.refusal(LayerSpec("int8", 4, 64, 32))
        finally:
            torch_packed._int8pack_problem.cache_clear()

    @compiled
    def test_gradients_through_the_kernels_are_refused(self) -> None:
        layer = make_layer(torch.bfloat16)
        fmt = PackedFormat(layer, spec_of(layer.module))
        hidden = torch.zeros((1, HIDDEN), dtype=torch.bfloat16, requires_grad=True)
        held = {0: allocate_host(fmt.host_shapes)}
        held[0][PACKED].zero_()
        with pytest.raises(ModelError, match="know no gradients: load with training=True"):
            fmt.rows(hidden, torch.zeros((1, 1), dtype=torch.int64), held)


class TestPacking:
    """Of int4pack."""

    @pytest.mark.parametrize(
        ("rows", "k", "nested"), [(128, 64, True), (96, 64, False), (80, 96, False), (16, 32, True)]
    )
    def test_it_is_undone(self, rows: int, k: int, nested: bool) -> None:
        stored = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        found = torch_packed.packing(rows, k)
        assert (found.order is None) is (found.strides is not None)
        nibbles = torch.stack([stored & 15, stored >> 4], -1).view(rows, k)
        assert torch.equal(found.packed(stored), torch_packed._pack(nibbles.int()))
        assert torch.equal(found.unpacked(found.packed(stored)), nibbles)
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert (found.strides is not None) is nested

    @pytest.mark.parametrize("is_rearrangement", [True, False])
    def test_it_is_found_whatever_it_is(self, monkeypatch: pytest.MonkeyPatch, is_rearrangement: bool) -> None:
        order = torch.randperm(64 * 256, generator=torch.Generator().manual_seed(0))

        def pack(nibbles: Any) -> Any:
            flat = nibbles.view(-1)[order].to(torch.uint8) ^ (0 if is_rearrangement else 8)
            return flat[::2] | flat[1::2] << 4

        monkeypatch.setattr(torch_packed, "_pack", pack)
        caches = (torch_packed.packing, torch_packed._int4pack_problem)
        for cache in caches:
            cache.cache_clear()
        try:
            problem = torch_packed._int4pack_problem()
            assert problem is not None  # the operator itself has another packing
            if is_rearrangement:
                nibbles = torch.randint(0, 16, (64, 256), dtype=torch.uint8)
                assert torch.equal(torch_packed.packing(64, 256).unpacked(pack(nibbles)), nibbles)
                assert "off by" in problem
            else:
                assert "no rearrangement of the codes" in problem
        finally:
            for cache in caches:
                cache.cache_clear()

    def test_groups_of_128_give_back_their_bytes_and_values(self) -> None:
        layer = make_layer(torch.bfloat16)
        spec = LayerSpec("int4_g128", 4, 128, 128, zero_points=True, scale_number="fp16")
        generator = np.random.default_rng(0)
        stored = quantise(spec, *(generator.standard_normal(shape, np.float32) for shape in ((256, 128), (128, 128))))
        fmt = Int4Format(layer, spec, RowChoice(("int4pack",)))
        held = allocate_host(fmt.host_shapes)
        fmt.read(Source(layer, [stored]), 0, 0, held)
        for name, tensor in fmt.to_device(held).items():
            assert np.array_equal(tensor.numpy(), getattr(stored, name)), name
        rows = torch.randn((3, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
        wanted = fmt.device_rows(layer.module, rows, fmt.to_device(held))
        assert (fmt.expert_rows(layer.module, rows, held) - wanted).norm() <= TOLERANCE["bf16"] * wanted.norm()


class TestRowChoice:
    def test_a_bound_belongs_to_the_way_before_it(self) -> None:
        choice = RowChoice(("mv", "linear", "swapped"), (2, 8))
        assert [choice(rows) for rows in (1, 2, 3, 8, 9, 1000)] == [
            "mv",
            "mv",
            "linear",
            "linear",
            "swapped",
            "swapped",
        ]
        assert str(choice) == "mv to 2 rows, linear to 8 rows, swapped beyond"
        assert str(RowChoice(("mv", "linear"), (1,))) == "mv to 1 row, linear beyond"
        assert str(RowChoice(("linear",))) == "linear"

    def test_another_way_must_win_by_a_twentieth(self) -> None:
        seconds = {"plain": {1: 1.0, 2: 1.0, 4: 2.0, 8: 3.0}, "other": {1: 0.94, 2: 0.96, 4: 1.5, 8: 9.0}}
        assert RowChoice.of_seconds(seconds) == RowChoice(("other", "plain", "other", "plain"), (1, 2, 4))

    def test_a_way_that_was_given_up_is_not_taken_again(self) -> None:
        seconds = {"plain": {1: 2.0, 16: 40.0}, "other": {1: 3.0, 16: 3.0, 32: 3.5}}
        assert RowChoice.of_seconds(seconds) == RowChoice(("plain", "other"), (1,))

    def test_a_way_that_is_hopeless_twice_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """slow takes a second a row, fast one for every ten, late a hundred whatever the rows."""
        now = [0.0]
        costs = {"fast": lambda rows: rows / 10, "slow": lambda rows: rows, "late": lambda rows: 100.0}

        def run(way: str, rows: int) -> None:
            now[0] += costs[way](rows)

        monkeypatch.setattr("hotset.runtime.expert_formats.operators.time.perf_counter", lambda: now[0])
        seconds = operators.seconds_by_rows(dict.fromkeys(costs, 1 << 30), run, rows=(1, 8, 16, 32, 64, 2048))
        assert seconds["slow"] == pytest.approx({1: 1, 8: 8, 16: 16, 32: 32})
        assert list(seconds["fast"]) == list(seconds["late"]) == [1, 8, 16, 32, 64, 2048]
        assert RowChoice.of_seconds(seconds) == RowChoice(("fast", "late"), (64,))

    def test_only_so_many_rows_are_tried(self) -> None:
        ran: list[tuple[str, int]] = []
        operators.seconds_by_rows({"a": 8, "b": 2}, lambda way, rows: ran.append((way, rows)), rows=(1, 2, 4, 16))
        assert set(ran) == {("a", 1), ("a", 2), ("a", 4), ("b", 1), ("b", 2)}


class TestMeasuredOnce:
    """Two ways of which the second is faster: by a clock of the test's own."""

    WAYS: ClassVar[Any] = {"slow": 1 << 30, "fast": 1 << 30}

    @pytest.fixture
    def times(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """One entry per time that was measured."""
        measured: list[int] = []

        def seconds(ways: Any, run: Any, rows: Any) -> Any:
            measured.append(1)
            return {"slow": {1: 2.0, 8: 2.0}, "fast": {1: 1.0, 8: 3.0}}

        monkeypatch.setattr(operators, "seconds_by_rows", seconds)
        return measured

    def ask(self, question: str = "q", *, fresh: bool = True) -> RowChoice:
        if fresh:
            operators._known.clear()
        return operators.fastest_by_rows({"experts": question}, self.WAYS, lambda: lambda way, rows: None)

    def test_the_file_is_read_back(self, own_cache: Path, times: list[int]) -> None:
        wanted = RowChoice(("fast", "slow"), (1,))
        assert [self.ask(), self.ask(), self.ask(fresh=False)] == [wanted] * 3
        assert len(times) == 1
        (made,) = (own_cache / "operators").iterdir()
        assert json.loads(made.read_text())["asked"]["torch"] == torch.__version__

    def test_another_question_or_machine_is_measured(
        self, own_cache: Path, times: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.ask()
        self.ask("other")
        monkeypatch.setattr(operators, "cpu", lambda: "another CPU")
        self.ask()
        assert len(times) == len(list((own_cache / "operators").iterdir())) == 3

    @pytest.mark.parametrize(
        "change",
        [
            lambda text, found: text[: len(text) // 2],
            lambda text, found: "[]",
            lambda text, found: json.dumps({**found, "asked": {**found["asked"], "threads": 99}}),
            lambda text, found: json.dumps({**found, "chosen": ["fast", "unheard of"]}),
            lambda text, found: json.dumps({**found, "chosen": "fast"}),
            lambda text, found: json.dumps({**found, "chosen": [["fast"], "slow"]}),
            lambda text, found: json.dumps({**found, "bounds": [1, 2]}),
            lambda text, found: json.dumps({**found, "bounds": ["1"]}),
            lambda text, found: json.dumps({**found, "chosen": ["fast", "slow", "fast"], "bounds": [2, 1]}),
        ],
    )
    def test_a_damaged_or_foreign_file_is_measured_anew(self, own_cache: Path, times: list[int], change: Any) -> None:
        wanted = self.ask()
        (made,) = (own_cache / "operators").iterdir()
        text = made.read_text()
        made.write_text(change(text, json.loads(text)))
        assert self.ask() == wanted
        assert len(times) == 2
        assert made.read_text() == text

    def test_a_folder_that_cannot_be_written_is_no_failure(
        self, own_cache: Path, times: list[int], caplog: pytest.LogCaptureFixture
    ) -> None:
        (own_cache / "operators").write_text("a file in the way")
        with caplog.at_level(logging.WARNING, "hotset.runtime"):
            assert self.ask() == self.ask(fresh=False) == RowChoice(("fast", "slow"), (1,))
        assert "is not kept" in caplog.text
        assert len(times) == 1


@compiled
def test_forced_by_the_environment(folder: Path) -> None:
    import subprocess
    import sys

    code = f"import hotset; print(hotset.load({str(folder)!r}, device='cpu').hotset_report()['host_compute']['format'])"
    for wanted, name in (("compiled", "fp32, packed"), ("torch", "float32")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "HOTSET_KERNELS": wanted}, capture_output=True, text=True
        )
        assert done.stdout.strip() == name, done.stderr
