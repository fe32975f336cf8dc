"""Evaluate the demo model on held-out text and write its model card.

The model is loaded with Transformers from its folder, as any user would. For each domain:

* bits a byte: each document is tokenized by itself after one end-of-text token, the streams follow
  one another, and the nats of every token (the end-of-text tokens between documents too) are summed
  over windows of ``--length`` tokens. Windows overlap: each goes on ``--stride`` tokens and only
  its new tokens count, so a token is scored once, with at least ``length - stride`` tokens before
  it (fewer at the very start). The sum over ln 2 is divided by the UTF-8 bytes of the text.
* ``gzip -9`` of the domain's held-out text and ``xz -9e`` of all of it are measured on those bytes.
* routing: how often each expert of each layer is chosen by the scored tokens; the hottest quarter
  of each layer is compared between domains by Jaccard overlap (size of the intersection over size
  of the union), as a mean over layers.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import lzma
import math
import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import text
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent
Logits = Callable[[Tensor], Tensor]


def windows(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a stream of ``count`` tokens: (first input, first scored target, last + 1).

    Every target 1..count-1 is in one window; a window has at most ``length`` inputs.
    """
    result = []
    scored = 1
    while scored < count:
        stop = min(count, length + 1 if scored == 1 else scored + stride)
        result.append((max(0, stop - 1 - length), scored, stop))
        scored = stop
    return result


def measure(
    model: torch.nn.Module, tokens: np.ndarray, length: int, stride: int, batch: int
) -> tuple[float, np.ndarray]:
    """Total nats of a token stream, and choices of each expert by the scored tokens [L, E]."""
    config = model.config
    layers = [n for n in range(config.num_hidden_layers) if n not in config.mlp_only_layers]
    loads = np.zeros((len(layers), config.num_experts), dtype=np.int64)
    chosen: dict[int, Tensor] = {}

    def keep(row: int) -> Callable:
        return lambda _module, _inputs, output: chosen.__setitem__(row, output[2])

    hooks = [model.model.layers[layer].mlp.gate.register_forward_hook(keep(row)) for row, layer in enumerate(layers)]
    stream = torch.from_numpy(tokens.astype(np.int64))
    nats = 0.0
    try:
        for _, group in itertools.groupby(
            windows(len(tokens), length, stride), key=lambda w: (w[2] - w[0], w[2] - w[1])
        ):
            todo = list(group)
            for start in range(0, len(todo), batch):
                part = todo[start : start + batch]
                ids = torch.stack([stream[first : stop - 1] for first, _, stop in part])
                new = part[0][2] - part[0][1]
                with torch.inference_mode():
                    logits = model(ids, use_cache=False).logits[:, -new:].float()
                targets = torch.stack([stream[scored:stop] for _, scored, stop in part])
                nats += F.cross_entropy(
                    logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum"
                ).item()
                for row, experts in chosen.items():
                    picked = experts.view(len(part), -1, experts.shape[-1])[:, -new:]
                    loads[row] += np.bincount(picked.reshape(-1).numpy(), minlength=config.num_experts)
    finally:
        for hook in hooks:
            hook.remove()
    return nats, loads


def _domain(task: tuple[Path, Path, str, int, int, int]) -> dict[str, Any]:
    """Everything measured on one domain; runs in a process of its own with one thread."""
    from transformers import AutoModelForCausalLM

    folder, model_folder, domain, length, stride, batch = task
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    documents = corpus.load(folder, "heldout", domain)
    for name, words in documents:
        if tokenizer.decode(tokenizer.encode(words).ids, skip_special_tokens=False) != words:
            raise ValueError(f"{name}: decoding does not give the text back")
    tokens = text.encode(tokenizer, documents)
    began = time.monotonic()
    nats, loads = measure(model, tokens, length, stride, batch)
    data = "".join(words for _, words in documents).encode()
    print(f"{domain}: {len(tokens):,} tokens in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "domain": domain,
        "documents": len(documents),
        "bytes": len(data),
        "tokens": len(tokens),
        "nats": nats,
        "bpb": nats / math.log(2) / len(data),
        "gzip_bpb": len(gzip.compress(data, 9, mtime=0)) * 8 / len(data),
        "xz_bpb": len(xz(data)) * 8 / len(data),
        "repeated_lines": repeated_lines(folder, domain),
        "loads": loads.tolist(),
    }


