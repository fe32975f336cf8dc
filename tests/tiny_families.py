"""A tiny random model of every Mixture-of-Experts family of Transformers: configs shrunk by attribute name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import hotset
from hotset.errors import UnsupportedModelError
from hotset.models.experts import find_expert_layers
from hotset.models.families import Family, FamilyStatus
from hotset.runtime.loading import load_skeleton

SMALL_VOCAB = 128
FIRST_SPECIAL_TOKEN = 110
"""Token ids from here up stand for images, ends and the like; the tests' inputs stay below."""
LAYERS = 4
RESIDENT_SHARES = (0.0, 0.5, 1.0)

# attribute name (whole, as a regular expression) -> its value in a tiny model; the first match counts
_SIZES: list[tuple[str, Any]] = [
    (r"(mel_|ngram_|unpadded_)?vocab_size(_per_layer_input|_base)?", SMALL_VOCAB),
    (r"hidden_size|d_model|moe_hidden_size|projector_hidden_size|merged_hidden_size|text_hidden_size", 32),
    (r"out_hidden_size|output_dim|adapter_in_dim|adapter_input_size|adapter_out_dim", 32),
    (r"projection_hidden_dim|router_hidden_size|downsample_hidden_size", 32),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (r"(expert_)?ffn_hidden_size", 24),
    (r"moe_intermediate_size|\w*shared\w*intermediate_size", 24),
    (r"(\w+_)?intermediate_size|\w*ffn_dim|mlp_dim", 48),
    (r"num_hidden_layers|num_layers|n_layers|depth|encoder_layers", LAYERS),
    (r"(num_attention_heads|num_heads|encoder_attention_heads|swa_num_attention_heads)", 4),
    (r"num_key_value_heads", 4),
    (r"swa_num_key_value_heads|linear_num_key_heads|index_n_heads", 2),
    (r"linear_num_heads|linear_num_value_heads|mamba_n(um)?_heads", 4),
    (r"qk_head_dim", 32),
    (r"(\w+_)?head_dim|mamba_d_head", 16),
    (r"(\w+_)?lora_rank|gated_norm_rank|loop_gate_rank|hc_lowrank|mamba_dt_rank", 16),
    (r"n(um)?_(local_|routed_)?experts|moe_num_experts", 8),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk", 2),
    (r"index_topk", 4),
    (r"mamba_d_state|ssm_state_size", 8),
    (r"mamba_chunk_size|chunk_size|block_size", 4),
    (r"index_block_size|index_topk_blocks|index_kpool", 2),
]


