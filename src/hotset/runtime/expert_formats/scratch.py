"""Tensors that live for one product or one read: memory of the thread's own, used again and again.

Fresh memory of a matrix's size comes as pages that were never touched, at about the cost of the product itself; whether
malloc keeps it instead depends on what the process did before. One set per thread, not per layer: a model has dozens.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from hotset.runtime.expert_formats.contract import Shapes


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        self.shapes: Shapes = {}
        self.tensors: dict[str, torch.Tensor] = {}


_of_thread = _OfThread()


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU, of any values, valid until this thread asks for one of the same dtype again."""
    buffers = _of_thread.buffers
    count = math.prod(shape)
    if dtype not in buffers or len(buffers[dtype]) < count:
        with torch.inference_mode(False):
            buffers[dtype] = torch.empty(count, dtype=dtype)
    return buffers[dtype][:count].view(*shape)


def scratch_expert(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Tensors of these names, shapes and dtypes, of any values, valid until this thread asks for an expert again."""
    mine = _of_thread
    if mine.shapes != shapes:
        mine.shapes, mine.tensors = {}, {}  # the old ones are let go of before there are new ones
        with torch.inference_mode(False):
            mine.tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        mine.shapes = shapes
    return mine.tensors
