"""One MoE layer of Qwen3-30B-A3B on the host as the runtime computes it, beside Transformers, kt-kernel and the memory.

    python benchmarks/bench_decode.py [--quick] [--formats bf16,int8,int4_g32] [--tokens 1,4,16,512]

128 experts, top-8, hidden 2048, intermediate 768, from a checkpoint that is written for the occasion. hotset's side is
the experts module of a model of `hotset.load`, all experts in host memory: the dispatch with its locks and counts is in
the time. Transformers' side is the same module of the same checkpoint with each of its experts implementations, in
bfloat16, the only format it has on a CPU; so int8 and int4 are compared with that too. kt-kernel is called as in
bench_kernels.py, with its best number of workers, where it is installed.

In every round all sides take turns on the same picks, and a read of as many bytes as hotset's experts have; experts go
round, so that none is in a cache. Numbers are medians over the rounds. Outputs are compared before anything is timed;
all experts have the same values, each in memory of its own, which no kernel's time depends on.

HOTSET_KERNELS=torch measures what stands in where there is no compiler: torch's own operators.

`slower_than_transformers`: "format@tokens" where hotset takes more than 5 % longer than the best Transformers path.
`bandwidth_share`: bytes of the experts that a call reads over its time, over the read bandwidth, at 1 and 4 tokens.
`kt_kernel`: kt-kernel's time over hotset's, or null. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotset
from hotset.kernels import LayerSpec, available_threads, dequantise, quantise
from hotset.kernels.measure import ReadStream

sys.path.insert(0, str(Path(__file__).parent))
from common import print_header, print_json_line
from kernel_peers import Experts, Inputs, KtKernel

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
TRANSFORMERS = {"eager": 512, "grouped_mm": 512, "batched_mm": 4}
"""Experts implementation -> most tokens it is tried with: batched_mm copies a token's experts."""
ALLOWED_ERROR = {"bf16": 0.02, "int8": 0.03, "int4_g32": 0.2, "int4_g128": 0.25}
"""Of hotset's output against Transformers' bfloat16: rounding, and what 8 and 4 bits cost."""
ALLOWED_OF_PEERS = 0.4
"""kt-kernel's AMXInt4 has one scale per row: off by .345 on these values."""
REST_SECONDS = 0.02
"""Before every timed call: OpenMP's threads and kt-kernel's workers spin for a while when their work is done, and would
take cores from whoever comes next."""
Call = Callable[[torch.Tensor], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 experts and few rounds")
    parser.add_argument("--formats", default="bf16,int8,int4_g32")
    parser.add_argument("--tokens", default="1,4,16,512")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    num_experts = 32 if args.quick else 128
    rounds = 7 if args.quick else args.rounds
    counts = [int(count) for count in args.tokens.split(",")]
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_checkpoint(folder, num_experts)
        plain, outer = transformers_experts(folder)
        stream = ReadStream(128 << 20 if args.quick else 512 << 20)
        slower: list[str] = []
        shares: dict[str, dict[str, float]] = {}
        kt_ratios: dict[str, dict[str, float]] = {}
        times: dict[str, dict[str, dict[str, float]]] = {}
        for name in args.formats.split(","):
            model = hotset.load(
                folder, device="cpu", dtype="bfloat16", expert_format="auto" if name == "bf16" else name
            )
            report = model.hotset_report()["host_compute"]
            if not times:
                print_header(
                    f"One MoE layer on the host: {report['format']} by {report['kernels']} kernels",
                    experts=num_experts, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE, rounds=rounds,
                    reason=report["reason"],
                )  # fmt: skip
            mine = model.hotset.layers[0].module
            expert_bytes = model.hotset.store.formats[0].expert_bytes
            peers = kt_kernel_peers(name, num_experts)
            times[name] = {}
            for count in counts:
                inputs = make_inputs(count)
                calls: dict[str, Call] = {"hotset": bind(mine, inputs)}
                for implementation, most in TRANSFORMERS.items():
                    if count <= most:
                        calls[implementation] = bind(plain, inputs, outer, implementation)
                for label, prepare in peers.items():
                    calls[label] = as_call(prepare(Inputs(inputs[0].float().numpy(), inputs[1].float().numpy())))
                order = Rotation(num_experts, count)
                check_equal(calls, order.next(), name)
                read = min(count * TOP_K, num_experts) * expert_bytes
                found = measure(calls, order, stream, read, rounds if count <= 16 else max(3, rounds // 6))
                times[name][str(count)] = {label: round(seconds * 1e3, 3) for label, seconds in found.items()}
                ours, rate = found["hotset"], found.pop("stream")
                best = min(found[implementation] for implementation in TRANSFORMERS if implementation in found)
                if ours > best * 1.05:
                    slower.append(f"{name}@{count}")
                line = [f"hotset {ours * 1e3:.2f} ms"]
                line += [f"{label} {found[label] / ours:.2f} x" for label in found if label in TRANSFORMERS]
                rivals = [found[label] for label in peers if label in found]
                if rivals:
                    kt_ratios.setdefault(name, {})[str(count)] = round(min(rivals) / ours, 2)
                    line.append(f"kt-kernel {min(rivals) / ours:.2f} x")
                if count <= 4:
                    share = read / ours / rate
                    shares.setdefault(name, {})[str(count)] = round(share, 3)
                    line.append(f"{read / ours / 1e9:.1f} of {rate / 1e9:.1f} GB/s = {share * 100:.0f} %")
                print(f"{name}, {count} token{'s' * (count > 1)}: {', '.join(line)}", flush=True)
            del model, mine, peers, calls
            gc.collect()
    print_json_line(
        slower_than_transformers=slower, bandwidth_share=shares, kt_kernel=kt_ratios or None, milliseconds=times
    )


def make_checkpoint(folder: Path, num_experts: int) -> None:
    """A Qwen3-MoE of one layer in bfloat16, its experts one by one as on the hub."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=num_experts, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, tie_word_embeddings=True, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    gate_up, down = expert_values()
    parts = {"gate_proj": gate_up[:INTERMEDIATE], "up_proj": gate_up[INTERMEDIATE:], "down_proj": down}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{part}.weight": value.clone()
        for expert in range(num_experts)
        for part, value in parts.items()
    }
    shapes = {
        "model.embed_tokens": (512, HIDDEN), "model.norm": (HIDDEN,), "model.layers.0.mlp.gate": (num_experts, HIDDEN),
        "model.layers.0.input_layernorm": (HIDDEN,), "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (512, HIDDEN), "model.layers.0.self_attn.k_proj": (128, HIDDEN),
        "model.layers.0.self_attn.v_proj": (128, HIDDEN), "model.layers.0.self_attn.o_proj": (HIDDEN, 512),
        "model.layers.0.self_attn.q_norm": (64,), "model.layers.0.self_attn.k_norm": (64,),
    }  # fmt: skip
    tensors |= {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def expert_values() -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up [2F, H], down [H, F]) bfloat16."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn((2 * INTERMEDIATE, HIDDEN), generator=generator) * HIDDEN**-0.5
    down = torch.randn((HIDDEN, INTERMEDIATE), generator=generator) * INTERMEDIATE**-0.5
    return gate_up.bfloat16(), down.bfloat16()


def transformers_experts(folder: Path) -> tuple[torch.nn.Module, Any]:
    """(the experts module, the model) as Transformers loads them."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    return model.model.layers[0].mlp.experts, model


def make_inputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [T, H], gate weights [T, K]) bfloat16."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand((count, TOP_K), generator=generator)
    hidden = torch.randn((count, HIDDEN), generator=generator)
    return hidden.bfloat16(), (weights / weights.sum(1, keepdim=True)).bfloat16()


def bind(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], model: Any = None, implementation: str = ""
) -> Call:
    """A call of the experts module; with a model, by that implementation."""
    hidden, weights = inputs
    if model is None:
        return lambda ids: module(hidden, ids, weights)

    def call(ids: torch.Tensor) -> Any:
        if module.config._experts_implementation != implementation:
            model.set_experts_implementation(implementation)
        return module(hidden, ids, weights)

    return call


def as_call(run: Callable[[Any], Any]) -> Call:
    return lambda ids: run(ids.numpy())


def kt_kernel_peers(name: str, num_experts: int) -> dict[str, Any]:
    """ "kt-kernel class, n workers" -> what makes a call for some inputs; empty where it is not installed."""
    if importlib.util.find_spec("kt_kernel") is None:
        return {}
    spec = LayerSpec(name, 1, HIDDEN, INTERMEDIATE, scale_number="fp16" if name.startswith("int4") else "")
    gate_up, down = (value.float().numpy() for value in expert_values())
    stored = quantise(spec, gate_up, down)
    first, second, _, _ = dequantise(spec, stored)
    experts = Experts(num_experts, first, second, stored, TOP_K, available_threads())
    peer, made = KtKernel(available_threads()), {}
    for label, make in peer.variants(name):
        try:
            made[f"kt-kernel {label}"] = make(experts)
        except Exception as problem:
            print(f"kt-kernel {label} left out: {type(problem).__name__}: {problem}")
    return made


class Rotation:
    """Picks that go round all experts."""

    def __init__(self, num_experts: int, count: int) -> None:
        self._order = np.random.default_rng(1).permutation(num_experts)
        self._count, self._at = count, 0

    def next(self) -> torch.Tensor:
        """[T, K] int64: the experts that have not been picked for longest; a token's are distinct."""
        wanted = self._count * TOP_K
        ids = self._order[(self._at + np.arange(wanted)) % len(self._order)]
        self._at += wanted
        return torch.from_numpy(ids.reshape(self._count, TOP_K))


def check_equal(calls: dict[str, Call], ids: torch.Tensor, name: str) -> None:
    wanted = calls["eager"](ids).float()
    for label, call in calls.items():
        error = float((call(ids).float() - wanted).norm() / wanted.norm())
        allowed = ALLOWED_ERROR[name] if label == "hotset" else ALLOWED_OF_PEERS
        if not error < allowed:
            raise AssertionError(f"{label} on {name} is off by {error:.3f}, allowed {allowed}")


def measure(
    calls: dict[str, Call], order: Rotation, stream: ReadStream, size_bytes: int, rounds: int
) -> dict[str, float]:
    """Median seconds by label, and under "stream" the median read bandwidth; the first round warms up."""
    seconds: dict[str, list[float]] = {label: [] for label in calls}
    rates = []
    for number in range(rounds + 1):
        rate = stream.rate(min(size_bytes, stream.size_bytes))
        for label, call in calls.items():
            ids = order.next()
            if label in TRANSFORMERS:
                call(ids)  # switching the implementation is not its time
                ids = order.next()
            time.sleep(REST_SECONDS)
            begin = time.perf_counter()
            call(ids)
            if number:
                seconds[label].append(time.perf_counter() - begin)
        if number:
            rates.append(rate)
    return {label: statistics.median(values) for label, values in seconds.items()} | {
        "stream": statistics.median(rates)
    }


if __name__ == "__main__":
    main()