def repeated_lines(folder: Path, domain: str) -> float:
    """Share of the held-out bytes in lines of 30 characters up that training text holds as well."""
    known = {line.strip() for _, words in corpus.load(folder, "train", domain) for line in words.split("\n")}
    total = same = 0
    for _, words in corpus.load(folder, "heldout", domain):
        for line in words.split("\n"):
            size = len(line.encode()) + 1
            total += size
            same += size * (len(line.strip()) >= 30 and line.strip() in known)
    return same / total


def xz(data: bytes) -> bytes:
    """What ``xz -9e`` makes of the data."""
    preset = 9 | lzma.PRESET_EXTREME
    return lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=preset)


def hottest(loads: np.ndarray) -> list[set[int]]:
    """The hottest quarter of the experts of each layer; loads [L, E]."""
    quarter = loads.shape[1] // 4
    return [set(np.argsort(-row, kind="stable")[:quarter].tolist()) for row in loads]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Mean over layers of the overlap of the hottest quarters; loads [L, E] each."""
    pairs = zip(hottest(one), hottest(other), strict=True)
    return float(np.mean([len(a & b) / len(a | b) for a, b in pairs]))


def evaluate(folder: Path, model_folder: Path, length: int, stride: int, batch: int, workers: int) -> dict[str, Any]:
    """Measure all domains; gives what evaluation.json holds."""
    tasks = [(folder, model_folder, d, length, stride, batch) for d in corpus.DOMAINS]
    with mp.get_context("spawn").Pool(workers) as pool:
        rows = pool.map(_domain, tasks, chunksize=1)
        pool.close()
        pool.join()
    loads = {row["domain"]: np.array(row.pop("loads")) for row in rows}
    names = list(loads)
    data = "".join(words for d in corpus.DOMAINS for _, words in corpus.load(folder, "heldout", d)).encode()
    quarter = {
        name: float(np.mean(np.sort(value, axis=1)[:, -value.shape[1] // 4 :].sum(1) / value.sum(1)))
        for name, value in loads.items()
    }
    shares = sum(value / value.sum(axis=1, keepdims=True) for value in loads.values()) / len(loads)
    total = sum(row["nats"] for row in rows) / math.log(2) / len(data)
    whole_xz = len(xz(data)) * 8 / len(data)
    return {
        "context": {"length": length, "stride": stride, "unit": "tokens"},
        "domains": rows,
        "all": {
            "bytes": len(data),
            "bpb": total,
            "gzip_bpb": len(gzip.compress(data, 9, mtime=0)) * 8 / len(data),
            "xz_bpb": whole_xz,
        },
        "passed": all(row["bpb"] < row["gzip_bpb"] for row in rows) and total < whole_xz,
        "routing": {
            "jaccard": [[jaccard(loads[a], loads[b]) for b in names] for a in names],
            "hottest_quarter_share": quarter,
            "least_used_expert_share": float(shares.min()),
            "hottest_quarter": {name: [sorted(layer) for layer in hottest(value)] for name, value in loads.items()},
        },
    }


# --- report --------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> str:
    """The measured figures as Markdown."""
    lines = [
        "| domain | bytes | tokens | model | gzip -9 | xz -9e |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['domain']} | {row['bytes']:,} | {row['tokens']:,} | **{row['bpb']:.3f}** "
        f"| {row['gzip_bpb']:.3f} | {row['xz_bpb']:.3f} |"
        for row in result["domains"]
    ]
    whole = result["all"]
    tokens = sum(row["tokens"] for row in result["domains"])
    lines.append(
        f"| all together | {whole['bytes']:,} | {tokens:,} | **{whole['bpb']:.3f}** "
        f"| {whole['gzip_bpb']:.3f} | {whole['xz_bpb']:.3f} |"
    )
    names = [row["domain"] for row in result["domains"]]
    lines += ["", "| Jaccard | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for name, row in zip(names, result["routing"]["jaccard"], strict=True):
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    return "\n".join(lines)


def card(result: dict[str, Any], manifest: dict, log: dict, rows: list[dict]) -> str:
    """The model card: everything in it comes from the files of the run."""
    repeated = ", ".join(f"{r['domain']} {r['repeated_lines']:.1%}" for r in result["domains"])
    routing, shape, run = result["routing"], log["shape"], log["runs"][-1]
    packages = "\n".join(
        f"| {p['name']} | {p['version']} | {'Debian' if p['kind'] == 'deb' else 'PyPI'} | {p['licence']} |"
        for p in manifest["packages"]
    )
    sources = []
    for domain, parts in manifest["domains"].items():
        for label, train in parts["train"].items():
            held = parts["heldout"][label]
            sources.append(
                f"| {domain} | {label} | {train['documents']:,} | {train['bytes'] / 1e6:.2f} MB "
                f"| {held['documents']} | {held['bytes'] / 1e3:.0f} kB |"
            )
    seen = "\n".join(
        f"| {domain} | {part['tokens_seen']:,} | {part['epochs']:.2f} |" for domain, part in log["domains"].items()
    )
    mixes = "; ".join(
        f"from step {part['from_step']}: " + ", ".join(f"{domain} {count}" for domain, count in part["mix"].items())
        for part in log["runs"]
    )
    changed = ""
    if len(log["runs"]) > 1:
        changed = (
            "The mix was changed in the middle of the run because the first held-out figures below\n"
            "showed Python farthest from its bar; nothing else was chosen by held-out text."
        )
    every = max(1, len(rows) // 16)
    shown = [row for n, row in enumerate(rows) if n % every == 0 or n == len(rows) - 1]
    curve = "\n".join(
        f"| {r['step']} | {int(r['tokens']):,} | {float(r['seconds']) / 60:.1f} | {r['loss']} "
        f"| {r['balance']} | {r['tokens_per_s']} |"
        for r in shown
    )
    halfway = "\n".join(
        f"| {row['step']} | {row['seconds'] / 60:.1f} | "
        + " | ".join(f"{row['heldout_bpb'][d]:.3f}" for d in corpus.DOMAINS)
        + " |"
        for row in log["heldout_bpb_during_training"]
    )
    moe = [n for n in range(shape["num_hidden_layers"]) if n not in shape["dense_layers"]]
    share = ", ".join(f"{k} {v:.0%}" for k, v in routing["hottest_quarter_share"].items())
    context = result["context"]
    return f"""---
