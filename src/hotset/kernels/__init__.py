"""Host expert kernels, compiled on first use for this CPU.

    from hotset.kernels import ExpertWeights, LayerSpec, expert_layer

    layer = expert_layer(LayerSpec("bf16", num_experts=128, hidden=2048, intermediate=768), layer=3)
    layer.put(17, ExpertWeights(gate_up, down))        # torch tensors or NumPy arrays
    out = layer.moe(tokens, ids, weights)              # [T, H]
    rows = layer.picks(tokens, ids)                    # [T, K, H] float32, to be combined with picks computed elsewhere

Importing this compiles nothing and loads no torch.
"""

from __future__ import annotations

from hotset.kernels.backend import Backend, backend, expert_layer
from hotset.kernels.formats import FORMATS, Activation, ExpertWeights, LayerSpec, dequantise, quantise
from hotset.kernels.layer import CompiledLayer, ExpertLayer
from hotset.kernels.measure import KernelReport, describe, measure_crossover
from hotset.kernels.packed import PackedKernel
from hotset.kernels.threads import available_threads

__all__ = [
    "FORMATS",
    "Activation",
    "Backend",
    "CompiledLayer",
    "ExpertLayer",
    "ExpertWeights",
    "KernelReport",
    "LayerSpec",
    "PackedKernel",
    "available_threads",
    "backend",
    "dequantise",
    "describe",
    "expert_layer",
    "measure_crossover",
    "quantise",
]
