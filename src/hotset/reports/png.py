"""The main pictures of the report as one PNG, for papers and chats. Needs matplotlib (the plots extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import MissingDependencyError, PlanError
from hotset.storage import atomic_path, wrap_format_errors

_COLOURS = {
    "certified": "#1f6feb",
    "coverage": "#00875f",
    "cluster": "#b7569a",
    "frequency": "#d9820a",
    "uniform": "#7b828f",
    "front-loading": "#c4451c",
}


def save_png(data: dict[str, Any], path: str | Path) -> None:
    """Draw what `report_data` gives. Raises MissingDependencyError without matplotlib, PlanError on a full disk."""
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "plots", "a PNG") from None

    counts = np.array(data["counts"], np.float64)
    mask = np.array([[c == "1" for c in row] for row in data["mask"]])
    even = counts.mean(axis=1, keepdims=True)
    relative = np.divide(counts, even, out=np.zeros_like(counts), where=even > 0)
    heat = (np.log2(np.clip(relative, 1 / 8, 8)) + 3) / 6
    gpu = LinearSegmentedColormap.from_list("gpu", ["#cfe2fb", "#0a3f94"])
    host = LinearSegmentedColormap.from_list("host", ["#f1f1f2", "#6d7079"])
    pixels = np.where(mask[:, :, None], gpu(heat), host(heat))

    figure = Figure(figsize=(12, 4 + 0.16 * len(counts)), layout="constrained", dpi=150)
    grid = figure.add_gridspec(2, 2, height_ratios=[0.16 * len(counts) + 0.4, 3.4])
    axes = figure.add_subplot(grid[0, :])
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    axes.set_xlabel("expert (blue: in GPU memory, grey: not; darker: more picks)")
    axes.set_ylabel("layer")
    step = max(1, len(counts) // 16)
    axes.set_yticks(range(0, len(counts), step), [str(n) for n in data["layer_ids"][::step]])
    plan = data["plan"]
    gap = "" if plan["gap"] is None else f", proven gap {plan['gap'] * 100:.2f} %"
    axes.set_title(
        f"{plan['strategy']}: {plan['gpu_experts']} of {mask.size} experts, token-resident rate "
        f"{data['token_resident_rate']:.3f}, hit rate {data['hit_rate']:.3f}{gap}",
        loc="left",
        fontsize=11,
    )
    curves = data["curves"]
    budgets = [0.0, *curves["budgets"], 100.0]
    for column, (key, bound, title) in enumerate(
        [
            ("token_resident_rate", "token_resident_bound", "token-resident rate"),
            ("hit_rate", "hit_bound", "hit rate"),
        ]
    ):
        axes = figure.add_subplot(grid[1, column])
        for name in curves["strategies"]:
            width = 2.4 if name == "certified" else 1.4
            axes.plot(budgets, [0, *curves[key][name], 1], color=_COLOURS.get(name), lw=width, label=name)
        if curves[bound] is not None:
            axes.plot(budgets, [0, *curves[bound], 1], "--", color="black", lw=1.2, label="proven bound")
        axes.plot(100 * plan["gpu_experts"] / mask.size, data[key], "o", mfc="white", mec="black", label="this plan")
        axes.set(title=title, xlabel="experts in GPU memory, %", xlim=(0, 100), ylim=(0, 1.02))
        axes.grid(alpha=0.25)
        if column == 0:
            axes.legend(frameon=False, fontsize=9)

    def write() -> None:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")

    wrap_format_errors(PlanError, write)
