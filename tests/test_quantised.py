"""Quantised checkpoints: each layout written by a writer of this file, independent of the reader, then read back.

A writer turns a float matrix into stored tensors and returns the floats that these stand for, by its own arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import hotset  # noqa: E402
from hotset.errors import CheckpointError, ModelError, UnsupportedModelError  # noqa: E402
from hotset.kernels import backend, dequantise  # noqa: E402
from hotset.models.checkpoint import Checkpoint  # noqa: E402
from hotset.runtime.loading import load_skeleton  # noqa: E402
from hotset.runtime.quantised import LazyFloats, QuantisedEntry, logical_checkpoint  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

HAS_COMPILER = backend().name == "compiled"
Written = tuple[dict[str, Any], Any]
"""(ending of the name -> tensor, the floats they stand for)."""
TOKENS = {1: torch.tensor([[5]]), 7: torch.tensor([[5, 17, 3, 41, 7, 99, 100]])}


def fp8_block(weight: Any) -> Written:
    rows, k = weight.shape
    scales = torch.rand(-(-rows // 128), -(-k // 128)) * 0.01 + 0.001
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * wide


def fp8_channel(weight: Any) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def fp8_tensor(weight: Any) -> Written:
    scale = (weight.abs().amax() / 448).reshape(1)
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(1)}
    return stored, codes.float() * scale


def int8_channel(weight: Any) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def mxfp8(weight: Any) -> Written:
    rows, k = weight.shape
    exponents = torch.randint(118, 122, (rows, k // 32), dtype=torch.uint8)
    wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": exponents}, codes.float() * wide


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: Any) -> Written:
    rows, k = weight.shape
    exponents = torch.randint(122, 126, (rows, k // 32), dtype=torch.uint8)
    nibbles = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
    packed = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int8)
    values = FP4[nibbles.long()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {".weight": packed, ".scale": exponents.view(torch.float8_e8m0fnu)}, values


def int4_groups(weight: Any, group: int, zeros: bool) -> tuple[Any, Any, Any, Any]:
    """(nibbles [N, K] 0..15, scales fp16 [N, groups], zeros [N, groups] 0..15, floats)."""
    rows, k = weight.shape
    by_group = weight.reshape(rows, k // group, group)
    scales = (by_group.abs().amax(2) / 7).half()
    zero = torch.randint(3, 12, scales.shape) if zeros else torch.full(scales.shape, 8)
    nibbles = ((by_group / scales.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    floats = (nibbles - zero[..., None]) * scales.float()[..., None]
    return nibbles.reshape(rows, k).long(), scales, zero, floats.reshape(rows, k)


def words(nibbles: Any) -> Any:
    """[..., 8 n] -> [..., n] int32, the first of eight lowest."""
    parts = nibbles.reshape(*nibbles.shape[:-1], -1, 8).numpy().astype(np.uint32)
    packed = sum(parts[..., i] << np.uint32(4 * i) for i in range(8))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def pack_quantized(weight: Any, group: int = 32, zeros: bool = False) -> Written:
    nibbles, scales, zero, floats = int4_groups(weight, group, zeros)
    stored = {".weight_packed": words(nibbles), ".weight_scale": scales, ".weight_shape": torch.tensor(weight.shape)}
    if zeros:
        stored[".weight_zero_point"] = words(zero.T.contiguous()).T.contiguous()
    return stored, floats


def gptq(weight: Any, group: int = 32, zeros: bool = False) -> Written:
    nibbles, scales, zero, floats = int4_groups(weight, group, zeros)
    stored = {
        ".qweight": words(nibbles).T.contiguous(),
        ".qzeros": words((zero - 1).T.contiguous()),
        ".scales": scales.T.contiguous(),
        ".g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }
    return stored, floats


def awq(weight: Any, group: int = 32) -> Written:
    nibbles, scales, zero, floats = int4_groups(weight, group, True)

    def shuffled(columns: Any) -> Any:
        """[n, N] -> words whose nibble i is column order[i] of eight."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return words(columns.reshape(len(columns), -1, 8)[:, :, order].reshape(len(columns), -1))

    stored = {
        ".qweight": shuffled(nibbles.T.contiguous()),
        ".qzeros": shuffled(zero.T.contiguous()),
        ".scales": scales.T.contiguous(),
    }
    return stored, floats


