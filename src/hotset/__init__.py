"""hotset: which experts of a Mixture-of-Experts model live in GPU memory, and a runtime that keeps to it.

    import hotset

    trace = hotset.Trace.open("trace.safetensors")
    plan = hotset.plan(trace, fraction=0.25)
    model = hotset.load("path/to/model", plan=plan)

Names are imported when first used: `import hotset` loads neither torch nor transformers nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it; "ops" and the like are modules themselves
_PUBLIC = {
    "Trace": "hotset.core",
    "Counts": "hotset.core",
    "Plan": "hotset.core",
    "Machine": "hotset.core",
    "Move": "hotset.core",
    "Tier": "hotset.core",
    "Residency": "hotset.residency",
    "EmaHotnessTracker": "hotset.adaptation.tracker",
    "Rebalancer": "hotset.adaptation.rebalancer",
    "replay": "hotset.simulation.replay",
    "load": "hotset.runtime.runtime",
    "Adaptation": "hotset.runtime.adapting",
    "prometheus_text": "hotset.reports.prometheus",
    "record": "hotset.traces.recorder",
    "read_documents": "hotset.traces.documents",
    "HotsetError": "hotset.errors",
    "ExpertNotOnHost": "hotset.errors",
    "plan": "hotset.planning.api",
    "generate_gpu_experts_masks": "hotset.planning.api",
    "plan_gpu_expert_placement": "hotset.planning.api",
    "build_coactivation_matrix": "hotset.planning.measures",
    "gpu_hit_rate": "hotset.planning.measures",
    "token_resident_rate": "hotset.planning.measures",
}
_MODULES = ("ops", "errors")

__all__ = ["__version__", *_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = import_module(f"hotset.{name}")
    else:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
