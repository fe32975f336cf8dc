"""What shedding costs in quality: perplexity on held-out text against share of experts resident and keep_mass.

Plans on the first half of every text, measures on the second half. "exact" serves every miss on the host and must have
the perplexity of the unmodified model, which is checked first. "all" sheds whatever is missing, over the limit or not:
what a captured graph would do.

Texts: --texts, by default demo/heldout; model: --model, by default demo/model. --plot writes a picture.
With --trace (a trace with gate weights) no model runs: planned on two thirds of its documents, it shows how much gate
mass the rest would drop and how many rows would still have to be served exactly.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import print_header, print_json_line

DEMO = Path(__file__).parents[1] / "demo"
SHARES = (0.25, 0.5, 0.75, 0.9)
KEEP_MASS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3)


def windows(tokenizer: Any, texts: list[str], length: int, tokens: int) -> list[list[int]]:
    """Windows of `length` tokens, taken in turn from the texts until `tokens` are reached."""
    per_text = [tokenizer(text)["input_ids"] for text in texts]
    cut = [[ids[i : i + length] for i in range(0, len(ids) - length + 1, length)] for ids in per_text]
    turns = [piece for turn in range(max(map(len, cut), default=0)) for of in cut for piece in of[turn : turn + 1]]
    if not turns:
        sys.exit(f"bench_shed_quality: no half of a text has {length} tokens")
    return turns[: max(1, tokens // length)]


def perplexity(model: Any, pieces: list[list[int]], batch: int) -> float:
    """exp of the mean negative log-likelihood of each next token within its window."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(pieces), batch):
            ids = torch.tensor(pieces[start : start + batch])
            logits = model(ids).logits[:, :-1].float()
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            )
            count += ids[:, 1:].numel()
    return math.exp(total / count)


