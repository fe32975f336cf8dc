"""Every error hotset raises on somebody's input. One line each: what, where, got, wanted, what to do next.

All derive from `HotsetError`; the command line prints the message and exits with 1. Broken promises of hotset's
own code are `AssertionError`s instead, and reach the user as a traceback.
"""

from __future__ import annotations


class HotsetError(Exception):
    """Base of all errors about input, files, budgets and models."""


class TraceError(HotsetError, ValueError):
    """A trace, counts table or routing array is not what it should be."""


class PlanError(HotsetError, ValueError):
    """A plan cannot be made, read, or used with this model."""


class BudgetError(PlanError):
    """A budget is negative, above what exists, or below what the constraints require."""


class MachineError(HotsetError, ValueError):
    """A machine description is unreadable, incomplete, or names an unknown preset."""


class ModelError(HotsetError):
    """A model cannot be recorded, planned for or run."""


class UnsupportedModelError(ModelError):
    """The model has no layer that uses Transformers' experts interface."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated, or lacks a tensor."""


class ResidencyError(HotsetError):
    """A move is impossible now: no free slot, expert locked, wrong tier."""


class ExpertNotOnHost(ResidencyError):
    """Somebody asked for the host copy of an expert that has none."""

    def __init__(self, layer: int, expert: int, why: str) -> None:
        super().__init__(f"expert {expert} of layer {layer} has no host copy: {why}")
        self.layer = layer
        self.expert = expert
        self.why = why

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        return (type(self), (self.layer, self.expert, self.why))


class ReportError(HotsetError, ValueError):
    """A file given to a report is not the record that it should be."""


class PolicyError(HotsetError, ValueError):
    """A policy or tracker got settings or observations that it cannot use."""


class OpsError(HotsetError, ValueError):
    """An array given to `hotset.ops` has the wrong dtype, rank, shape, device or layout."""


class BackendError(HotsetError):
    """A backend that was asked for by name is not available here."""


class MissingDependencyError(HotsetError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs {package}, which is not installed: pip install 'hotset[{extra}]'")
        self.package = package
        self.extra = extra
        self.why = why

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return (type(self), (self.package, self.extra, self.why))
