"""llama.cpp's side of bench_disk_tier.py, run by an interpreter that has llama-cpp-python and gguf (no torch needed).

    python disk_tier_llama.py write CHECKPOINT FILE.gguf    the same weights as GGUF
    python disk_tier_llama.py run JOB                       decode; JOB and the answer are JSON

Matrices stay bfloat16, norms and the router become float32 (llama.cpp wants them so; no bit is lost). The vocabulary is
made up: only token ids go in and out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bfloat16 as stored: NumPy has no such type."""


def read_tensors(folder: Path) -> dict[str, Callable[[], Bits]]:
    """Tensor name -> reads it, of every safetensors file in the folder."""
    found: dict[str, Callable[[], Bits]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert entry["dtype"] == "BF16", name
            first, shape = 8 + size + entry["data_offsets"][0], entry["shape"]
            found[name] = lambda file=file, first=first, shape=shape: np.fromfile(
                file, np.uint16, int(np.prod(shape)), offset=first
            ).reshape(shape)
    return found


def write(folder: Path, out: Path) -> None:
    """One GGUF file (architecture qwen3moe), never more than one layer's stacked matrix in memory."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    layers, experts, vocabulary = config["num_hidden_layers"], config["num_local_experts"], config["vocab_size"]
    writer = gguf.GGUFWriter(str(out), "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{n:02X}>" if n < 256 else f"t{n}" for n in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([gguf.TokenType.BYTE if n < 256 else gguf.TokenType.NORMAL for n in range(vocabulary)])

    stored = read_tensors(folder)
    places: list[tuple[str, list[str], bool]] = [  # (GGUF name, stored names to stack, matrix)
        ("token_embd.weight", ["model.embed_tokens.weight"], True),
        ("output_norm.weight", ["model.norm.weight"], False),
        ("output.weight", ["lm_head.weight"], True),
    ]
    for layer in range(layers):
        at, to = f"model.layers.{layer}.", f"blk.{layer}."
        places += [
            (to + "attn_norm.weight", [at + "input_layernorm.weight"], False),
            (to + "attn_q.weight", [at + "self_attn.q_proj.weight"], True),
            (to + "attn_k.weight", [at + "self_attn.k_proj.weight"], True),
            (to + "attn_v.weight", [at + "self_attn.v_proj.weight"], True),
            (to + "attn_output.weight", [at + "self_attn.o_proj.weight"], True),
            (to + "attn_q_norm.weight", [at + "self_attn.q_norm.weight"], False),
            (to + "attn_k_norm.weight", [at + "self_attn.k_norm.weight"], False),
            (to + "ffn_norm.weight", [at + "post_attention_layernorm.weight"], False),
            (to + "ffn_gate_inp.weight", [at + "mlp.gate.weight"], False),
        ]
        for part in ("gate", "up", "down"):
            names = [f"{at}mlp.experts.{expert}.{part}_proj.weight" for expert in range(experts)]
            places.append((f"{to}ffn_{part}_exps.weight", names, True))

    def data(names: list[str], matrix: bool) -> NDArray[Any]:
        bits = stored[names[0]]() if len(names) == 1 else np.stack([stored[name]() for name in names])
        return bits.view(np.uint8) if matrix else (bits.astype(np.uint32) << 16).view(np.float32)

    for name, names, matrix in places:
        one = data(names[:1], matrix)
        shape = one.shape if len(names) == 1 else (len(names), *one.shape)
        raw = gguf.GGMLQuantizationType.BF16 if matrix else None
        writer.add_tensor_info(name, shape, one.dtype, one.nbytes * len(names), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, names, matrix in places:
        writer.write_tensor_data(data(names, matrix))
    writer.close()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding of each prompt through llama.cpp's mapped file; the clock runs from the second new token on."""
    from llama_cpp import Llama, llama_get_logits_ith

    model = Llama(job["gguf"], n_ctx=256, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False)
    texts, logits, seconds, count, read = [], [], 0.0, 0, 0
    for prompt in job["prompts"]:
        model.reset()
        model.eval(prompt)
        text = list(prompt)
        for new in range(job["tokens"]):
            scores = np.ctypeslib.as_array(llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),))
            if new == 0:
                logits.append([round(float(x), 4) for x in scores])
            text.append(int(np.argmax(scores)))
            if new == job["tokens"] - 1:
                break
            read -= process_number("io", "read_bytes")
            started = time.perf_counter()
            model.eval(text[-1:])
            seconds += time.perf_counter() - started
            read += process_number("io", "read_bytes")
            count += 1
        texts.append(text)
    peak = process_number("status", "VmHWM") * 1024
    return {"texts": texts, "logits": logits, "rate": count / seconds, "peak": peak, "read_per_token": read / count}


def process_number(file: str, key: str) -> int:
    """One number of /proc/self; read_bytes are bytes fetched from the device, read-ahead for mappings included."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(run(json.loads(sys.argv[2]))))
