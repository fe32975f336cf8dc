"""EmaHotnessTracker: one token's cost as experts grow, and a batch against vectorised torch.

    python benchmarks/bench_tracker.py [--quick]

Peer: the way one writes it with torch, decay powers and index_add_, float64. Timed alternately in one process, medians;
results are compared before anything is timed. The tracker as shipped keeps two averages, so its peer adds twice; with
fast_weight=0 ("one_average") both keep one. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from common import print_header, print_json_line

from hotset import EmaHotnessTracker

TOP_K = 8


def torch_observe(averages: list[torch.Tensor], decays: list[float], ids: torch.Tensor) -> None:
    """Each average [E] moves on by the tokens of ids [T, K]."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    for average, decay in zip(averages, decays, strict=True):
        powers = (1 - decay) * decay ** torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
        average.mul_(decay**tokens)
        average.index_add_(0, flat, powers.repeat_interleave(top_k))


def medians(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, taken in turn so that a busy moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def picks(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """[T, K] skewed picks without repeats."""
    heat = rng.normal(size=experts) * 1.5
    return np.argsort(-(heat + rng.gumbel(size=(tokens, experts))), axis=1)[:, :TOP_K].astype(np.int64)


def observe_seconds(repeats: int, calls: int) -> dict[int, float]:
    """Seconds per observe of one token, by number of experts."""
    rng = np.random.default_rng(0)
    trackers = {e: EmaHotnessTracker(1, e) for e in (64, 512)}
    tokens = {e: list(picks(rng, 256, e)) for e in trackers}

    def many(e: int) -> Callable[[], None]:
        tracker, rows = trackers[e], tokens[e]

        def call() -> None:
            for i in range(calls):
                tracker.observe(0, rows[i & 255])

        return call

    timed = {str(e): many(e) for e in trackers}
    for call in timed.values():
        call()
    found = medians(timed, repeats)
    return {e: found[str(e)] / calls for e in trackers}


def batch_seconds(fast_weight: float | None, repeats: int, tokens: int, experts: int) -> dict[str, float]:
    """Seconds per observe_batch of [tokens, 8]: ours with torch ids, and the peer's."""
    ids = torch.from_numpy(picks(np.random.default_rng(1), tokens, experts))
    settings = {} if fast_weight is None else {"fast_weight": fast_weight}
    tracker = EmaHotnessTracker(1, experts, **settings)
    slow, fast = tracker.arrays.decay.tolist()
    weight = float(tracker.arrays.fast_weight[0])
    decays = [slow, fast] if weight > 0 else [slow]
    averages = [torch.zeros(experts, dtype=torch.float64) for _ in decays]
    for _ in range(3):
        tracker.observe_batch({0: ids})
        torch_observe(averages, decays, ids)
    expected = averages[0] if weight == 0 else (1 - weight) * averages[0] + weight * averages[1]
    difference = np.abs(tracker.hotness()[0] - expected.numpy()).max()
    assert difference < 1e-9, difference
    return medians(
        {
            "hotset": lambda: tracker.observe_batch({0: ids}),
            "torch": lambda: torch_observe(averages, decays, ids),
        },
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print_header("EmaHotnessTracker", torch=torch.__version__, threads=torch.get_num_threads(), top_k=TOP_K)
    single = observe_seconds(100 if quick else 400, 200)
    ratio = single[512] / single[64]
    print(
        f"observe, one token, top-{TOP_K}: {single[64] * 1e6:.2f} us at E = 64, {single[512] * 1e6:.2f} us at E = 512"
    )
    repeats = 40 if quick else 300
    result = {"observe_seconds": single, "observe_ratio_512_to_64": ratio}
    for name, weight in (("", None), ("one_average_", 0.0)):
        times = batch_seconds(weight, repeats, 4096, 256)
        speedup = times["torch"] / times["hotset"]
        label = "one average" if weight == 0.0 else "as shipped, two averages"
        print(
            f"observe_batch, 4096 tokens x {TOP_K} of 256, {label}: hotset {times['hotset'] * 1e6:.0f} us, "
            f"torch {times['torch'] * 1e6:.0f} us, {speedup:.1f} times"
        )
        result[f"{name}observe_batch_seconds"] = times
        result[f"{name}observe_batch_speedup"] = speedup
    print_json_line(**result)


if __name__ == "__main__":
    main()
