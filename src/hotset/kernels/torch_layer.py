"""The same contract by torch's own operators: where there is no compiler, and where torch's matrix products win.

Knows: how to run one expert's tokens through torch on the CPU. Float formats go through torch's kernels as they are;
quantised ones are dequantised to float32 for every call, which is right and slow. Does not know: packing, the compiled
library. torch is imported when the first layer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotset.errors import OpsError
from hotset.kernels.call import Call
from hotset.kernels.formats import (
    FORMATS,
    Activation,
    Buffer,
    ExpertWeights,
    LayerSpec,
    as_array,
    checked_weights,
    dequantise,
    fp8_to_float,
    is_torch,
)
from hotset.kernels.layer import ExpertLayer

if TYPE_CHECKING:
    import torch

Matrices = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor | None", "torch.Tensor | None"]
"""gate_up [2F, H] gates first, down [H, F], their biases in float32"""


class TorchLayer(ExpertLayer):
    """Experts kept as stored and computed by torch. Raises ImportError where torch is not installed."""

    def __init__(self, spec: LayerSpec, layer: int = 0) -> None:
        import torch  # noqa: F401

        super().__init__(spec, layer)
        self._present: tuple[ExpertWeights | None, ...] = (None,) * spec.num_experts

    def has(self, expert: int) -> bool:
        return self._present[expert] is not None

    def put(self, expert: int, weights: ExpertWeights) -> None:
        parts = checked_weights(self.spec, weights)
        if self.spec.kind.code == FORMATS["mxfp8"].code and any(
            np.isnan(fp8_to_float(data)).any() for data, *_ in parts
        ):
            raise OpsError(
                f"an FP8 weight of layer {self.layer} is NaN: the checkpoint is damaged, or not {self.spec.format}"
            )
        kept: dict[str, Any] = {}
        for name, (data, _, zeros, bias) in zip(("gate_up", "down"), parts, strict=True):
            kept[name] = (data.T if self.spec.transposed else data).copy(order="C")
            scales = getattr(weights, f"{name}_scale")
            kept[f"{name}_scale"] = None if scales is None else as_array(name, scales)[0].copy(order="C")
            kept[f"{name}_zero"] = None if zeros is None else zeros.copy(order="C")
            kept[f"{name}_bias"] = None if bias is None else bias.copy()
        with self._change:
            self._require_known(expert)
            self._set(expert, ExpertWeights(**kept))

    def unpack(self, expert: int) -> ExpertWeights:
        self._require(expert)
        found = self._present[expert]
        if found is None:
            raise self._absent(expert)
        return found

    def _take(self, expert: int) -> None:
        self._set(expert, None)

    def _set(self, expert: int, weights: ExpertWeights | None) -> None:
        self._present = (*self._present[:expert], weights, *self._present[expert + 1 :])

    def _run(self, call: Call, out: Buffer) -> None:
        present = self._present

        def weights_of(expert: int) -> ExpertWeights:
            found = present[expert]
            if found is None:
                raise self._absent(expert)
            return found

        self._check_ids(call, lambda expert: present[expert] is not None)
        compute(self.spec, weights_of, call, out)


def compute(spec: LayerSpec, weights_of: Callable[[int], ExpertWeights], call: Call, out: Buffer) -> None:
    """Fills `out` as `ExpertLayer._run` says, one expert at a time, picks summed in the router's order in float32.

    All ids that are not -1 or num_experts must have weights.
    """
    import torch

    tokens, ids = _tensor(call.tokens), _tensor(call.ids).long()
    num_tokens, top_k = ids.shape
    rows = torch.zeros((num_tokens * top_k, spec.hidden), dtype=torch.float32)
    flat = ids.reshape(-1)
    with torch.no_grad():
        for expert in flat[(flat >= 0) & (flat < spec.num_experts)].unique().tolist():  # type: ignore[no-untyped-call]
            picks = (flat == expert).nonzero()[:, 0]
            matrices = _matrices(spec, weights_of(expert))
            rows[picks] = expert_rows(spec, matrices, tokens[picks // top_k])
        picks_by_token = rows.view(num_tokens, top_k, spec.hidden)
        if call.weights is None:
            _tensor(out).copy_(picks_by_token)
            return
        weights = _tensor(call.weights).float()
        total = torch.zeros((num_tokens, spec.hidden), dtype=torch.float32)
        for k in range(top_k):
            total += weights[:, k, None] * picks_by_token[:, k]
        _tensor(out).copy_(total)


def expert_rows(spec: LayerSpec, matrices: Matrices, x: torch.Tensor) -> torch.Tensor:
    """[n, H] float32 of one expert for n tokens [n, H]."""
    import torch

    first, second, first_bias, second_bias = matrices
    inner = torch.nn.functional.linear(x.to(first.dtype), first).float()
    if first_bias is not None:
        inner += first_bias
    inner = between(spec, inner)
    out = torch.nn.functional.linear(inner.to(second.dtype), second).float()
    return out if second_bias is None else out + second_bias


def between(spec: LayerSpec, inner: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """[n, F] float32 that goes into the second matrix, from what came out of the first, bias added: [n, 2F], or [n, F]
    without a gate. interleaved: its gates and ups alternate."""
    if not spec.gated:
        return activate(spec.activation, inner)
    gate, up = (inner[..., ::2], inner[..., 1::2]) if interleaved else inner.chunk(2, -1)
    limit = spec.activation.limit
    return activate(spec.activation, gate.clamp(max=limit)) * (up.clamp(-limit, limit) + spec.activation.up_offset)


def activate(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    import torch

    if activation.kind == "silu":
        return x * torch.sigmoid(activation.alpha * x)
    if activation.kind in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="none" if activation.kind == "gelu" else "tanh")
    positive = x.clamp(min=0)
    return positive if activation.kind == "relu" else positive * positive


def _matrices(spec: LayerSpec, weights: ExpertWeights) -> Matrices:
    import torch

    if spec.kind.scales != "none":
        first, second, first_bias, second_bias = (
            None if a is None else torch.from_numpy(a) for a in dequantise(spec, weights)
        )
        assert first is not None, "dequantise always gives both matrices"
        assert second is not None, "dequantise always gives both matrices"
        return first, second, first_bias, second_bias
    first, second = tensor_of_bits(weights.gate_up), tensor_of_bits(weights.down)
    biases = [None if b is None else tensor_of_bits(b).float() for b in (weights.gate_up_bias, weights.down_bias)]
    if spec.transposed:
        first, second = first.T, second.T
    if spec.interleaved:
        first = torch.cat([first[::2], first[1::2]])
        biases[0] = None if biases[0] is None else torch.cat([biases[0][::2], biases[0][1::2]])
    return first, second, biases[0], biases[1]


def _tensor(buffer: Buffer) -> torch.Tensor:
    return buffer.owner if is_torch(buffer.owner) else tensor_of_bits(buffer.owner)


def tensor_of_bits(array: NDArray[Any]) -> torch.Tensor:
    """A tensor on the same memory; np.uint16 and ml_dtypes' bfloat16 are bfloat16 bits."""
    import torch

    if array.dtype.itemsize == 2 and array.dtype.kind not in "if":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
