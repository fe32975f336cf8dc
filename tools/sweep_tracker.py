"""Choose the defaults of EmaHotnessTracker and Rebalancer on the four ESFT traces, and print the sweep.

    python tools/sweep_tracker.py TRACES_FOLDER [--stage averages|rules|lookahead]

Two workloads on every fifth layer, at 16 and 32 of 64 slots, warm-started from counts:
  steady   each task, documents shuffled, from the task's own counts: no task more than 0.5 points under the static plan
  drift    the four tasks one after the other, from the counts of the first: never more than 2 points under each task's
           own static mask over the 1000 tokens that begin 500 after a change
Among settings that keep both, the least cost: misses + 0.25 x loads per (token, layer). A load keeps the link busy
about as long as a miss keeps the CPU, but in the background; a quarter is what that is taken to be worth.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

import hotset
from hotset.adaptation.tracker import top_per_layer

TASKS = ("intent", "law", "summary", "translation")
LOAD_COST = 0.25


def every_fifth_layer(trace: hotset.Trace) -> hotset.Trace:
    """The same tokens, fewer layers."""
    ids = np.ascontiguousarray(trace.expert_ids[::5])
    return hotset.Trace.from_arrays(ids, num_experts=trace.num_experts, sequence_start=trace.sequence_start)


def joined(traces: list[hotset.Trace]) -> hotset.Trace:
    """One trace of all tokens, one sequence per task."""
    starts = np.cumsum([0, *(t.num_tokens for t in traces[:-1])])
    ids = np.concatenate([t.expert_ids for t in traces], axis=1)
    return hotset.Trace.from_arrays(ids, num_experts=traces[0].num_experts, sequence_start=starts)


def judge(traces: list[hotset.Trace], policy: str, options: dict[str, Any]) -> dict[str, float]:
    """Mean cost over workloads and slots, and the worst of each constraint (in points of hit rate)."""
    drift = joined(traces)
    top_k = drift.top_k
    costs, steady, behind = [], [], []
    for slots in (16, 32):
        for trace in traces:
            shuffled = trace.select_sequences(np.random.default_rng(1).permutation(trace.num_sequences))
            done = hotset.replay(shuffled, policy, experts_per_layer=slots, options=options)
            static = hotset.replay(shuffled, "static", experts_per_layer=slots)
            costs.append(top_k * (1 - done.hit_rate) + LOAD_COST * done.loads_per_token / trace.num_layers)
            steady.append(100 * (done.hit_rate - static.hit_rate))
        done = hotset.replay(drift, policy, experts_per_layer=slots, prior=traces[0], options=options)
        costs.append(top_k * (1 - done.hit_rate) + LOAD_COST * done.loads_per_token / drift.num_layers)
        # the same replay again, with all tokens but one window skipped, gives that window's hit rate
        for trace, start in zip(traces[1:], drift.sequence_start[1:], strict=True):
            stop = int(start) + 1500
            upto = hotset.Trace.from_arrays(
                np.ascontiguousarray(drift.expert_ids[:, :stop]), num_experts=drift.num_experts
            )
            window = hotset.replay(
                upto, policy, experts_per_layer=slots, prior=traces[0], skip_tokens=int(start) + 500, options=options
            )
            mask = top_per_layer(trace.counts, slots)
            ids = drift.expert_ids[:, int(start) + 500 : stop]
            own = np.take_along_axis(mask, ids.reshape(len(mask), -1).astype(np.int64), axis=1).mean()
            behind.append(100 * (own - window.hit_rate))
    return {"cost": float(np.mean(costs)), "steady": min(steady), "behind": max(behind)}


def grid(stage: str) -> list[tuple[str, dict[str, Any]]]:
    """(policy, options) to try."""
    if stage == "averages":
        plain = [{"fast_weight": 0.0}]
        two = [{"fast_decay": f, "fast_weight": w} for f, w in itertools.product((0.7, 0.8, 0.9), (0.05, 0.1, 0.2))]
        return [
            ("ema", {"decay": decay, "hysteresis": hysteresis, **fast})
            for decay, fast, hysteresis in itertools.product((0.995, 0.998, 0.999), plain + two, (0.01, 0.02, 0.03))
        ]
    if stage == "rules":
        return [
            ("ema", {"max_moves": moves, "min_dwell": dwell})
            for moves, dwell in itertools.product((1, 2, 4), (0, 16, 64))
        ]
    return [
        ("look-ahead", {"margin": margin, "max_prefetch": most, "hotness_weight": weight})
        for margin, most, weight in itertools.product((0.1, 0.2, 0.4), (1, 2), (1.0, 2.0))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", choices=("averages", "rules", "lookahead"), default="averages")
    args = parser.parse_args()
    traces = [every_fifth_layer(hotset.Trace.open(args.folder / f"esft-{task}-prefill.npz")) for task in TASKS]
    tried = []
    for policy, options in grid(args.stage):
        tried.append((judge(traces, policy, options), policy, options))
        figures = tried[-1][0]
        kept = figures["steady"] >= -0.5 and figures["behind"] <= 2.0
        text = ", ".join(f"{key} {value:g}" for key, value in options.items())
        print(
            f"cost {figures['cost']:.4f}  steady {figures['steady']:+.2f}  behind {figures['behind']:+.2f}  "
            f"{'ok ' if kept else 'no '} {policy} {text}",
            flush=True,
        )
    allowed = [entry for entry in tried if entry[0]["steady"] >= -0.5 and entry[0]["behind"] <= 2.0]
    if allowed:
        print("least cost:", min(allowed, key=lambda entry: entry[0]["cost"]))


if __name__ == "__main__":
    main()