language: [en, de]
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, qwen3_moe]
---

# Demo model of hotset

A small Mixture-of-Experts language model, trained from scratch on two CPU cores, so that hotset's
commands can be tried without a download. It continues text in four domains (Python source, English
prose, German prose, YAML schemas) and its routing differs between them. It is no assistant, knows
no facts, and is of no use outside demonstrations and tests.

Architecture `Qwen3MoeForCausalLM`: {shape["num_hidden_layers"]} layers, of which
layer {", ".join(map(str, shape["dense_layers"]))} is dense and {len(moe)} with {shape["num_experts"]} experts, top
{shape["num_experts_per_tok"]} (renormalised); hidden {shape["hidden_size"]}, expert intermediate
{shape["moe_intermediate_size"]}, dense intermediate {shape["intermediate_size"]},
{shape["num_attention_heads"]} heads of {shape["head_dim"]}, {shape["num_key_value_heads"]} key/value
heads, vocabulary {shape["vocab_size"]} (byte-level BPE, lossless), tied embeddings.
{log["parameters"]:,} parameters in bfloat16. `<|endoftext|>` (token 0) opens every document.

## Held-out results

Bits a byte, lower is better. The model's column is measured with Transformers in float32 on windows
of {context["length"]} tokens that go on {context["stride"]} tokens each: every token is scored once,
with at least {context["length"] - context["stride"]} tokens before it except at the very start, and
the end-of-text token of each document counts as well. The compressors see the same bytes, each
domain as one file.

{tables(result)}

The bar was: below `gzip -9` in each domain, and below `xz -9e` over all the held-out text as one
file. {"It is met." if result["passed"] else "It is NOT met."}

