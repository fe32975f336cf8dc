"""How a layer's experts are held and computed: one class per way, behind one contract.

    plain       parameters as Transformers has them, computed by torch's operators with the bits of its eager loops
    packed      packed for the compiled kernels; float and quantised
    stored      quantised as checkpoints store them, computed by torch: where there is no compiler
    kt_kernel   handed to kt-kernel's extension, where it is asked for

Which of them a model gets, and why, is `choice.py`'s.
"""

from __future__ import annotations

from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors, Shapes
from hotset.runtime.expert_formats.packed import PackedFormat
from hotset.runtime.expert_formats.plain import PlainFormat
from hotset.runtime.expert_formats.stored import StoredFormat

__all__ = [
    "ExpertFormat",
    "ExpertSource",
    "ExpertTensors",
    "PackedFormat",
    "PlainFormat",
    "Shapes",
    "StoredFormat",
]
