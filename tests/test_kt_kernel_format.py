"""Experts handed over to kt-kernel: with the extension where it is installed, and with a stand-in for it everywhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import BackendError, ExpertNotOnHost, ModelError, OpsError, ResidencyError  # noqa: E402
from hotset.kernels import Activation, LayerSpec, dequantise, quantise  # noqa: E402
from hotset.kernels.formats import ExpertWeights  # noqa: E402
from hotset.runtime.expert_formats import kt_kernel  # noqa: E402
from hotset.runtime.expert_formats.kt_kernel import CLASSES, KtKernelFormat, checked_class  # noqa: E402
from hotset.runtime.expert_formats.stored import stored_tensors  # noqa: E402
from tests.test_quantised import fp8_channel, quantised_folder  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

IS_INSTALLED = importlib.util.find_spec("kt_kernel") is not None
installed = pytest.mark.skipif(not IS_INSTALLED, reason="kt-kernel is not installed")
SIZES = {"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 32}
HALF = np.tile(np.arange(8) % 2 == 0, (2, 1))
TOKENS = {1: torch.tensor([[5]]), 7: torch.tensor([[5, 17, 3, 41, 7, 99, 100]])}


class StandIn:
    """Computes what the extension is told to hold, by torch, from the tensors that it is told of."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, _spec: LayerSpec, _wanted: Any, layer_id: int, parts: list[dict[str, Any]]) -> None:
        self.layer_id, self.parts = layer_id, [{n: t.clone() for n, t in part.items()} for part in parts]
        self.made.append(self)

    def run(self, rows: Any, places: Any) -> Any:
        out = torch.empty_like(rows)
        for i, place in enumerate(places.tolist()):
            gate, up, down = (self._floats(self.parts[place], name) for name in ("gate", "up", "down"))
            x = rows[i].float()
            out[i] = (down @ (torch.nn.functional.silu(gate @ x) * (up @ x))).bfloat16()
        return out

    def _floats(self, part: dict[str, Any], name: str) -> Any:
        codes = part[f"{name}_projs"]
        if f"{name}_scales" not in part:
            return codes.float()
        return codes.view(torch.float8_e4m3fn).float() * part[f"{name}_scales"].reshape(-1, 1)


@pytest.fixture(params=["stand-in", pytest.param("kt-kernel", marks=installed)])
def extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        StandIn.made.clear()
        monkeypatch.setattr(kt_kernel, "_KtLayer", StandIn)
        monkeypatch.setattr(kt_kernel, "_constructor", lambda wanted: wanted)
    return str(request.param)


@pytest.fixture(params=["bf16", "fp8_channel"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "bf16":
        return make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES)
    return quantised_folder(tmp_path, fp8_channel, {"quant_method": "compressed-tensors"})


def load(folder: Path, **options: Any) -> Any:
    return hotset.load(folder, **{"device": "cpu", "dtype": "bfloat16", "kernels": "kt-kernel", **options})


def test_logits_are_those_of_torch_wherever_experts_live(folder: Path, extension: str) -> None:
    by_torch, none, half = load(folder, kernels="torch"), load(folder), load(folder, plan=HALF)
    compute = none.hotset_report()["host_compute"]
    assert compute["kernels"] == "kt-kernel"
    assert compute["format"].endswith("in kt-kernel")
    for ids in TOKENS.values():
        with torch.inference_mode():
            wanted = by_torch(input_ids=ids).logits.float()
            for model in (none, half):
                assert (model(input_ids=ids).logits.float() - wanted).norm() <= 2e-2 * wanted.norm()


def test_experts_in_slots_are_never_handed_over(folder: Path, extension: str) -> None:
    skipped = load(folder, plan=HALF)
    kept = load(folder, plan=HALF, skip_gpu_expert_cpu_copy="off")
    each = skipped.hotset.store.formats[0].expert_bytes
    assert (skipped.hotset.store.host_bytes, kept.hotset.store.host_bytes) == (8 * each, 16 * each)
    assert [len(fmt._at) for fmt in skipped.hotset.store.formats] == [4, 4]
    if extension == "stand-in":
        assert sorted(len(layer.parts) for layer in StandIn.made) == [4, 4, 8, 8]
    for model in (skipped, kept):
        model.hotset.store.check_integrity()
    for ids in TOKENS.values():
        with torch.inference_mode():
            assert torch.equal(skipped(input_ids=ids).logits, kept(input_ids=ids).logits)


def test_a_layer_that_is_all_in_slots_hands_nothing_over(folder: Path, extension: str) -> None:
    mask = HALF.copy()
    mask[0] = True
    model = load(folder, plan=mask)
    assert len(model.hotset.store.formats[0]._at) == 0
    with torch.inference_mode():
        assert torch.isfinite(model(input_ids=TOKENS[7]).logits).all()


def test_what_was_handed_over_cannot_move(folder: Path, extension: str) -> None:
    model = load(folder, plan=HALF, skip_gpu_expert_cpu_copy="off")
    for move in (lambda store: store.promote(0, 1, 0), lambda store: store.demote(0, 0)):
        with pytest.raises(
            ResidencyError, match=r"experts of row 0 .*in kt-kernel. cannot move: load with other kernels"
        ):
            move(model.hotset.store)
    fmt = load(folder, plan=HALF).hotset.store.formats[0]
    with pytest.raises(ExpertNotOnHost, match=r"expert 0 of layer 0 .*it was not handed over"):
        fmt.rows(torch.zeros((1, 128), dtype=torch.bfloat16), torch.tensor([[0]]), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapt": True}, "kernels='kt-kernel' and moves between tiers exclude each other"),
        ({"training": True, "expert_format": "float"}, "kernels='kt-kernel' and training exclude each other"),
        ({"gpu_prefill_token_threshold": 16}, "experts that are bf16, in kt-kernel cannot be streamed"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], message: str, extension: str) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES)
    with pytest.raises(ModelError, match=message):
        load(folder, **options)