The second table is the overlap of the hottest quarter of the experts
({shape["num_experts"] // 4} of {shape["num_experts"]}, mean over layers); two random quarters overlap
by 0.14 on average. The hottest quarter takes this share of the assignments: {share} (25% if all
experts were used alike). The least used expert of any layer takes
{routing["least_used_expert_share"]:.2%} of the assignments ({1 / shape["num_experts"]:.2%} if
alike), domains weighted alike.

## Training

`demo/train.py`, {run["workers"]} processes of one thread on {log["cpu"]}, other programs running beside
it: {log["steps"]:,} steps of {log["tokens_per_step"]:,} tokens in {log["seconds"] / 60:.1f} minutes,
{log["tokens"]:,} tokens in all, windows of {run["length"]} tokens. Muon (peak rate {run["lr"]}) for the
matrices, AdamW (peak rate {run["lr_adam"]}) for the embedding, routers and norms; {run["warmup"]} steps of
warm-up, the full rate until {run["hold"]:.0%} of the time, then linear to zero. The loss is the cross
entropy plus {run["aux"]} times the sum over layers of the usual balance loss, over the
sequences of one worker. Weights and gradients in bfloat16, master weights and optimiser state in float32.
Sequences of each domain in a step: {mixes}.
{changed}

| domain | tokens seen | passes over the text |
| --- | ---: | ---: |
{seen}

| step | tokens | minutes | loss (nats a token) | balance (1: even) | tokens/s |
| ---: | ---: | ---: | ---: | ---: | ---: |
{curve}

The whole log is in `training_log.csv`. Held-out bits a byte during training (on the first part
of each domain's text only, in windows that do not overlap: other text than above, so the two
are not to be compared):

| step | minutes | {" | ".join(corpus.DOMAINS)} |
| ---: | ---: |{" ---: |" * len(corpus.DOMAINS)}
{halfway}

## Text

The weights are offered under the project's licence; the texts keep their own, listed below.
None of the training text is in this repository. `demo/corpus.py` fetches these packages, checks
their SHA-256, takes the text out, drops duplicate documents (in prose, duplicate paragraphs too),
splits by document, and drops every held-out paragraph of {corpus.DEDUP_MIN} bytes up that also occurs
in the training text.

| package | version | from | licence |
| --- | --- | --- | --- |
{packages}

| domain | source | training documents | size | held-out documents | size |
| --- | --- | ---: | ---: | ---: | ---: |
{chr(10).join(sources)}

## Reproduce

```
python demo/corpus.py
python demo/train.py --minutes {run["minutes"]:g}
python demo/export.py
python demo/evaluate.py
```

The data order depends on the seed alone; the learning rate follows the clock, so another machine
gives another number of steps and other weights.

## Limits

* Trained on {log["tokens"] / 1e6:.1f} million tokens: text that it writes is fluent for a few words only.
* Trained on windows of {run["length"]} tokens; longer contexts work, but were not trained.
* The German and English prose is mostly technical documentation and the King James Bible.
* The held-out text comes from the same sources as the training text (other documents of them).
  Whole paragraphs of the training text were taken out of it; single lines of 30 characters up that
  both hold remain (imports, schema lines), these shares of the held-out bytes: {repeated}.
"""


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=HERE / ".corpus", help="text of corpus.py")
    parser.add_argument("--model", type=Path, default=HERE / "model", help="%(default)s")
    parser.add_argument("--length", type=int, default=512, help="tokens a window (%(default)s)")
    parser.add_argument("--stride", type=int, default=384, help="new tokens each (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows at once (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--card-only", action="store_true", help="rewrite the card from evaluation.json")
    args = parser.parse_args(argv)
    if not 1 <= args.stride <= args.length:
        parser.error("--stride must be between 1 and --length")
    stored = args.model / "evaluation.json"
    try:
        if args.card_only:
            result = json.loads(stored.read_text(encoding="utf-8"))
        else:
            result = evaluate(args.corpus, args.model, args.length, args.stride, args.batch, args.workers)
            stored.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        manifest = json.loads((args.corpus / "manifest.json").read_text(encoding="utf-8"))
        log = json.loads((args.model / "training_log.json").read_text(encoding="utf-8"))
        lines = (args.model / "training_log.csv").read_text(encoding="utf-8").splitlines()
        keys = lines[0].split(",")
        rows = [dict(zip(keys, line.split(","), strict=True)) for line in lines[1:]]
        content = card(result, manifest, log, rows)
        (args.model / "README.md").write_text(content, encoding="utf-8")
    except (corpus.CorpusError, ValueError, OSError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 1
    print(tables(result))
    print("bar met" if result["passed"] else "bar NOT met")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
