"""Whether an expert that lives on the GPU also keeps a copy in host memory: one table, looked up once, with its reason.

Knows the situation (what may move, from where a demoted expert can be restored, whether weights are trained). Knows no
bytes and no tensors. "skip" means: one copy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hotset.errors import ModelError

SkipRequest = Literal["auto", "on", "off"]
"""What `skip_gpu_expert_cpu_copy` may be."""
RestoreSource = Literal["slot", "checkpoint"]
"""Whence a demoted expert gets its host copy back: its GPU slot (device to host), or the checkpoint on disk."""

_AFTER = {"slot": "copied back from its slot", "checkpoint": "read again from the checkpoint"}


@dataclass(frozen=True)
class CopyPolicy:
    """The resolved answer. Frozen, and copying or replacing fields never loses `skip`."""

    skip: bool
    """True = an expert with a slot has no host copy."""
    requested: SkipRequest
    reason: str
    warning: str | None = None
    """Where the request could not be met: said once, at load."""

    def check_training(self) -> None:
        """Raises ModelError where host copies are skipped: there would be nothing to train or to write back."""
        if self.skip:
            raise ModelError(
                "training is refused: experts on the GPU keep no host copy to train or to write back "
                f"({self.reason}): load with skip_gpu_expert_cpu_copy='off'"
            )


def resolve_copy_policy(
    requested: SkipRequest, *, dynamic: bool, restore: RestoreSource | None, training: bool = False
) -> CopyPolicy:
    """The table. dynamic: experts may move while serving. restore: read only where dynamic.

    | | auto | on | off |
    |---|---|---|---|
    | static plan | skip | skip | keep |
    | dynamic, with a restore source | skip | skip | keep |
    | dynamic, without | keep | keep, and warn | keep |
    | training | keep | ModelError | keep |

    Raises ModelError: an unknown request, or training with "on".
    """
    if requested not in get_args(SkipRequest):
        raise ModelError(f"skip_gpu_expert_cpu_copy is {requested!r}: wanted 'auto', 'on' or 'off'")
    if training and requested == "on":
        raise ModelError(
            "skip_gpu_expert_cpu_copy='on' and training exclude each other: an expert on the GPU would have no host "
            "copy to train or to write back: use 'auto' or 'off'"
        )
    if requested == "off":
        return CopyPolicy(False, requested, "asked for: every expert keeps its host copy")
    if training:
        return CopyPolicy(False, requested, "training: experts on the GPU keep a host copy")
    if not dynamic:
        return CopyPolicy(True, requested, "static plan: the host copy of an expert on the GPU would never be read")
    if restore is not None:
        return CopyPolicy(True, requested, f"dynamic: a demoted expert is {_AFTER[restore]}")
    reason = "dynamic without a restore source: a demoted expert needs the host copy that it kept"
    if requested == "auto":
        return CopyPolicy(False, requested, reason)
    warning = (
        "skip_gpu_expert_cpu_copy='on' is not possible with dynamic updates and restore='none': host copies are kept; "
        "set restore='slot' or restore='checkpoint' to skip them"
    )
    return CopyPolicy(False, requested, reason, warning)