def test_a_tier_on_disk_is_refused(tmp_path: Path, extension: str) -> None:
    from tests.test_expert_formats import from_disk

    folder = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES)
    with pytest.raises(ModelError, match="kernels='kt-kernel' and a tier on disk exclude each other"):
        from_disk(folder, {"device": "cpu", "dtype": "bfloat16", "kernels": "kt-kernel"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LayerSpec("fp32", 4, 64, 64), "fp32 experts: wanted bf16, fp8_block128"),
        (LayerSpec("int4_g32", 4, 64, 64, scale_number="fp16"), "int4_g32 with scales in fp16: wanted bf16"),
        (LayerSpec("bf16", 4, 64, 64, activation=Activation(limit=7.0)), "only SwiGLU experts without limits"),
        (LayerSpec("bf16", 4, 64, 64, bias="bf16"), "only SwiGLU experts without limits, biases"),
        (LayerSpec("fp8_block128", 4, 128, 64), "fp8_block128 experts of 128 x 64: wanted multiples of 128"),
    ],
)
def test_layers_that_it_does_not_compute_are_refused(spec: LayerSpec, message: str) -> None:
    with pytest.raises(OpsError, match=message):
        checked_class(spec)


@pytest.mark.skipif(IS_INSTALLED, reason="kt-kernel is installed")
def test_it_must_be_installed(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES)
    with pytest.raises(BackendError, match="it is not installed: `pip install --no-deps kt-kernel`"):
        load(folder)


@installed
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_format_against_float32_arithmetic(name: str) -> None:
    spec = LayerSpec(name, 8, 256, 128, scale_number="bf16" if name == "int4_g32" else "")
    rng = np.random.default_rng(0)
    stored = {
        expert: quantise(spec, *(rng.standard_normal(shape, np.float32) / 16 for shape in ((256, 256), (256, 128))))
        for expert in (1, 2, 5)
    }
    fmt = KtKernelFormat(layer_of(spec), spec)
    fmt.take_over({expert: held(spec, weights) for expert, weights in stored.items()})
    hidden = torch.randn((1500, 256), generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[1, 2], [5, 8], [8, 8], [2, 5]]).repeat(375, 1)
    got, wanted = fmt.rows(hidden, ids, {}), torch.zeros((1500, 2, 256))
    for expert, weights in stored.items():
        first, second, *_ = (torch.from_numpy(part) for part in dequantise(spec, weights) if part is not None)
        tokens, at = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[tokens].float() @ first.T).chunk(2, -1)
        wanted[tokens, at] = (torch.nn.functional.silu(gate) * up) @ second.T
    assert (got - wanted).norm() <= 8e-3 * wanted.norm()
    assert not got[2].any()


@installed
def test_nothing_of_it_reaches_stdout(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES)
    program = (
        "import hotset, torch\n"
        f"model = hotset.load({str(folder)!r}, device='cpu', dtype='bfloat16', kernels='kt-kernel')\n"
        "model(input_ids=torch.tensor([[1, 2, 3]]))\nprint('mine')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "mine\n"


def layer_of(spec: LayerSpec) -> Any:
    """What a format reads of a layer."""
    from hotset.models.experts import ExpertLayer

    shapes = {"gate_up_proj": (2 * spec.intermediate, spec.hidden), "down_proj": (spec.hidden, spec.intermediate)}
    parameters = {
        name: torch.empty((spec.num_experts, *shape), dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }
    return ExpertLayer("layers.0.experts", 0, torch.nn.Module(), spec.num_experts, parameters)


def held(spec: LayerSpec, weights: ExpertWeights) -> dict[str, Any]:
    tensors = stored_tensors(weights)
    if spec.kind.scales != "none":
        return tensors
    return {"gate_up_proj": tensors["gate_up"], "down_proj": tensors["down"]}
