"""Which `LayerSpec` computes what an experts module of Transformers computes.

Knows: the attributes that Transformers' experts interface puts on a module (has_gate, has_bias, is_transposed, ...).
What happens between the matrices is not read off a list of models: the module's own `_apply_gate` is run on numbers,
and the `Activation` that gives the same ones is taken. Does not know: checkpoints, residency. Needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from hotset.errors import OpsError
from hotset.kernels.formats import Activation, ExpertWeights, LayerSpec
from hotset.kernels.torch_layer import activate

_FORMATS: dict[torch.dtype, Literal["fp32", "fp16", "bf16"]] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def spec_of(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor] | None = None) -> LayerSpec:
    """The spec of an experts module with float parameters, on any device, meta included.

    parameters: name -> [E, ...], where they have been taken out of the module.

    Raises OpsError, saying why, where the kernels do not compute what the module does: another activation, a norm after
    each expert, parameters that are not fp32, fp16 or bf16. Such a layer stays with torch.
    """
    what = type(module).__name__
    flags = {name: bool(getattr(module, name, False)) for name in ("has_gate", "has_bias", "is_transposed")}
    if getattr(module, "has_post_expert_norm", False):
        raise OpsError(f"{what} normalises each expert's output, which the kernels do not")
    held = dict(module.named_parameters(recurse=False)) if parameters is None else parameters
    name = "gate_up_proj" if flags["has_gate"] else "up_proj"
    wanted = {name, "down_proj", *((f"{name}_bias", "down_proj_bias") if flags["has_bias"] else ())}
    if not wanted <= held.keys() or (parameters is not None and held.keys() != wanted):
        raise OpsError(f"{what} has parameters {', '.join(sorted(held))}: the kernels take {', '.join(sorted(wanted))}")
    first = held[name]
    if first.dtype not in _FORMATS:
        raise OpsError(f"{what} holds {first.dtype} parameters: the kernels take fp32, fp16 or bf16 ones from a module")
    num_experts, rows, hidden = first.shape
    if flags["is_transposed"]:
        rows, hidden = hidden, rows
    activation, interleaved = _activation_of(module) if flags["has_gate"] else (_plain_activation_of(module), False)
    bias = held[f"{name}_bias"].dtype if flags["has_bias"] else None
    return LayerSpec(
        _FORMATS[first.dtype],
        num_experts,
        hidden,
        rows // 2 if flags["has_gate"] else rows,
        activation=activation,
        gated=flags["has_gate"],
        bias="none" if bias is None else _FORMATS[bias],
        interleaved=interleaved,
        transposed=flags["is_transposed"],
    )


def expert_weights(weights: Mapping[str, Any]) -> ExpertWeights:
    """One expert's slice of each parameter, by the module's own names, as the kernels take it."""
    first = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
    return ExpertWeights(
        weights[first],
        weights["down_proj"],
        gate_up_bias=weights.get(f"{first}_bias"),
        down_bias=weights.get("down_proj_bias"),
    )


def _activation_of(module: torch.nn.Module) -> tuple[Activation, bool]:
    """(the activation, whether gate and up rows alternate) that gives the numbers of `_apply_gate`."""
    x = _numbers()
    with torch.no_grad():
        wanted = module._apply_gate(x.clone())  # type: ignore[operator]
    for interleaved, candidate in itertools.product((False, True), _candidates(module)):
        gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        inner = activate(candidate, gate.clamp(max=candidate.limit))
        got = inner * (up.clamp(-candidate.limit, candidate.limit) + candidate.up_offset)
        if torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            return candidate, interleaved
    raise OpsError(f"{type(module).__name__}._apply_gate is no activation that the kernels know")


def _plain_activation_of(module: torch.nn.Module) -> Activation:
    x = _numbers()
    with torch.no_grad():
        wanted = module.act_fn(x.clone())  # type: ignore[operator]
    for kind in Activation.KINDS:
        candidate = Activation(kind)  # type: ignore[arg-type]
        if torch.allclose(activate(candidate, x), wanted, rtol=1e-4, atol=1e-5):
            return candidate
    raise OpsError(f"{type(module).__name__}.act_fn is no activation that the kernels know")


def _candidates(module: torch.nn.Module) -> Iterator[Activation]:
    """Plain ones first; then with every limit and alpha that the module carries."""
    numbers = {
        name: float(v) for name, v in vars(module).items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
    limits = [math.inf, *(v for name, v in numbers.items() if "limit" in name and v > 0)]
    alphas = [1.0, *(v for name, v in numbers.items() if "alpha" in name)]
    for limit, alpha, offset in itertools.product(limits, alphas, (0.0, 1.0)):
        yield Activation("silu", alpha, limit, offset)
    for kind, limit in itertools.product(Activation.KINDS[1:], limits):
        yield Activation(kind, limit=limit)


def _numbers() -> torch.Tensor:
    """[32, 16] float32: most near 1, some beyond any clamp; the same every time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((32, 16), generator=generator)
    x[:4] *= 30
    return x
