"""Matrices that live for one product: memory of the thread's own, used again and again.

Fresh memory of a matrix's size comes as pages that were never touched, at about the cost of the product itself; whether
malloc keeps it instead depends on what the process did before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, torch.Tensor] = {}


_of_thread = _OfThread()


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU, of any values, valid until this thread asks for one of the same dtype again."""
    buffers = _of_thread.buffers
    count = math.prod(shape)
    if dtype not in buffers or len(buffers[dtype]) < count:
        with torch.inference_mode(False):
            buffers[dtype] = torch.empty(count, dtype=dtype)
    return buffers[dtype][:count].view(*shape)
