"""The runtime's part of `make gpu-check`: what a machine without a GPU cannot show about running a model.

On a random Qwen3-MoE in bfloat16, made on the spot:
  parity     logits of a prompt of 7 and one decoded token, experts at 0, 50 and 100 % on the device, beside everything
             on the CPU; on the device alone, streamed experts must give the bits of resident ones
  moves      text of a model whose experts move while it generates equals the text without moves
  timelines  what ran on which stream, from torch's profiler: prefill streaming, and moves while decoding
  decode     tokens per second at 0, 25, 50, 75 and 100 % resident beside `hotset bench`'s prediction

Every function takes the device, so that the tests run the same code with "cpu". Tolerances are relative L2 errors of
the logits: float32 differs by the order of summation; bfloat16 rounds every activation (2^-9) and, where two experts
are nearly tied, the devices may pick different ones. A wrong expert or layout gives an error near 1.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotset
from hotset.bench import bench
from hotset.errors import ResidencyError
from hotset.machines.format import machine_from_json, machine_to_json
from hotset.runtime.measure import record_decode
from hotset.runtime.quantising import quantised_file

# 8 layers x 64 experts x 3 MiB in bfloat16: 1.6 GB of experts
FULL = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_experts": 64}
MEDIUM = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 32}
# as wide as the others: copies of smaller experts would be over before a kernel starts
QUICK = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 2, "num_experts": 16}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
SHARES = (0.0, 0.5, 1.0)
PROMPT_TOKENS = 7

Span = tuple[str, float, float, str]
"""(stream, start in ms, end in ms, what)."""


def make_checkpoint(folder: Path, shape: Mapping[str, int], device: str = "cpu") -> Path:
    """A random Qwen3-MoE in bfloat16; device: where the random numbers are drawn."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=4096,
        intermediate_size=4 * shape["moe_intermediate_size"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // 8,
        num_experts_per_tok=min(8, shape["num_experts"] // 2),
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **shape,
    )
    generator = torch.Generator(device).manual_seed(1234)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, device=device)
            # as trained matrices are: unit outputs for unit inputs
            scaled = 1.0 + 0.1 * values if "norm" in name else values / parameter.shape[-1] ** 0.5
            parameter.copy_(scaled)
    model.save_pretrained(folder)
    return folder


def resident(model_shape: Mapping[str, int], share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[L, E] mask with that share of every layer's experts, spread evenly."""
    experts = np.arange(model_shape["num_experts"])
    picked = np.floor((experts + 1) * share) > np.floor(experts * share)
    return np.tile(picked, (model_shape["num_hidden_layers"], 1))


def logits_of(model: Any) -> torch.Tensor:
    """[2, V] float32 on the CPU: after a prompt of PROMPT_TOKENS, and after one more, the same for every model."""
    prompt = torch.arange(11, 11 + PROMPT_TOKENS, device=model.device)[None]
    # the argument was renamed in Transformers 5.24
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        first = model(input_ids=prompt, use_cache=True)
        second = model(input_ids=prompt[:, :1] + 100, use_cache=True, **{cache: first.past_key_values})
    return torch.cat([first.logits[0, -1:], second.logits[0, -1:]]).float().cpu()


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """L2 norm of the difference over that of what was wanted."""
    return float((got - wanted).norm() / wanted.norm())


def check_parity(folder: Path, shape: Mapping[str, int], device: str) -> dict[str, dict[str, float]]:
    """{case: {share of experts on the device: relative error}}. Raises AssertionError beyond the tolerance."""
    found: dict[str, dict[str, float]] = {}
    made: set[Path] = set()
    cases: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32"},
        "bfloat16 plain": {"dtype": "bfloat16", "kernels": "torch"},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "expert_format": "int8"},
        "int8 stored": {"dtype": "bfloat16", "expert_format": "int8", "kernels": "torch"},
    }
    for name, settings in cases.items():
        tolerance = TOLERANCE[settings["dtype"]]
        reference = _load(folder, device="cpu", **settings)
        if "expert_format" in settings:  # the user's cache is left as it was
            made.add(quantised_file(settings["expert_format"], reference.hotset.model_fingerprint, None))
        wanted = logits_of(reference)
        del reference
        found[name] = {}
        on_device = []
        for share in SHARES:
            mask = resident(shape, share)
            error = relative_error(logits_of(_load(folder, plan=mask, device=device, **settings)), wanted)
            found[name][f"{share:.0%}"] = error
            assert error <= tolerance, f"{name}, {share:.0%} on {device}: relative error {error:.2e} > {tolerance:.0e}"
            streaming = _load(folder, plan=mask, device=device, gpu_prefill_token_threshold=1, **settings)
            on_device.append(logits_of(streaming))
            error = relative_error(on_device[-1], wanted)
            assert error <= tolerance, f"{name}, {share:.0%}, streamed: relative error {error:.2e} > {tolerance:.0e}"
            del streaming
        for share, got in zip(SHARES, on_device, strict=True):
            same = torch.equal(got, on_device[-1])
            assert same, f"{name}: streamed at {share:.0%} differs in bits from all resident"
    for path in made:
        path.unlink(missing_ok=True)
    return found


