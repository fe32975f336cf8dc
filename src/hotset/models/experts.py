"""Where the experts are in a Transformers model: the modules that use its experts interface, and how to run one.

Reads the attributes that `transformers.integrations.moe.use_experts_implementation` puts on an experts module; there
is no list of models here. Needs torch and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotset.errors import ModelError, UnsupportedModelError

ExpertsFunction = Callable[..., torch.Tensor]
"""(module, hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]."""

_INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer of a model: its experts module and the parameters that hold all experts side by side."""

    name: str
    """Module path, e.g. "model.layers.3.mlp.experts"."""
    layer_id: int
    """The model's own number of the layer."""
    module: nn.Module
    num_experts: int
    parameters: Mapping[str, torch.Tensor]
    """Parameter name -> tensor [E, ...] (on any device, meta included)."""
    twins: MutableMapping[str, nn.Module] = field(default_factory=dict)
    """Module path -> further experts modules tied to the same parameters (DiffusionGemma's decoder)."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module that runs these experts: `module` and its twins."""
        return (self.module, *self.twins.values())

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert: all experts of a layer have the same shapes."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values()) // self.num_experts


def find_expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The model's MoE layers in order.

    Where a model has several towers with experts (text and images, thinker and talker), the one with the most expert
    bytes is taken; the others' experts stay ordinary weights of the model. Raises UnsupportedModelError where nothing
    uses the experts interface, or where that tower's layers differ in their number of experts.
    """
    towers: dict[str, list[ExpertLayer]] = {}
    by_parameters: dict[tuple[int, ...], ExpertLayer] = {}
    for name, module in model.named_modules():
        if not (all(hasattr(module, flag) for flag in _INTERFACE_FLAGS) and hasattr(module, "num_experts")):
            continue
        num_experts = int(module.num_experts)
        parameters = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.ndim >= 2 and parameter.shape[0] == num_experts
        }
        layer_id, tower = _layer_number(name)
        layer = ExpertLayer(name, layer_id, module, num_experts, parameters)
        first = by_parameters.setdefault(tuple(map(id, parameters.values())) or (id(module),), layer)
        if first is not layer:
            first.twins[name] = module
        else:
            towers.setdefault(tower, []).append(layer)
    if not towers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer that uses Transformers' experts interface: "
            "hotset works on Mixture-of-Experts models that do (`hotset models` lists them)"
        )
    pattern, layers = max(towers.items(), key=lambda tower: sum(x.bytes_per_expert * x.num_experts for x in tower[1]))
    if len({layer.num_experts for layer in layers}) != 1:
        counts = sorted({layer.num_experts for layer in layers})
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with different numbers of experts in {pattern}: {counts}"
        )
    return sorted(layers, key=lambda layer: layer.layer_id)


def _layer_number(name: str) -> tuple[int, str]:
    """(the last number in a module path, the path with "*" in its place)."""
    numbers = list(_LAYER_NUMBER.finditer(name))
    if not numbers:
        raise ModelError(f"experts module {name!r} has no layer number in its name")
    start, end = numbers[-1].span()
    return int(name[start:end]), f"{name[:start]}*{name[end:]}"


def experts_per_token(config: Any) -> int | None:
    """The top-k that a Transformers configuration names, or None where it has no such name."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "top_k"):
        found = getattr(text, name, None)
        found = found[0] if isinstance(found, list | tuple) and found else found
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


def model_class_of(config: Any) -> Any:
    """The Transformers class that a checkpoint's config names, else that of its causal language model.

    Raises UnsupportedModelError where there is neither.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None and hasattr(found, "_finalize_model_loading"):
            return found
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    raise UnsupportedModelError(f"model type {config.model_type!r} has no causal language model in Transformers")


def run_expert(
    module: nn.Module,
    rows: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """One expert's output, before its gate weight: rows [n, H] -> [n, H].

    weights: this expert's slice of each parameter. The same operations in the same order as the eager loops of
    Transformers' model files, so that the bits are the same. multiply: (rows [n, K], matrix [N, K]) -> [n, N] in their
    place, with other bits.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _project(module, rows, weights, up_name, multiply)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)  # type: ignore[operator]
    out = _project(module, hidden, weights, "down_proj", multiply)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)  # type: ignore[operator]
    return out


def _project(
    module: nn.Module,
    rows: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    name: str,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    bias = weights[f"{name}_bias"] if module.has_bias else None
    if multiply is not None or module.is_transposed:
        matrix = weights[name]
        out = rows @ matrix if multiply is None else multiply(rows, matrix.T if module.is_transposed else matrix)
        return out if bias is None else out + bias
    return nn.functional.linear(rows, weights[name], bias)


def interface_implementation(key: str, module: nn.Module) -> ExpertsFunction:
    """What Transformers would call on this module for the implementation named `key`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if key == "eager":
        eager: Any = type(module).forward
        return eager.__wrapped__  # type: ignore[no-any-return]
    found: ExpertsFunction = ALL_EXPERTS_FUNCTIONS[key]
    return found


def picks_by_expert(top_k_index: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, pick positions, token positions) of each expert picked, experts ascending.

    top_k_index: [T, K] on the CPU; ids outside 0..num_experts-1 (expert-parallel sentinels) are skipped. Picks of one
    expert come ordered by pick position, then token: the order of Transformers' eager loops.
    """
    flat = top_k_index.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    num_tokens = top_k_index.shape[0]
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        chosen = order[start : start + count]
        start += count
        if 0 <= expert < num_experts:
            yield expert, chosen // num_tokens, chosen % num_tokens
