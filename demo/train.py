"""Train the demo model from scratch on the CPU.

The steps share ``--work``: the text comes from ``demo/corpus.py``, the tokenizer and the token
streams are made at the first run, and the state is written every ``--save-minutes`` to a temporary
name that is then renamed. An interrupt (Ctrl-C or SIGTERM) saves and stops after the current step;
the same command goes on from there with the same data order. The learning rate falls to zero over
``--minutes`` of training time (interruptions do not count), so a slower machine sees fewer tokens
but always ends with a finished schedule.

Each worker is a process with one thread: they share the weights in memory, work on their own
sequences, and each updates its own part of the parameters. That keeps the number of waits between
cores at two a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if sys.platform == "linux":  # keep freed blocks: the step's big buffers are then reused, not mapped
    _libc = ctypes.CDLL(None)
    _libc.mallopt(-4, 0)  # M_MMAP_MAX
    _libc.mallopt(-1, 2_000_000_000)  # M_TRIM_THRESHOLD, bytes
    _libc.mallopt(-2, 256 << 20)  # M_TOP_PAD, bytes

import corpus
import numpy as np
import text
import torch
from moe import Model, Shape
from tokenizers import Tokenizer
from torch import Tensor

MIX = "python=9,english=3,german=2,yaml=2"  # sequences of each domain in a step
HERE = Path(__file__).resolve().parent
WAIT_S = 600.0  # longest wait for another worker, seconds


@dataclass(frozen=True)
class Plan:
    """Everything a worker needs to know; plain values, so that it can be sent to a process."""

    work: Path
    mix: dict[str, int]
    workers: int
    minutes: float
    length: int
    seed: int
    save_minutes: float
    eval_minutes: float
    warmup: int
    hold: float
    lr: float
    lr_adam: float
    aux: float
    compiled: bool
    max_steps: int


def learning_rate(plan: Plan, step: int, progress: float) -> float:
    """Factor of the peak rates: warm-up by steps, then flat, then linear to 0 at progress 1."""
    warm = min(1.0, (step + 1) / plan.warmup)
    return warm * max(0.0, min(1.0, (1.0 - progress) / (1.0 - plan.hold)))


# --- data ----------------------------------------------------------------------------------------


def prepare(folder: Path, work: Path, vocabulary: int) -> None:
    """Make the tokenizer and the token streams, unless they are there."""
    path = work / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        print(f"training a tokenizer of {vocabulary} entries", flush=True)
        tokenizer = text.train_tokenizer(folder, path, vocabulary)
    for part in ("train", "heldout"):
        for domain in corpus.DOMAINS:
            target = work / f"{part}-{domain}.npy"
            if target.exists():
                continue
            documents = corpus.load(folder, part, domain)
            tokens = text.encode(tokenizer, documents)
            partial = target.with_suffix(".partial.npy")
            np.save(partial, tokens)
            partial.replace(target)
            size = sum(len(words.encode()) for _, words in documents)
            print(
                f"{part:8s} {domain:8s} {len(tokens):>10,} tokens, {size / len(tokens):.2f} bytes each",
                flush=True,
            )


class Batches:
    """Batches of fixed numbers of sequences of each domain, in a fixed order.

    ``cursors`` holds the number of windows taken from each domain so far; with the seed it is all
    that the order depends on.
    """

    def __init__(self, plan: Plan, cursors: dict[str, int]) -> None:
        self.mix = plan.mix
        self.cursors = dict(cursors)
        self.streams = {
            domain: text.Stream(
                np.load(plan.work / f"train-{domain}.npy", mmap_mode="r"),
                plan.length,
                plan.seed * 100 + number,
            )
            for number, domain in enumerate(corpus.DOMAINS)
        }

    def get(self, rank: int, workers: int) -> Tensor:
        """The sequences of one worker in the next step, int64 [B, S + 1]."""
        rows = []
        for domain, count in self.mix.items():
            first = self.cursors[domain]
            rows += [self.streams[domain].window(first + place) for place in range(count)]
            self.cursors[domain] = first + count
        return torch.from_numpy(np.stack(rows[rank::workers]))


# --- optimiser -----------------------------------------------------------------------------------


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices; [..., R, C]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Muon for matrices, AdamW for the embedding, the routers and the norms.

    State lies in shared memory (float32 [P] each: master weights, momentum, second moment), so one
    worker can save all of it; each worker updates the parameters it owns.
    """

    def __init__(self, shape: Shape, parts: dict[str, tuple[int, torch.Size]], plan: Plan) -> None:
        self.parts = parts
        self.plan = plan
        heads, kv, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.qkv = (heads * d, kv * d, kv * d)
        # Matrices in a balanced order: the largest first, each to the least loaded worker.
        load = [0] * plan.workers
        self.owner: dict[str, int] = {}
        for name in sorted(parts, key=lambda key: -parts[key][1].numel()):
            least = load.index(min(load))
            self.owner[name] = least
            load[least] += parts[name][1].numel()

    def _direction(self, name: str, momentum: Tensor) -> Tensor:
        """Muon's update of one parameter, each of its matrices made orthogonal by itself."""
        if name.endswith("qkv"):
            pieces: tuple[Tensor, ...] = momentum.split(self.qkv)
        elif name.endswith("gate_up"):
            pieces = momentum.chunk(2, dim=-2)
        else:
            pieces = (momentum,)
        done = []
        for piece in pieces:
            scale = max(1.0, piece.shape[-2] / piece.shape[-1]) ** 0.5
            done.append(orthogonal(piece) * scale)
        return done[0] if len(done) == 1 else torch.cat(done, dim=-2)

    def update(self, rank: int, step: int, factor: float, weights: Tensor, grads: Tensor, state: Tensor) -> None:
        """One step on the parameters of ``rank``.

        ``weights`` bfloat16 [P], ``grads`` bfloat16 [workers, P], ``state`` float32 [3, P].
        """
        master, first, second = state
        for name, (start, size) in self.parts.items():
            if self.owner[name] != rank:
                continue
            part = slice(start, start + size.numel())
            grad = grads[:, part].float().mean(dim=0).view(size)
            value, m, v = (x[part].view(size) for x in (master, first, second))
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("qkv", "o", "gate_up", "down"):
                m.lerp_(grad, 0.05)
                rate = self.plan.lr * factor
                value.mul_(1 - rate * 0.01)
                value.sub_(self._direction(name, grad.lerp(m, 0.95)), alpha=rate)
            else:
                rate = self.plan.lr_adam * factor * (0.5 if leaf == "router" else 1.0)
                m.lerp_(grad, 0.1)
                v.lerp_(grad.square(), 0.05)
                number = step + 1
                scale = (v / (1 - 0.95**number)).sqrt_().add_(1e-10)
                value.sub_(m / (1 - 0.9**number) / scale, alpha=rate)
            weights[part] = value.reshape(-1).bfloat16()


