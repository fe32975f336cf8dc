"""The demo's model: it loads, it is exact at every budget, and the demo's road works from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.demo import demo_folder, run_demo  # noqa: E402
from hotset.traces.recorder import load_plain  # noqa: E402
from tests.test_runtime_load import decode_logits, prefill_logits  # noqa: E402

MODEL = demo_folder() / "model"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_demo_model_split_is_the_demo_model(share: float) -> None:
    plain, tokenizer = load_plain(MODEL, dtype="float32", device="cpu")
    mask = np.random.default_rng(0).permutation(7 * 32).reshape(7, 32) < share * 7 * 32
    split = hotset.load(MODEL, plan=mask, dtype="float32", device="cpu")
    ids = torch.tensor([tokenizer("def main():\n    return 0\n" * 4)["input_ids"][:8]])
    with torch.no_grad():
        for call in (prefill_logits, decode_logits):
            ours = call(split, ids)
            plain.set_experts_implementation("grouped_mm")
            torch.testing.assert_close(ours, call(plain, ids), rtol=0, atol=1e-4)
            plain.set_experts_implementation("eager")
            assert torch.equal(ours, call(plain, ids))


def test_the_demo_model_is_what_its_card_says() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_hidden_layers"], config["mlp_only_layers"]) == (8, [0])
    assert (config["num_experts"], config["num_experts_per_tok"]) == (32, 4)
    assert sum(p.stat().st_size for p in MODEL.rglob("*") if p.is_file()) <= 32 * 1024 * 1024
    assert [layer.layer_id for layer in hotset.load(MODEL).hotset.layers] == list(range(1, 8))


def test_the_demo_runs_and_the_texts_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(MODEL)
    (tmp_path / "prompts").symlink_to(demo_folder() / "prompts")
    (tmp_path / "heldout").mkdir()
    for path in sorted((demo_folder() / "heldout").glob("*.txt")):
        (tmp_path / "heldout" / path.name).write_text(path.read_text()[:3000])
    said: list[str] = []
    result = run_demo(tmp_path, say=said.append)
    assert result.all_same
    assert len(result.prompts) == 3
    assert len(said) == 3
    assert result.bytes_arena + result.bytes_host == result.bytes_experts
    assert 0.49 * result.bytes_experts < result.bytes_arena <= 0.5 * result.bytes_experts
