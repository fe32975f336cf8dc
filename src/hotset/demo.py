"""The whole road on a small real model: record, plan, run, compare. What `hotset demo` shows.

Uses the model, the held-out texts and the prompts of the source tree's `demo/` folder (see `demo/train.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import ModelError

STRATEGIES = ("certified", "coverage", "cluster", "frequency", "uniform", "layer-balanced", "front-loading", "random")
FRACTION = 0.5
NEW_TOKENS = 128
HOLDOUT = 1 / 3


@dataclass(frozen=True)
class StrategyRow:
    """One strategy at the demo's budget, planned on two thirds of the documents, measured on the rest."""

    strategy: str
    hit_rate: float
    token_resident_rate: float
    gap: float | None


@dataclass(frozen=True)
class PromptRow:
    """One prompt, continued by the unmodified model and by the split one."""

    source: str
    prompt: str
    text: str
    same_text: bool
    plain_tokens_per_second: float
    split_tokens_per_second: float


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo prints; JSON-able by dataclasses.asdict."""

    model: str
    tokens_recorded: int
    documents: int
    fraction: float
    strategy: str
    bound_gap: float | None
    strategies: list[StrategyRow]
    prompts: list[PromptRow]
    bytes_experts: int
    bytes_arena: int
    bytes_host: int
    host_bytes_saved: int
    seconds: float
    report: dict[str, Any]

    @property
    def all_same(self) -> bool:
        """Whether every continuation equals that of the unmodified model."""
        return all(row.same_text for row in self.prompts)


def demo_folder() -> Path:
    """The `demo/` folder of the source tree that this package runs from. Raises ModelError where there is none."""
    folder = Path(__file__).parents[2] / "demo"
    if not (folder / "model" / "config.json").exists():
        raise ModelError(
            "the demo's model is part of the source tree, not of the installed package: "
            "clone the repository and run `make demo` there, or name a folder with model/, heldout/ and prompts/ in it"
        )
    return folder


def run_demo(folder: Path, *, say: Callable[[str], None] = lambda _: None) -> DemoResult:
    """Record on `folder`/heldout with `folder`/model, plan at half of the expert bytes, run three prompts both ways.

    say: called with a sentence before each step. Raises HotsetError.
    """
    import torch

    import hotset.planning.api as planning
    from hotset.planning.strategies import STRATEGIES as KNOWN
    from hotset.runtime.generation import generate_text, load_tokenizer
    from hotset.runtime.runtime import load
    from hotset.traces.documents import read_documents
    from hotset.traces.recorder import load_plain, record

    started = time.perf_counter()
    model_folder, texts = folder / "model", sorted((folder / "heldout").glob("*.txt"))
    if not texts:
        raise ModelError(f"{folder / 'heldout'}: no .txt files: the demo needs texts to record on")
    say(f"recording the routing of {len(texts)} held-out texts")
    plain, _ = load_plain(model_folder, device="cpu", dtype="float32")
    tokenizer = load_tokenizer(model_folder)
    with tempfile.TemporaryDirectory() as scratch:
        trace = record(plain, read_documents(texts), Path(scratch) / "trace", tokenizer=tokenizer, max_tokens=256)
        say(f"planning: which half of the expert bytes should be in GPU memory ({trace.num_tokens:,} tokens seen)")
        rows, plans = [], {}
        for strategy in STRATEGIES:
            if strategy not in KNOWN:
                continue
            plan = plans[strategy] = planning.plan(trace, fraction=FRACTION, strategy=strategy, holdout=HOLDOUT)
            held = plan.report["held_out"]
            rows.append(StrategyRow(strategy, held["hit_rate"], held["token_resident_rate"], plan.gap))
        best = next(iter(plans.values()))
    say("running three prompts: unmodified, then with the experts split between two memories")
    split = load(model_folder, plan=best, device="cpu", dtype="float32")
    prompts = []
    for path in sorted((folder / "prompts").glob("*.txt")):
        prompt = path.read_text(encoding="utf-8")
        timed = []
        for model in (plain, split):
            torch.manual_seed(0)
            begun = time.perf_counter()
            answer = generate_text(model, tokenizer, prompt, max_new_tokens=NEW_TOKENS)
            timed.append((answer, answer.new_tokens / (time.perf_counter() - begun)))
        (theirs, plain_rate), (ours, split_rate) = timed
        prompts.append(PromptRow(path.stem, prompt, ours.text, ours.text == theirs.text, plain_rate, split_rate))
    report = split.hotset_report()
    arena, host = report["bytes"]["arena"], report["bytes"]["host_experts"]
    return DemoResult(
        model=str(model_folder),
        tokens_recorded=trace.num_tokens,
        documents=trace.num_sequences,
        fraction=FRACTION,
        strategy=best.strategy,
        bound_gap=best.gap,
        strategies=rows,
        prompts=prompts,
        bytes_experts=arena + host,
        bytes_arena=arena,
        bytes_host=host,
        host_bytes_saved=arena,
        seconds=time.perf_counter() - started,
        report=report,
    )
