"""Time per call of every route_shed backend beside plain indexing, `slot_table[indices]`, which is the floor.

Each backend's result is compared with the reference, bit for bit, before anything is timed. All backends and the
floor take turns of 1 ms; the tenth percentile of the turns is shown, since a shared machine interrupts and drifts. The
reference is timed at small T only; the Triton interpreter is no measure of anything and is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import print_header, print_json_line

from hotset.ops import available_backends, choose_backend, route_shed

PICKS, EXPERTS = 8, 256
TOKENS = (1, 8, 64, 4096)


def make_case(num_tokens: int, share: float, dtype: Any, descending: bool = True) -> tuple[Any, Any, Any]:
    """Distinct experts per token; scores as a softmax over random logits would give them, largest first."""
    rng = np.random.default_rng(0)
    indices = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :PICKS].astype(dtype)
    logits = rng.standard_normal((num_tokens, PICKS))
    if descending:
        logits = -np.sort(-logits, axis=1)
    scores = np.exp(logits)
    scores = (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
    table = np.full(EXPERTS, -1, np.int32)
    resident = rng.permutation(EXPERTS)[: round(share * EXPERTS)]
    table[resident] = np.arange(len(resident))
    return indices, scores, table


def seconds_per_call(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds per call of each: the tenth percentile of turns of about 1 ms, taken one after the other for `seconds`.

    The turn's first call, which finds the caches as the others left them, is not counted. A low percentile, for the
    floor and the rest alike, since on a shared machine most turns may be interrupted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        started = time.perf_counter()
        call()
        repeats[name] = max(1, min(1000, round(1e-3 / (time.perf_counter() - started))))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            call()
            started = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - started) / repeats[name])
    return {name: float(np.percentile(of, 10)) for name, of in times.items()}


def check(case: tuple[Any, Any, Any], backend: str) -> None:
    wanted = route_shed(*case, backend="reference")
    got = route_shed(*case, backend=backend)
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        assert (np.asarray(a).view(np.int32) == b.view(np.int32)).all(), f"{backend} differs in {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--share", type=float, default=0.7, help="share of experts resident in the main table")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 3.0
    backends = [name for name, missing in available_backends().items() if missing is None and name != "triton"]
    print_header(
        "bench_route_shed: microseconds per call, uint32 ids",
        R=PICKS,
        E=EXPERTS,
        resident=options.share,
        auto=choose_backend("numpy"),
    )
    print(f"{'T':>6}{'floor':>10}" + "".join(f"{name:>12}" for name in backends))
    results: dict[str, dict[str, float]] = {"floor": {}, **{name: {} for name in backends}}
    for num_tokens in TOKENS:
        case = make_case(num_tokens, options.share, np.uint32)
        calls: dict[str, Callable[[], Any]] = {"floor": lambda case=case: case[2][case[0]]}
        for name in backends:
            if name == "reference" and num_tokens > 64:
                continue
            check(case, name)
            native = to_native(name, case)
            calls[name] = lambda native=native, name=name: finish(route_shed(*native, backend=name))
        for name, value in seconds_per_call(calls, seconds).items():
            results[name][str(num_tokens)] = value
        cells = [results[name].get(str(num_tokens)) for name in ("floor", *backends)]
        print(
            f"{num_tokens:>6}"
            + "".join(
                f"{'-' if c is None else f'{c * 1e6:.1f}':>{w}}"
                for c, w in zip(cells, [10] + [12] * len(backends), strict=True)
            )
        )
    print(
        "\nNumba over the floor at T = 4096 (NumPy casts uint32 ids to int64 before it indexes: int64's floor is lower)"
    )
    print(f"{'resident':>10}{'uint32':>10}{'int64':>10}{'uint32, scores unordered':>28}")
    ratios: dict[str, list[float]] = {}
    for share in (0.0, 0.3, 0.5, 0.7, 1.0):
        row = []
        for dtype, descending in ((np.uint32, True), (np.int64, True), (np.uint32, False)):
            case = make_case(4096, share, dtype, descending)
            check(case, "numba")
            both = seconds_per_call(
                {
                    "floor": lambda case=case: case[2][case[0]],
                    "numba": lambda case=case: route_shed(*case, backend="numba"),
                },
                seconds / 3,
            )
            row.append(both["numba"] / both["floor"])
        ratios[str(share)] = row
        print(f"{share:>10}" + f"{row[0]:>10.2f}{row[1]:>10.2f}{row[2]:>28.2f}")
    over = results["numba"]["4096"] / results["floor"]["4096"]
    print(f"\nnumba over floor at T = 4096, {options.share:.0%} resident: {over:.2f} (wanted: at most 3)")
    print_json_line(
        numba_over_floor_4096=round(over, 3),
        numba_over_floor_4096_by_share={s: [round(x, 2) for x in r] for s, r in ratios.items()},
        share=options.share,
        seconds_per_call={name: {t: float(f"{v:.4g}") for t, v in of.items()} for name, of in results.items()},
    )


def to_native(backend: str, case: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """The arrays as the backend's own users hold them."""
    if backend == "torch":
        import torch

        return tuple(map(torch.from_numpy, case))
    if backend == "mlx":
        import mlx.core as mx

        return tuple(map(mx.array, case))
    return case


def finish(result: Any) -> Any:
    """MLX computes when asked to."""
    if type(result.slots).__module__.startswith("mlx"):
        import mlx.core as mx

        mx.eval(*result)
    return result


if __name__ == "__main__":
    main()
