"""Shedding in a running model: what is dropped is what the policy says, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import ModelError  # noqa: E402
from hotset.ops import ShedPolicy  # noqa: E402
from hotset.ops.reference import route_shed  # noqa: E402
from hotset.runtime.shedding import disable_shedding, enable_shedding  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

IDS = torch.randint(1, 128, (2, 8), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def half_loaded(folder: Path) -> Any:
    mask = np.zeros((2, 8), bool)
    mask[:, ::2] = True
    return hotset.load(folder, plan=mask, device="cpu")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def test_keep_mass_1_leaves_the_logits_as_they_are(folder: Path) -> None:
    model = half_loaded(folder)
    exact = logits(model)
    ledger = enable_shedding(model, ShedPolicy(1.0))
    assert torch.equal(logits(model), exact)
    totals = ledger.totals()
    assert totals.tokens.tolist() == [16, 16]
    assert totals.shed_picks.tolist() == [0, 0]
    assert (totals.rows_over_limit > 0).all()


def test_shedding_everything_equals_the_model_with_the_references_weights(folder: Path) -> None:
    """The unmodified model, its routing rewritten row by row by the plain reference, gives the same logits."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = half_loaded(folder)
    exact = logits(model)
    ledger = enable_shedding(model, ShedPolicy(0.01, over_limit="shed"))
    shed = logits(model)
    tables = iter(model.hotset.store.residency.slot_table())

    def rewritten(module: Any, hidden: Any, ids: Any, weights: Any, **_: Any) -> Any:
        routed = route_shed(ids.numpy(), weights.numpy(), next(tables))
        return type(module).forward.__wrapped__(module, hidden, ids, torch.from_numpy(routed.mix))

    ALL_EXPERTS_FUNCTIONS.register("rewritten_by_reference", rewritten)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="rewritten_by_reference"
    )
    torch.testing.assert_close(shed, logits(plain), rtol=0, atol=1e-6)
    assert not torch.equal(shed, exact)
    totals = ledger.totals()
    assert (totals.shed_picks > 0).all()
    assert (totals.dropped_share > 0.1).all()


def test_a_bound_on_kept_mass_is_held_and_ends_with_disable(folder: Path) -> None:
    model = half_loaded(folder)
    exact = logits(model)
    ledger = enable_shedding(model, ShedPolicy(0.5))
    bounded = logits(model)
    totals = ledger.totals()
    assert (totals.shed_rows > 0).any()
    assert (totals.rows_over_limit > 0).any()
    # no row drops more than half of its mass, so no layer does
    assert (totals.dropped_share <= 0.5).all()
    assert not torch.equal(bounded, exact)
    enable_shedding(model, ShedPolicy(1.0))
    assert torch.equal(logits(model), exact)
    disable_shedding(model)
    disable_shedding(model)
    assert torch.equal(logits(model), exact)


def test_a_model_that_hotset_did_not_load_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear was not loaded by hotset.load"):
        enable_shedding(torch.nn.Linear(1, 1), ShedPolicy(0.5))