def rewrite(folder: Path, config: dict[str, Any], write: Callable[[Any], Written], which: str) -> dict[str, Any]:
    """Quantise every matrix whose name has `which` in it; returns all tensors as the floats that they stand for."""
    tensors, floats = load_file(folder / "model.safetensors"), {}
    stored: dict[str, Any] = {}
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        is_matrix = name.endswith(".weight") and tensor.ndim == 2 and which in name and "embed" not in name
        if not is_matrix or ("mlp.gate.weight" in name):
            stored[name] = floats[name] = tensor
            continue
        parts, floats[name] = write(tensor)
        stored |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return floats


class LayoutContract:
    """What must hold of a Qwen3-MoE whose matrices, attention included, are in the layout."""

    config: ClassVar[dict[str, Any]]
    format: ClassVar[str]
    inner: ClassVar[int] = 32
    which = "model.layers"

    def write(self, weight: Any) -> Written:
        raise NotImplementedError

    @pytest.fixture
    def folders(self, tmp_path: Path) -> tuple[Path, Path]:
        """(quantised, the same with the floats that it stands for)."""
        sizes = {"hidden_size": 128, "moe_intermediate_size": self.inner, "intermediate_size": 128, "head_dim": 32}
        made = [make_checkpoint("qwen3_moe", tmp_path / name, **sizes) for name in ("quantised", "floats")]
        floats = rewrite(made[0], self.config, self.write, self.which)
        save_file(floats, made[1] / "model.safetensors", metadata={"format": "pt"})
        return made[0], made[1]

    def test_as_floats_it_gives_the_logits_of_these_floats(self, folders: tuple[Path, Path]) -> None:
        quantised, floats = (hotset.load(f, device="cpu", dtype="float32", expert_format="float") for f in folders)
        assert quantised.hotset_report()["host_compute"]["format"] == "float32"
        for ids in TOKENS.values():
            with torch.inference_mode():
                assert torch.equal(quantised(input_ids=ids).logits, floats(input_ids=ids).logits)

    def test_stored_experts_stand_for_these_floats(self, folders: tuple[Path, Path]) -> None:
        skeletons = [load_skeleton(f, dtype=torch.float32, device=torch.device("cpu")) for f in folders]
        specs = skeletons[0].reader.quantised_specs()
        assert {spec and spec.format for spec in specs} == {self.format}
        assert not any(skeletons[1].reader.quantised_specs())
        for row, layer in enumerate(skeletons[0].layers):
            for expert in (0, 7):
                got = dequantise(specs[row], skeletons[0].reader.read_stored(row, expert))
                wanted = {n: torch.empty(p.shape[1:]) for n, p in layer.parameters.items()}
                skeletons[1].reader.read_into(row, expert, wanted)
                np.testing.assert_array_equal(got[0], wanted["gate_up_proj"].numpy())
                np.testing.assert_array_equal(got[1], wanted["down_proj"].numpy())

    def test_held_as_stored_it_is_near_the_floats_wherever_experts_live(self, folders: tuple[Path, Path]) -> None:
        floats = hotset.load(folders[1], device="cpu", dtype="float32")
        mask = np.tile(np.arange(8) % 2 == 0, (2, 1))
        ways = [("torch", "float32", 1e-5), ("torch", "bfloat16", 2e-2), ("compiled", "float32", 2e-2)]
        for kernels, dtype, tolerance in ways if HAS_COMPILER else ways[:2]:
            options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kernels": kernels}
            none, half = hotset.load(folders[0], **options), hotset.load(folders[0], plan=mask, **options)
            assert self.format in none.hotset_report()["host_compute"]["format"]
            for ids in TOKENS.values():
                with torch.inference_mode():
                    wanted, got = floats(input_ids=ids).logits, none(input_ids=ids).logits
                    assert torch.equal(half(input_ids=ids).logits, got)
                assert (got - wanted).norm() <= tolerance * wanted.norm()


class TestFp8Block(LayoutContract):
    config: ClassVar = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    format = "fp8_block128"
    inner = 128

    def write(self, weight: Any) -> Written:
        return fp8_block(weight)

    def test_transformers_dequantises_to_the_same(self) -> None:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        stored, floats = fp8_block(torch.randn(256, 384))
        theirs = Fp8Dequantize(None)._dequantize_one(stored[".weight"], stored[".weight_scale_inv"], torch.float32)
        assert torch.equal(theirs, floats)


class TestFp8Channel(LayoutContract):
    config: ClassVar = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    format = "fp8_channel"

    def write(self, weight: Any) -> Written:
        return fp8_channel(weight)


class TestFp8Tensor(TestFp8Channel):
    def write(self, weight: Any) -> Written:
        return fp8_tensor(weight)


