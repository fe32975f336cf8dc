"""Decode time predicted by the cost model beside measured, at 25, 50 and 100 % of experts in the arena.

    python benchmarks/bench_predict.py [--quick] [--threads N] [--model FOLDER ...]

Models: the demo model of the source tree, and a random Qwen3-MoE of about 1.5 GB that is made on the spot; or those
given. The prediction is made of two prices (a pass without experts, one expert) and of the hits and misses that replay
of the recorded routing gives. The prices come from passes that compute a quarter and three quarters of other tokens'
picks, in turn with the decode. Medians over rounds of each round's mean. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench_load import FULL, QUICK, make_checkpoint
from common import print_header, print_json_line

BUDGETS = ("25%", "50%", "100%")
DEMO = Path(__file__).parents[1] / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, help="threads of torch; default its own choice")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model", type=Path, action="append", help="model folder instead of the two; repeatable")
    args = parser.parse_args()
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    rounds = args.rounds or (3 if args.quick else 15)
    tokens = 12 if args.quick else 24
    print_header("decode time, predicted and measured", threads=torch.get_num_threads(), rounds=rounds, tokens=tokens)
    with tempfile.TemporaryDirectory(prefix="hotset-bench-") as scratch:
        models = {folder.name: folder for folder in args.model or ()}
        if not models:
            demo = sorted(p.parent for p in DEMO.glob("**/config.json"))
            if demo:
                models["demo"] = demo[0]
            else:
                print("the demo model is not in the source tree: left out")
            models["random Qwen3-MoE"] = Path(scratch)
            make_checkpoint(Path(scratch), QUICK if args.quick else FULL)
        results = {name: run(folder, rounds, tokens) for name, folder in models.items()}
    predicted, measured, error = (
        {name: {b: row[key] for b, row in found.items()} for name, found in results.items()}
        for key in ("predicted", "measured", "error")
    )
    print_json_line(predicted=predicted, measured=measured, error=error)


def run(folder: Path, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Rows by budget."""
    from hotset.bench import bench

    print(folder.name)
    found = {}
    for budget, row in zip(BUDGETS, bench(folder, budgets=BUDGETS, rounds=rounds, new_tokens=tokens), strict=True):
        print(
            f"  {budget:>5}: predicted {row.predicted * 1e3:7.2f} ms, measured {row.measured * 1e3:7.2f} ms "
            f"(rounds {row.spread[0] * 1e3:.2f} to {row.spread[1] * 1e3:.2f}), error {row.error * 100:+.1f} %"
        )
        found[budget] = {"predicted": row.predicted, "measured": row.measured, "error": row.error}
    return found


if __name__ == "__main__":
    main()
