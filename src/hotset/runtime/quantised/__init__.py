"""Quantised checkpoints: how one matrix lies in several stored tensors, one file per layout, and the checkpoint as it
looks without that.

A layout turns its stored tensors into a kernel format of `hotset.kernels` without changing a code or a scale. All else
(names, experts, what a model wants) sees one tensor of floats per matrix.
"""

from __future__ import annotations

from hotset.runtime.quantised.checkpoint import LazyFloats, QuantisedEntry, logical_checkpoint
from hotset.runtime.quantised.contract import Layout, StoredMatrix

__all__ = ["Layout", "LazyFloats", "QuantisedEntry", "StoredMatrix", "logical_checkpoint"]