# --- training ------------------------------------------------------------------------------------


def save_state(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary name, then rename it."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


def _layout(model: Model) -> dict[str, tuple[int, torch.Size]]:
    parts = {}
    start = 0
    for name, value in model.master.items():
        parts[name] = (start, value.shape)
        start += value.numel()
    return parts


def _evaluate(model: Model, plan: Plan, domain: str, rows: int) -> float:
    """Bits a byte of the first held-out windows of a domain (windows apart, for the log)."""
    tokens = np.load(plan.work / f"heldout-{domain}.npy").astype(np.int64)
    tokenizer = Tokenizer.from_file(str(plan.work / "tokenizer.json"))
    span = rows * plan.length
    batches = min(4, (len(tokens) - 1) // span)
    nats, size = 0.0, 0
    for number in range(batches):
        block = tokens[number * span : (number + 1) * span + 1]
        view = torch.from_numpy(block)
        with torch.no_grad():
            loss, _, _ = model.loss(view[:-1].view(rows, -1), view[1:].view(rows, -1))
        nats += loss.item() * span
        size += len(tokenizer.decode(block[1:].tolist()).encode())
    return nats / np.log(2) / size


def work(rank: int, plan: Plan, shared: dict[str, Any]) -> None:
    """One worker: forward and backward on its sequences, update of its parameters."""
    torch.set_num_threads(1)
    stop = shared["stop"]
    if rank == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(stop, "value", 1))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    barrier = shared["barrier"]
    weights, grads, state, stats = (shared[k] for k in ("weights", "grads", "state", "stats"))
    shape = Shape(**shared["shape"])
    model = Model(shape, plan.length, plan.seed, plan.compiled)
    parts = _layout(model)
    optimiser = Optimiser(shape, parts, plan)
    model.weights = {
        name: weights[start : start + size.numel()].view(size).requires_grad_() for name, (start, size) in parts.items()
    }
    batches = Batches(plan, shared["cursors"])
    rows = sum(plan.mix.values()) // plan.workers
    tokens_a_step = rows * plan.workers * plan.length
    elapsed, step = shared["elapsed"], shared["step"]
    log: list[dict[str, float]] = shared["log"]
    checkpoint = plan.work / "state.pt"
    total = plan.minutes * 60
    last = saved = evaluated = time.monotonic()
    shown, shown_at = step, last

    def content() -> dict[str, Any]:
        return {
            "state": state,
            "step": step,
            "elapsed": elapsed,
            "log": log,
            "shape": asdict(shape),
            "cursors": batches.cursors,
            "runs": shared["runs"],
        }

    while True:
        batch = batches.get(rank, plan.workers)
        ce, aux, loads = model.loss(batch[:, :-1], batch[:, 1:])
        (ce + plan.aux * aux).backward()
        for name, (start, size) in parts.items():
            leaf = model.weights[name]
            grads[rank, start : start + size.numel()] = leaf.grad.reshape(-1)
            leaf.grad = None
        stats[rank, 0], stats[rank, 1] = ce.item(), aux.item()
        stats[rank, 2] = min(min(load) for load in loads) / (rows * plan.length)
        if rank == 0:
            now = time.monotonic()
            elapsed += now - last
            last = now
            stats[0, 3] = elapsed
            stats[0, 4] = stop.value
        barrier.wait(WAIT_S)
        progress = min(1.0, stats[0, 3].item() / total)
        factor = learning_rate(plan, step, progress)
        halted = stats[0, 4].item() != 0
        with torch.no_grad():
            optimiser.update(rank, step, factor, weights, grads, state)
        mean = stats.mean(dim=0)
        loss, balance = mean[0].item(), mean[1].item() / len(shape.moe_layers)
        least = stats[:, 2].min().item()
        step += 1
        finished = progress >= 1.0 or step == plan.max_steps
        if rank == 0:
            stats[0, 5] = time.monotonic() - evaluated > plan.eval_minutes * 60
        barrier.wait(WAIT_S)
        if finished or halted or stats[0, 5].item():
            for number, domain in enumerate(corpus.DOMAINS):
                if number % plan.workers == rank and not halted:
                    stats[0, 8 + number] = _evaluate(model, plan, domain, rows)
            barrier.wait(WAIT_S)
            evaluated = time.monotonic()
        if rank:
            if finished or halted:
                return
            continue
        if step % 10 == 0 or finished:
            now = time.monotonic()
            speed = (step - shown) * tokens_a_step / (now - shown_at)
            shown, shown_at = step, now
            log.append(
                {
                    "step": step,
                    "tokens": step * tokens_a_step,
                    "seconds": round(elapsed, 1),
                    "loss": round(loss, 4),
                    "balance": round(balance, 4),
                    "least_load": round(least, 5),
                    "lr_factor": round(factor, 4),
                    "tokens_per_s": round(speed),
                }
            )
            left = max(0.0, total - elapsed)
            print(
                f"step {step:5d}  loss {loss:.3f}  balance {balance:.2f}  least {least:.4f}  "
                f"lr {factor:.2f}  {speed:6.0f} tokens/s  ETA {left / 60:.1f} min",
                flush=True,
            )
        if stats[0, 5].item() or (finished and not halted):
            bpb = {d: round(stats[0, 8 + n].item(), 4) for n, d in enumerate(corpus.DOMAINS)}
            log.append({"step": step, "seconds": round(elapsed, 1), "heldout_bpb": bpb})
            print("held-out bits per byte (part): " + json.dumps(bpb), flush=True)
        if finished or halted or time.monotonic() - saved > plan.save_minutes * 60:
            save_state(checkpoint, content())
            saved = time.monotonic()
        if finished or halted:
            word = "finished" if finished else "interrupted"
            print(f"{word} at step {step}, {elapsed / 60:.1f} min; state in {checkpoint}", flush=True)
            shared["finished"] = finished
            return


def train(plan: Plan, shape: Shape) -> bool:
    """Run all workers until the schedule ends or an interrupt; whether it ended."""
    model = Model(shape, plan.length, plan.seed, compiled=False)
    flat = torch.cat([value.reshape(-1) for value in model.master.values()])
    state = torch.zeros(3, flat.numel())
    state[0] = flat
    step, elapsed, log = 0, 0.0, []
    cursors = dict.fromkeys(corpus.DOMAINS, 0)
    runs: list[dict[str, Any]] = []
    checkpoint = plan.work / "state.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        saved["shape"]["dense_layers"] = tuple(saved["shape"]["dense_layers"])
        runs = saved["runs"]
        if saved["shape"] != asdict(shape) or runs[-1]["seed"] != plan.seed:
            raise ValueError(f"{checkpoint} is of another shape or seed; remove it to start anew")
        state, step, elapsed, log = (saved[k] for k in ("state", "step", "elapsed", "log"))
        cursors = saved["cursors"]
        print(f"resuming at step {step}, {elapsed / 60:.1f} min", flush=True)
        if elapsed >= plan.minutes * 60:
            print("already finished", flush=True)
            return True
    print(f"{flat.numel():,} parameters", flush=True)
    settings = {key: value for key, value in asdict(plan).items() if key != "work"}
    if not runs or {k: v for k, v in runs[-1].items() if k != "from_step"} != settings:
        runs.append({"from_step": step, **settings})
    context = mp.get_context("spawn")
    shared: dict[str, Any] = {
        "weights": state[0].bfloat16().share_memory_(),
        "grads": torch.zeros(plan.workers, flat.numel(), dtype=torch.bfloat16).share_memory_(),
        "state": state.clone().share_memory_(),
        "stats": torch.zeros(plan.workers, 16, dtype=torch.float64).share_memory_(),
        "barrier": context.Barrier(plan.workers),
        "stop": context.Value("i", 0),
        "shape": asdict(shape),
        "step": step,
        "elapsed": elapsed,
        "log": log,
        "cursors": cursors,
        "runs": runs,
        "finished": False,
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    helpers = [context.Process(target=work, args=(rank, plan, shared), daemon=True) for rank in range(1, plan.workers)]
    for helper in helpers:
        helper.start()
    work(0, plan, shared)
    for helper in helpers:
        helper.join(60)
    return shared["finished"]


def parse_mix(value: str) -> dict[str, int]:
    """``python=8,english=3,...`` as a mapping; every domain must be there."""
    try:
        mix = {name: int(count) for name, count in (part.split("=") for part in value.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r}: not of the form name=number,...") from None
    if sorted(mix) != sorted(corpus.DOMAINS) or min(mix.values()) < 0:
        raise argparse.ArgumentTypeError(f"{value!r}: needs {', '.join(corpus.DOMAINS)}")
    return mix


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=HERE / ".corpus", help="text of corpus.py")
    parser.add_argument("--work", type=Path, default=HERE / ".train", help="state (%(default)s)")
    parser.add_argument("--minutes", type=float, default=65, help="training time (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--mix", type=parse_mix, default=MIX, help="sequences a step of each domain (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens a window (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--save-minutes", type=float, default=3, help="between states (%(default)s)")
    parser.add_argument("--eval-minutes", type=float, default=10, help="%(default)s")
    parser.add_argument("--warmup", type=int, default=60, help="steps (%(default)s)")
    parser.add_argument("--hold", type=float, default=0.2, help="share at the full rate (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's peak rate (%(default)s)")
    parser.add_argument("--lr-adam", type=float, default=0.004, help="AdamW's peak rate (%(default)s)")
    parser.add_argument("--aux", type=float, default=0.003, help="balance loss (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=0, help="stop early (0: no)")
    parser.add_argument("--no-compile", action="store_true", help="plain PyTorch, slower")
    args = parser.parse_args(argv)
    if sum(args.mix.values()) % args.workers:
        parser.error(f"--workers must divide the {sum(args.mix.values())} sequences of a step")
    shape = Shape()
    plan = Plan(
        work=args.work,
        mix=args.mix,
        workers=args.workers,
        minutes=args.minutes,
        length=args.length,
        seed=args.seed,
        save_minutes=args.save_minutes,
        eval_minutes=args.eval_minutes,
        warmup=args.warmup,
        hold=args.hold,
        lr=args.lr,
        lr_adam=args.lr_adam,
        aux=args.aux,
        compiled=not args.no_compile,
        max_steps=args.max_steps,
    )
    try:
        args.work.mkdir(parents=True, exist_ok=True)
        prepare(args.corpus, args.work, shape.vocab_size)
        return 0 if train(plan, shape) else 130
    except threading.BrokenBarrierError:
        print("train.py: a worker stopped or hung; run again to go on from the last state", file=sys.stderr)
        return 1
    except (corpus.CorpusError, ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
