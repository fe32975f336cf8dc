"""The strategies, one file each. Adding one is a file with `place(problem) -> Placement` and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

from hotset.errors import PlanError
from hotset.planning.budget import Budget
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


def place_each(name: str, problem: Problem, budgets: Sequence[Budget]) -> list[Placement]:
    """Placements at several budgets of one problem, whose sizes and limits the budgets share.

    A strategy that can prepare once for all of them says so by a function `place_each(problem, budgets)` of its own.
    """
    place = strategy(name)
    own = getattr(import_module(STRATEGIES[name]), "place_each", None)
    if own is not None:
        placements: list[Placement] = own(problem, budgets)
        return placements
    return [place(replace(problem, budget=budget)) for budget in budgets]
