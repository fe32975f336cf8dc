"""Write a training state as a Transformers model folder (``Qwen3MoeForCausalLM``, bfloat16)."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from moe import EPS, Model, Shape, hf_tensors
from safetensors.torch import save_file
from text import END_OF_TEXT, Stream
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent
SHARD_BYTES = 8_000_000


def load_state(path: Path) -> tuple[Shape, dict[str, Tensor], dict]:
    """Shape, float32 master weights by name, and the rest of a training state."""
    saved = torch.load(path, weights_only=True)
    saved["shape"]["dense_layers"] = tuple(saved["shape"]["dense_layers"])
    shape = Shape(**saved["shape"])
    flat, weights, start = saved["state"][0], {}, 0
    for name, value in Model(shape, 8, compiled=False).master.items():
        weights[name] = flat[start : start + value.numel()].view(value.shape)
        start += value.numel()
    return shape, weights, saved


def config(shape: Shape) -> dict:
    """The content of config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_only_layers": list(shape.dense_layers),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": 0,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.003,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def _write_json(path: Path, content: dict | list) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(folder: Path, tensors: dict[str, Tensor], limit: int = SHARD_BYTES) -> None:
    """Shards of at most ``limit`` bytes in the order of the tensors, and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        if shards[-1] and size + count > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += count
    where = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    count = sum(t.numel() for t in tensors.values())
    index = {"metadata": {"total_parameters": count, "total_size": total}, "weight_map": where}
    _write_json(folder / "model.safetensors.index.json", index)


def processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "an unknown processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "an unknown processor"


def summary(shape: Shape, saved: dict, work: Path, rows: list[dict]) -> dict:
    """What training_log.json holds; ``rows`` are the lines of the loss log."""
    run = saved["runs"][-1]
    domains = {}
    for domain, taken in saved["cursors"].items():
        stream = Stream(np.load(work / f"train-{domain}.npy", mmap_mode="r"), run["length"], 0)
        domains[domain] = {
            "tokens_seen": taken * run["length"],
            "epochs": round(taken / stream.windows, 3),
        }
    return {
        "shape": {**asdict(shape), "dense_layers": list(shape.dense_layers)},
        "parameters": saved["state"].shape[1],
        "cpu": processor(),
        "steps": saved["step"],
        "tokens": rows[-1]["tokens"],
        "tokens_per_step": sum(run["mix"].values()) * run["length"],
        "seconds": round(saved["elapsed"], 1),
        "runs": saved["runs"],
        "domains": domains,
        "heldout_bpb_during_training": [row for row in saved["log"] if "loss" not in row],
    }


def export(state: Path, tokenizer: Path, folder: Path) -> None:
    """Write the whole model folder, except for its card."""
    shape, weights, saved = load_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    tensors = {name: tensor.bfloat16().contiguous().clone() for name, tensor in hf_tensors(shape, weights)}
    write_shards(folder, tensors)
    _write_json(folder / "config.json", config(shape))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": 0,
            "do_sample": True,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "temperature": 0.8,
            "top_p": 0.95,
        },
    )
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    if Tokenizer.from_file(str(tokenizer)).token_to_id(END_OF_TEXT) != 0:
        raise ValueError(f"{tokenizer}: {END_OF_TEXT} is not token 0")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    rows = [row for row in saved["log"] if "loss" in row]
    with (folder / "training_log.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    _write_json(folder / "training_log.json", summary(shape, saved, state.parent, rows))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=HERE / ".train", help="state of train.py")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="%(default)s")
    args = parser.parse_args(argv)
    state = args.work / "state.pt"
    if not state.exists():
        print(f"export.py: {state} is missing; run demo/train.py first", file=sys.stderr)
        return 1
    export(state, args.work / "tokenizer.json", args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
