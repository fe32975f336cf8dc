"""Host expert kernels beside the memory's read bandwidth and beside the kernels that people use today.

    python benchmarks/bench_kernels.py [--quick] [--formats bf16,int8] [--peers kt-kernel,torch.mv]

One MoE layer (default 128 experts, top-8, H 2048, F 768), experts going round so that none is in a cache when it is
read. In every round a read of as many bytes, or the peer, takes its turn with hotset, so that a shared machine's moods
hit both; numbers are medians over the rounds. Before anything is timed, each side's output is compared with a float64
reference of the weights it was given.

`decode_share`: stored bytes (weights and scales) of the experts of one token over the time of the call, over the read
bandwidth. `decode_speedup`: the peer's time over hotset's, the smaller of those at 1 and 4 tokens, the peer's best
variant counting. `prefill_speedup`: at 512 tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hotset.kernels import (
    FORMATS,
    LayerSpec,
    available_threads,
    backend,
    dequantise,
    native,
    quantise,
    reference,
)
from hotset.kernels.formats import float_to_numbers, numbers_to_float
from hotset.kernels.layer import CompiledLayer
from hotset.kernels.measure import DecodeStep, ReadStream

sys.path.insert(0, str(Path(__file__).parent))
from common import print_header, print_json_line
from kernel_peers import Experts, Inputs, Peer, installed

ALLOWED_ERROR = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 2e-2}
"""of an output row against float64; int8, FP8 and four bits: what quantising activations and weights anew may cost a
peer"""
QUANTISED_ERROR = {"int4_g32": 0.35, "int4_g128": 0.35, "mxfp4": 0.35}
REST_SECONDS = 0.02
"""Before every timed call: OpenMP's, kt-kernel's and ggml's threads spin for a while when their work is done."""
TARGETS = {
    "bf16": 0.85,
    "int8": 0.70,
    "fp8_block128": 0.70,
    "fp8_channel": 0.70,
    "int4_g32": 0.5,
    "int4_g128": 0.5,
    "mxfp4": 0.5,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 experts and few rounds")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--formats", default="bf16,int8,fp8_block128,int4_g32,mxfp4,mxfp8,fp16")
    parser.add_argument("--peers", default="all", help="names, all or none")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--prefill", type=int, default=512, help="tokens; 0 = none")
    args = parser.parse_args()
    if args.quick:
        args.experts, args.rounds = min(args.experts, 32), min(args.rounds, 9)
    formats = args.formats.split(",")
    unknown = [f for f in formats if f not in FORMATS]
    if unknown:
        parser.error(f"unknown formats {unknown}: choose from {', '.join(FORMATS)}")
    started = time.perf_counter()
    chosen = backend()
    first_call = (time.perf_counter() - started) * 1e3
    if chosen.name != "compiled":
        sys.exit(f"bench_kernels needs the compiled kernels: {chosen.reason}")
    peers = [] if args.peers == "none" else installed(available_threads())
    if args.peers not in ("all", "none"):
        peers = [p for p in peers if p.name in args.peers.split(",")]
    print_header(
        f"Host expert kernels, {chosen.reason}",
        experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        intermediate=args.intermediate,
        rounds=args.rounds,
        peers=", ".join(p.name for p in peers) or "none",
        library_ready_ms=round(first_call, 1),
    )
    stream = ReadStream(128 << 20 if args.quick else 512 << 20)
    one_stream = ReadStream(stream.size_bytes // 2, threads=1)
    ways = "{} streams a thread, pieces of {} bytes, prefetch {} ahead".format(*stream.variant)
    print(f"ceiling: {ways}")
    result: dict[str, Any] = {
        "decode_share": {},
        "decode_share_one_core": {},
        "decode_speedup": {},
        "prefill_speedup": {},
        "decode_ms": {},
        "prefill_ms": {},
    }
    for name in formats:
        bench_format(name, args, peers, stream, one_stream, result)
    result["read_gigabytes_per_second"] = round(statistics.median(READS) / 1e9, 1)
    print_json_line(**result)


READS: list[float] = []


def bench_format(
    name: str,
    args: argparse.Namespace,
    peers: list[Peer],
    stream: ReadStream,
    one_stream: ReadStream,
    result: dict[str, Any],
) -> None:
    rng = np.random.default_rng(0)
    spec = LayerSpec(
        name, args.experts, args.hidden, args.intermediate, scale_number="fp16" if name.startswith("int4") else ""
    )
    values = (
        rng.standard_normal((2 * args.intermediate, args.hidden), np.float32) * np.float32(args.hidden**-0.5),
        rng.standard_normal((args.hidden, args.intermediate), np.float32) * np.float32(args.intermediate**-0.5),
    )
    stored = quantise(spec, *values)
    layer = CompiledLayer(spec)
    first = native.buffer(spec.layout.expert_bytes)
    layer.kernel.pack(stored, first)
    for expert in range(args.experts):
        packed = native.buffer(spec.layout.expert_bytes)
        packed[:] = first
        layer.put_packed(expert, packed)
    gate_up, down, _, _ = dequantise(spec, stored)
    experts = Experts(args.experts, gate_up, down, stored, args.top_k, available_threads())

    counts = [1, 4]
    inputs = {count: made_inputs(count, args.hidden, args.top_k) for count in (*counts, args.prefill) if count}
    tokens = {count: float_to_numbers(i.tokens, "bf16") for count, i in inputs.items()}
    wanted = {count: reference_rows(spec, stored, i, 1) for count, i in inputs.items()}
    steps = {count: DecodeStep(layer, count, args.top_k) for count in inputs}

    def ours(count: int, ids: Any) -> Any:
        return layer.moe(tokens[count], ids, inputs[count].weights)

    for count, step in steps.items():
        check("hotset", name, numbers_to_float(ours(count, step.next_ids()), "bf16"), wanted[count])

    for count in counts:
        step, mine, reads = steps[count], [], []
        for _ in range(args.rounds):  # as many bytes each
            reads.append(stream.rate(step.stored_bytes))
            mine.append(timed(lambda ids, count=count: ours(count, ids), step.next_ids()))
        READS.extend(reads)
        rate, ceiling = step.stored_bytes / statistics.median(mine), statistics.median(reads)
        share = rate / ceiling
        pairs = statistics.median(step.stored_bytes / t / r for t, r in zip(mine, reads, strict=True))
        best = step.stored_bytes / min(mine) / max(reads)
        target = f", target {TARGETS[name] * 100:.0f} %" if name in TARGETS else ""
        print(
            f"{name}, {count} token{'s' * (count > 1)}: {statistics.median(mine) * 1e3:.2f} ms, {rate / 1e9:.1f} of "
            f"{ceiling / 1e9:.1f} GB/s = {share * 100:.0f} % (median of pairs {pairs * 100:.0f} %, best over best "
            f"{best * 100:.0f} %{target})",
            flush=True,
        )
        one = one_core_share(layer, step, one_stream, args.rounds, tokens[count], inputs[count].weights)
        print(f"  one core, CPU time (what else runs takes no part): {one * 100:.0f} %", flush=True)
        result["decode_share_one_core"].setdefault(name, {})[str(count)] = round(one, 3)
        if count == 1:
            result["decode_share"][name] = round(share, 3)
        result["decode_ms"].setdefault(name, {})[str(count)] = round(statistics.median(mine) * 1e3, 3)
    if args.prefill:
        alone = [timed(lambda ids: ours(args.prefill, ids), steps[args.prefill].next_ids()) for _ in range(3)]
        flops = 6.0 * args.prefill * args.top_k * args.hidden * args.intermediate
        took = statistics.median(alone)
        print(f"{name}, {args.prefill} tokens: {took * 1e3:.1f} ms, {flops / took / 1e9:.0f} GFLOP/s", flush=True)
        result["prefill_ms"][name] = round(statistics.median(alone) * 1e3, 2)

    for peer in peers:
        ratios: dict[int, list[float]] = {count: [] for count in inputs}
        for label, make in peer.variants(name):
            try:
                prepare = make(experts)
                runs = {count: prepare(i) for count, i in inputs.items() if count <= 8 or peer.prefills}
                for count, run in runs.items():
                    out = run(steps[count].next_ids())
                    check(
                        f"{peer.name} {label}",
                        name,
                        run.output() if hasattr(run, "output") else as_rows(out),
                        wanted[count],
                    )
            except Exception as problem:
                print(f"  {peer.name} {label}: left out: {type(problem).__name__}: {problem}")
                continue
            for count, run in runs.items():
                pairs = []
                for _ in range(args.rounds if count <= 8 else 3):
                    a = timed(lambda ids, count=count: ours(count, ids), steps[count].next_ids())
                    b = timed(run, steps[count].next_ids())
                    pairs.append((a, b))
                mine, theirs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
                ratios[count].append(theirs / mine)
                who = f"  {peer.name} {label}, {count} tokens"
                print(f"{who}: {theirs * 1e3:.2f} ms against {mine * 1e3:.2f} = {theirs / mine:.2f} x", flush=True)
            del prepare, runs
            gc.collect()
        if all(ratios[count] for count in counts):
            # the peer's best variant at each count, hotset's worst count
            result["decode_speedup"].setdefault(peer.name, {})[name] = round(min(min(ratios[c]) for c in counts), 2)
            if args.prefill and ratios[args.prefill]:
                result["prefill_speedup"].setdefault(peer.name, {})[name] = round(min(ratios[args.prefill]), 2)


def one_core_share(layer: Any, step: DecodeStep, stream: ReadStream, rounds: int, tokens: Any, weights: Any) -> float:
    """Decode over reading on one thread, by the thread's own CPU time: medians, interleaved."""
    mine, reads = [], []
    for _ in range(rounds):
        start = time.thread_time()
        read = stream.read(step.stored_bytes)
        middle = time.thread_time()
        layer.moe(tokens, step.next_ids(), weights, threads=1)
        reads.append((middle - start) / read)
        mine.append((time.thread_time() - middle) / step.stored_bytes)
    return statistics.median(reads) / statistics.median(mine)


def made_inputs(count: int, hidden: int, top_k: int) -> Inputs:
    rng = np.random.default_rng(3)
    values = numbers_to_float(float_to_numbers(rng.standard_normal((count, hidden)), "bf16"), "bf16")
    return Inputs(values, numbers_to_float(float_to_numbers(rng.random((count, top_k)), "bf16"), "bf16"))


def reference_rows(spec: LayerSpec, stored: Any, inputs: Inputs, count: int) -> Any:
    """The first `count` output rows: all experts are the same one."""
    return np.stack([reference.expert(spec, stored, inputs.tokens[t]) * inputs.weights[t].sum() for t in range(count)])


def check(who: str, name: str, got: Any, wanted: Any) -> None:
    error = np.linalg.norm(got[: len(wanted)] - wanted) / np.linalg.norm(wanted)
    allowed = QUANTISED_ERROR.get(name, 5e-2) if who != "hotset" else 3e-2
    if name in ALLOWED_ERROR:
        allowed = max(ALLOWED_ERROR[name], 2e-2)
    if not error < allowed:
        raise AssertionError(f"{who} on {name} is off by {error:.3f} of the reference, allowed {allowed}")


def as_rows(out: Any) -> Any:
    return out.float().numpy()


def timed(run: Any, ids: Any) -> float:
    time.sleep(REST_SECONDS)
    start = time.perf_counter()
    run(ids)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
