"""Replay results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.errors import MissingDependencyError
from hotset.storage import atomic_path

if TYPE_CHECKING:
    from hotset.simulation.replay import Replay


def budget_of(result: Replay) -> str:
    """ "16 per layer", "8-20 per layer" or "384 pooled"."""
    slots = result.experts_per_layer
    if result.pooled:
        return f"{sum(slots)} pooled"
    return f"{slots[0]} per layer" if len(set(slots)) == 1 else f"{min(slots)}-{max(slots)} per layer"


def save_plot(results: Sequence[Replay], path: str | Path) -> None:
    """Hit rate by budget, and over time at each budget. Raises MissingDependencyError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("matplotlib", "plots", "a plot of replay") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    budgets = list(dict.fromkeys(budget_of(r) for r in results))
    policies = list(dict.fromkeys(r.policy for r in results))
    colors = {policy: f"C{i}" for i, policy in enumerate(policies)}
    figure, axes = pyplot.subplots(1, 1 + len(budgets), figsize=(4.5 * (1 + len(budgets)), 3.6), squeeze=False)
    first: Any = axes[0, 0]
    for policy in policies:
        rates = [r.hit_rate for r in results if r.policy == policy]
        first.plot(range(len(rates)), rates, "o-", label=policy, color=colors[policy])
    first.set_xticks(range(len(budgets)), budgets)
    first.set_ylabel("hit rate")
    first.legend(frameon=False, fontsize="small")
    for axis, budget in zip(axes[0, 1:], budgets, strict=True):
        for result in results:
            if budget_of(result) == budget:
                axis.plot(result.series["token"], result.series["hit_rate"], color=colors[result.policy], lw=1.2)
        axis.set_title(budget, fontsize="medium")
        axis.set_xlabel("token")
    figure.tight_layout()
    suffix = Path(path).suffix.lstrip(".") or "png"
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=suffix, dpi=120)
    pyplot.close(figure)
