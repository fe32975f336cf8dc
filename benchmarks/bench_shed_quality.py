"""What shedding costs in quality: perplexity on held-out text against share of experts resident and keep_mass.

Plans on the first half of every text, measures on the second half. "exact" serves every miss on the host, and has the
perplexity of the unmodified model. "all" sheds whatever is missing, over the limit or not: what a captured graph does.

Texts: --texts, by default demo/heldout; model: --model, by default demo/model. --plot writes a picture, --output the
record that `hotset report PLAN TRACE --shed-quality FILE.json` draws (`hotset.reports.shed_quality` states its format).
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


class ShedExperts:
    """The unmodified model's own experts, with the gate weights that a policy leaves.

    A shed pick has weight 0, so it adds nothing: what the runtime gets by skipping it, at the speed of the model's own
    implementation. `main` checks one point against `hotset.load` and `enable_shedding`.
    """

    KEY = "bench_shed_quality"

    def __init__(self, model: Any, mask: Any) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        from hotset.models.experts import find_expert_layers

        self.model = model
        self.mask = mask
        self.policy: Any = None
        self.ledger: Any = None
        self.row_of = {id(layer.module): row for row, layer in enumerate(find_expert_layers(model))}
        self.experts = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        ALL_EXPERTS_FUNCTIONS.register(self.KEY, self.forward)
        model.set_experts_implementation(self.KEY)

    def forward(self, module: Any, hidden: Any, ids: Any, weights: Any, **more: Any) -> Any:
        import torch

        if self.policy is not None:
            row = self.row_of[id(module)]
            slots = np.where(self.mask[row], np.cumsum(self.mask[row]) - 1, -1).astype(np.int32)
            routing = self.policy.apply(ids.contiguous(), weights.float().contiguous(), torch.from_numpy(slots))
            self.ledger.record(row, routing)
            weights = torch.where(routing.cpu_ids >= 0, routing.cpu_weights, routing.weights).to(weights.dtype)
        return self.experts(module, hidden, ids, weights, **more)

    def measure(self, pieces: list[list[int]], batch: int, policy: Any) -> dict[str, float]:
        """Perplexity under a policy, and what the ledger says over all layers."""
        from hotset.ops import ShedLedger

        self.policy, self.ledger = policy, ShedLedger(len(self.mask))
        found = {"perplexity": perplexity(self.model, pieces, batch), **shares_of(self.ledger.totals())}
        self.policy = None
        return found


def shares_of(totals: Any) -> dict[str, float]:
    rows = totals.tokens.sum()
    return {
        "dropped_mass": float(totals.dropped_mass.sum() / totals.mass.sum()),
        "shed_rows": float(totals.shed_rows.sum() / rows),
        "rows_over_limit": float(totals.rows_over_limit.sum() / rows),
    }


def check_against_the_runtime(folder: Path, plan: Any, pieces: list[list[int]], policy: Any, wanted: Any) -> None:
    """The same point through hotset.load and enable_shedding. Ends the benchmark where it differs."""
    import hotset
    from hotset.runtime.shedding import enable_shedding

    model = hotset.load(folder, plan=plan, device="cpu", dtype="float32")
    ledger = enable_shedding(model, policy)
    got = {"perplexity": perplexity(model, pieces, 8), **shares_of(ledger.totals())}
    for name, value in wanted.items():
        if abs(got[name] - value) > 1e-4 * max(value, 1e-2):
            sys.exit(f"bench_shed_quality: {name} is {got[name]} in the runtime but {value} here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens, one share, three bounds")
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--texts", type=Path, default=DEMO / "heldout", help="folder of .txt files")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens to measure on, for each point")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--trace", type=Path, help="a recorded trace with gate weights, instead of a model")
    parser.add_argument(
        "--strategy", default="certified", help="as in `hotset plan`; several: a,b (default: %(default)s)"
    )
    parser.add_argument("--markdown", action="store_true", help="end with the table that docs/shedding.md shows")
    parser.add_argument("--plot", type=Path, help="write the curves there (.svg or .png)")
    parser.add_argument("--output", type=Path, help="write the record there (.json)")
    options = parser.parse_args()
    strategies = options.strategy.split(",")
    if len(strategies) > 1 and (options.trace or options.plot):
        parser.error("--trace and --plot take one strategy")
    if options.trace and options.output:
        parser.error("--output needs a model: a trace has no perplexity")
    if options.trace:
        on_trace(options.trace, options.strategy, options.quick)
        return
    paths = sorted(options.texts.glob("*.txt"))
    if not paths or not (options.model / "config.json").exists():
        sys.exit(f"bench_shed_quality: wanted a model in {options.model} and .txt files in {options.texts}")

    import hotset
    from hotset.ops import ShedPolicy
    from hotset.reports.shed_quality import FORMAT
    from hotset.runtime.generation import load_tokenizer
    from hotset.storage import write_json
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
        strategy=options.strategy,
    )
    plain, _ = load_plain(options.model, device="cpu", dtype="float32")
    unmodified = perplexity(plain, pieces, batch=8)
    with tempfile.TemporaryDirectory() as scratch:
        halves = [Document(path.stem, text[: len(text) // 2]) for path, text in zip(paths, texts, strict=True)]
        trace = record(plain, halves, Path(scratch) / "trace", tokenizer=tokenizer, max_tokens=options.length)
        plans = {(s, share): hotset.plan(trace, fraction=share, strategy=s) for s in strategies for share in shares}
    print(f"unmodified model: {unmodified:.4f}\n")
    print(
        f"{'strategy':>9} {'resident':>8} {'keep_mass':>9} {'perplexity':>10} {'over exact':>10} {'mass dropped':>12} "
        f"{'rows shed':>9} {'rows with a miss served exactly':>32}"
    )
    points: list[dict[str, Any]] = []
    for (strategy, share), plan in plans.items():
        shed = ShedExperts(plain, plan.gpu_experts_mask)
        exact = perplexity(plain, pieces, batch=8)
        assert exact == unmodified, f"the model without a policy has {exact}, not {unmodified}"
        where = f"{strategy:>9} {share:>8.0%}"
        print(f"{where} {'exact':>9} {exact:>10.4f} {0:>10.2%} {0:>12.2%} {0:>9.2%}")
        points.append({"strategy": strategy, "share": share, "keep_mass": "exact", "perplexity": exact})
        policies = [(str(bound), ShedPolicy(bound)) for bound in bounds]
        policies.append(("all", ShedPolicy(min(bounds), over_limit="shed")))
        for name, policy in policies:
            found = shed.measure(pieces, 8, policy)
            points.append({"strategy": strategy, "share": share, "keep_mass": name, **found})
            print(
                f"{where} {name:>9} {found['perplexity']:>10.4f} {found['perplexity'] / exact - 1:>10.2%} "
                f"{found['dropped_mass']:>12.2%} {found['shed_rows']:>9.2%} {served_rows(points[-1]):>32.2%}"
            )
    policy = ShedPolicy(0.5)
    few = pieces[: 8 if options.quick else 16]
    check_against_the_runtime(options.model, plan, few, policy, shed.measure(few, 8, policy))
    print("the runtime gives the same perplexity and the same counts at keep_mass 0.5")
    if options.plot:
        plot(points, options.plot)
    if options.markdown:
        for strategy in strategies:
            print(f"\n{strategy}\n\n" + markdown([p for p in points if p["strategy"] == strategy]))
    if options.output:
        folder = options.model.resolve()
        write_json(
            options.output,
            {
                "format": FORMAT,
                "model": f"{folder.parent.name}/{folder.name}",
                "texts": [path.stem for path in paths],
                "tokens": sum(map(len, pieces)),
                "window_tokens": options.length,
                "exact_perplexity": unmodified,
                "rows": rows_of(points),
            },
        )
        print(f"record written to {options.output}")
    print_json_line(unmodified_perplexity=unmodified, strategy=options.strategy, points=points)


def on_trace(path: Path, strategy: str, quick: bool) -> None:
    """Mass and rows over a recorded trace, every layer, per share of experts resident."""
    import hotset
    from hotset.ops import ShedLedger, ShedPolicy

    planned, held = hotset.Trace.open(path).split()
    if held.weights is None:
        sys.exit(f"bench_shed_quality: {path} has no gate weights: record it again with this version")
    tokens = min(held.num_tokens, 1_000 if quick else held.num_tokens)
    config = {"trace": path.stem, "layers": held.num_layers, "tokens": tokens, "strategy": strategy}
    print_header("bench_shed_quality: gate mass over a recorded trace", **config)
    heads = ("resident", "keep_mass", "mass dropped", "rows resident", "rows shed", "served exactly")
    print(" ".join(f"{head:>{max(len(head), 8)}}" for head in heads))
    points = []
    for share in SHARES:
        mask = hotset.plan(planned, fraction=share, strategy=strategy).gpu_experts_mask
        bounds = (0.9, 0.5) if quick else KEEP_MASS
        policies = [(str(bound), ShedPolicy(bound)) for bound in bounds]
        for name, policy in [*policies, ("all", ShedPolicy(min(bounds), over_limit="shed"))]:
            ledger = ShedLedger(held.num_layers)
            for row in range(held.num_layers):
                table = np.where(mask[row], np.cumsum(mask[row]) - 1, -1).astype(np.int32)
                weights = held.layer_weights(row)
                assert weights is not None
                case = held.layer(row)[:tokens].astype(np.int32), weights[:tokens].astype(np.float32), table
                ledger.record(row, policy.apply(*case))
            point = {"share": share, "keep_mass": name, **shares_of(ledger.totals())}
            points.append(point)
            served = served_rows(point)
            resident = 1 - point["shed_rows"] - served
            cells = [point["dropped_mass"], resident, point["shed_rows"], served]
            print(
                f"{share:>8.0%} {name:>9} "
                + " ".join(f"{c:>{w}.2%}" for c, w in zip(cells, (12, 13, 9, 14), strict=True))
            )
    print_json_line(trace=path.stem, strategy=strategy, points=points)


def served_rows(point: dict[str, Any]) -> float:
    """Share of the rows with a miss that is served on the host."""
    return 0.0 if point["keep_mass"] == "all" else point["rows_over_limit"]


def missed_rows(points: list[dict[str, Any]]) -> float:
    """What exact serves on the host: share of the rows with a miss, from the points of one strategy and share."""
    shed = next(p for p in points if p["keep_mass"] not in ("exact", "all"))
    return shed["rows_over_limit"] + shed["shed_rows"]


def rows_of(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points as the record has them."""
    rows = []
    for point in points:
        name, exact = point["keep_mass"], point["keep_mass"] == "exact"
        mine = [p for p in points if (p["strategy"], p["share"]) == (point["strategy"], point["share"])]
        rows.append(
            {
                "strategy": point["strategy"],
                "resident_share": point["share"],
                "keep_mass": name if name in ("exact", "all") else float(name),
                "perplexity": point["perplexity"],
                "rows_to_host_share": missed_rows(mine) if exact else served_rows(point),
                "dropped_mass": 0.0 if exact else point["dropped_mass"],
            }
        )
    return rows


