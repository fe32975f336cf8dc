"""Decoding a model larger than its memory: hotset's disk tier, Accelerate's disk offload and llama.cpp's mapped file.

All run the same random Qwen3-MoE in bfloat16 on the CPU, on the same prompts, greedily, each in a process of its own,
in turn. Every process gets a fresh memory cgroup (version 1 or 2) with one and the same limit, from before its first
import to its end: the kernel counts the process's memory and the page cache that it fills, and evicts pages when the
limit is reached. So nobody runs from a page cache that a small machine would not have. The limit is hotset's budget
(--budget, given to it as host_memory_bytes and to Accelerate as the layers that it may keep) and 64 MiB for page tables
and pages on their way from disk. Before each process the files' pages are dropped, since pages that others have read
would be free to it. A process killed for memory ends the benchmark with an error.

The peers map their files, so the kernel's read-ahead decides how they fare under the limit: a large one fetches, and
evicts, many times what a token needs. It is a setting of the machine (often 128 KiB), left as it is and printed, with
the bytes that each fetched per token; read a ratio with both in mind.

hotset and Accelerate must decode the same tokens. llama.cpp rounds elsewhere (float32 between operations), and with
random weights a rounding can change a routing or a token: asked of it is that its logits after each prompt point the
way of hotset's (cosine of 0.98 or more). How many of its first tokens are the same is printed.

The second measurement, once, has no cgroup, as on a machine with memory to spare: the page cache holds every file and
Accelerate, which maps its files, runs from it; only hotset's own memory is limited then (RLIMIT_DATA). Where no cgroup
can be made (it takes root) it is the only one, and output and JSON say so ("limit"). peak_bytes is hotset's own memory,
libraries and all, by the kernel's account (VmHWM). llama.cpp is run by --llama-python, an interpreter that has
llama-cpp-python and gguf, and is null where it has not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common import print_header, print_json_line
from memory_cgroup import memory_cgroup, why_no_memory_cgroup

# 10 layers x 96 experts x 3 MiB in bfloat16: 3.0 GB of experts
FULL = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 10, "num_experts": 96}
QUICK = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 96}
TOP_K = 8
FULL_BUDGET = 1_200_000_000
QUICK_BUDGET = 850_000_000
MARGIN = 64 * 2**20
"""Bytes of a cgroup's limit above the budget: page tables and pages on their way from disk are not resident memory."""
LEAST_COSINE = 0.98


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


def read_ahead_bytes(folder: Path) -> int | None:
    """What the kernel reads at once for a mapped file in this folder: it decides how mapped files fare."""
    device = folder.stat().st_dev
    known = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(known.read_text()) * 1024 if known.exists() else None


