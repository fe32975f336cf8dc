"""Peak memory of hotset.load beside Transformers' from_pretrained, on a random Qwen3-MoE checkpoint of its own.

Each load runs in a process of its own; the peak is the kernel's (VmHWM), less what importing the libraries alone
takes. The ceiling: non-expert bytes + expert bytes, which must be somewhere. Each format of experts is loaded without
and with host copies of the experts in the arena (skip_gpu_expert_cpu_copy "auto" and "off"): the logits must be the
same, bit for bit, and the second peak higher by just these copies. Experts computed by torch must give the bits of
from_pretrained's eager loops.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_header, print_json_line

# hidden, expert intermediate, layers, experts: about 1.5 GB in bfloat16
FULL = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 7, "num_experts": 64}
FORMATS = {
    "bf16 by torch": {"kernels": "torch"},
    "bf16 packed": {},
    "int8 packed": {"expert_format": "int8"},
    "int4 packed": {"expert_format": "int4_g32"},
}
QUICK = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 32}

CHILD = """
import json, sys, time
import numpy as np, torch, transformers, hotset
from transformers import AutoModelForCausalLM
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
how, folder, share, options = sys.argv[1], sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[6])
import hotset.runtime.runtime, transformers.models.qwen3_moe.modeling_qwen3_moe
from hotset.runtime.memory import peak_bytes as peak
before, started, report = peak(), time.perf_counter(), None
if how in ("auto", "off"):
    layers, experts = int(sys.argv[4]), int(sys.argv[5])
    mask = np.zeros(layers * experts, bool)
    mask[np.random.default_rng(0).permutation(mask.size)[: int(share * mask.size)]] = True
    model = hotset.load(folder, plan=mask.reshape(layers, experts), device="cpu", skip_gpu_expert_cpu_copy=how,
                        **options)
elif how == "plain":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
seconds, after = time.perf_counter() - started, peak()
values = None
if how != "import":
    with torch.inference_mode():
        values = model(torch.arange(1, 8)[None]).logits.float().sum(dim=-1).flatten().tolist()
if how in ("auto", "off"):
    report = model.hotset_report()
print(json.dumps({"before": before, "peak": after, "seconds": seconds, "logits": values, "report": report}))
"""


def make_checkpoint(folder: Path, shape: dict[str, int]) -> None:
    """A random Qwen3-MoE in bfloat16, sharded."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=4096,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts_per_tok=4,
        **shape,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="400MB")


def child(how: str, folder: Path, share: float, shape: dict[str, int], **options: str) -> dict:
    """Run one load in a process of its own; quantised experts are kept beside the checkpoint."""
    sizes = [str(shape["num_hidden_layers"]), str(shape["num_experts"])]
    arguments = [how, str(folder), str(share), *sizes, json.dumps(options)]
    environment = {**os.environ, "HOTSET_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, for a look at the script")
    parser.add_argument("--share", type=float, default=0.5, help="share of the experts in the arena")
    options = parser.parse_args()
    shape = QUICK if options.quick else FULL
    print_header("bench_load: peak resident memory while loading", share_in_arena=options.share, **shape)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        started = time.perf_counter()
        make_process = subprocess.run(
            [sys.executable, __file__, "--make", str(folder), json.dumps(shape)], check=False, capture_output=True
        )
        if make_process.returncode:
            sys.exit(make_process.stderr.decode())
        print(f"made the checkpoint in {time.perf_counter() - started:.0f} s")
        plain = child("plain", folder, 0.0, shape)
        found = {}
        for name, how in FORMATS.items():
            if "expert_format" in how:
                child("auto", folder, options.share, shape, **how)  # the first load quantises
            found[name] = [child(skip, folder, options.share, shape, **how) for skip in ("auto", "off")]
        none_in_arena = child("auto", folder, 0.0, shape, kernels="torch")
    ours = found["bf16 by torch"][0]
    assert ours["logits"] == plain["logits"], "torch's experts differ from Transformers' eager ones"
    sizes, all_on_host = ours["report"]["bytes"], none_in_arena["report"]["bytes"]
    expert_bytes = sizes["arena"] + sizes["host_experts"]
    assert all_on_host["host_experts"] - sizes["host_experts"] == sizes["arena"], "the host tier did not shrink by it"
    ceiling = sizes["non_expert"] + expert_bytes
    peak_ours, peak_plain = ours["peak"] - ours["before"], plain["peak"] - plain["before"]
    print(f"must be in memory: {ceiling / 1e6:.0f} MB; imports alone take {ours['before'] / 1e6:.0f} MB")
    print(f"from_pretrained: peak {peak_plain / 1e6:.0f} MB = {peak_plain / ceiling:.3f} x, {plain['seconds']:.1f} s")
    saved, peaks = {}, {}
    for name, (skipped, kept) in found.items():
        assert skipped["logits"] == kept["logits"], f"{name}: host copies change the logits"
        sizes = skipped["report"]["bytes"]
        needed, peak = sum(sizes.values()), skipped["peak"] - skipped["before"]
        saved[name] = round((kept["peak"] - kept["before"] - peak) / sizes["arena"], 4)
        peaks[name] = round(peak / needed, 3)
        print(
            f"{name + ':':15} peak {peak / 1e6:.0f} MB = {peak / needed:.3f} x what must be in memory, "
            f"{skipped['seconds']:.1f} s; skipping the copies saves {saved[name]:.3f} of the arena's bytes"
        )
    peak_kept = found["bf16 by torch"][1]["peak"] - found["bf16 by torch"][1]["before"]
    sizes = ours["report"]["bytes"]
    print_json_line(
        peak_bytes_hotset=peak_ours,
        peak_bytes_with_copies=peak_kept,
        saved_share_of_arena=saved,
        peak_share_of_needed=peaks,
        peak_bytes_plain=peak_plain,
        non_expert_bytes=sizes["non_expert"],
        expert_bytes=expert_bytes,
        arena_bytes=sizes["arena"],
        host_tier_bytes=sizes["host_experts"],
        import_bytes=ours["before"],
        seconds_hotset=round(ours["seconds"], 2),
        seconds_plain=round(plain["seconds"], 2),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_checkpoint(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
