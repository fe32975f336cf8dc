"""Every Mixture-of-Experts family of the installed Transformers: loaded, run and compared, or refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import CheckpointError, UnsupportedModelError  # noqa: E402
from hotset.models.checkpoint import Checkpoint  # noqa: E402
from hotset.models.experts import find_expert_layers  # noqa: E402
from hotset.models.families import decorated_classes, find_families, installed_transformers, read_table  # noqa: E402
from hotset.runtime.loading import _convert, _Recipe, _Shapes, _works_per_expert  # noqa: E402
from tests.tiny_families import (  # noqa: E402
    difference,
    eager_model,
    logits_of,
    make_checkpoint,
    measure,
    residency_mask,
)
from tests.tiny_models import add_tokenizer  # noqa: E402

ALL = {family.model_type: family for family in find_families()}
QUICK = [
    "mixtral",  # one tensor per expert, w1, w2, w3
    "gpt_oss",  # interleaved, transposed, biases, clamped gate
    "nemotron_h",  # no gate; hybrid with Mamba layers
    "muse_spark",  # a norm after each expert
    "deepseek_v4",  # clamped gate, compressed attention
    "inkling_text",  # its converter interleaves
    "qwen3_vl_moe",  # its converter transposes where shapes ask for it
    "ernie4_5_vl_moe",  # its converter makes text and image experts from one list
    "diffusion_gemma",  # encoder and decoder share their experts
    "qwen3_omni_moe_thinker",  # the block around initialises its experts
    "aria_text",  # transposed, fused
    "jamba",  # layers without experts between those with
]
REFUSED_QUICK = ["llama4_text"]


def cases() -> list[Any]:
    quick = {*QUICK, *REFUSED_QUICK}
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow], id=name) for name in ALL]


@pytest.mark.parametrize("model_type", cases())
def test_a_family_gives_transformers_logits_or_is_refused_as_the_table_says(model_type: str, tmp_path: Path) -> None:
    row = measure(ALL[model_type], tmp_path)
    if ALL[model_type].on_interface:
        assert row.status == "bit-identical"
    else:
        assert row.status == "refused"
        assert row.reason == f"{row.class_name} has no layer that uses Transformers' experts interface"
    measured_with, table = read_table()
    if measured_with == installed_transformers():
        assert row in table


def test_the_table_has_every_family_and_every_class_on_the_interface() -> None:
    measured_with, table = read_table()
    if measured_with != installed_transformers():
        pytest.skip(f"the table is of Transformers {measured_with}: run tools/families.py")
    assert [row.model_type for row in table] == list(ALL)
    classes = {name for names in decorated_classes().values() for name in names}
    # the talker has no auto class of its own; beside the thinker its experts stay with Transformers
    assert classes - {row.experts_class for row in table} == {"Qwen3OmniMoeTalkerTextExperts"}


def rewrite(folder: Path, change: Any) -> None:
    """Replace the checkpoint's tensors by change(name, tensor) -> {name: tensor}."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    changed: dict[str, Any] = {}
    for name, tensor in load_file(file).items():
        changed |= {key: value.contiguous() for key, value in change(name, tensor).items()}
    save_file(changed, file, metadata={"format": "pt"})


def assert_same_as_transformers(model_type: str, folder: Path) -> None:
    model = hotset.load(folder, plan=residency_mask(4, 8, 0.5), dtype=torch.float32)
    for mine, theirs in zip(logits_of(model), logits_of(eager_model(ALL[model_type], folder)), strict=True):
        assert difference(mine, theirs) == 0.0


def test_a_checkpoint_with_transposed_experts_is_turned(tmp_path: Path) -> None:
    # the layout of Qwen3-VL-MoE on the hub: [E, H, 2F] and [E, F, H]; saving writes the model's own layout
    make_checkpoint(ALL["qwen3_vl_moe"], tmp_path)
    rewrite(tmp_path, lambda name, x: {name: x.transpose(1, 2) if "experts" in name else x})
    assert_same_as_transformers("qwen3_vl_moe", tmp_path)


