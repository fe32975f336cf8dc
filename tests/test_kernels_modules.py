"""Transformers' experts modules and the kernels compute the same."""

from __future__ import annotations

from typing import Any

import pytest

from hotset.errors import BackendError, OpsError
from hotset.kernels import Activation, CompiledLayer, native

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hotset.kernels.modules import expert_weights, spec_of  # noqa: E402
from hotset.kernels.torch_layer import TorchLayer  # noqa: E402

try:
    native.library()
    KINDS = [CompiledLayer, TorchLayer]
except BackendError:  # pragma: no cover
    KINDS = [TorchLayer]

H, F, E = 96, 40, 4
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", "moe_intermediate_size", {"num_experts": E}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", "intermediate_size", {"num_local_experts": E}),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4Experts", "moe_intermediate_size", {"n_routed_experts": E}),
    "mixtral": ("MixtralConfig", "MixtralExperts", "intermediate_size", {"num_local_experts": E}),
}


def module_of(family: str) -> Any:
    config_name, class_name, width, options = FAMILIES[family]
    config = getattr(transformers, config_name)(hidden_size=H, **{width: F}, **options)
    config._experts_implementation = "eager"
    code = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[class_name])
    module = getattr(code, class_name)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_of_transformers_and_its_spec_compute_the_same(family: str, kind: type) -> None:
    module = module_of(family)
    spec = spec_of(module)
    assert (spec.num_experts, spec.hidden, spec.intermediate, spec.format) == (E, H, F, "fp32")
    layer = kind(spec)
    parameters = {name: p for name, p in module.named_parameters() if p.shape[0] == E}
    for expert in range(E):
        layer.put(expert, expert_weights({name: p[expert] for name, p in parameters.items()}))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn((7, H), generator=generator) * 3
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand((7, 2), generator=generator)
    wanted = module(tokens, ids, weights)
    torch.testing.assert_close(
        layer.moe(tokens, ids, weights), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item()
    )


def test_activations_are_found_by_running_them() -> None:
    assert spec_of(module_of("gpt_oss")).activation == Activation("silu", 1.702, 7.0, 1.0)
    assert spec_of(module_of("gpt_oss")).interleaved
    assert spec_of(module_of("deepseek_v4")).activation.limit == 10.0
    assert spec_of(module_of("qwen3_moe")).activation == Activation()


def test_a_module_that_does_something_else_is_refused() -> None:
    module = module_of("qwen3_moe")
    module._apply_gate = lambda x: torch.sin(x.chunk(2, -1)[0])
    with pytest.raises(OpsError, match="_apply_gate is no activation that the kernels know"):
        spec_of(module)
    module = module_of("qwen3_moe")
    module.has_post_expert_norm = True
    with pytest.raises(OpsError, match="normalises each expert's output"):
        spec_of(module)
    with pytest.raises(OpsError, match=r"holds torch\.float64 parameters"):
        spec_of(module_of("qwen3_moe").double())
