"""Decoding a model larger than its host memory: hotset's disk tier beside Accelerate's disk offload.

Both run the same random Qwen3-MoE checkpoint on the CPU, on the same prompts, each in processes of its own, in turn;
their decoded tokens must be the same. hotset's private memory is limited by the kernel (RLIMIT_DATA) to the budget and
thread stacks, far below the model's size; the peak is the kernel's account of resident memory (VmHWM), libraries and
all. Accelerate keeps as many layers in memory as the budget allows and gets the rest from disk.

A limit on a process does not limit the kernel's page cache, which on a large machine holds the whole checkpoint. So
there are two measurements: with the files' pages dropped after every token (posix_fadvise; the clock stands still
meanwhile), which is how a machine without the memory behaves and what the first JSON keys say, and with the page cache
left alone. The rates of plain parallel reads of whole experts are printed as the ceiling. llama.cpp is null where
llama-cpp-python is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import print_header, print_json_line

# 10 layers x 96 experts x 3 MiB in bfloat16: 3.0 GB of experts
FULL = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 10, "num_experts": 96}
QUICK = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 96}
TOP_K = 8
FULL_BUDGET = 1_200_000_000
QUICK_BUDGET = 850_000_000

CHILD = """
import json, os, resource, sys, time
from pathlib import Path
import torch
import hotset.runtime.runtime, hotset.policies.demand
import transformers.models.qwen3_moe.modeling_qwen3_moe
from hotset.runtime.memory import peak_bytes, resident_bytes
from transformers import AutoModelForCausalLM
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
job = json.loads(sys.argv[1])
base = resident_bytes()
if job["limit"]:
    data = next(int(l.split()[1]) * 1024 for l in Path("/proc/self/status").read_text().splitlines() if "VmData" in l)
    resource.setrlimit(resource.RLIMIT_DATA, (data + job["budget"] - base + 64 * 2**20,) * 2)
if job["how"] == "hotset":
    import hotset
    model = hotset.load(job["folder"], device="cpu", host_memory_bytes=job["budget"],
                        host_cache_policy=job["policy"])
else:
    room = job["budget"] - base - hotset.runtime.runtime.RESERVE_BYTES - job["outer_bytes"] - job["layer_bytes"]
    kept = max(0, room // job["layer_bytes"])  # the rest: one layer at a time goes through memory
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{n}": "cpu" if n < kept else "disk" for n in range(job["layers"])}
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype="auto", experts_implementation="eager", device_map=places, offload_folder=job["offload"])
loaded_peak = peak_bytes()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
files = [os.open(path, os.O_RDONLY) for folder in job["forget"] for path in Path(folder).rglob("*") if path.is_file()]
for descriptor in files:
    os.fsync(descriptor)
class Clock:
    def __init__(self): self.seconds, self.puts = 0.0, 0
    def put(self, value):
        now = time.perf_counter()
        if self.puts >= 2:  # put 0 is the prompt, put 1 ends the prefill
            self.seconds += now - self.since
        self.puts += 1
        for descriptor in files:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.since = time.perf_counter()
    def end(self): pass
texts, seconds, count = [], 0.0, 0
for prompt in job["prompts"]:
    ids, clock = torch.tensor([prompt]), Clock()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"],
                         min_new_tokens=job["tokens"], do_sample=False, pad_token_id=0, streamer=clock)
    texts.append(out[0].tolist())
    seconds += clock.seconds
    count += clock.puts - 2
report = model.hotset_report() if job["how"] == "hotset" else None
places = [] if report else [str(place) for place in model.hf_device_map.values()]
where = {place: places.count(place) for place in set(places)}
print(json.dumps({"texts": texts, "rate": count / seconds, "peak": max(loaded_peak, peak_bytes()),
                  "decode_peak": peak_bytes(), "report": report, "device_map": where}))