def child(how: str, folder: Path, scratch: Path, options: argparse.Namespace, *, limited: bool) -> dict[str, Any]:
    """One process: load, generate, report. limited: in a memory cgroup of its own."""
    offload = scratch / "offload"
    offload.mkdir(exist_ok=True)
    for place in (folder, scratch):
        drop_page_cache(place)
    job = {
        "how": how,
        "folder": str(folder),
        "offload": str(offload),
        "gguf": str(scratch / "model.gguf"),
        "budget": options.budget,
        "policy": options.policy,
        "tokens": options.tokens,
        "threads": options.threads,
        "limit_private": how == "hotset" and not limited,
        "outer_bytes": (folder / "outer.safetensors").stat().st_size,
        "layer_bytes": (folder / "layer-00.safetensors").stat().st_size,
        "layers": len(list(folder.glob("layer-*.safetensors"))),
        "prompts": [[(7 * i + 131 * p) % 4000 + 1 for i in range(16)] for p in range(options.prompts)],
        "logits": options.prompts if how == "hotset" else 0,
    }
    here = Path(__file__).parent
    command = [sys.executable, str(here / "disk_tier_child.py")]
    if how == "llama.cpp":
        command = [options.llama_python, str(here / "disk_tier_llama.py"), "run"]
    with memory_cgroup("hotset-bench", options.budget + MARGIN) if limited else nullcontext() as group:
        done = subprocess.run(
            [*command, json.dumps(job)],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=group.enter if group else None,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        )
        account = group.account() if group else {"oom_kills": 0}
    if done.returncode or account["oom_kills"]:
        sys.exit(f"{how}: exit {done.returncode}, cgroup {account}\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), **account}


def has_llama(python: str) -> bool:
    """Whether the interpreter can import what llama.cpp's side needs."""
    found = subprocess.run([python, "-c", "import llama_cpp, gguf"], capture_output=True, check=False)
    return found.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, for a look at the script")
    parser.add_argument("--make", metavar="FOLDER", help="write the checkpoint there and stop")
    parser.add_argument("--checkpoint", type=Path, help="use the one that --make wrote")
    parser.add_argument("--budget", type=int, help="bytes of host memory, libraries and all")
    parser.add_argument("--policy", default="lfu-aged", help="of the host cache")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, help="of each process")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of compute, for all")
    parser.add_argument("--only", help="comma list of hotset, accelerate, llama.cpp; hotset is always run")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter with llama-cpp-python and gguf")
    options = parser.parse_args()
    shape = QUICK if options.quick else FULL
    options.budget = options.budget or (QUICK_BUDGET if options.quick else FULL_BUDGET)
    options.tokens = options.tokens or (6 if options.quick else 12)
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.make:
        Path(options.make).mkdir(parents=True, exist_ok=True)
        make_checkpoint(Path(options.make), shape)
        return
    signal.signal(signal.SIGTERM, _terminate)
    with tempfile.TemporaryDirectory(prefix="hotset-bench-") as name:
        scratch = Path(name)
        folder = options.checkpoint or scratch / "model"
        if not options.checkpoint:
            arguments = [sys.executable, __file__, "--make", str(folder), *(["--quick"] if options.quick else [])]
            subprocess.run(arguments, check=True)
        measure(shape, folder, scratch, options)


