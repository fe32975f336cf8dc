"""What a running model tells: the report adds up, Prometheus can read it, and the routing recorded is the real one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import Trace  # noqa: E402
from hotset.errors import ModelError, TraceError  # noqa: E402
from hotset.runtime import runtime as runtime_module  # noqa: E402
from hotset.runtime.expert_formats.contract import parameter_shapes  # noqa: E402
from hotset.runtime.memory import buffer_bytes  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

MASK = np.zeros((3, 8), bool)
MASK[:, :4] = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


def generate(model: Any, prompt: Any, tokens: int = 6, **settings: Any) -> Any:
    return model.generate(
        prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings
    )


def test_the_disk_report_adds_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "resident_bytes", lambda: 0)
    monkeypatch.setattr(runtime_module, "RESERVE_BYTES", 0)
    one = buffer_bytes(parameter_shapes(hotset.load(folder).hotset.layers[0]))
    model = hotset.load(folder, plan=MASK, adapt=True, host_memory_bytes=(12 + 8) * one)
    generate(model, torch.arange(3, 13)[None])
    report = model.hotset_report()
    disk = report["disk"]
    assert disk["loads"] * model.hotset.layers[0].bytes_per_expert == disk["read_bytes"]
    assert disk["loads"] >= disk["misses"] > 0
    assert report["bytes"]["host_experts"] == 8 * one
    assert sum(report["experts"][tier] for tier in ("gpu", "host", "disk")) == 24
    assert report["peak_host_bytes"] > report["bytes"]["arena"] + report["bytes"]["host_experts"]
    assert json.loads(json.dumps(report)) == report


def test_prometheus_text_is_well_formed_and_says_what_the_report_says(folder: Path) -> None:
    model = hotset.load(folder, plan=MASK, adapt=True)
    generate(model, torch.arange(3, 13)[None])
    report = model.hotset_report()
    samples: dict[str, float] = {}
    described: set[str] = set()
    for line in hotset.prometheus_text(report).splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("counter", "gauge")
            assert (kind == "counter") == name.endswith("_total")
            assert name not in described
            described.add(name)
        elif not line.startswith("# HELP "):
            key, value = line.rsplit(" ", 1)
            assert key.split("{")[0] in described
            assert key not in samples
            samples[key] = float(value)
    assert samples['hotset_tokens_total{phase="prefill"}'] == 10
    assert samples['hotset_tokens_total{phase="decode"}'] == 5
    assert samples['hotset_picks_total{phase="decode"}'] == report["decode"]["picks"] == 5 * 3 * 2
    assert samples['hotset_experts{tier="gpu"}'] == 12
    assert samples['hotset_moves_total{outcome="promotions"}'] == report["moves"]["promotions"]
    assert samples['hotset_memory_bytes{kind="arena"}'] == report["bytes"]["arena"]
    assert not any(key.startswith("hotset_disk") for key in samples)


def test_recording_while_serving_is_what_the_recorder_records(folder: Path, tmp_path: Path) -> None:
    """Two prompts of different lengths in one padded batch, and one alone, against `hotset.record`'s own hooks."""
    from hotset.traces.recorder import RoutingRecorder

    prompts = [torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10]])]
    expected = []
    model = hotset.load(folder)
    for prompt in prompts:
        text = generate(model, prompt)
        with RoutingRecorder(model) as recorder, torch.no_grad():
            model(text[:, :-1])  # the last token was never fed
            expected.append(recorder.take(text.shape[1] - 1))
    padded = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = (padded > 0).long()
    serving = hotset.load(folder, plan=MASK, adapt=True)
    with serving.hotset.recording(tmp_path / "trace"):
        generate(serving, padded, attention_mask=mask)
        generate(serving, prompts[1])
    generate(serving, prompts[0])  # after the recording: not in it
    trace = Trace.open(tmp_path / "trace")
    assert trace.num_sequences == 3
    assert trace.layer_ids.tolist() == [0, 1, 2]
    assert trace.model_fingerprint == serving.hotset.model_fingerprint
    start = [*trace.sequence_start.tolist(), trace.num_tokens]
    ids, weights = np.concatenate(trace.id_shards, axis=1), np.concatenate(trace.weight_shards or (), axis=1)
    for index, which in enumerate([0, 1, 1]):
        span = slice(start[index], start[index + 1])
        assert (ids[:, span] == expected[which][0]).all()
        np.testing.assert_allclose(weights[:, span], expected[which][1], atol=2e-3)
        length = prompts[which].shape[1]
        assert trace.phase[span].tolist() == [0] * length + [1] * 5


def test_a_row_that_has_ended_is_not_recorded_on(folder: Path, tmp_path: Path) -> None:
    model = hotset.load(folder)
    first = generate(model, torch.tensor([[5, 6, 7, 8]]), 8)[0, 4:].tolist()
    model.generation_config.eos_token_id = first[2]
    assert first[2] not in first[:2]
    with model.hotset.recording(tmp_path / "trace"):
        out = model.generate(
            torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    if out.shape[1] <= 7:
        pytest.fail("the second row ended as early: choose another prompt")
    trace = Trace.open(tmp_path / "trace")
    # the prompt and the two tokens before the end
    assert np.diff([*trace.sequence_start, trace.num_tokens])[0] == 4 + 2


def test_threads_record_sequences_of_their_own(folder: Path, tmp_path: Path) -> None:
    model = hotset.load(folder, plan=MASK, adapt=True)
    with model.hotset.recording(tmp_path / "trace"):
        threads = [
            threading.Thread(target=lambda n=n: [generate(model, torch.arange(3, 3 + n)[None]) for _ in range(3)])
            for n in (4, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = Trace.open(tmp_path / "trace")
    lengths = sorted(np.diff([*trace.sequence_start, trace.num_tokens]).tolist())
    assert lengths == [9] * 3 + [14] * 3


def test_two_recordings_at_once_and_a_folder_in_use_are_refused(folder: Path, tmp_path: Path) -> None:
    model = hotset.load(folder)
    with (
        model.hotset.recording(tmp_path / "trace"),
        pytest.raises(ModelError, match="a recording is under way"),
    ):
        model.hotset.recording(tmp_path / "other")
    with model.hotset.recording(tmp_path / "trace"):
        generate(model, torch.arange(3, 8)[None])
    with pytest.raises(TraceError, match="already holds a trace"):
        model.hotset.recording(tmp_path / "trace")
    with model.hotset.recording(tmp_path / "trace", overwrite=True):
        generate(model, torch.arange(3, 8)[None])