def test_a_checkpoint_in_the_models_own_layout_needs_no_conversion(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make_checkpoint(ALL["flex_olmo"], tmp_path)
    assert any(".experts.7.up_proj" in name for name in Checkpoint.open(tmp_path).tensors)
    save_file(eager_model(ALL["flex_olmo"], tmp_path).state_dict(), tmp_path / "model.safetensors")
    assert any(name.endswith(".experts.gate_up_proj") for name in Checkpoint.open(tmp_path).tensors)
    assert_same_as_transformers("flex_olmo", tmp_path)


def test_an_incomplete_list_of_experts_is_named(tmp_path: Path) -> None:
    make_checkpoint(ALL["mixtral"], tmp_path)
    rewrite(tmp_path, lambda name, x: {} if "experts.7.w1" in name and "layers.2" in name else {name: x})
    with pytest.raises(CheckpointError, match=r"layer 2 has \[7, 8\] stored tensors for gate_up_proj"):
        hotset.load(tmp_path)


def test_image_experts_that_share_a_list_with_text_experts_are_loaded_too(tmp_path: Path) -> None:
    family = ALL["ernie4_5_vl_moe"]
    make_checkpoint(family, tmp_path)
    model = hotset.load(tmp_path, dtype=torch.float32)
    wanted = {n: p for n, p in eager_model(family, tmp_path).named_parameters() if "vision_moe.experts" in n}
    assert len(wanted) == 6  # two matrices in three sparse layers
    for name, parameter in wanted.items():
        assert torch.equal(model.get_parameter(name), parameter)


def test_recording_a_loaded_model_follows_the_tower_that_hotset_has(tmp_path: Path) -> None:
    from hotset.traces.recorder import RoutingRecorder

    make_checkpoint(ALL["ernie4_5_vl_moe"], tmp_path)
    recorded = {}
    for loaded in (True, False):
        model = hotset.load(tmp_path) if loaded else eager_model(ALL["ernie4_5_vl_moe"], tmp_path)
        with RoutingRecorder(model) as recorder, torch.no_grad():
            model(torch.arange(1, 8)[None])
            recorded[loaded] = recorder.take(7)[0]
        assert recorder.layer_ids.tolist() == [1, 2, 3]
        # gate, up and down of 24 x 32 numbers of 4 bytes
        assert (recorder.expert_bytes == 3 * 24 * 32 * 4).all()
    assert (recorded[True] == recorded[False]).all()


def test_a_multimodal_model_is_recorded_by_its_text(tmp_path: Path) -> None:
    from hotset.traces.recorder import record

    add_tokenizer(make_checkpoint(ALL["qwen3_vl_moe"], tmp_path / "model"))
    trace = record(tmp_path / "model", ["w3 w4 w5 w6 w7"], tmp_path / "trace")
    assert (trace.num_tokens, trace.num_layers, trace.num_experts) == (5, 4, 8)


def test_every_tower_of_a_model_has_the_dtype_asked_for(tmp_path: Path) -> None:
    make_checkpoint(ALL["muse_spark"], tmp_path)  # its config says float32, for each tower too
    model = hotset.load(tmp_path, plan=residency_mask(4, 8, 0.5), dtype="bfloat16")
    reference = eager_model(ALL["muse_spark"], tmp_path, torch.bfloat16)
    wanted = {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert all(parameter.dtype == wanted[name] for name, parameter in model.named_parameters())
    assert wanted["model.vision_tower.ln_pre.weight"] == torch.bfloat16
    for mine, theirs in zip(logits_of(model), logits_of(reference), strict=True):
        assert difference(mine, theirs) == 0.0


def test_what_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    make_checkpoint(ALL["mixtral"], tmp_path / "narrow")
    rewrite(tmp_path / "narrow", lambda name, x: {name: x[:-1] if "layers.1.self_attn.q_proj" in name else x})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight is stored as \(\d+, 32\), the"):
        hotset.load(tmp_path / "narrow")
    # 8 experts for text, then 8 for images, split in the middle: of 15 come 8 and 7, of 14 the 8th text expert is put
    # to the others (whose shapes differ), of 8 come 4 and 4
    for lost, what in ((1, r"vision_moe.* \(7, "), (2, "cannot convert.*text_moe"), (8, r"text_moe.* \(4, .*complete")):
        folder = make_checkpoint(ALL["ernie4_5_vl_moe"], tmp_path / f"lost{lost}")
        gone = [f"layers.2.mlp.experts.{expert}." for expert in range(16 - lost, 16)]
        rewrite(folder, lambda name, x, gone=gone: {} if any(part in name for part in gone) else {name: x})
        with pytest.raises(CheckpointError, match=what):
            hotset.load(folder)


class Experts(torch.nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate = self.has_bias = self.is_transposed = self.has_post_expert_norm = False
        self.up_proj = torch.nn.Parameter(torch.empty(num_experts, width, 2))
        self.down_proj = torch.nn.Parameter(torch.empty(num_experts, 2, width))


def test_of_two_towers_the_one_with_more_expert_bytes_is_taken() -> None:
    towers = {"image": [Experts(8, 3), Experts(4, 3)], "text": [Experts(4, 9), Experts(4, 9)]}
    model = torch.nn.ModuleDict({name: torch.nn.ModuleList(layers) for name, layers in towers.items()})
    # text: 2 layers x 4 experts x 2 matrices x 18 numbers = 288; image: 12 experts x 2 x 6 = 144
    assert [layer.name for layer in find_expert_layers(model)] == ["text.0", "text.1"]
    with pytest.raises(UnsupportedModelError, match=r"different numbers of experts in \*.* \[4, 8\]"):
        find_expert_layers(torch.nn.ModuleList([*model["image"]]))


def test_tied_experts_are_one_layer() -> None:
    encoder, decoder = Experts(4, 3), Experts(4, 3)
    decoder.up_proj, decoder.down_proj = encoder.up_proj, encoder.down_proj
    model = torch.nn.ModuleDict({"encoder": torch.nn.ModuleList([encoder]), "decoder": torch.nn.ModuleList([decoder])})
    (layer,) = find_expert_layers(model)
    assert (layer.name, dict(layer.twins)) == ("encoder.0", {"decoder.0": decoder})


# --- one expert at a time through a converter gives what Transformers makes of the whole layer ---

E, F, H = 3, 4, 6


def converters() -> dict[str, Any]:
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose, WeightConverter

    two = ["experts.*.w1", "experts.*.w3"]
    return {
        "stack": (WeightConverter(["experts.*.w"], "experts.t", [MergeModulelist(0)]), True, (F, H)),
        "stack and join": (WeightConverter(two, "experts.t", [MergeModulelist(0), Concatenate(1)]), True, (F, H)),
        "join fused": (WeightConverter(["g", "u"], "experts.t", [Concatenate(2)]), False, (F, H)),
        "deinterleave fused": (WeightConverter(["w13"], "experts.t", [Interleave(dim=1)]), False, (F, H)),
        "transpose fused": (WeightConverter(["w"], "experts.t", [Transpose(1, 2)]), False, (H, F)),
        "transpose where shapes differ": (
            WeightConverter(["w"], "experts.t", [Transpose(1, 2, check_dims=True)]),
            False,
            (H, F),
        ),
        "leave where shapes agree": (
            WeightConverter(["w"], "experts.t", [Transpose(1, 2, check_dims=True)]),
            False,
            (F, H),
        ),
        "stack, join, transpose": (
            WeightConverter(two, "experts.t", [MergeModulelist(0), Concatenate(1), Transpose(1, 2)]),
            True,
            (H, F),
        ),
    }


@pytest.mark.parametrize("kind", converters())
def test_converting_one_expert_gives_its_slice_of_the_converted_layer(kind: str) -> None:
    converter, one_by_one, stored_shape = converters()[kind]
    assert _works_per_expert(converter)
    torch.manual_seed(1234)
    stored = {pattern: torch.randn(E, *stored_shape) for pattern in converter.source_patterns}
    name = "model.layers.0.mlp.experts.t"
    whole_sources = {p: list(t.unbind(0)) if one_by_one else [t] for p, t in stored.items()}
    shapes = _Shapes({name: torch.Size((E, F, H))})
    whole = _convert(converter, whole_sources, name, shapes, None)[name]
    recipe = _Recipe(converter, {pattern: ["stored"] for pattern in stored})
    for expert in range(E):
        pieces = {pattern: tensor[expert] for pattern, tensor in stored.items()}
        parts, dim = recipe.parts(pieces, name, whole.shape[1:], None)
        assert torch.equal(torch.cat(parts, dim), whole[expert])


def test_a_converter_that_looks_across_experts_or_makes_two_tensors_runs_on_the_whole_layer() -> None:
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        ErnieFuseAndSplitTextVisionExperts,
        MergeModulelist,
        Transpose,
        WeightConverter,
    )

    for operations, targets in (
        ([Transpose(0, 1)], ["t"]),
        ([MergeModulelist(1)], ["t"]),
        ([MergeModulelist(0), Concatenate(0)], ["t"]),
        ([Chunk(dim=1)], ["gate", "up"]),
        ([ErnieFuseAndSplitTextVisionExperts()], ["text", "image"]),
    ):
        assert not _works_per_expert(WeightConverter(["experts.*.w"], targets, operations))


# --- the command ---


def hotset_models(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotset", "models", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_the_command_prints_a_row_per_family_and_why_some_are_refused() -> None:
    done = hotset_models()
    for row in read_table()[1]:
        assert re.search(rf"^ *{row.model_type} +{row.class_name} .* {row.status}", done.stdout, re.MULTILINE)
    assert "dbrx: DbrxForCausalLM has no layer that uses Transformers' experts interface" in done.stdout
    assert ("was measured with" in done.stderr) == (read_table()[0] != installed_transformers())


def test_the_command_gives_the_table_as_json() -> None:
    content = json.loads(hotset_models("--json").stdout)
    assert content["transformers"] == read_table()[0]
    assert content["installed"] == installed_transformers()
    assert [row["model_type"] for row in content["families"]] == [row.model_type for row in read_table()[1]]
