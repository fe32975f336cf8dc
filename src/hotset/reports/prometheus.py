"""What a running model did, from `model.hotset_report()`, in Prometheus' text exposition format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4). Counters count since the model was
loaded; names carry base units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_Sample = tuple[Mapping[str, str], float | int | None]


def prometheus_text(report: Mapping[str, Any]) -> str:
    """One scrape. report: as `model.hotset_report()` gives it."""
    lines = []
    for name, kind, about, samples in _metrics(report):
        known = [(labels, value) for labels, value in samples if value is not None]
        if not known:
            continue
        lines += [f"# HELP hotset_{name} {about}", f"# TYPE hotset_{name} {kind}"]
        for labels, value in known:
            inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
            lines.append(f"hotset_{name}{{{inside}}} {value}" if inside else f"hotset_{name} {value}")
    return "\n".join(lines) + "\n"


def _metrics(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    phases = {name: report[name] for name in ("prefill", "decode")}

    def by_phase(key: str) -> list[_Sample]:
        return [({"phase": name}, part[key]) for name, part in phases.items()]

    tiers = {name: count for name, count in report["experts"].items() if name != "total"}
    yield "experts", "gauge", "Experts in each tier.", [({"tier": t}, n) for t, n in tiers.items()]
    sizes: list[_Sample] = [({"kind": kind}, size) for kind, size in report["bytes"].items()]
    yield "memory_bytes", "gauge", "Bytes of the arena, of host copies of experts, of buffers and of the rest.", sizes
    yield "peak_host_bytes", "gauge", "Most memory the process ever had.", [({}, report["peak_host_bytes"])]
    yield "tokens_total", "counter", "Tokens through the model.", by_phase("tokens")
    yield "forward_seconds_total", "counter", "Seconds in forward passes, moves included.", by_phase("seconds")
    yield "picks_total", "counter", "Picks of experts.", by_phase("picks")
    yield "pick_hits_total", "counter", "Picks whose expert was in the arena.", by_phase("hits")
    yield "dropped_mass", "gauge", "Share of gate mass dropped; 0 in exact mode.", [({}, report["dropped_mass"])]
    prefill = report["gpu_prefill"]
    if prefill["token_threshold"] is not None:
        yield "prefill_chunks_total", "counter", "Forward passes long enough to stream.", [({}, prefill["chunks"])]
        streamed: list[_Sample] = [({}, prefill["experts_streamed"])]
        yield "prefill_streamed_experts_total", "counter", "Experts copied to the device for one chunk.", streamed
        yield "prefill_streamed_bytes_total", "counter", "Bytes of those experts.", [({}, prefill["bytes"])]
        yield (
            "prefill_streaming_seconds_total",
            "counter",
            "Host seconds in streamed layers.",
            [({}, prefill["seconds"])],
        )
    moves = report["moves"]
    if moves is not None:
        outcomes = ("promotions", "demotions", "failed", "deferred")
        yield "moves_total", "counter", "Moves by outcome.", [({"outcome": key}, moves[key]) for key in outcomes]
        yield "moved_bytes_total", "counter", "Bytes moved, both ways.", [({}, moves["bytes"])]
        yield "move_seconds_total", "counter", "Seconds deciding and moving.", [({}, moves["seconds"])]
    disk = report["disk"]
    if disk is not None:
        requests: list[_Sample] = [({"result": "hit"}, disk["hits"]), ({"result": "miss"}, disk["misses"])]
        yield "host_cache_requests_total", "counter", "Experts asked of the host cache.", requests
        yield "disk_read_bytes_total", "counter", "Bytes of experts read.", [({}, disk["read_bytes"])]
        yield "disk_reads_total", "counter", "Experts read.", [({}, disk["loads"])]
        yield "disk_read_failures_total", "counter", "Reads that failed.", [({}, disk["failures"])]
        yield "stalls_total", "counter", "Times that compute waited for the disk.", [({}, disk["stalls"])]
        yield "stall_seconds_total", "counter", "Seconds that compute waited.", [({}, disk["stall_seconds"])]