def tiny_config(model_type: str) -> Any:
    """A config of the family with 4 layers, hidden size 32 and 8 experts, top-2."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    settings = _shrink(config_class().to_dict(), OVERRIDES.get(model_type, {}))
    return config_class(**settings)


def _shrink(before: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    after: dict[str, Any] = {}
    layers = next((before[k] for k in ("num_hidden_layers", "depth") if isinstance(before.get(k), int)), None)
    tokens = iter(range(FIRST_SPECIAL_TOKEN, SMALL_VOCAB))
    for name, value in before.items():
        if name in ("architectures", "transformers_version", "id2label", "label2id"):
            continue
        if isinstance(value, dict) and "model_type" in value:
            after[name] = _shrink(value, overrides.get(name, {}))
        elif name in overrides:
            after[name] = overrides[name]
        elif name == "per_layer_config" and value:
            after[name] = {
                str(int(layer)): {k: _small(k, v) if isinstance(v, int) else v for k, v in changes.items()}
                for layer, changes in value.items()
                if int(layer) < LAYERS
            }
        elif re.search(r"token_(id|index)$", name):
            after[name] = None if value is None else next(tokens)
        elif isinstance(value, list) and layers and len(value) == layers:
            after[name] = _shorten(value)
        elif isinstance(value, bool) or not isinstance(value, int):
            after[name] = value
        else:
            after[name] = _small(name, value)
    after.update({k: v for k, v in overrides.items() if k not in before})
    heads, kv = before.get("num_attention_heads"), before.get("num_key_value_heads")
    if isinstance(kv, int) and "num_key_value_heads" not in overrides:
        after["num_key_value_heads"] = after["num_attention_heads"] if kv == heads else min(kv, 2)
    for groups in ("n_group", "num_expert_group", "topk_group"):
        if isinstance(before.get(groups), int) and groups not in overrides:
            after[groups] = min(before[groups], 2)
    if isinstance(after.get("rope_parameters"), dict) and "rope_parameters" not in overrides:
        after["rope_parameters"] = _shrink_rope(after["rope_parameters"])
    return after


def _shorten(per_layer: list[Any]) -> list[Any]:
    """The first layers' entries; the last of them give way to kinds of layer that would be missing."""
    head = per_layer[:LAYERS]
    missing = sorted({kind for kind in per_layer if isinstance(kind, str)} - set(head))
    return [*head[: LAYERS - len(missing)], *missing[:LAYERS]]


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Sections of a multimodal rotary embedding, cut to a head of 16 of which `partial_rotary_factor` turns."""
    rope = {name: _shrink_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    if rope.get("mrope_section"):
        half = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return rope


def _small(name: str, value: int) -> int:
    if value == 0:
        return 0
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)


_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "layer_types": _SLIDING_AND_FULL,
}

_SAM = {"output_channels": 32, "downsample_channels": [32, 32]}
_GLM4V_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
_DOTS3 = {"head_dim": 32}

# model type -> settings that shrinking by name does not reach, each with its reason
OVERRIDES: dict[str, dict[str, Any]] = {
    # no default for what makes it a Mixture of Experts
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "diffusion_gemma": {"canvas_length": 4, "text_config": _GEMMA4},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": _SAM},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    # no default for other things that its forward pass needs
    "hunyuan_v1_moe": {"head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 24}},
        "code2wav_config": {"decoder_dim": 32, "codebook_size": 16},
    },
    # its sections are a default of the model's code, for a head of 128; intermediate sizes of text and vision experts
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [24, 12],
        }
    },
    # what its config checks: the head of sliding layers is as wide as that of the others
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    # megabytes of image, audio or zero-expert weights otherwise
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM}},
    "inkling_mm_model": {"vision_config": {"patch_size": 8}},
    "muse_spark": {"audio_config": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}},
    "llama4": {
        "vision_config": {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    },
    "longcat_flash": {"zero_expert_num": 4},
    "switch_transformers": {"d_ff": 48},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    # what their code takes from the width of a head by default
    "mistral4": {"head_dim": 32},
    "glm4v_moe": {"text_config": {"rope_parameters": _GLM4V_ROPE}},
    # the layers with attention and with experts come by period
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    # the default has one MoE layer; groups of its 4 Mamba heads
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
    # checked by its config: one pick per token
    "zaya": {"num_experts_per_tok": 1},
}


def make_checkpoint(family: Family, folder: Path, *, seed: int = 1234) -> Path:
    """Save a random float32 model of the family into `folder`, in the layout its checkpoints have."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, family.class_name)._from_config(tiny_config(family.model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                # larger than the default initialisation, so that experts matter and routing is not all ties
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of a prefill of 7 tokens, of a decode of 1 after it), two sequences, seeded."""
    ids = torch.randint(1, FIRST_SPECIAL_TOKEN, (2, 8), generator=torch.Generator().manual_seed(1234))
    model = getattr(model, "thinker", model)  # Qwen3-Omni has no forward pass of its own
    if type(model).__name__ == "DiffusionGemmaForBlockDiffusion":  # a block after a prompt, not the next token
        return model(ids[:, :7], decoder_input_ids=ids[:, :4]).logits, model(ids[:, :7], decoder_input_ids=ids).logits
    if type(model).__name__.endswith("ForTokenClassification"):  # reads both ways, so nothing is cached
        return model(ids[:, :7]).logits, model(ids[:, 7:]).logits
    prefill = model(ids[:, :7], use_cache=True)
    return prefill.logits, model(ids[:, 7:], cache=prefill.cache, use_cache=True).logits


def residency_mask(num_layers: int, num_experts: int, share: float) -> NDArray[np.bool_]:
    """[L, E] bool with `share` of the experts chosen at random, seeded."""
    mask = np.zeros(num_layers * num_experts, np.bool_)
    mask[np.random.default_rng(1234).permutation(mask.size)[: round(share * mask.size)]] = True
    return mask.reshape(num_layers, num_experts)


def measure(family: Family, folder: Path) -> FamilyStatus:
    """Load the family's tiny model with hotset at 0, 50 and 100 % resident and compare with Transformers' eager."""
    make_checkpoint(family, folder)
    try:
        skeleton = load_skeleton(folder, dtype=torch.float32, device=torch.device("cpu"))
    except UnsupportedModelError as problem:
        reason = str(problem).split(": ")[0]
        return FamilyStatus(family.model_type, family.class_name, "refused", reason, "", (), "", "")
    eager = eager_model(family, folder)
    wanted = logits_of(eager)
    worst = 0.0
    for share in RESIDENT_SHARES:
        mask = residency_mask(len(skeleton.layers), skeleton.layers[0].num_experts, share)
        model = hotset.load(folder, plan=mask, dtype=torch.float32)
        worst = max(worst, *(difference(*pair) for pair in zip(logits_of(model), wanted, strict=True)))
        check_counts(model, mask)
    swap_experts(eager)
    assert difference(logits_of(eager)[0], wanted[0]) > 1e-3, "these logits would not show a wrong expert"
    status = "bit-identical" if worst == 0.0 else "within 1e-5" if worst <= 1e-5 else "differs"
    reason = "" if worst == 0.0 else f"largest difference {worst:.1e}"
    layer = skeleton.layers[0]
    return FamilyStatus(
        family.model_type,
        family.class_name,
        status,
        reason,
        experts_class=type(layer.module).__name__,
        experts=traits(layer.module),
        stored=skeleton.reader.layout,
        note=note(model),
    )


def check_counts(model: Any, mask: NDArray[np.bool_]) -> None:
    """Every pick of the test went through hotset, and to the tier that the mask says."""
    statistics = [s.to_json() for s in model.hotset.statistics.values()]
    picks, hits = (sum(s[key] for s in statistics) for key in ("picks", "hits"))
    assert picks > 0
    if mask.all() or not mask.any():
        assert hits == (picks if mask.all() else 0)
    else:
        assert 0 < hits < picks


def swap_experts(model: Any) -> None:
    """Give each expert of a layer the weights of another."""
    for layer in find_expert_layers(model):
        for parameter in layer.parameters.values():
            parameter.data = parameter.data.flip(0)


def traits(module: torch.nn.Module) -> tuple[str, ...]:
    """What the table says of an experts class, read off its flags."""
    from transformers.integrations import moe

    own_gate = module.has_gate and type(module)._apply_gate is not moe._default_apply_gate
    said = {
        "no-gate": not module.has_gate,
        "own-gate": own_gate,
        "interleaved": not module.is_concatenated,
        "transposed": module.is_transposed,
        "bias": module.has_bias,
        "post-norm": module.has_post_expert_norm,
    }
    return tuple(name for name, is_so in said.items() if is_so)


def note(model: Any) -> str:
    """Which experts modules of the model are not hotset's, or are its own twice."""
    layers = model.hotset.layers
    owned = {name for layer in layers for name in (layer.name, *layer.twins)}
    everything = {name for name, module in model.named_modules() if hasattr(module, "has_post_expert_norm")}
    notes = ["measured by its thinker"] if hasattr(model, "thinker") else []
    if everything - owned:
        pattern = re.sub(r"\d+", "*", min(everything - owned))
        notes.append(f"{pattern} stay with Transformers")
    if layers[0].twins:
        pattern = re.sub(r"\d+", "*", min(layers[0].twins))
        notes.append(f"{pattern} are tied to these")
    return "; ".join(notes)


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest absolute difference; 0.0 means the same bits."""
    assert mine.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    return (mine - theirs).abs().max().item()


def eager_model(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' own model, each of its parameters in memory of its own.

    As loaded, a parameter begins wherever the file has it, and torch's matrix-vector products round differently by the
    address modulo 64: the unmodified model differs from itself by 1e-6 that way. hotset's tensors begin at multiples
    of 64 bytes, and so do copies.
    """
    import transformers

    model_class = getattr(transformers, family.class_name)
    model = model_class.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
