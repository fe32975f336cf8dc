"""How a layer's experts are held and computed: one class per way, behind one contract.

    plain         parameters as Transformers has them, computed by torch's operators, mostly with its eager loops' bits
    packed        packed for the compiled kernels; float and quantised
    torch_packed  int8 and int4 as torch's quantised operators take them: where there is no compiler
    stored        quantised as checkpoints store them, dequantised for every call: what is left
    kt_kernel     handed to kt-kernel's extension, where it is asked for

Which of them a model gets, and why, is `choice.py`'s; which of torch's operators is the fastest, `operators.py`'s.
"""

from __future__ import annotations

from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertSource, ExpertTensors, Shapes
from hotset.runtime.expert_formats.packed import PackedFormat
from hotset.runtime.expert_formats.plain import PlainFormat
from hotset.runtime.expert_formats.stored import StoredFormat
from hotset.runtime.expert_formats.torch_packed import Int4Format, Int8Format

__all__ = [
    "ExpertFormat",
    "ExpertSource",
    "ExpertTensors",
    "Int4Format",
    "Int8Format",
    "PackedFormat",
    "PlainFormat",
    "Shapes",
    "StoredFormat",
]
