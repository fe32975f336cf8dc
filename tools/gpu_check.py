"""`make gpu-check`: what a test machine without a GPU cannot show about remapping and runtime. Needs a CUDA device.

For the Triton and the torch implementation, on the GPU: the same bits as the reference on the CPU; no call waits for
the device (torch's sync debug mode set to "error"); a captured CUDA graph gives the right bits when its inputs and the
slot table change between replays; time per call beside plain indexing. Then the slot table's upkeep on two streams,
with the fence between them, and the runtime on random models made on the spot (`gpu_check_runtime.py`). Progress on
stderr, one JSON line on stdout (and to --output). Exit status 1 where a check failed, could not run, or there is no
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hotset.core import Move
from hotset.ops import ShedLedger, ShedPolicy, available_backends, route_shed, split_by_residency
from hotset.residency import Residency, Swap
from hotset.runtime.slot_tables import SlotTables

BACKENDS = ("triton", "torch")
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38, 1.0, -1.0], np.float32)
FULL = {
    "T": (1, 4, 33, 4096),
    "R": (1, 2, 4, 6, 8, 10, 64),
    "E": (8, 32, 256, 512, 1024),
    "share": (0.0, 0.3, 0.7, 1.0),
}
QUICK = {"T": (1, 33, 4096), "R": (1, 6, 8, 64), "E": (8, 256), "share": (0.3, 1.0)}

Case = tuple[Any, Any, Any]


def make_case(num_tokens: int, num_picks: int, num_experts: int, share: float, dtype: Any, seed: int = 0) -> Case:
    """NumPy arrays; one score in ten and one id in forty is an odd one."""
    rng = np.random.default_rng([num_tokens, num_picks, num_experts, round(share * 10), seed])
    indices = rng.integers(0, num_experts, (num_tokens, num_picks)).astype(dtype)
    odd, limits = rng.random(indices.shape) < 0.025, np.iinfo(dtype)
    indices[odd] = rng.choice(np.array([limits.min, limits.max, num_experts], dtype), odd.sum())
    scores = rng.random(indices.shape).astype(np.float32)
    odd = rng.random(indices.shape) < 0.1
    scores[odd] = rng.choice(SPECIAL, odd.sum())
    table = np.full(num_experts, -1, np.int32)
    resident = rng.permutation(num_experts)[: round(share * num_experts)]
    table[resident] = rng.permutation(len(resident))
    return indices, scores, table


def on_device(case: Case, device: str) -> Case:
    import torch

    indices, scores, table = (torch.from_numpy(array).to(device) for array in case)
    return indices, scores, table


def require_same(got: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError unless every array has the same bits."""
    for name, g, w in zip(wanted._fields, got, wanted, strict=True):
        g, w = g.cpu().numpy(), np.asarray(w)
        assert g.dtype == w.dtype, f"{what}: {name} is {g.dtype}, wanted {w.dtype}"
        if name in ("over_limit", "mass"):  # mass alone is not held to one NaN
            wrong = np.argwhere((g != w) & ((g == g) | (w == w)))
        else:
            wrong = np.argwhere(g.view(np.int32) != w.view(np.int32))
        assert len(wrong) == 0, f"{what}: {len(wrong)} values of {name} differ, the first at {wrong[0].tolist()}"


def check_bits(backend: str, device: str, shapes: dict[str, tuple[Any, ...]]) -> int:
    """Number of cases with the reference's bits on the device. Raises AssertionError at the first that differs."""
    dtypes = (np.uint32, np.int32, np.int64)
    for number, shape in enumerate(product(*shapes.values())):
        case = make_case(*shape, dtype=dtypes[number % 3])
        # the reference is a Python loop; NumPy's equality with it is a matter of the ordinary tests
        on_host = "reference" if shape[0] * shape[1] < 1000 else "numpy"
        native = on_device(case, device)
        what = f"{backend} at T, R, E, share = {shape}"
        require_same(route_shed(*native, backend=backend), route_shed(*case, backend=on_host), what)
        require_same(split_by_residency(*native, backend=backend), split_by_residency(*case, backend=on_host), what)
    return number + 1


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_sync(backend: str) -> None:
    """Raises RuntimeError where a call makes the host wait."""
    import torch

    native = on_device(make_case(64, 8, 256, 0.7, np.int64), "cuda")
    ledger, policy = ShedLedger(1, device="cuda"), ShedPolicy(0.5)

    def calls() -> None:
        route_shed(*native, backend=backend)
        split_by_residency(*native, backend=backend)
        ledger.record(0, policy.apply(*native, backend=backend))

    calls()  # compiles, loads and allocates
    with waiting_is_an_error():
        try:
            native[1].sum().item()
        except RuntimeError:
            pass
        else:
            raise AssertionError("torch's sync debug mode does not notice .item(): this check would show nothing")
        calls()
    torch.cuda.synchronize()


