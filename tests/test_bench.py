"""Bench: the routing it records, what it leaves as it was, and the counts it predicts from. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.bench import bench  # noqa: E402
from hotset.core import DECODE  # noqa: E402
from hotset.errors import BudgetError, ModelError  # noqa: E402
from hotset.runtime import measure  # noqa: E402
from hotset.runtime.measure import measure_decode, record_decode  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

PROMPT = torch.tensor([[3, 7, 11, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny"))


def test_recording_gives_the_greedy_tokens_and_routing_whatever_is_resident(folder: Path) -> None:
    mask = np.zeros((2, 8), np.bool_)
    mask[:, :3] = True
    recorded = []
    for plan in (None, mask):
        model = hotset.load(folder, plan=plan, device="cpu")
        trace, tokens = record_decode(model, PROMPT, 6)
        recorded.append((trace, tokens))
        assert trace.expert_ids.shape == (2, 4 + 6, 2)
        assert (trace.phase == DECODE).sum() == 6
        assert trace.layer_ids.tolist() == [layer.layer_id for layer in model.hotset.layers]
        assert trace.expert_bytes is not None
        assert int(trace.expert_bytes.sum()) == model.hotset.store.arena_bytes + model.hotset.store.host_bytes
    (first, tokens), (second, same) = recorded
    assert (first.expert_ids == second.expert_ids).all()
    assert tokens.tolist() == same.tolist()
    out = model.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out[0, 4:].tolist() == tokens.tolist()


def test_measuring_leaves_the_model_as_it_was(folder: Path) -> None:
    mask = np.zeros((2, 8), np.bool_)
    mask[:, ::2] = True
    model = hotset.load(folder, plan=mask, device="cpu")
    before = model(PROMPT).logits
    trace, tokens = record_decode(model, PROMPT, 5)
    times = measure_decode(model, PROMPT, tokens, trace, rounds=2)
    assert (model(PROMPT).logits == before).all()
    assert times.spread[0] <= times.seconds_per_token <= times.spread[1]
    assert times.hit_seconds is not None
    assert times.miss_seconds is not None
    with pytest.raises(ModelError, match="wanted at least 2 and 1"):
        measure_decode(model, PROMPT, tokens, trace, rounds=0)


def test_a_kind_of_pick_that_does_not_occur_has_no_time(folder: Path) -> None:
    model = hotset.load(folder, plan=np.ones((2, 8), np.bool_), device="cpu")
    trace, tokens = record_decode(model, PROMPT, 3)
    times = measure_decode(model, PROMPT, tokens, trace, rounds=1)
    assert times.miss_seconds is None
    assert times.hit_seconds is not None


def test_prices_are_the_line_through_thinned_passes_and_owe_nothing_to_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = np.zeros((2, 8), np.bool_)
    mask[:, ::2] = True
    model = hotset.load(folder, plan=mask, device="cpu")
    trace, tokens = record_decode(model, PROMPT, 8)
    decode = trace.expert_ids[:, trace.phase == DECODE]
    fed: list[torch.Tensor] = []

    def timed(_model: object, _ids: object, _tokens: object, picks: torch.Tensor | None) -> list[float]:
        if picks is None:
            return [9.0] * 8
        fed.append(picks)
        return [0.5 + 0.25 * float((token < 8).sum()) for token in picks.unbind(1)]

    monkeypatch.setattr(measure, "_timed_decode", timed)
    times = measure_decode(model, PROMPT, tokens, trace, rounds=1)
    assert times.seconds_per_token == 9.0
    assert times.non_expert_seconds == pytest.approx(0.5)
    assert times.hit_seconds == times.miss_seconds == pytest.approx(0.25)
    for picks in fed:
        kept = picks.numpy() < 8
        assert 0 < kept.sum() < decode.size
        assert (picks.numpy() == np.where(kept, np.roll(decode, 4, axis=1), 8)).all()  # of the token 4 before


def test_picks_fed_to_a_decode_replace_those_of_its_tokens_alone(folder: Path) -> None:
    model = hotset.load(folder, device="cpu")
    picks = torch.arange(2 * 3 * 2).reshape(2, 3, 2) % 8
    tokens = record_decode(model, PROMPT, 3)[1]
    fed: list[list[list[list[int]]]] = [[], []]

    def see(row: int, ids: torch.Tensor) -> torch.Tensor:
        fed[row].append(ids.tolist())
        return ids

    with measure._picks_through(model.hotset, see):
        seconds = measure._timed_decode(model, PROMPT, tokens, picks)
    assert len(seconds) == 3
    assert [len(calls[0]) for calls in fed] == [4, 4]  # the prompt's own
    assert [calls[1:] for calls in fed] == picks[:, :, None].tolist()


def test_a_price_is_a_slope_and_one_below_nothing_is_nothing() -> None:
    counts = np.array([[1.0, 1.0], [3.0, 1.0], [1.0, 3.0], [3.0, 3.0]])
    assert measure._line(counts, 10 + counts @ [2.0, 5.0]) == (pytest.approx(10), pytest.approx([2, 5]))
    non_expert, prices = measure._line(counts, 10 + counts @ [-1.0, 5.0])
    assert prices == [0.0, pytest.approx(5)]
    assert non_expert == pytest.approx(8)  # 10 less 1 for the two that there are on average


def test_rows_hold_what_replay_predicts_and_their_parts_add_up(folder: Path) -> None:
    said: list[str] = []
    rows = bench(folder, budgets=["25%", "100%"], new_tokens=4, rounds=1, device="cpu", machine=None, say=said.append)
    assert [row.gpu_experts for row in rows] == [4, 16]
    assert rows[1].hit_rate == 1.0
    for row in rows:
        assert row.predicted == pytest.approx(
            sum(row.parts[p] for p in ("non_expert", "gpu", "cpu", "round_trip", "stall"))
        )
        assert row.error == pytest.approx(row.predicted / row.measured - 1)
        assert row.predicted_by_machine is None
    assert said == ["recording the decode", "measuring at 25.0 %", "measuring at 100.0 %"]


def test_an_empty_budget_is_refused(folder: Path) -> None:
    with pytest.raises(BudgetError, match="nothing in the arena"):
        bench(folder, budgets=["0%"])


def test_the_command_takes_plans_and_prints_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotset.cli.main import build_app

    trace, _ = record_decode(hotset.load(folder, device="cpu"), PROMPT, 4)
    hotset.plan(trace, fraction=0.5).save(tmp_path / "p.safetensors")
    arguments = ["--plan", str(tmp_path / "p.safetensors"), "--new-tokens", "3", "--rounds", "1", "--json"]
    with pytest.raises(SystemExit) as left:
        build_app()(["bench", str(folder), "--device", "cpu", "--machine", "l4", *arguments])
    assert left.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["gpu_experts"] == 8
    assert row["predicted_by_machine"] > 0