class TestInt8Channel(LayoutContract):
    config: ClassVar = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    format = "int8"

    def write(self, weight: Any) -> Written:
        return int8_channel(weight)


class TestMxfp8(LayoutContract):
    config: ClassVar = {"quant_method": "fp8", "scale_fmt": "ue8m0"}
    format = "mxfp8"
    which = "experts"

    def write(self, weight: Any) -> Written:
        return mxfp8(weight)


class TestMxfp4(LayoutContract):
    """DeepSeek-V4: FP4 experts beside FP8 or plain attention."""

    config: ClassVar = {"quant_method": "fp8", "expert_dtype": "fp4"}
    format = "mxfp4"
    which = "experts"

    def write(self, weight: Any) -> Written:
        return mxfp4(weight)

    def test_transformers_dequantises_to_the_same(self) -> None:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        stored, floats = mxfp4(torch.randn(64, 96))
        theirs = Fp8Dequantize(None)._dequantize_one(stored[".weight"], stored[".scale"], torch.float32)
        assert torch.equal(theirs, floats)


class TestPackQuantized(LayoutContract):
    config: ClassVar = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    format = "int4_g32"

    def write(self, weight: Any) -> Written:
        return pack_quantized(weight)


class TestPackQuantizedAsymmetric(TestPackQuantized):
    def write(self, weight: Any) -> Written:
        return pack_quantized(weight, zeros=True)


class TestPackQuantizedGroupOf64(TestPackQuantized):
    inner = 64

    def write(self, weight: Any) -> Written:
        return pack_quantized(weight, group=64)


class TestPackQuantizedPerRow(TestPackQuantized):
    format = "int4_g128"
    inner = 128

    def write(self, weight: Any) -> Written:
        return pack_quantized(weight, group=weight.shape[1])


class TestGptq(LayoutContract):
    config: ClassVar = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    format = "int4_g32"

    def write(self, weight: Any) -> Written:
        return gptq(weight)


class TestGptqAsymmetric(TestGptq):
    config: ClassVar = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    format = "int4_g128"
    inner = 128

    def write(self, weight: Any) -> Written:
        return gptq(weight, 128, zeros=True)


class TestAwq(LayoutContract):
    config: ClassVar = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    format = "int4_g32"

    def write(self, weight: Any) -> Written:
        return awq(weight)


class TestPackQuantizedInt8(LayoutContract):
    config: ClassVar = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True}}},
    }
    format = "int8"

    def write(self, weight: Any) -> Written:
        stored, floats = int8_channel(weight)
        columns = (stored[".weight"].long() + 128).reshape(len(weight), -1, 4)
        packed = sum(columns[..., i] << (8 * i) for i in range(4))
        signed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        shape = torch.tensor(weight.shape)
        return {".weight_packed": signed, ".weight_scale": stored[".weight_scale"], ".weight_shape": shape}, floats


class TestCompressedMxfp4(LayoutContract):
    config: ClassVar = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    format = "mxfp4"
    which = "experts"

    def write(self, weight: Any) -> Written:
        stored, floats = mxfp4(weight)
        codes, exponents = stored[".weight"].view(torch.uint8), stored[".scale"].view(torch.uint8)
        return {".weight_packed": codes, ".weight_scale": exponents}, floats


class TestCompressedMxfp8(LayoutContract):
    config: ClassVar = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}
    format = "mxfp8"
    which = "experts"

    def write(self, weight: Any) -> Written:
        stored, floats = mxfp8(weight)
        return {".weight": stored[".weight"], ".weight_scale": stored[".weight_scale_inv"]}, floats


class TestGptqV2(TestGptq):
    """Zero points as they are, one of them 0, which the first version has no word for."""

    config: ClassVar = {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}

    def write(self, weight: Any) -> Written:
        nibbles, scales, zero, _ = int4_groups(weight, 32, True)
        zero[0, 0] = 0
        floats = (nibbles.reshape(*zero.shape, 32) - zero[..., None]) * scales.float()[..., None]
        stored = {**gptq(weight)[0], ".qweight": words(nibbles).T.contiguous(), ".scales": scales.T.contiguous()}
        return {**stored, ".qzeros": words(zero.T.contiguous())}, floats.reshape(weight.shape)


