"""The closing summary of a run, from `model.hotset_report()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotset.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console


def print_run(console: Console, report: Mapping[str, Any]) -> None:
    """Experts and bytes per tier, hit rates, moves, reads and tokens per second, one fact per line."""
    experts, sizes = report["experts"], report["bytes"]
    on_disk = f", {experts['disk']} on disk" if "disk" in experts else ""
    copies, compute = report["skip_gpu_expert_cpu_copy"], report["host_compute"]
    lines = [
        (
            "experts",
            f"{experts['gpu']} of {experts['total']} in the arena ({report['arena']}), "
            f"{experts['host']} in host memory{on_disk}",
        ),
        ("host compute", f"{compute['format']}, {compute['kernels']} kernels ({compute['reason']})"),
        ("host copies", f"{'skipped' if copies['skip'] else 'kept'} ({copies['reason']})"),
        (
            "bytes",
            f"arena {format_bytes(sizes['arena'])}, host experts {format_bytes(sizes['host_experts'])}, "
            f"everything else {format_bytes(sizes['non_expert'])}",
        ),
        ("peak host memory", format_bytes(report["peak_host_bytes"])),
    ]
    for phase in ("prefill", "decode"):
        part = report[phase]
        if part["tokens"]:
            lines.append(
                (
                    phase,
                    f"{part['tokens']:,} tokens at {part['tokens_per_second']:,.1f} tokens/s, "
                    f"hit rate {format_share(part['hit_rate'])}, "
                    f"token-resident rate {format_share(part['token_resident_rate'])}",
                )
            )
    prefill = report["gpu_prefill"]
    if prefill["chunks"]:
        lines.append(
            (
                "prefill streaming",
                f"{prefill['experts_streamed']:,} experts ({format_bytes(prefill['bytes'])}) to the device in "
                f"{prefill['chunks']:,} chunks of {prefill['token_threshold']:,} tokens or more ({prefill['reason']}), "
                f"{prefill['seconds']:.2f} s, buffers {format_bytes(sizes['prefill_buffers'])}",
            )
        )
    elif prefill["token_threshold"] is not None:
        lines.append(("prefill streaming", f"from {prefill['token_threshold']:,} tokens on ({prefill['reason']})"))
    if report["keep_mass"] is not None:
        dropped = format_share(report["dropped_mass"])
        lines.append(("shed", f"{dropped} of the gate mass dropped, at least {report['keep_mass']:g} kept per token"))
    moves, disk = report["moves"], report["disk"]
    if moves is not None:
        lines.append(
            (
                "moves",
                f"{moves['promotions']:,} in, {moves['demotions']:,} out, {format_bytes(moves['bytes'])} in "
                f"{moves['seconds']:.2f} s, {moves['failed']:,} failed, {moves['deferred']:,} deferred",
            )
        )
    if disk is not None:
        asked = disk["hits"] + disk["misses"]
        lines.append(
            (
                "disk",
                f"{disk['loads']:,} experts read ({format_bytes(disk['read_bytes'])}), host cache ({disk['policy']}, "
                f"{disk['buffers']:,} experts) hit rate {format_share(disk['hits'] / max(asked, 1))}, "
                f"waited {disk['stall_seconds']:.2f} s in {disk['stalls']:,} stalls; read {disk['reads']}",
            )
        )
    console.print()
    for name, text in lines:
        console.print(f"{name + ':':19}{text}", soft_wrap=True)