def measure(shape: dict[str, int], folder: Path, scratch: Path, options: argparse.Namespace) -> None:
    """Rounds of all, in turn; prints and ends with the JSON line."""
    wanted = options.only.split(",") if options.only else ["accelerate", "llama.cpp"]
    peers = [how for how in ("accelerate", "llama.cpp") if how in wanted]
    if "llama.cpp" in peers and not has_llama(options.llama_python):
        print(f"llama.cpp: {options.llama_python} cannot import llama_cpp and gguf: left out (--llama-python)")
        peers.remove("llama.cpp")
    if "llama.cpp" in peers:
        script = str(Path(__file__).with_name("disk_tier_llama.py"))
        subprocess.run([options.llama_python, script, "write", str(folder), str(scratch / "model.gguf")], check=True)
    expert_bytes = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 2
    experts = shape["num_hidden_layers"] * shape["num_experts"]
    why_not = why_no_memory_cgroup()
    limit = f"memory cgroup, {(options.budget + MARGIN) / 1e6:.0f} MB for each process, page cache included"
    if why_not is not None:
        limit = f"none on the page cache ({why_not}); RLIMIT_DATA on hotset alone"
    print_header(
        "bench_disk_tier: decode with less host memory than the model",
        limit=limit,
        budget_bytes=options.budget,
        expert_bytes_total=experts * expert_bytes,
        top_k=TOP_K,
        policy=options.policy,
        threads=options.threads,
        tokens=options.tokens,
        read_ahead_bytes=read_ahead_bytes(folder),
        **shape,
    )
    drop_page_cache(folder)
    cold = read_rate(folder, expert_bytes, 4, 600_000_000)
    warm = read_rate(folder, expert_bytes, 4, 600_000_000)
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for limited in (False,) if why_not else (True, False) if number == 0 else (True,):
            for how in ("hotset", *peers):
                run = child(how, folder, scratch, options, limited=limited)
                runs.setdefault((how, limited), []).append(run)
                name = "memory cgroup" if limited else "page cache"
                print(f"round {number + 1}, {name}: {how} {run['rate']:.2f} tokens/s", file=sys.stderr, flush=True)
    same = [run["texts"] for (how, _), several in runs.items() if how != "llama.cpp" for run in several]
    assert all(texts == same[0] for texts in same), "hotset and Accelerate decode different tokens"
    headline = why_not is None
    disk = runs["hotset", headline][-1]["report"]["disk"]
    hit_rate = disk["hits"] / (disk["hits"] + disk["misses"])
    peak = max(run["peak"] for (how, _), several in runs.items() if how == "hotset" for run in several)
    print(f"reading experts, 4 threads: {cold / 1e9:.2f} GB/s from disk, {warm / 1e9:.2f} GB/s from the page cache")
    print(
        f"hotset: peak {peak / 1e6:.0f} MB of {options.budget / 1e6:.0f} MB; host cache of {disk['buffers']} experts "
        f"of {experts}, hit rate {hit_rate:.2f}; read {disk['reads']}"
    )
    if "accelerate" in peers:
        print(f"accelerate: layers {runs['accelerate', headline][-1]['device_map']}")
    cosine = None
    if "llama.cpp" in peers:
        cosine = compare_logits(runs["hotset", headline][0], runs["llama.cpp", headline][0], options.tokens)
    rates = {key: statistics.median(run["rate"] for run in several) for key, several in runs.items()}
    names = {True: "memory cgroup", False: "page cache of the whole machine"}
    for (how, limited), rate in sorted(rates.items(), key=lambda item: (not item[0][1], -item[1])):
        line = f"{names[limited]}: {how:10} {rate:6.2f} tokens/s"
        if how != "hotset":
            line += f", hotset is {rates['hotset', limited] / rate:.1f} times that"
        if limited:
            last = runs[how, True][-1]
            line += f" ({last['read_per_token'] / 1e6:.0f} MB read from disk per token"
            if last["cgroup_peak_bytes"] is not None:
                line += f"; its cgroup held up to {last['cgroup_peak_bytes'] / 1e6:.0f} MB"
            line += ")"
        print(line)
    print_json_line(
        hotset_tokens_per_second=_rounded(rates["hotset", headline]),
        accelerate_tokens_per_second=_rounded(rates.get(("accelerate", headline))),
        llama_cpp_tokens_per_second=_rounded(rates.get(("llama.cpp", headline))),
        peak_bytes=peak,
        budget_bytes=options.budget,
        limit=limit,
        limit_bytes=options.budget + MARGIN if headline else None,
        hotset_tokens_per_second_with_page_cache=_rounded(rates["hotset", False]),
        accelerate_tokens_per_second_with_page_cache=_rounded(rates.get(("accelerate", False))),
        llama_cpp_tokens_per_second_with_page_cache=_rounded(rates.get(("llama.cpp", False))),
        all_rates={
            f"{how}{'' if limited else ' with page cache'}": [_rounded(run["rate"]) for run in several]
            for (how, limited), several in runs.items()
        },
        disk_bytes_read_per_token={
            how: round(statistics.median(run["read_per_token"] for run in several))
            for (how, limited), several in runs.items()
            if limited is headline
        },
        read_ahead_bytes=read_ahead_bytes(folder),
        llama_cpp_logits_cosine=_rounded(cosine),
        hit_rate=_rounded(hit_rate),
        cold_read_bytes_per_second=round(cold),
        warm_read_bytes_per_second=round(warm),
        model_bytes=sum(p.stat().st_size for p in folder.glob("*.safetensors")),
    )


def compare_logits(ours: dict[str, Any], theirs: dict[str, Any], tokens: int) -> float:
    """The least cosine between the two's logits after a prompt; raises AssertionError below LEAST_COSINE."""
    cosines = []
    for a, b in zip(ours["logits"], theirs["logits"], strict=True):
        cosines.append(sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b))
    agreeing = [
        next((n for n, (x, y) in enumerate(zip(a[-tokens:], b[-tokens:], strict=True)) if x != y), tokens)
        for a, b in zip(ours["texts"], theirs["texts"], strict=True)
    ]
    print(
        f"llama.cpp: cosine of logits after each prompt {min(cosines):.4f} or more; first tokens the same: {agreeing}"
    )
    assert min(cosines) >= LEAST_COSINE, f"llama.cpp computes something else: cosines {cosines}"
    return min(cosines)


def _terminate(*_: Any) -> None:
    """End by an exception, so that cgroup and scratch files go all the same; a second signal must not stop that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("terminated")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    main()
