"""The slow truth: one loop over tokens and picks in float64, against which every implementation is compared.

Knows: what routed experts compute. Does not know: packing, threads, quantised activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.kernels.formats import Activation, ExpertWeights, LayerSpec, dequantise


def activate(activation: Activation, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """act(x), elementwise."""
    y: NDArray[np.float64]
    if activation.kind == "silu":
        y = x / (1 + np.exp(-activation.alpha * x))
    elif activation.kind == "gelu":
        y = x * np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[np.float64])(x)
    elif activation.kind == "gelu_tanh":
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        y = np.maximum(x, 0)
        y = y if activation.kind == "relu" else y**2
    return y


def expert(spec: LayerSpec, weights: ExpertWeights, token: NDArray[Any]) -> NDArray[np.float64]:
    """[H] output of one expert for one token [H]."""
    first, second, first_bias, second_bias = dequantise(spec, weights)
    inner = first.astype(np.float64) @ np.asarray(token, np.float64)
    if first_bias is not None:
        inner += first_bias
    if spec.gated:
        gate, up = inner[: spec.intermediate], inner[spec.intermediate :]
        limit = spec.activation.limit
        up = np.clip(up, -limit, limit) + spec.activation.up_offset
        inner = activate(spec.activation, np.minimum(gate, limit)) * up
    else:
        inner = activate(spec.activation, inner)
    out: NDArray[np.float64] = second.astype(np.float64) @ inner
    return out if second_bias is None else out + second_bias


def moe(
    spec: LayerSpec, experts: Sequence[ExpertWeights], tokens: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any]
) -> NDArray[np.float64]:
    """[T, H] from tokens [T, H], ids [T, K] (-1 and num_experts: no pick) and weights [T, K]."""
    out = np.zeros(tokens.shape, np.float64)
    for t, token in enumerate(tokens):
        for pick, weight in zip(ids[t], weights[t], strict=True):
            if 0 <= pick < spec.num_experts:
                out[t] += float(weight) * expert(spec, experts[pick], token)
    return out