def measure(model: Any, pieces: list[list[int]], batch: int, policy: Any) -> dict[str, float]:
    """Perplexity under a policy (None = exact) and what the ledger says, over all layers."""
    from hotset.runtime.shedding import disable_shedding, enable_shedding

    ledger = None if policy is None else enable_shedding(model, policy)
    found = {"perplexity": perplexity(model, pieces, batch)}
    disable_shedding(model)
    if ledger is not None:
        totals = ledger.totals()
        rows = totals.tokens.sum()
        found["dropped_mass"] = float(totals.dropped_mass.sum() / totals.mass.sum())
        found["shed_rows"] = float(totals.shed_rows.sum() / rows)
        found["rows_over_limit"] = float(totals.rows_over_limit.sum() / rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens, one share, three bounds")
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--texts", type=Path, default=DEMO / "heldout", help="folder of .txt files")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens to measure on, for each point")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--trace", type=Path, help="a recorded trace with gate weights, instead of a model")
    parser.add_argument("--plot", type=Path, help="write the curves there (.svg or .png)")
    options = parser.parse_args()
    if options.trace:
        on_trace(options.trace, options.quick)
        return
    paths = sorted(options.texts.glob("*.txt"))
    if not paths or not (options.model / "config.json").exists():
        sys.exit(f"bench_shed_quality: wanted a model in {options.model} and .txt files in {options.texts}")

    import hotset
    from hotset.ops import ShedPolicy
    from hotset.runtime.generation import load_tokenizer
    from hotset.traces.documents import Document
    from hotset.traces.recorder import load_plain, record

    tokens = 2_048 if options.quick else options.tokens
    shares, bounds = ((0.5,), (0.9, 0.5, 0.3)) if options.quick else (SHARES, KEEP_MASS)
    tokenizer = load_tokenizer(options.model)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    pieces = windows(tokenizer, [text[len(text) // 2 :] for text in texts], options.length, tokens)
    print_header(
        "bench_shed_quality: perplexity on held-out text, shed against exact",
        model=options.model.name,
        tokens=sum(map(len, pieces)),
        window=options.length,
        texts=" ".join(path.stem for path in paths),
    )
    plain, _ = load_plain(options.model, device="cpu", dtype="float32")
    unmodified = perplexity(plain, pieces, batch=8)
    with tempfile.TemporaryDirectory() as scratch:
        halves = [Document(path.stem, text[: len(text) // 2]) for path, text in zip(paths, texts, strict=True)]
        trace = record(plain, halves, Path(scratch) / "trace", tokenizer=tokenizer, max_tokens=options.length)
        plans = {share: hotset.plan(trace, fraction=share) for share in shares}
    del plain
    print(f"unmodified model: {unmodified:.4f}\n")
    print(
        f"{'resident':>8} {'keep_mass':>9} {'perplexity':>10} {'over exact':>10} {'mass dropped':>12} {'rows shed':>9} "
        f"{'rows with a miss served exactly':>32}"
    )
    points: list[dict[str, Any]] = []
    for share in shares:
        model = hotset.load(options.model, plan=plans[share], device="cpu", dtype="float32")
        exact = measure(model, pieces, 8, None)["perplexity"]
        assert abs(exact / unmodified - 1) < 1e-4, f"exact {exact} is not the unmodified model's {unmodified}"
        print(f"{share:>8.0%} {'exact':>9} {exact:>10.4f} {0:>10.2%} {0:>12.2%} {0:>9.2%}")
        points.append({"share": share, "keep_mass": "exact", "perplexity": exact})
        policies = [(str(bound), ShedPolicy(bound)) for bound in bounds]
        policies.append(("all", ShedPolicy(min(bounds), over_limit="shed")))
        for name, policy in policies:
            found = measure(model, pieces, 8, policy)
            points.append({"share": share, "keep_mass": name, **found})
            served = 0.0 if name == "all" else found["rows_over_limit"]
            print(
                f"{share:>8.0%} {name:>9} {found['perplexity']:>10.4f} {found['perplexity'] / exact - 1:>10.2%} "
                f"{found['dropped_mass']:>12.2%} {found['shed_rows']:>9.2%} {served:>32.2%}"
            )
    if options.plot:
        plot(points, options.plot)
    print_json_line(unmodified_perplexity=unmodified, points=points)


def on_trace(path: Path, quick: bool) -> None:
    """Mass and rows over a recorded trace, every layer, per share of experts resident."""
    import hotset
    from hotset.ops import ShedLedger, ShedPolicy

    planned, held = hotset.Trace.open(path).split()
    if held.weights is None:
        sys.exit(f"bench_shed_quality: {path} has no gate weights: record it again with this version")
    tokens = min(held.num_tokens, 1_000 if quick else held.num_tokens)
    print_header(
        "bench_shed_quality: gate mass over a recorded trace", trace=path.stem, layers=held.num_layers, tokens=tokens
    )
    heads = ("resident", "keep_mass", "mass dropped", "rows resident", "rows shed", "served exactly")
    print(" ".join(f"{head:>{max(len(head), 8)}}" for head in heads))
    points = []
    for share in SHARES:
        mask = hotset.plan(planned, fraction=share).gpu_experts_mask
        for bound in (0.9, 0.5) if quick else KEEP_MASS:
            ledger = ShedLedger(held.num_layers)
            for row in range(held.num_layers):
                table = np.where(mask[row], np.cumsum(mask[row]) - 1, -1).astype(np.int32)
                weights = held.layer_weights(row)
                assert weights is not None
                case = held.layer(row)[:tokens].astype(np.int32), weights[:tokens].astype(np.float32), table
                ledger.record(row, ShedPolicy(bound).apply(*case))
            totals = ledger.totals()
            rows = totals.tokens.sum()
            point = {
                "share": share,
                "keep_mass": bound,
                "dropped_mass": float(totals.dropped_mass.sum() / totals.mass.sum()),
                "shed_rows": float(totals.shed_rows.sum() / rows),
                "rows_over_limit": float(totals.rows_over_limit.sum() / rows),
            }
            points.append(point)
            resident = 1 - point["shed_rows"] - point["rows_over_limit"]
            print(
                f"{share:>8.0%} {bound:>9} {point['dropped_mass']:>12.2%} {resident:>13.2%} {point['shed_rows']:>9.2%} "
                f"{point['rows_over_limit']:>14.2%}"
            )
    print_json_line(trace=path.stem, points=points)


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Perplexity over exact against the share of rows with a miss served exactly, one curve per share resident."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    for share in sorted({point["share"] for point in points}):
        mine = [p for p in points if p["share"] == share]
        exact = next(p["perplexity"] for p in mine if p["keep_mass"] == "exact")
        curve = [p for p in mine if p["keep_mass"] not in ("exact", "all")]
        over = np.array([p["perplexity"] / exact - 1 for p in curve]) * 100
        axes.plot([float(p["keep_mass"]) for p in curve], over, marker="o", label=f"{share:.0%} of experts resident")
    axes.set_xlabel("keep_mass: least share of a row's gate mass that stays")
    axes.set_ylabel("perplexity over exact, %")
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