# -- gpt-oss: fused, transposed, interleaved, biases -----------------------------------------------------------


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """(MXFP4, the same as floats by Transformers' own conversion)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32}
    made = [make_checkpoint("gpt_oss", tmp_path / name, **sizes) for name in ("quantised", "floats")]
    tensors = load_file(made[0] / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored, floats = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, k, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, rows, k // 32), generator=generator, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert floats[name].shape == tensor.shape
    save_file(stored, made[0] / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, made[1] / "model.safetensors", metadata={"format": "pt"})
    path = made[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    return made[0], made[1]


def test_gpt_oss_gives_the_logits_of_transformers_own_dequantisation(gpt_oss: tuple[Path, Path]) -> None:
    floats = hotset.load(gpt_oss[1], device="cpu", dtype="float32")
    as_floats = hotset.load(gpt_oss[0], device="cpu", dtype="float32", expert_format="float")
    ways = [{"kernels": "torch"}, *([{"kernels": "compiled"}] if HAS_COMPILER else [])]
    held = [hotset.load(gpt_oss[0], device="cpu", dtype="float32", **way) for way in ways]
    for ids in TOKENS.values():
        with torch.inference_mode():
            wanted = floats(input_ids=ids).logits
            assert torch.equal(as_floats(input_ids=ids).logits, wanted)
            for model, tolerance in zip(held, (1e-5, 3e-2), strict=False):
                assert "mxfp4" in model.hotset_report()["host_compute"]["format"]
                assert (model(input_ids=ids).logits - wanted).norm() <= tolerance * wanted.norm()


# -- refusals --------------------------------------------------------------------------------------------------


def quantised_folder(tmp_path: Path, write: Callable[[Any], Written], config: dict[str, Any], **sizes: int) -> Path:
    folder = make_checkpoint(
        "qwen3_moe", tmp_path / "model", **{"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 32, **sizes}
    )
    rewrite(folder, config, write, "experts")
    return folder


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, fp8_channel, {"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedModelError, match="quantised by 'bitsandbytes': hotset reads fp8, mxfp4"):
        hotset.load(folder, device="cpu")


def test_a_checkpoint_without_a_known_layout_is_refused(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, lambda w: ({".weird": w}, w), {"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="quantised by 'gptq', but no tensor of it is laid out as"):
        hotset.load(folder, device="cpu")


def test_activation_order_is_refused(tmp_path: Path) -> None:
    def shuffled(weight: Any) -> Written:
        stored, floats = gptq(weight)
        return {**stored, ".g_idx": stored[".g_idx"].flip(0).contiguous()}, floats

    folder = quantised_folder(tmp_path, shuffled, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"experts\.0\..*columns are in activation order"):
        hotset.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["experts.3.up_proj", "self_attn.q_proj"])
@pytest.mark.parametrize("expert_format", ["auto", "float"])
def test_codes_without_their_scales_are_refused(tmp_path: Path, name: str, expert_format: Any) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", hidden_size=128, moe_intermediate_size=128, head_dim=32)
    rewrite(folder, TestFp8Block.config, fp8_block, "model.layers")
    stored = load_file(folder / "model.safetensors")
    (lost,) = (x for x in stored if "layers.0." in x and x.endswith(f".{name}.weight_scale_inv"))
    del stored[lost]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"layers\.0\..*{name}.weight is F8_E4M3 .* has no scales"):
        hotset.load(folder, device="cpu", expert_format=expert_format)


def asymmetric_int8(weight: Any) -> Written:
    stored, floats = int8_channel(weight)
    return {**stored, ".weight_zero_point": torch.full((len(weight), 1), 3, dtype=torch.int8)}, floats


def grouped_int8(weight: Any) -> Written:
    stored, floats = TestPackQuantizedInt8().write(weight)
    return {**stored, ".weight_scale": torch.ones(len(weight), 2)}, floats


def nvfp4(weight: Any) -> Written:
    codes = torch.zeros((len(weight), weight.shape[1] // 2), dtype=torch.uint8)
    scales = torch.ones((len(weight), weight.shape[1] // 16)).to(torch.float8_e4m3fn)
    return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": torch.ones(1)}, weight


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (asymmetric_int8, r"I8 with zero points \(asymmetric\)"),
        (grouped_int8, r"int8 with scales \[\d+, 2\]: wanted one per row"),
        (nvfp4, "scales of F8_E4M3: wanted F32"),
    ],
)
def test_what_no_kernel_format_holds_is_refused(tmp_path: Path, write: Callable[[Any], Written], says: str) -> None:
    folder = quantised_folder(tmp_path, write, {"quant_method": "compressed-tensors"})
    with pytest.raises(CheckpointError, match=says) as refused:
        hotset.load(folder, device="cpu")
    assert "\n" not in str(refused.value)


def test_other_bits_are_refused(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, awq, {"quant_method": "awq", "bits": 8})
    with pytest.raises(CheckpointError, match="AWQ of 8 bits: only 4 are read"):
        hotset.load(folder, device="cpu")


def test_blocks_that_do_not_join_are_refused_as_stored_and_read_as_floats(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, fp8_block, {"quant_method": "fp8"}, moe_intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"do not join on blocks of 128: use expert_format='float'"):
        hotset.load(folder, device="cpu")
    assert hotset.load(folder, device="cpu", expert_format="float").hotset_report()["host_compute"]["kernels"]


@pytest.fixture
def half_quantised(tmp_path: Path) -> Path:
    """A Qwen3-MoE whose second of two MoE layers is FP8, its first bfloat16."""
    folder = make_checkpoint(
        "qwen3_moe", tmp_path / "m", hidden_size=128, moe_intermediate_size=32, head_dim=32, dtype="bfloat16"
    )
    rewrite(folder, {"quant_method": "compressed-tensors"}, fp8_channel, "layers.2.mlp.experts")
    return folder


@pytest.mark.parametrize("kernels", ["torch", "compiled"] if HAS_COMPILER else ["torch"])
def test_layers_that_are_not_quantised_are_float_beside_those_that_are(half_quantised: Path, kernels: str) -> None:
    from tests.test_expert_formats import from_disk, text_of

    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kernels": kernels}
    mask = np.tile(np.arange(8) % 2 == 0, (2, 1))
    none, half = hotset.load(half_quantised, **options), hotset.load(half_quantised, plan=mask, **options)
    floats = hotset.load(half_quantised, **options, expert_format="float")
    formats = [fmt.name for fmt in none.hotset.store.formats]
    assert ("bf" in formats[0], "fp8" in formats[0]) == (True, False)
    assert "fp8" in formats[1]
    assert none.hotset_report()["host_compute"]["format"] == " and ".join(formats)
    one, other = (fmt.expert_bytes for fmt in none.hotset.store.formats)
    assert one == 3 * 128 * 32 * 2
    assert other == 3 * 128 * 32 + (2 * 32 + 128) * 2  # a scale in bfloat16 for each row
    for ids in TOKENS.values():
        with torch.inference_mode():
            wanted, got = floats(input_ids=ids).logits, none(input_ids=ids).logits
            assert torch.equal(half(input_ids=ids).logits, got)
        assert (got - wanted).norm() <= 2e-2 * wanted.norm()
    limited = from_disk(half_quantised, options)
    assert text_of(limited) == text_of(none)
    assert limited.hotset_report()["disk"]["loads"] > 0


def test_an_expert_that_is_not_quantised_among_others_of_its_layer_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", hidden_size=128, moe_intermediate_size=32, head_dim=32)
    rewrite(folder, {"quant_method": "compressed-tensors"}, fp8_channel, "experts.0.")
    with pytest.raises(
        CheckpointError, match=r"expert [1-7] of .* is not stored quantised .*: use expert_format='float'"
    ):
        hotset.load(folder, device="cpu")


def test_training_of_quantised_experts_is_refused(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, fp8_channel, {"quant_method": "compressed-tensors"})
    with pytest.raises(ModelError, match="quantised experts know no gradients"):
        hotset.load(folder, device="cpu", training=True)


def test_a_quantised_checkpoint_runs_from_disk(tmp_path: Path) -> None:
    from tests.test_expert_formats import from_disk, text_of

    folder = quantised_folder(tmp_path, gptq, {"quant_method": "gptq", "bits": 4, "sym": True})
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    limited = from_disk(folder, options)
    assert text_of(limited) == text_of(hotset.load(folder, **options))
    assert limited.hotset_report()["disk"]["loads"] > 0


def test_one_expert_of_a_fused_tensor_is_read_alone(
    gpt_oss: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = logical_checkpoint(Checkpoint.open(gpt_oss[0]), {"quant_method": "mxfp4"})
    (name,) = (n for n in checkpoint.tensors if n.endswith("layers.0.mlp.experts.down_proj"))
    entry = checkpoint.tensors[name]
    assert isinstance(entry, QuantisedEntry)
    lazy, whole = LazyFloats(entry), entry.floats()
    assert lazy.get_shape() == list(whole.shape)
    reads: list[int | None] = []
    read = QuantisedEntry.floats
    monkeypatch.setattr(QuantisedEntry, "floats", lambda self, e=None: (reads.append(e), read(self, e))[1])
    assert torch.equal(lazy[3:4], whole[3:4])
    assert reads == [3]
