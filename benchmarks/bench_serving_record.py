"""What recording the routing costs while a model serves, in % of a decoded token, with an interval.

    python benchmarks/bench_serving_record.py [--quick] [--blocks N] [--model FOLDER ...]

Models: a random Qwen3-MoE of 48 layers of small experts (the worst case: most calls to record for the least work), the
demo model of the source tree, and a random Qwen3-MoE of about 1.5 GB; or those given. The text is compared first.

paired   One decode, one KV cache, one process. Recording is switched token by token, in blocks of three in random
         order: recorded, not, not. Medians over blocks of recorded less not, and of not less not as the control, in %
         of the median token that is not recorded; 95 % intervals by bootstrap over blocks; wall clock.
alone    The calls that recording adds to, run with and without it on the routing of that decode, nothing between
         them: processor time of the thread. What code costs whose instructions and data are in the caches.
writing  The trace written at the end, by token.

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_load import FULL, QUICK, make_checkpoint
from common import print_header, print_json_line

DEMO = Path(__file__).parents[1] / "demo" / "model"
SMALL_EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 48, "num_experts": 32}
PROMPT_TOKENS = 16
WARM_UP = 10
"""Blocks whose times are not used."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and few blocks")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--model", type=Path, action="append", help="model folder instead of the three; repeatable")
    options = parser.parse_args()
    blocks = options.blocks or (20 if options.quick else 300)
    print_header("bench_serving_record: decode while the routing is recorded", blocks=blocks)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = {folder.name: folder for folder in options.model or ()}
        shapes = {"small": QUICK} if options.quick else {"48 layers": SMALL_EXPERTS, "1.5 GB": FULL}
        for name, shape in {} if models else shapes.items():
            models[name] = Path(scratch) / name
            make_checkpoint(models[name], shape)
        if not (options.model or options.quick) and DEMO.exists():
            models["demo"] = DEMO
        for name, folder in models.items():
            found[name] = row = measured(folder, blocks, Path(scratch) / "trace")
            print(
                f"{name:>10}: {row['ms_per_token']:6.2f} ms per token; recording, paired: {percent(row['cost'])} "
                f"(95 %: {' to '.join(percent(c) for c in row['interval'])}; control "
                f"{' to '.join(percent(c) for c in row['control_interval'])}); alone: {percent(row['cost_alone'])}; "
                f"writing {percent(row['cost_writing'])}"
            )
    worst = max(row["interval"][1] + row["cost_writing"] for row in found.values())
    print_json_line(recording_cost=found, worst_upper_bound=round(worst, 4), blocks=blocks)


def percent(share: float) -> str:
    return f"{share * 100:+.2f} %"


def measured(folder: Path, blocks: int, trace: Path) -> dict[str, Any]:
    """Shares of a token's time, and what they are shares of."""
    import torch

    import hotset
    from hotset.runtime.measure import _decode

    model = hotset.load(folder, device="cpu")
    runtime, ids = model.hotset, torch.arange(1, 1 + PROMPT_TOKENS)[None]
    assert text_of(model, ids) == text_of(model, ids, trace), "recording changed the text"
    random = np.random.default_rng(0)
    recorder = runtime.recording(trace, overwrite=True)
    kept: list[Any] = []
    add = recorder.add
    recorder.add = lambda forward: (kept.append(forward), add(forward))
    times: list[float] = []
    recorded = np.concatenate([random.permutation([True, False, False]) for _ in range(blocks + WARM_UP)])
    decode = _decode(model, ids, len(recorded), None, times)
    for on in recorded.tolist():
        # what `recording` sets and closing unsets: a recording per token would write a file per token
        runtime._recorder = recorder if on else None
        next(decode)
    seconds = np.array(times).reshape(-1, 3)[WARM_UP:]
    on = recorded.reshape(-1, 3)[WARM_UP:]
    plain = seconds[~on].reshape(-1, 2)
    token = float(np.median(plain))
    differences = {"cost": seconds[on] - plain.mean(axis=1), "control": plain[:, 0] - plain[:, 1]}
    row: dict[str, Any] = {"ms_per_token": round(token * 1e3, 3)}
    for name, values in differences.items():
        resampled = np.median(random.choice(values, (4000, len(values))), axis=1) / token
        row[name] = round(float(np.median(values)) / token, 5)
        row["interval" if name == "cost" else "control_interval"] = [
            round(float(q), 5) for q in np.quantile(resampled, (0.025, 0.975))
        ]
    recorder.add = add
    row["cost_alone"] = round(alone(runtime, recorder, [f for f in kept if f.is_decode][-24:]) / token, 5)
    started = time.thread_time()
    recorder.close()
    row["cost_writing"] = round((time.thread_time() - started) / recorder.writer.num_tokens / token, 5)
    return row


def alone(runtime: Any, recorder: Any, forwards: list[Any], rounds: int = 31) -> float:
    """Seconds per forward pass that recording adds to the bookkeeping around it."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for on in found:
            runtime._recorder = recorder if on else None
            started = time.thread_time()
            for forward in forwards:
                runtime._running.forward = replace(forward, picks=[], weights=[])
                for (layer, ids), weights in zip(forward.picks, forward.weights, strict=True):
                    runtime.count(layer, ids, weights)
                runtime._after_forward()
            found[on].append((time.thread_time() - started) / len(forwards))
    return statistics.median(found[True]) - statistics.median(found[False])


def text_of(model: Any, ids: Any, trace: Path | None = None) -> list[int]:
    arguments = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    if trace is None:
        return model.generate(ids, **arguments)[0].tolist()
    with model.hotset.recording(trace, overwrite=True):
        return model.generate(ids, **arguments)[0].tolist()


if __name__ == "__main__":
    main()
