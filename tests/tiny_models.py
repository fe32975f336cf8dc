"""Tiny random models of real families, saved as checkpoints: what runtime tests load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# family -> (model type, overrides of its config); 8 experts, top-2, 4 layers of which DeepSeek's first is dense
_COMMON = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        "olmoe",
        {"intermediate_size": 24, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "intermediate_size": 24,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def add_tokenizer(folder: Path, vocab_size: int = 128) -> Path:
    """Save a tokenizer that knows the words w3, w4, ...: the text "w3 w5" is the tokens 3 and 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {**{f"w{i}": i for i in range(3, vocab_size)}, "<pad>": 0, "<unk>": 1, "<eos>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def make_checkpoint(family: str, folder: Path, *, seed: int = 1234, **overrides: Any) -> Path:
    """Save a random float32 model of the family into `folder` and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **settings, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # larger than the default initialisation, so that experts matter and routing is not all ties
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder
