"""The `ema` policy: `EmaHotnessTracker` and `Rebalancer`, the objects that the runtime uses."""

from __future__ import annotations

from typing import Any

from hotset.adaptation.rebalancer import Rebalancer
from hotset.adaptation.tracker import EmaHotnessTracker
from hotset.policies import Setting

TRACKER_OPTIONS = ("decay", "fast_decay", "fast_weight")


def make(_name: str, setting: Setting, **options: Any) -> Rebalancer:
    """Options: decay, fast_decay, fast_weight of the tracker; hysteresis, max_moves, max_bytes, min_dwell."""
    tracker = EmaHotnessTracker(
        *setting.hotness.shape, **{name: options.pop(name) for name in TRACKER_OPTIONS if name in options}
    )
    tracker.set_hotness(setting.hotness)
    return Rebalancer(tracker, setting.residency, expert_bytes=setting.expert_bytes, machine=setting.machine, **options)