def markdown(points: list[dict[str, Any]]) -> str:
    """One row per share: perplexity over exact, and in brackets the rows that still go to the host."""
    bounds = list(dict.fromkeys(p["keep_mass"] for p in points if p["keep_mass"] != "exact"))
    lines = [f"| resident | exact | {' | '.join(bounds)} |", "|---" * (len(bounds) + 2) + "|"]
    for share in sorted({p["share"] for p in points}):
        mine = {p["keep_mass"]: p for p in points if p["share"] == share}
        exact = mine.pop("exact")
        cells = [f"{share:.0%}", f"{exact['perplexity']:.3f} ({missed_rows(list(mine.values())):.1%})"]
        cells += [f"{p['perplexity'] / exact['perplexity'] - 1:+.2%} ({served_rows(p):.1%})" for p in mine.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Perplexity over exact against the rows that still go to the host, one curve per share, one dot per bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    for share in sorted({point["share"] for point in points}):
        mine = [p for p in points if p["share"] == share]
        exact = next(p["perplexity"] for p in mine if p["keep_mass"] == "exact")
        curve = [p for p in mine if p["keep_mass"] not in ("exact", "all")]
        over = [(p["perplexity"] / exact - 1) * 100 for p in curve]
        rows = [p["rows_over_limit"] * 100 for p in curve]
        axes.plot(rows, over, marker="o", label=f"{share:.0%} of experts resident")
        for x, y, point in zip(rows, over, curve, strict=True):
            axes.annotate(point["keep_mass"], (x, y), textcoords="offset points", xytext=(4, 3), fontsize=6)
    axes.set_xlabel("rows (token and layer) with a miss served exactly, %")
    axes.set_ylabel("perplexity over exact, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
