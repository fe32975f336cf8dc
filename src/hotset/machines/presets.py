"""Machines from data sheets: what a GPU, a link, a host's memory and a disk can do at most, each with its source.

Knows published peaks. Does not know what a program reaches of them (commonly 70 to 90 %), nor the two fixed costs,
which no data sheet gives: those are assumptions, marked as such. A prediction from a preset is therefore optimistic;
`hotset probe` measures the real figures.

A preset is named by its parts, joined by "+", in any order, the GPU compulsory: "rtx-4090" or
"rtx-4090+pcie4-x8+ddr4-3200-x2+nvme3". Parts left out are the GPU's own link, DDR5-5600 on two channels, and "nvme4".
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.core import Machine
from hotset.errors import MachineError

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class _Gpu:
    memory_bytes: int
    read_bytes_per_second: float
    link: str
    source: str


@dataclass(frozen=True)
class _Rate:
    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class _Host:
    read_bytes_per_second: float
    threads: int
    memory_bytes: int
    source: str


def _pcie(generation: int, lanes: int) -> _Rate:
    # PCI Express Base Specification: 8, 16 and 32 GT/s per lane and direction, 128b/130b coding, before packet headers
    gigatransfers = {3: 8, 4: 16, 5: 32}[generation]
    rate = gigatransfers * 1e9 * lanes * 128 / 130 / 8
    return _Rate(rate, f"PCI Express Base Specification: {gigatransfers} GT/s x {lanes} lanes, 128b/130b")


def _ddr(kind: int, megatransfers: int, channels: int, threads: int, memory_bytes: int) -> _Host:
    # JEDEC: a channel is 64 data bits wide
    standard = {4: "JESD79-4", 5: "JESD79-5"}[kind]
    return _Host(
        megatransfers * 1e6 * 8 * channels,
        threads,
        memory_bytes,
        f"JEDEC {standard}: {megatransfers} MT/s x 8 bytes x {channels} channels; threads and size assumed",
    )


GPUS: dict[str, _Gpu] = {
    "t4": _Gpu(16 * GB, 320 * GB, "pcie3-x16", "NVIDIA T4 data sheet"),
    "v100-32gb": _Gpu(32 * GB, 900 * GB, "pcie3-x16", "NVIDIA V100 data sheet (PCIe)"),
    "rtx-3060": _Gpu(12 * GB, 360 * GB, "pcie4-x16", "NVIDIA GeForce RTX 3060 12 GB specification"),
    "rtx-3090": _Gpu(24 * GB, 936 * GB, "pcie4-x16", "NVIDIA Ampere GA102 architecture white paper"),
    "rtx-4060-ti-16gb": _Gpu(16 * GB, 288 * GB, "pcie4-x8", "NVIDIA GeForce RTX 4060 Ti specification"),
    "rtx-4080": _Gpu(16 * GB, 716.8 * GB, "pcie4-x16", "NVIDIA Ada GPU architecture white paper"),
    "rtx-4090": _Gpu(24 * GB, 1008 * GB, "pcie4-x16", "NVIDIA Ada GPU architecture white paper"),
    "rtx-5090": _Gpu(32 * GB, 1792 * GB, "pcie5-x16", "NVIDIA RTX Blackwell GPU architecture white paper"),
    "rtx-a6000": _Gpu(48 * GB, 768 * GB, "pcie4-x16", "NVIDIA RTX A6000 data sheet"),
    "rtx-6000-ada": _Gpu(48 * GB, 960 * GB, "pcie4-x16", "NVIDIA RTX 6000 Ada Generation data sheet"),
    "l4": _Gpu(24 * GB, 300 * GB, "pcie4-x16", "NVIDIA L4 data sheet"),
    "l40s": _Gpu(48 * GB, 864 * GB, "pcie4-x16", "NVIDIA L40S data sheet"),
    "a100-40gb-pcie": _Gpu(40 * GB, 1555 * GB, "pcie4-x16", "NVIDIA A100 data sheet"),
    "a100-80gb-pcie": _Gpu(80 * GB, 1935 * GB, "pcie4-x16", "NVIDIA A100 data sheet"),
    "a100-80gb-sxm": _Gpu(80 * GB, 2039 * GB, "pcie4-x16", "NVIDIA A100 data sheet"),
    "h100-pcie": _Gpu(80 * GB, 2000 * GB, "pcie5-x16", "NVIDIA H100 data sheet (PCIe)"),
    "h100-sxm": _Gpu(80 * GB, 3350 * GB, "pcie5-x16", "NVIDIA H100 data sheet (SXM)"),
    "h200-sxm": _Gpu(141 * GB, 4800 * GB, "pcie5-x16", "NVIDIA H200 data sheet"),
}

LINKS: dict[str, _Rate] = {
    **{f"pcie{generation}-x{lanes}": _pcie(generation, lanes) for generation in (3, 4, 5) for lanes in (4, 8, 16)},
    "nvlink-c2c": _Rate(450 * GB, "NVIDIA Grace Hopper Superchip data sheet: 900 GB/s both ways together"),
}

HOSTS: dict[str, _Host] = {
    "ddr4-3200-x2": _ddr(4, 3200, 2, 8, 64 * GIB),
    "ddr4-3200-x8": _ddr(4, 3200, 8, 32, 512 * GIB),
    "ddr5-4800-x8": _ddr(5, 4800, 8, 32, 512 * GIB),
    "ddr5-4800-x12": _ddr(5, 4800, 12, 64, 768 * GIB),
    "ddr5-5600-x2": _ddr(5, 5600, 2, 8, 64 * GIB),
    "ddr5-5600-x8": _ddr(5, 5600, 8, 32, 512 * GIB),
    "ddr5-6400-x12": _ddr(5, 6400, 12, 64, 768 * GIB),
}

DISKS: dict[str, _Rate] = {
    "sata": _Rate(560e6, "Samsung 870 EVO data sheet, sequential read"),
    "nvme3": _Rate(3500e6, "Samsung 970 EVO Plus data sheet, sequential read"),
    "nvme4": _Rate(7450e6, "Samsung 990 PRO data sheet, sequential read"),
    "nvme5": _Rate(14_500e6, "Crucial T705 data sheet (2 TB), sequential read"),
}

DEFAULT_HOST = "ddr5-5600-x2"
DEFAULT_DISK = "nvme4"

# No data sheet gives these. A launch of a few microseconds and a device-host-device round trip of a few tens (two small
# copies and a synchronisation) are the orders that CUDA programs see; only `hotset probe` knows yours.
ASSUMED_LAUNCH_SECONDS = 5e-6
ASSUMED_ROUND_TRIP_SECONDS = 30e-6


def preset(name: str) -> Machine:
    """The machine of that preset name. Raises MachineError on an unknown part, no GPU, or two parts of one kind."""
    chosen: dict[str, str] = {}
    for part in name.split("+"):
        kind = next((k for k, table in _TABLES.items() if part in table), None)
        if kind is None:
            raise MachineError(
                f"{name!r} is neither a machine file nor a preset: {part!r} is unknown. GPUs: {', '.join(GPUS)}; "
                f"links: {', '.join(LINKS)}; hosts: {', '.join(HOSTS)}; disks: {', '.join(DISKS)}"
            )
        if kind in chosen:
            raise MachineError(f"preset {name!r} names two {kind}s, {chosen[kind]} and {part}: wanted one")
        chosen[kind] = part
    if "GPU" not in chosen:
        raise MachineError(f"preset {name!r} names no GPU: start with one of {', '.join(GPUS)}")
    gpu = GPUS[chosen["GPU"]]
    link_name, host_name, disk_name = (
        chosen.get("link", gpu.link),
        chosen.get("host", DEFAULT_HOST),
        chosen.get("disk", DEFAULT_DISK),
    )
    link, host, disk = LINKS[link_name], HOSTS[host_name], DISKS[disk_name]
    return Machine(
        name=f"{chosen['GPU']}+{link_name}+{host_name}+{disk_name}",
        source="data sheets: peaks, not measurements",
        device="cuda",
        host_read_bytes_per_second=host.read_bytes_per_second,
        host_threads=host.threads,
        gpu_read_bytes_per_second=float(gpu.read_bytes_per_second),
        host_to_device_bytes_per_second=link.bytes_per_second,
        device_to_host_bytes_per_second=link.bytes_per_second,
        disk_read_bytes_per_second=disk.bytes_per_second,
        round_trip_seconds=ASSUMED_ROUND_TRIP_SECONDS,
        launch_seconds=ASSUMED_LAUNCH_SECONDS,
        host_memory_bytes=host.memory_bytes,
        gpu_memory_bytes=gpu.memory_bytes,
        details={
            "sources": {
                "gpu": gpu.source,
                "link": link.source,
                "host": host.source,
                "disk": disk.source,
                "round_trip_seconds": "assumed; measure with `hotset probe`",
                "launch_seconds": "assumed; measure with `hotset probe`",
            }
        },
    )


_TABLES: dict[str, dict[str, _Gpu] | dict[str, _Rate] | dict[str, _Host]] = {
    "GPU": GPUS,
    "link": LINKS,
    "host": HOSTS,
    "disk": DISKS,
}
