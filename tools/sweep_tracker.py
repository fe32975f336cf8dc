"""Choose the defaults of EmaHotnessTracker, Rebalancer and look-ahead on the four ESFT traces, and print the sweep.

    python tools/sweep_tracker.py TRACES_FOLDER [--stage averages|rules|lookahead]

Two workloads on every fifth layer, at 16 and 32 of 64 slots, warm-started from counts:
  steady   each task, documents shuffled, from the task's own counts
  drift    the four tasks one after the other, from the counts of the first
A setting is allowed if
  - no steady task is more than 0.5 points of hit rate under the static plan,
  - over the 1000 tokens that begin 500 after a change of task it is at most 2 points under the task's own static mask,
  - at each number of slots it loads at most a quarter of what LRU loads.
Of the allowed ones within 0.1 points of the highest mean hit rate, the one that recovers best wins. (look-ahead loads
more by its nature: up to half of what LRU loads.)
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
SLOTS = (16, 32)


def every_fifth_layer(trace: hotset.Trace) -> hotset.Trace:
    """The same tokens, fewer layers."""
    ids = np.ascontiguousarray(trace.expert_ids[::5])
    return hotset.Trace.from_arrays(ids, num_experts=trace.num_experts, sequence_start=trace.sequence_start)


class Workloads:
    """The traces, and what static and LRU make of them."""

    def __init__(self, traces: list[hotset.Trace]) -> None:
        self.tasks = traces
        self.steady = [t.select_sequences(np.random.default_rng(1).permutation(t.num_sequences)) for t in traces]
        self.starts = np.cumsum([0, *(t.num_tokens for t in traces[:-1])])
        ids = np.concatenate([t.expert_ids for t in traces], axis=1)
        self.drift = hotset.Trace.from_arrays(ids, num_experts=traces[0].num_experts)
        self.static = {
            s: [hotset.replay(t, "static", experts_per_layer=s).hit_rate for t in self.steady] for s in SLOTS
        }
        self.lru_loads = {s: np.mean([r.loads_per_token for r in self.replays("lru", s, {})]) for s in SLOTS}

    def replays(self, policy: str, slots: int, options: dict[str, Any]) -> list[hotset.simulation.replay.Replay]:
        """Steady tasks, then drift."""
        done = [hotset.replay(t, policy, experts_per_layer=slots, options=options) for t in self.steady]
        return [
            *done,
            hotset.replay(self.drift, policy, experts_per_layer=slots, prior=self.tasks[0], options=options),
        ]

    def behind(self, policy: str, slots: int, options: dict[str, Any]) -> float:
        """Worst number of points under a task's own mask, 500 to 1500 tokens after the change to it."""
        worst = -100.0
        for trace, start in zip(self.tasks[1:], self.starts[1:].tolist(), strict=True):
            window = np.ascontiguousarray(self.drift.expert_ids[:, : start + 1500])
            upto = hotset.Trace.from_arrays(window, num_experts=trace.num_experts)
            done = hotset.replay(
                upto, policy, experts_per_layer=slots, prior=self.tasks[0], skip_tokens=start + 500, options=options
            )
            mask = top_per_layer(trace.counts, slots)
            ids = window[:, start + 500 :].reshape(len(mask), -1).astype(np.int64)
            worst = max(worst, 100 * (float(np.take_along_axis(mask, ids, axis=1).mean()) - done.hit_rate))
        return worst

    def judge(self, policy: str, options: dict[str, Any]) -> dict[str, float]:
        """hit: mean hit rate, per cent; steady, behind: worst, in points; loads: worst share of LRU's."""
        hits, steady, behind, loads = [], 100.0, -100.0, 0.0
        for slots in SLOTS:
            done = self.replays(policy, slots, options)
            hits += [100 * r.hit_rate for r in done]
            steady = min(steady, *(100 * (r.hit_rate - s) for r, s in zip(done, self.static[slots], strict=False)))
            loads = max(loads, float(np.mean([r.loads_per_token for r in done]) / self.lru_loads[slots]))
            behind = max(behind, self.behind(policy, slots, options))
        return {"hit": float(np.mean(hits)), "steady": steady, "behind": behind, "loads": loads}


def grid(stage: str) -> list[tuple[str, dict[str, Any]]]:
    """(policy, options) to try."""
    if stage == "averages":
        plain = [{"fast_weight": 0.0}]
        two = [
            {"fast_decay": f, "fast_weight": w} for f, w in itertools.product((0.8, 0.85, 0.9, 0.95), (0.1, 0.2, 0.3))
        ]
        return [
            ("ema", {"decay": decay, "hysteresis": hysteresis, **fast})
            for decay, fast, hysteresis in itertools.product((0.995, 0.998, 0.999), plain + two, (0.01, 0.015, 0.02))
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
    workloads = Workloads(traces)
    most_loads = 0.5 if args.stage == "lookahead" else 0.25
    allowed = []
    for policy, options in grid(args.stage):
        found = workloads.judge(policy, options)
        kept = found["steady"] >= -0.5 and found["behind"] <= 2.0 and found["loads"] <= most_loads
        if kept:
            allowed.append((found["hit"], found["behind"], policy, options))
        figures = "  ".join(f"{key} {value:+.3f}" for key, value in found.items())
        settings = ", ".join(f"{key} {value:g}" for key, value in options.items())
        print(f"{figures}  {'ok ' if kept else 'no '} {policy} {settings}", flush=True)
    if allowed:
        best = max(entry[0] for entry in allowed)
        print("chosen:", min((entry for entry in allowed if entry[0] >= best - 0.1), key=lambda entry: entry[1]))


if __name__ == "__main__":
    main()
