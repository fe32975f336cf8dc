"""Replay: (token, layer) steps per second of one core, LRU and EMA, at 256 experts, top-8.

    python benchmarks/bench_replay.py [--quick]

Routing is made up (skewed, drifting); a quarter of each layer is resident. The figure is steps per second of processor
time of the one thread that replays, so that a busy machine does not hide it; wall time is printed beside it. Before
timing, the LRU hits are compared with cachetools on the same requests. Where moe-policylang is installed, its replay of
the same trace with an LRU cache of the same size is timed too. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import cachetools
import numpy as np
from common import print_header, print_json_line

import hotset

EXPERTS, TOP_K, SLOTS = 256, 8, 64


def made_up(layers: int, tokens: int) -> hotset.Trace:
    """Skewed picks whose popularity drifts from document to document."""
    rng = np.random.default_rng(0)
    ids = np.empty((layers, tokens, TOP_K), np.int16)
    heat = rng.normal(size=(layers, 1, EXPERTS)) * 1.2
    for start in range(0, tokens, 500):
        stop = min(tokens, start + 500)
        here = heat + rng.normal(size=(layers, 1, EXPERTS)) * 0.8
        noisy = here + rng.gumbel(size=(layers, stop - start, EXPERTS))
        ids[:, start:stop] = np.argpartition(-noisy, TOP_K, axis=2)[:, :, :TOP_K]
    phase = np.ones(tokens, np.uint8)
    return hotset.Trace.from_arrays(ids, num_experts=EXPERTS, sequence_start=range(0, tokens, 500), phase=phase)


def steps_per_second(trace: hotset.Trace, policy: str, repeats: int) -> dict[str, float]:
    """Median over repeats, of processor time and of wall time."""
    steps = trace.num_layers * trace.num_tokens
    cpu, wall = [], []
    for _ in range(repeats):
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        hotset.replay(trace, policy, experts_per_layer=SLOTS)
        cpu.append(steps / (time.thread_time() - begin_cpu))
        wall.append(steps / (time.perf_counter() - begin))
    return {"cpu": statistics.median(cpu), "wall": statistics.median(wall)}


def check_lru(trace: hotset.Trace) -> None:
    """Our LRU and cachetools' make the same hits on one layer."""
    short = trace.select_sequences(range(2))
    ours = hotset.replay(short, "lru", experts_per_layer=SLOTS, initial="empty")
    hits = 0
    for row in range(short.num_layers):
        cache: cachetools.LRUCache[int, bool] = cachetools.LRUCache(SLOTS)
        for expert in short.layer(row).ravel().tolist():
            hits += expert in cache
            cache[expert] = True
    assert ours.hit_rate == hits / short.expert_ids.size, (ours.hit_rate, hits / short.expert_ids.size)


def policylang_steps_per_second(trace: hotset.Trace) -> float | None:
    """moe-policylang's own per-layer LRU replay, or None where it is not installed. It takes router scores [T, E]."""
    try:
        from moe_policylang.benchmark.replay import policy_topk_lru
    except ImportError:
        return None
    scores = np.zeros((trace.num_tokens, EXPERTS), np.float32)
    np.put_along_axis(scores, trace.layer(0).astype(np.int64), 1.0, axis=1)
    begin = time.thread_time()
    policy_topk_lru(scores, TOP_K, SLOTS)
    return trace.num_tokens / (time.thread_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    trace = made_up(2 if quick else 8, 20_000 if quick else 50_000)
    print_header("replay", layers=trace.num_layers, tokens=trace.num_tokens, top_k=TOP_K, experts=EXPERTS, slots=SLOTS)
    check_lru(trace)
    result: dict[str, Any] = {}
    for policy in ("lru", "ema"):
        hotset.replay(trace, policy, experts_per_layer=SLOTS)
        rates = steps_per_second(trace, policy, 3 if quick else 7)
        wall = rates["wall"] / 1e6
        print(f"{policy}: {rates['cpu'] / 1e6:.2f} M steps per second of one core ({wall:.2f} M by wall time)")
        result[f"{policy}_steps_per_second"] = rates["cpu"]
        result[f"{policy}_steps_per_second_wall"] = rates["wall"]
    peer = policylang_steps_per_second(trace.select_sequences(range(10)))
    print("moe-policylang: " + ("not installed" if peer is None else f"{peer / 1e6:.4f} M steps per second"))
    result["moe_policylang_steps_per_second"] = peer
    print_json_line(**result)


if __name__ == "__main__":
    main()
