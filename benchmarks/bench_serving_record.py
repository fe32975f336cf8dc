"""What recording the routing costs while a model serves: decode with and without, in turn, in one process.

The same prompt is continued by a random Qwen3-MoE whose experts are all in memory; the tokens are compared first. The
cost is the median over pairs of runs of (processor time with / without - 1): other processes do not count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench_load import FULL, QUICK, make_checkpoint
from common import print_header, print_json_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and few pairs")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    shape, pairs = (QUICK, options.pairs or 5) if options.quick else (FULL, options.pairs or 15)
    print_header("bench_serving_record: decode while the routing is recorded", pairs=pairs, **shape)
    import torch
    import transformers

    import hotset

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_checkpoint(folder, shape)
        model = hotset.load(folder, device="cpu")
        ids = torch.arange(1, 17)[None]

        def run() -> tuple[float, list[int]]:
            started = time.process_time()
            out = model.generate(
                ids, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False, pad_token_id=0
            )
            return time.process_time() - started, out[0].tolist()

        _, expected = run()
        ratios, plain = [], []
        for index in range(pairs):
            # which of the two goes first alternates, so that a drift of the machine cancels
            seconds = {}
            for recorded in (index % 2 == 0, index % 2 == 1):
                if recorded:
                    with model.hotset.recording(Path(scratch) / "trace", overwrite=True):
                        seconds[recorded], text = run()
                else:
                    seconds[recorded], text = run()
                assert text == expected, "recording changed the text"
            ratios.append(seconds[True] / seconds[False])
            plain.append(seconds[False])
    cost = statistics.median(ratios) - 1
    quartiles = statistics.quantiles(ratios, n=4)
    per_token = statistics.median(plain) / options.tokens
    print(
        f"{per_token * 1e3:.1f} ms of processor time per token; recording costs {cost:+.2%} ({quartiles[0] - 1:+.2%} to"
    )
    print(f"{quartiles[2] - 1:+.2%} between the quartiles)")
    print_json_line(
        recording_cost=round(cost, 4),
        quartiles=[round(quartiles[0] - 1, 4), round(quartiles[2] - 1, 4)],
        ms_per_token=round(per_token * 1e3, 2),
        pairs=pairs,
    )


if __name__ == "__main__":
    main()
