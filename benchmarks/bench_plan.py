"""Planning at the size of DeepSeek-V3: 58 layers x 256 experts x top-8, a million tokens of made-up routing.

Times `certified` with its bound beside `frequency`, `coverage` and `cluster` (each once, after a small run that
compiles the loops), the peak resident memory of this process until then, and the three measures beside their
vectorised torch counterparts on one layer: interleaved, median of several rounds, results checked equal beforehand.
torch runs on as many threads as it takes by itself.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
from common import print_header, print_json_line

import hotset
from hotset import Trace
from hotset.traces.synthetic import synthetic_trace
from hotset.units import format_bytes

STRATEGIES = ("certified", "frequency", "coverage", "cluster")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 layers x 64 experts x top-6, 50,000 tokens")
    parser.add_argument("--fraction", type=float, default=0.25, help="budget")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the three measures")
    options = parser.parse_args()
    layers, experts, top_k, tokens = (4, 64, 6, 50_000) if options.quick else (58, 256, 8, 1_000_000)
    print_header(
        "bench_plan: planning with a proven bound, beside the other strategies; measures beside torch",
        layers=layers,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        budget=options.fraction,
    )
    began = time.perf_counter()
    trace = synthetic_trace(num_layers=layers, num_experts=experts, top_k=top_k, num_tokens=tokens)
    print(f"trace made in {time.perf_counter() - began:.1f} s, {format_bytes(trace.expert_ids.nbytes)}")
    small = synthetic_trace(num_layers=2, num_experts=32, top_k=4, num_tokens=2000)
    result: dict[str, object] = {}
    for name in STRATEGIES:
        hotset.plan(small, fraction=0.3, strategy=name)
        began, used = time.perf_counter(), time.process_time()
        plan = hotset.plan(trace, fraction=options.fraction, strategy=name)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        gap = "" if plan.gap is None else f", bound {plan.bound:,.0f}, gap {plan.gap:.3%}"
        print(f"{name:10} {seconds:7.2f} s ({used:.1f} s of processor time)   score {plan.score:,.0f}{gap}")
        result[f"{name}_seconds"] = seconds
        if name == "certified":
            result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(f"{'':10} peak resident memory {format_bytes(result['peak_bytes'])}")
            result["certified_gap"] = plan.gap
    result |= measures(trace, options.rounds)
    print_json_line(**result)


def measures(trace: Trace, rounds: int) -> dict[str, float | None]:
    """Our three measures and torch's on the first layer: how many times faster ours are."""
    names = ("coactivation_speedup", "token_resident_rate_speedup", "gpu_hit_rate_speedup")
    try:
        import torch
    except ImportError:
        print("torch is not installed: the three measures are not compared")
        return dict.fromkeys(names)
    one = Trace.from_arrays(trace.layer(0)[None], num_experts=trace.num_experts)
    mask = hotset.plan(one, fraction=0.5, strategy="frequency").gpu_experts_mask
    ids = torch.from_numpy(one.expert_ids[0].astype(np.int64))
    resident = torch.from_numpy(mask[0])

    def torch_coactivation() -> object:
        # float32 counts are exact up to 2**24 tokens
        indicator = torch.zeros(len(ids), trace.num_experts)
        indicator.scatter_(1, ids, 1.0)
        return (indicator.T @ indicator).to(torch.int64)

    def torch_resident() -> float:
        return float(resident[ids].all(dim=1).sum()) / len(ids)

    def torch_hits() -> float:
        return float(resident[ids].sum()) / ids.numel()

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        names[0]: (lambda: hotset.build_coactivation_matrix(one), torch_coactivation),
        names[1]: (lambda: hotset.token_resident_rate(mask, one), torch_resident),
        names[2]: (lambda: hotset.gpu_hit_rate(mask, one), torch_hits),
    }
    print(f"one layer of {one.num_tokens:,} tokens, torch {torch.__version__} on {torch.get_num_threads()} threads:")
    speedups: dict[str, float | None] = {}
    for name, (ours, theirs) in pairs.items():
        mine, other = ours(), theirs()
        equal = bool((np.asarray(mine)[0] == other.numpy()).all()) if hasattr(other, "numpy") else mine == other
        assert equal, f"{name}: results differ"
        times = [(clock(ours), clock(theirs)) for _ in range(rounds)]
        my_time, other_time = (statistics.median(t[i] for t in times) for i in (0, 1))
        speedups[name] = statistics.median(b / a for a, b in times)
        print(f"  {name:28} ours {my_time * 1e3:8.2f} ms, torch {other_time * 1e3:8.2f} ms: {speedups[name]:.1f} times")
    return speedups


def clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
