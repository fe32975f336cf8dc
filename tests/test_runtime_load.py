"""Loading with a plan: the same outputs, one copy of each expert, and clear refusals."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.core import Plan  # noqa: E402
from hotset.errors import CheckpointError, ExpertNotOnHost, ModelError, PlanError, UnsupportedModelError  # noqa: E402
from hotset.models.checkpoint import Checkpoint  # noqa: E402
from tests.tiny_models import FAMILIES, make_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def unmodified(folder: Path, experts: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation=experts, dtype=torch.float32)


def mask_for(folder: Path, share: float) -> np.ndarray:
    model = hotset.load(folder)
    total = len(model.hotset.layers), model.hotset.num_experts
    mask = np.zeros(total, bool).ravel()
    mask[np.random.default_rng(1234).permutation(mask.size)[: round(share * mask.size)]] = True
    return mask.reshape(total)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unmodified_model(checkpoints: dict[str, Path], family: str, share: float) -> None:
    folder = checkpoints[family]
    torch.manual_seed(1234)
    ids = torch.randint(1, 128, (2, 8))
    eager, default = unmodified(folder, "eager"), unmodified(folder, "grouped_mm")
    model = hotset.load(folder, plan=mask_for(folder, share))
    with torch.no_grad():
        for call in (prefill_logits, decode_logits):
            mine = call(model, ids)
            # the same operations in the same order as the model file's own loop: the same bits
            assert torch.equal(mine, call(eager, ids))
            # the default implementation sums a token's picks in another order: a rounding apart
            torch.testing.assert_close(mine, call(default, ids), rtol=0, atol=1e-5)
    assert model.hotset.store.residency.mask().mean() == pytest.approx(share, abs=0.05)


def prefill_logits(model: Any, ids: Any) -> Any:
    return model(ids[:, :7]).logits


def decode_logits(model: Any, ids: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids[:, :7], cache=cache, use_cache=True)
    return model(ids[:, 7:8], cache=cache, use_cache=True).logits


def test_every_expert_is_held_once_and_bytes_add_up(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["qwen3_moe"]
    everything_on_host = hotset.load(folder).hotset.store
    mask = mask_for(folder, 0.5)
    store = hotset.load(folder, plan=mask).hotset.store
    assert store.host_bytes + store.arena_bytes == everything_on_host.host_bytes
    assert store.arena_bytes == mask.sum() * store.layers[0].bytes_per_expert
    for row, expert in np.ndindex(mask.shape):
        if mask[row, expert]:
            with pytest.raises(ExpertNotOnHost, match=rf"expert {expert} of layer {store.layers[row].layer_id} "):
                store.on_host(row, expert)
        else:
            assert store.on_host(row, expert)["down_proj"].shape == (32, 24)


def test_layer_numbers_are_the_models_own_where_some_layers_are_dense(checkpoints: dict[str, Path]) -> None:
    assert [x.layer_id for x in hotset.load(checkpoints["qwen3_moe"]).hotset.layers] == [0, 2]
    assert [x.layer_id for x in hotset.load(checkpoints["deepseek_v3"]).hotset.layers] == [1, 2]


def test_the_report_counts_picks_by_hand(checkpoints: dict[str, Path]) -> None:
    model = hotset.load(checkpoints["mixtral"], plan=np.ones((3, 8), bool))
    model.generate(torch.ones((1, 5), dtype=torch.long), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    report = model.hotset_report()
    # 5 prompt tokens, then 2 steps: the last new token is never fed. 3 layers, top-2.
    assert (report["prefill"]["tokens"], report["decode"]["tokens"]) == (5, 2)
    assert (report["prefill"]["picks"], report["decode"]["picks"]) == (30, 12)
    assert report["hit_rate"] == report["token_resident_rate"] == 1.0
    json.dumps(report)


def test_saving_a_split_model_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not save itself"):
        hotset.load(checkpoints["mixtral"]).save_pretrained(tmp_path)


def plan_for(folder: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "gpu_experts_mask": np.zeros((3, 8), bool),
        "layer_ids": np.arange(3, dtype=np.int32),
        "strategy": "frequency",
        "objective": "hit-rate",
        "budget": {},
        "score": 0.0,
        "model_fingerprint": Checkpoint.open(folder).fingerprint,
    }
    return Plan(**{**settings, **changes})


def test_a_plan_for_another_model_is_refused(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["mixtral"]
    hotset.load(folder, plan=plan_for(folder))
    with pytest.raises(PlanError, match="made for another model"):
        hotset.load(folder, plan=plan_for(checkpoints["olmoe"]))
    with pytest.raises(PlanError, match="3 MoE layers of 4 experts"):
        hotset.load(folder, plan=plan_for(folder, gpu_experts_mask=np.zeros((3, 4), bool)))
    with pytest.raises(PlanError, match=r"for layers \[1, 2, 3\]"):
        hotset.load(folder, plan=plan_for(folder, layer_ids=np.arange(1, 4, dtype=np.int32)))
    with pytest.raises(PlanError, match=r"wants bool \[3, 8\]"):
        hotset.load(folder, plan=np.zeros((3, 8)))


def test_a_model_without_the_experts_interface_is_refused_by_class_name(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no layer"):
        hotset.load(tmp_path)


def sharded(tmp_path: Path) -> Path:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint("mixtral", tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_missing_and_truncated_shards_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: cut short"):
        hotset.load(folder)
    shard.write_bytes(data[:50])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: cut short"):
        hotset.load(folder)
    shard.write_bytes(struct.pack("<Q", 5) + b"hello")
    with pytest.raises(CheckpointError, match=r"not a safetensors file"):
        hotset.load(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: shard is missing"):
        hotset.load(folder)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.extra"] = sorted(content["weight_map"].values())[0]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"lacks tensor 'model.layers.9.extra'"):
        hotset.load(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        hotset.load(tmp_path)
    with pytest.raises(ModelError, match="no such model folder"):
        hotset.load(tmp_path / "absent")


def test_a_malformed_header_entry_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    header = json.dumps({"some.weight": {"shape": [1]}}).encode()
    shard.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: the header entry of 'some.weight' is malformed"):
        hotset.load(folder)