def check_graph(backend: str) -> int:
    """Number of replays of one captured graph that gave the reference's bits, inputs and table changed in between."""
    import torch

    policy, ledger = ShedPolicy(0.5), ShedLedger(1, device="cuda")
    static = on_device(make_case(33, 8, 256, 0.7, np.int64), "cuda")

    def step() -> tuple[Any, Any]:
        routing = policy.apply(*static, backend=backend)
        ledger.record(0, routing)
        return route_shed(*static, backend=backend), routing

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed, routing = step()
    before = int(ledger.totals().tokens[0])
    replays = 5
    for seed in range(1, replays + 1):
        case = make_case(33, 8, 256, seed / (replays + 1), np.int64, seed)
        for target, source in zip(static, case, strict=True):
            target.copy_(torch.from_numpy(source))
        graph.replay()
        torch.cuda.synchronize()
        require_same(routed, route_shed(*case, backend="reference"), f"{backend}, graph replay {seed}")
        require_same(routing, policy.apply(*case, backend="reference"), f"{backend}, policy in graph replay {seed}")
    counted = int(ledger.totals().tokens[0]) - before
    assert counted == 33 * replays, f"{backend}: the ledger in the graph counted {counted} tokens, not {33 * replays}"
    return replays


def seconds_per_call(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Median over 5 rounds: as called from Python, and as a replayed CUDA graph of 20 calls."""
    import torch

    for _ in range(10):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()

    def timed(run: Callable[[], Any], rounds: int, per_run: int) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / (rounds * per_run))
        return float(np.median(times))

    return {"from_python": timed(call, calls, 1), "in_graph": timed(graph.replay, max(calls // 20, 1), 20)}


def measure(calls: int, backends: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """{"floor" or backend: {T: seconds per call}} at R = 8, E = 256, 70 % resident."""
    result: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ("floor", *backends)}
    for num_tokens in (1, 8, 64, 4096):
        native = on_device(make_case(num_tokens, 8, 256, 0.7, np.int64), "cuda")
        indices, _, table = native
        indices.clamp_(0, 255)  # plain indexing knows no ids outside
        result["floor"][str(num_tokens)] = seconds_per_call(lambda t=table, i=indices: t[i], calls)
        for name in backends:
            run = lambda n=native, b=name: route_shed(*n, backend=b)  # noqa: E731
            result[name][str(num_tokens)] = seconds_per_call(run, calls)
    return result


def check_slot_tables(rounds: int) -> int:
    """Swap experts on a copying stream while kernels read the table; whoever reads must find the right expert's bytes.

    Returns the number of swaps. The arena holds each expert's number in every word of its slot, so a kernel that
    gathers by the table shows whose bytes it met.
    """
    import torch

    num_experts, num_slots, words = 64, 16, 1 << 20
    mask = np.zeros((1, num_experts), bool)
    mask[0, :num_slots] = True
    residency = Residency(num_experts, [num_slots], initial_mask=mask)
    tables = SlotTables(residency, device="cuda")
    arena = torch.arange(num_slots, device="cuda", dtype=torch.int32)[:, None].repeat(1, words)
    row, copying, computing = tables.row(0), torch.cuda.Stream(), torch.cuda.current_stream()
    sources = [torch.full((words,), e, dtype=torch.int32).pin_memory() for e in range(num_experts)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    everybody = torch.arange(num_experts, device="cuda", dtype=torch.int32)

    def read() -> None:
        met = arena[row.clamp(min=0)]
        wrong.add_(((met != everybody[:, None]) & (row >= 0)[:, None]).sum())

    read()
    rng = np.random.default_rng(0)
    pending: tuple[Move, Any] | None = None
    with waiting_is_an_error():
        for _ in range(rounds):
            read()
            residents = np.flatnonzero(residency.mask()[0])
            absent = np.setdiff1d(np.arange(num_experts), [*residents, *([pending[0].expert] if pending else [])])
            _, move = residency.begin(Swap(0, int(rng.choice(absent)), 0, int(rng.choice(residents))))
            copying.wait_event(tables.before_copy())
            with torch.cuda.stream(copying):
                arena[move.slot].copy_(sources[move.expert], non_blocking=True)
                landed = torch.cuda.Event()
                landed.record(copying)
            read()  # while the copy may be under way
            if pending:
                tables.publish([pending[0]], pending[1])
            pending = (move, landed)
            read()
    computing.synchronize()
    assert int(wrong) == 0, f"kernels met {int(wrong)} words of another expert"
    tables.check_integrity()
    residency.check_integrity()
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and calls")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gpu-check: torch is not installed, so nothing was checked: pip install 'hotset[hf]'", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} finds no CUDA device here, so nothing was checked: "
            "run it on a machine with an NVIDIA GPU and a CUDA build of torch",
            file=sys.stderr,
        )
        return 1
    missing = {name: available_backends()[name] for name in BACKENDS}
    usable = [name for name in BACKENDS if missing[name] is None]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "not_checked": {name: why for name, why in missing.items() if why},
        "failures": {},
    }

    def attempt(name: str, check: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            report[name] = check()
        except Exception as error:  # every check is reported, whatever ails one of them
            report["failures"][name] = f"{type(error).__name__}: {error}"
        outcome = report["failures"].get(name, "ok")
        print(f"gpu-check: {name}: {outcome} ({time.perf_counter() - started:.1f} s)", file=sys.stderr)

    for backend in usable:
        attempt(f"{backend}_equal_cases", lambda b=backend: check_bits(b, "cuda", QUICK if options.quick else FULL))
        attempt(f"{backend}_no_sync", lambda b=backend: check_no_sync(b) or True)
        attempt(f"{backend}_graph_replays", lambda b=backend: check_graph(b))
    attempt("slot_table_swaps", lambda: check_slot_tables(20 if options.quick else 200))
    attempt("seconds_per_call", lambda: measure(100 if options.quick else 1000, usable))
    import gpu_check_runtime as runtime

    small = runtime.QUICK if options.quick else runtime.MEDIUM
    large, tokens, rounds = (runtime.QUICK, 16, 3) if options.quick else (runtime.FULL, 32, 5)
    with tempfile.TemporaryDirectory(prefix="hotset-gpu-check-") as temporary:
        first = runtime.make_checkpoint(Path(temporary) / "small", small, "cuda")
        attempt("parity", lambda: runtime.check_parity(first, small, "cuda"))
        attempt("text_under_moves", lambda: runtime.check_text_under_moves(first, small, "cuda", 4 * tokens))
        folder = runtime.make_checkpoint(Path(temporary) / "large", large, "cuda")
        attempt("probe", lambda: runtime.measured_machine(folder))
        machine = report["probe"]["machine"] if "probe" in report else None
        attempt("prefill_timeline", lambda: runtime.check_prefill_timeline(folder, "cuda", 2048))
        attempt("moves_timeline", lambda: runtime.check_moves_timeline(folder, large, "cuda", tokens))
        attempt("decode", lambda: runtime.check_decode(folder, large, "cuda", tokens, rounds, machine))
    for name, why in report["not_checked"].items():
        print(f"gpu-check: {name}: not checked, {why}", file=sys.stderr)
    line = json.dumps(report)
    print(line)
    if options.output:
        options.output.write_text(line + "\n")
    return 1 if report["failures"] or report["not_checked"] else 0


if __name__ == "__main__":
    sys.exit(main())
