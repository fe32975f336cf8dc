"""The strategies, one file each. Adding one is a file with `place(problem) -> Placement` and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hotset.errors import PlanError
from hotset.planning.problem import Placement, Problem

# name -> module, in the order in which help and tables show them
STRATEGIES = {
    "certified": "hotset.planning.strategies.certified",
    "frequency": "hotset.planning.strategies.frequency",
    "layer-balanced": "hotset.planning.strategies.layer_balanced",
    "coverage": "hotset.planning.strategies.coverage",
    "cluster": "hotset.planning.strategies.cluster",
    "uniform": "hotset.planning.strategies.uniform",
    "front-loading": "hotset.planning.strategies.front_loading",
    "random": "hotset.planning.strategies.random",
}


def strategy(name: str) -> Callable[[Problem], Placement]:
    """The strategy's `place`. Raises PlanError on an unknown name."""
    if name not in STRATEGIES:
        raise PlanError(f"strategy {name!r} is unknown: choose one of {', '.join(STRATEGIES)}")
    place: Callable[[Problem], Placement] = import_module(STRATEGIES[name]).place
    return place