def check_text_under_moves(folder: Path, shape: Mapping[str, int], device: str, tokens: int) -> int:
    """Number of moves made while a text was generated that equals the one without. Raises AssertionError.

    Every pass streams what it misses, so that all arithmetic is the device's and moves cannot change a bit.
    """
    settings = {"device": device, "plan": resident(shape, 0.5), "gpu_prefill_token_threshold": 1}
    wanted = _text(_load(folder, **settings), tokens)
    model = _load(folder, adapt=hotset.Adaptation(automatic=False), **settings)
    moves, texts = _while_moving(model, lambda: _text(model, tokens))
    assert texts == wanted, "the text changed while experts moved"
    assert moves > 0, "no expert moved: this check would show nothing"
    model.hotset.store.check_integrity()
    return moves


def _while_moving(model: Any, work: Callable[[], Any]) -> tuple[int, Any]:
    """(promotions made by a second thread while `work` ran, what `work` returned)."""
    store, rng, stop, made = model.hotset.store, np.random.default_rng(7), threading.Event(), [0]
    problems: list[BaseException] = []

    def move() -> None:
        try:
            while not stop.is_set():
                row = int(rng.integers(store.residency.num_layers))
                mask = store.residency.mask()[row]
                expert, victim = int(rng.choice(np.flatnonzero(~mask))), int(rng.choice(np.flatnonzero(mask)))
                try:
                    store.promote(row, expert, victim)
                    made[0] += 1
                except ResidencyError:  # in use by a token
                    stop.wait(0.0005)
        except BaseException as problem:
            problems.append(problem)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        result = work()
    finally:
        stop.set()
        mover.join()
    if problems:
        raise problems[0]
    return made[0], result


def _text(model: Any, tokens: int) -> list[int]:
    prompt = torch.arange(5, 21, device=model.device)[None]
    out = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    text: list[int] = out[0].tolist()
    return text


# -- timelines ---------------------------------------------------------------------------------------------------------