"""


def make_checkpoint(folder: Path, shape: dict[str, int]) -> None:
    """A random Qwen3-MoE in bfloat16, one shard per layer, written without ever holding the model in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=4096,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        **shape,
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = shape["hidden_size"], shape["moe_intermediate_size"], shape["num_experts"]

    def normal(*size: int, std: float = 0.04) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, std, generator=generator)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    shards = {
        "outer": {
            "model.embed_tokens.weight": normal(4096, hidden, std=1.0),
            "lm_head.weight": normal(4096, hidden),
            "model.norm.weight": ones,
        }
    }
    heads, kv_heads, head = 16 * 64, 4 * 64, torch.ones(64, dtype=torch.bfloat16)
    index: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, f"{name}.safetensors"))

    save("outer", shards["outer"])
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors = {
            at + "input_layernorm.weight": ones.clone(),
            at + "post_attention_layernorm.weight": ones.clone(),
            at + "self_attn.q_proj.weight": normal(heads, hidden),
            at + "self_attn.k_proj.weight": normal(kv_heads, hidden),
            at + "self_attn.v_proj.weight": normal(kv_heads, hidden),
            at + "self_attn.o_proj.weight": normal(hidden, heads),
            at + "self_attn.q_norm.weight": head.clone(),
            at + "self_attn.k_norm.weight": head.clone(),
            at + "mlp.gate.weight": normal(experts, hidden),
        }
        for expert in range(experts):
            name = f"{at}mlp.experts.{expert}."
            tensors[name + "gate_proj.weight"] = normal(inner, hidden)
            tensors[name + "up_proj.weight"] = normal(inner, hidden)
            tensors[name + "down_proj.weight"] = normal(hidden, inner)
        save(f"layer-{layer:02d}", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def drop_page_cache(folder: Path) -> None:
    """Have the kernel forget the files' pages; dirty ones are written first."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_rate(folder: Path, expert_bytes: int, threads: int, total: int) -> float:
    """Bytes per second of reading whole experts' worth at random places, by so many threads, into kept buffers."""
    files = sorted(folder.glob("layer-*.safetensors"))
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    blocks = [(f, at) for f, p in zip(descriptors, files, strict=True)
              for at in range(0, p.stat().st_size - expert_bytes, expert_bytes)]  # fmt: skip
    chosen = blocks[:: max(1, len(blocks) * expert_bytes // total)]

    def read(part: list[tuple[int, int]]) -> int:
        buffer = memoryview(bytearray(expert_bytes))
        return sum(os.preadv(f, [buffer], at) for f, at in part)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, [chosen[n::threads] for n in range(threads)]))
    rate = done / (time.perf_counter() - started)
    for descriptor in descriptors:
        os.close(descriptor)
    return rate


def child(how: str, folder: Path, offload: Path, options: argparse.Namespace, *, forget: bool) -> dict:
    """One process: load, generate, report. forget: drop the files' pages after every token."""
    drop_page_cache(folder)
    drop_page_cache(offload)
    job = {
        "how": how,
        "folder": str(folder),
        "offload": str(offload),
        "budget": options.budget,
        "policy": options.policy,
        "tokens": options.tokens,
        "limit": how == "hotset",
        "forget": [str(folder), str(offload)] if forget else [],
        "outer_bytes": (folder / "outer.safetensors").stat().st_size,
        "layer_bytes": (folder / "layer-00.safetensors").stat().st_size,
        "layers": len(list(folder.glob("layer-*.safetensors"))),
        "prompts": [[(7 * i + 131 * p) % 4000 + 1 for i in range(16)] for p in range(options.prompts)],
    }
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{how}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, for a look at the script")
    parser.add_argument("--make", metavar="FOLDER", help="write the checkpoint there and stop")
    parser.add_argument("--checkpoint", type=Path, help="use the one that --make wrote")
    parser.add_argument("--budget", type=int, help="bytes of host memory, libraries and all")
    parser.add_argument("--policy", default="lfu-aged", help="of the host cache")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-accelerate", action="store_true", help="measure hotset only")
    options = parser.parse_args()
    shape = QUICK if options.quick else FULL
    options.budget = options.budget or (QUICK_BUDGET if options.quick else FULL_BUDGET)
    options.tokens = options.tokens or (6 if options.quick else 12)
    if options.make:
        Path(options.make).mkdir(parents=True, exist_ok=True)
        make_checkpoint(Path(options.make), shape)
        return
    with tempfile.TemporaryDirectory(prefix="hotset-bench-") as scratch:
        folder, offload = options.checkpoint or Path(scratch) / "model", Path(scratch) / "offload"
        offload.mkdir()
        if not options.checkpoint:
            arguments = [sys.executable, __file__, "--make", str(folder), *(["--quick"] if options.quick else [])]
            subprocess.run(arguments, check=True)
        measure(shape, folder, offload, options)


def measure(shape: dict[str, int], folder: Path, offload: Path, options: argparse.Namespace) -> None:
    """Rounds of both, in turn; prints and ends with the JSON line."""
    expert_bytes = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 2
    experts = shape["num_hidden_layers"] * shape["num_experts"]
    print_header(
        "bench_disk_tier: decode with less host memory than the model",
        budget_bytes=options.budget,
        expert_bytes_total=experts * expert_bytes,
        top_k=TOP_K,
        policy=options.policy,
        tokens=options.tokens,
        **shape,
    )
    drop_page_cache(folder)
    cold = read_rate(folder, expert_bytes, 4, 600_000_000)
    warm = read_rate(folder, expert_bytes, 4, 600_000_000)
    runs: dict[tuple[str, bool], list[dict]] = {}
    for _ in range(options.rounds):
        for forget in (True, False):
            for how in ("hotset",) if options.no_accelerate else ("hotset", "accelerate"):
                runs.setdefault((how, forget), []).append(child(how, folder, offload, options, forget=forget))
    texts = [run["texts"] for several in runs.values() for run in several]
    assert all(text == texts[0] for text in texts), "the two decode different tokens"
    rates = {key: statistics.median(run["rate"] for run in several) for key, several in runs.items()}
    peaks = {
        how: max(run["peak"] for (who, _), several in runs.items() if who == how for run in several)
        for how in {who for who, _ in runs}
    }
    disk = runs["hotset", True][-1]["report"]["disk"]
    hit_rate = disk["hits"] / (disk["hits"] + disk["misses"])
    print(f"reading experts, 4 threads: {cold / 1e9:.2f} GB/s from disk, {warm / 1e9:.2f} GB/s from the page cache")
    print(
        f"hotset: peak {peaks['hotset'] / 1e6:.0f} MB of {options.budget / 1e6:.0f} MB; host cache of "
        f"{disk['buffers']} experts of {experts}, hit rate {hit_rate:.2f}"
    )
    if not options.no_accelerate:
        last = runs["accelerate", True][-1]
        print(
            f"accelerate: layers {last['device_map']}, peak {peaks['accelerate'] / 1e6:.0f} MB while loading, "
            f"{last['decode_peak'] / 1e6:.0f} MB while decoding (mapped files included)"
        )
    for forget, name in ((True, "pages dropped after every token"), (False, "page cache of the whole machine")):
        line = f"{name}: hotset {rates['hotset', forget]:.2f} tokens/s"
        if not options.no_accelerate:
            theirs = rates["accelerate", forget]
            line += f", accelerate {theirs:.2f} tokens/s, ratio {rates['hotset', forget] / theirs:.1f}"
        print(line)
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp: llama-cpp-python is not installed")
    print_json_line(
        hotset_tokens_per_second=round(rates["hotset", True], 3),
        accelerate_tokens_per_second=_rounded(rates.get(("accelerate", True))),
        llama_cpp_tokens_per_second=None,
        peak_bytes=peaks["hotset"],
        budget_bytes=options.budget,
        hotset_tokens_per_second_with_page_cache=round(rates["hotset", False], 3),
        accelerate_tokens_per_second_with_page_cache=_rounded(rates.get(("accelerate", False))),
        accelerate_peak_bytes=peaks.get("accelerate"),
        all_rates={
            f"{how}{'' if forget else ' cached'}": [round(r["rate"], 3) for r in several]
            for (how, forget), several in runs.items()
        },
        hit_rate=round(hit_rate, 3),
        cold_read_bytes_per_second=round(cold),
        warm_read_bytes_per_second=round(warm),
        model_bytes=sum(p.stat().st_size for p in folder.glob("*.safetensors")),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    main()