def timeline(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Kernels and copies of a Chrome trace as torch's profiler writes it, in order, from 0 ms on.

    Events of categories "kernel" and "gpu_memcpy" have their stream in args.stream, ts and dur in microseconds.
    """
    wanted = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy") and "dur" in e]
    if not wanted:
        return []
    zero = min(float(e["ts"]) for e in wanted)
    spans = []
    for e in wanted:
        start = (float(e["ts"]) - zero) / 1e3
        what = str(e["name"]) if e["cat"] == "gpu_memcpy" else "kernel"
        spans.append((str(e["args"]["stream"]), start, start + float(e["dur"]) / 1e3, what))
    return sorted(spans, key=lambda span: (span[1], span[2]))


def overlap(spans: Iterable[Span]) -> dict[str, float | None]:
    """Of the copies on streams that run no kernel: their ms, the kernels' ms, and the share during which a kernel ran.

    hidden: share of copy time with a kernel running. possible: the most that could be, min(copies, kernels) / copies.
    """
    spans = list(spans)
    computing = {stream for stream, _, _, what in spans if what == "kernel"}
    kernels = _union([(start, end) for _, start, end, what in spans if what == "kernel"])
    copies = _union(
        [(start, end) for stream, start, end, what in spans if what != "kernel" and stream not in computing]
    )
    copy_ms, kernel_ms = (sum(end - start for start, end in part) for part in (copies, kernels))
    both, first = 0.0, 0
    for start, end in copies:
        while first < len(kernels) and kernels[first][1] <= start:
            first += 1
        at = first
        while at < len(kernels) and kernels[at][0] < end:
            both += min(end, kernels[at][1]) - max(start, kernels[at][0])
            at += 1
    return {
        "copy_ms": copy_ms,
        "kernel_ms": kernel_ms,
        "hidden": both / copy_ms if copy_ms else None,
        "possible": min(copy_ms, kernel_ms) / copy_ms if copy_ms else None,
    }


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def condensed(spans: list[Span], most: int = 400) -> list[Span]:
    """The timeline with each stream's neighbours of one kind, less than 20 us apart, as one span; the first `most`."""
    result: list[Span] = []
    last: dict[str, int] = {}
    for stream, start, end, what in spans:
        at = last.get(stream)
        if at is not None and result[at][3] == what == "kernel" and start - result[at][2] < 0.02:
            result[at] = (stream, result[at][1], max(end, result[at][2]), what)
            continue
        last[stream] = len(result)
        result.append((stream, start, end, what))
    return [(stream, round(start, 4), round(end, 4), what) for stream, start, end, what in result[:most]]


def profiled(work: Callable[[], Any]) -> list[Span]:
    """The device's timeline of `work`; empty where there is no CUDA."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return timeline(json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"])


def check_prefill_timeline(folder: Path, device: str, tokens: int) -> dict[str, Any]:
    """The timeline of one long chunk with no expert resident.

    Raises AssertionError where, on CUDA, no copy ran beside a kernel.
    """
    model = _load(folder, device=device, gpu_prefill_token_threshold=1)
    prompt = torch.randint(3, 4000, (1, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)

    def chunk() -> None:
        with torch.inference_mode():
            model(input_ids=prompt, logits_to_keep=1)

    chunk()  # allocates the buffers, chooses kernels
    before = model.hotset_report()["gpu_prefill"]
    spans = profiled(chunk)
    after = model.hotset_report()["gpu_prefill"]
    streamed = {key: after[key] - before[key] for key in ("experts_streamed", "bytes", "seconds")}
    assert streamed["experts_streamed"] > 0, "nothing was streamed"
    found = overlap(spans)
    if device != "cpu":
        assert found["hidden"], f"no copy ran beside a kernel: {found}"
    return {"tokens": tokens, **streamed, **found, "timeline": condensed(spans)}


def check_moves_timeline(folder: Path, shape: Mapping[str, int], device: str, tokens: int) -> dict[str, Any]:
    """The timeline of decoding while a second thread moves experts. Raises AssertionError where none moved."""
    model = _load(folder, device=device, plan=resident(shape, 0.5), adapt=hotset.Adaptation(automatic=False))
    _text(model, 4)
    moves = 0

    def work() -> None:
        nonlocal moves
        moves, _ = _while_moving(model, lambda: _text(model, tokens))

    spans = profiled(work)
    assert moves > 0, "no expert moved"
    return {"tokens": tokens, "moves": moves, **overlap(spans), "timeline": condensed(spans)}


# -- decode ------------------------------------------------------------------------------------------------------------


def check_decode(
    folder: Path,
    shape: Mapping[str, int],
    device: str,
    new_tokens: int,
    rounds: int,
    machine: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """[{share, tokens_per_second, predicted_tokens_per_second, error, ...}] at 0, 25, 50, 75 and 100 % resident.

    The plan at each share holds the experts that this decode picks most. machine: of `measured_machine`, for its round
    trip.
    """
    model = _load(folder, device=device)
    prompt = torch.arange(5, 21, device=model.device)[None]
    trace, _ = record_decode(model, prompt, new_tokens)
    del model
    gc.collect()
    some = hotset.plan(trace, fraction=0.25)
    nothing = np.zeros_like(resident(shape, 0.0))
    none = dataclasses.replace(some, gpu_experts_mask=nothing, budget={"asked": "0 %"}, score=0.0, bound=None)
    rows = bench(
        folder,
        plans=[none],
        budgets=["25%", "50%", "75%", "100%"],
        new_tokens=new_tokens,
        rounds=rounds,
        machine=None if machine is None else machine_from_json(machine, "the probe"),
        device=device,
    )
    return [
        {
            "resident": row.budget,
            "hit_rate": row.hit_rate,
            "tokens_per_second": 1.0 / row.measured,
            "predicted_tokens_per_second": 1.0 / row.predicted,
            "error": row.error,
            "hit_seconds": row.hit_seconds,
            "miss_seconds": row.miss_seconds,
        }
        for row in rows
    ]


def measured_machine(folder: Path) -> dict[str, Any]:
    """What `hotset probe` finds, and the prefill threshold that follows for the checkpoint's shape."""
    from hotset.machines.probe import probe

    machine = probe(folder=folder, repeats=3)
    model = _load(folder, machine=machine)
    return {"machine": machine_to_json(machine), "gpu_prefill": model.hotset_report()["gpu_prefill"]}


def _load(folder: Path, **settings: Any) -> Any:
    gc.collect()
    return hotset.load(folder, **settings)
