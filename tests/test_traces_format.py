"""Trace files: what is written is read back, memory-mapped; every fault has its own message."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset import Trace
from hotset.errors import TraceError
from hotset.storage import read_arrays
from hotset.traces.writer import TraceWriter

IDS = np.array([[[0, 1], [2, 3], [1, -1]], [[3, 2], [0, 2], [-1, -1]]], np.int16)  # 2 layers, 3 tokens, top-2


def small(**changes: Any) -> Trace:
    settings: dict[str, Any] = {
        "num_experts": 4,
        "sequence_start": [0, 2],
        "weights": np.full(IDS.shape, 0.5),
        "phase": [0, 1, 1],
        "layer_ids": [1, 5],
        "expert_bytes": 100,
        "token_ids": [7, 8, 9],
        "model_fingerprint": "abc",
        "metadata": {"model": "m", "sequence_source": ["a", "b"]},
    }
    return Trace.from_arrays(IDS, **{**settings, **changes})


def assert_same(a: Trace, b: Trace) -> None:
    np.testing.assert_array_equal(a.expert_ids, b.expert_ids)
    np.testing.assert_array_equal(a.sequence_start, b.sequence_start)
    np.testing.assert_array_equal(a.phase, b.phase)
    np.testing.assert_array_equal(a.layer_ids, b.layer_ids)
    assert (a.weights is None) == (b.weights is None)
    if a.weights is not None and b.weights is not None:
        np.testing.assert_array_equal(a.weights, b.weights)
    assert a.num_experts == b.num_experts
    assert a.model_fingerprint == b.model_fingerprint
    assert a.metadata == b.metadata
    assert a.fingerprint == b.fingerprint


def test_a_trace_survives_saving(tmp_path: Path) -> None:
    trace = small()
    trace.save(tmp_path / "t.safetensors")
    back = Trace.open(tmp_path / "t.safetensors")
    assert_same(trace, back)
    assert back.expert_bytes is not None
    assert back.token_ids is not None
    assert back.expert_bytes.tolist() == [[100] * 4] * 2
    assert back.token_ids.tolist() == [7, 8, 9]
    assert not back.expert_ids.flags.writeable


def test_counts_by_hand() -> None:
    assert small().counts.tolist() == [[1, 2, 1, 1], [1, 0, 2, 1]]


def test_selecting_and_splitting_keep_whole_sequences() -> None:
    trace = small()
    second = trace.select_sequences([1])
    assert second.expert_ids.tolist() == [[[1, -1]], [[-1, -1]]]
    assert second.metadata["sequence_source"] == ["b"]
    swapped = trace.select_sequences([1, 0])
    assert swapped.expert_ids[0].tolist() == [[1, -1], [0, 1], [2, 3]]
    assert swapped.sequence_start.tolist() == [0, 1]
    plan_part, held_out = trace.split(0.5, seed=0)
    assert sorted([*plan_part.metadata["sequence_source"], *held_out.metadata["sequence_source"]]) == ["a", "b"]
    with pytest.raises(TraceError, match="nothing can be held out"):
        second.split()
    with pytest.raises(TraceError, match="sequence 2 is not in this trace"):
        trace.select_sequences([2])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 400))
def test_any_sharding_reads_back_as_one_trace(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_bytes: int
) -> None:
    rng = np.random.default_rng(sum(lengths))
    ids = np.argsort(rng.random((2, sum(lengths), 6)), axis=2)[:, :, :2].astype(np.int16)
    starts = np.cumsum([0, *lengths[:-1]])
    whole = Trace.from_arrays(ids, num_experts=6, sequence_start=starts)
    folder = tmp_path_factory.mktemp("shards")
    writer = TraceWriter(folder, num_experts=6, layer_ids=np.arange(2, dtype=np.int32), shard_bytes=shard_bytes)
    with writer:
        for index, span in enumerate(whole.sequence_slices()):
            writer.add_sequence(ids[:, span], phase=whole.phase[span], source=str(index))
    back = Trace.open(folder)
    np.testing.assert_array_equal(back.expert_ids, ids)
    np.testing.assert_array_equal(back.layer(1), ids[1])
    assert back.sequence_start.tolist() == starts.tolist()
    assert back.metadata["sequence_source"] == [str(i) for i in range(len(lengths))]
    assert back.fingerprint == whole.fingerprint
    assert len(list(folder.iterdir())) == len(back.id_shards)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 3}, "expert id 3 in layer 1 is out of range: wanted 0 to 2"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"sequence_start": [1, 2]}, "must ascend strictly from 0"),
        ({"sequence_start": [0, 2, 2]}, "must ascend strictly from 0"),
        ({"sequence_start": [0, 9]}, "must ascend strictly from 0"),
        ({"weights": np.zeros((2, 3, 1))}, r"weights have shape \(2, 3, 1\)"),
        ({"phase": [0, 1, 2]}, "phase has the value 2"),
        ({"phase": [0, 1]}, "phase has 2 tokens"),
        ({"phase": [0.0, 1.0, 1.0]}, "phase has dtype float64"),
        ({"layer_ids": [1, 1]}, "repeat"),
        ({"token_ids": [1]}, "token_ids has 1 entries"),
        ({"expert_bytes": 0}, "size of 0"),
        ({"expert_bytes": [1, 2]}, r"expert_bytes has shape \(2,\)"),
        ({"expert_bytes": 1.5}, "whole bytes"),
    ],
)
def test_bad_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        small(**change)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[[0, 0]]], "token 0 of layer 0 picks expert 0 twice"),
        ([[[0, 1]], [[0, 1], [2, 3]]], "ragged"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([[[0.0, 1.0]]], "dtype float64"),
        ([[[-2, 1]]], "expert id -2"),
        ([[[0, 40000]]], "expert id 40000"),
        (np.zeros((0, 3, 2), int), "the trace is empty"),
        (np.zeros((2, 0, 2), int), "the trace is empty"),
    ],
)
def test_bad_expert_ids_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace.from_arrays(ids, num_experts=4)


def test_two_missing_picks_are_not_a_duplicate() -> None:
    assert Trace.from_arrays([[[-1, -1]]], num_experts=4).counts.sum() == 0


def rewrite(path: Path, change: Any) -> None:
    """Change a file's header or arrays behind hotset's back, with plain safetensors."""
    from safetensors.numpy import save_file

    file = read_arrays(path)
    arrays = {name: np.array(array) for name, array in file.arrays.items()}
    metadata = {key: json.dumps(value) for key, value in file.metadata.items()}
    change(arrays, metadata)
    save_file(arrays, path, metadata=metadata)


def test_faults_of_a_file_have_each_their_message(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"

    def fault(change: Any, message: str) -> None:
        small().save(path)
        rewrite(path, change)
        with pytest.raises(TraceError, match=message):
            Trace.open(path)

    fault(lambda a, m: m.update(format='"other"'), "not a hotset trace")
    fault(lambda a, m: m.update(version="9"), "trace version 9")
    fault(lambda a, m: m.update(num_experts="0"), "num_experts is 0")
    fault(lambda a, m: m.update(num_experts="3"), "expert_bytes has shape")
    fault(lambda a, m: (a.pop("expert_bytes"), m.update(num_experts="3")), "expert id 3 .* out of range")
    fault(lambda a, m: a.pop("phase"), "no array 'phase'")
    fault(lambda a, m: a.update(phase=a["phase"].astype(np.int32)), "phase is int32 of rank 1, wanted uint8")
    fault(lambda a, m: a.update(expert_ids=a["expert_ids"][0]), "expert_ids is int16 of rank 2")
    fault(lambda a, m: a.update(phase=a["phase"][:2].copy()), "disagree")
    fault(lambda a, m: a.update(sequence_start=a["sequence_start"] + 1), "ascend strictly")


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        Trace.open(tmp_path / "absent.safetensors")
    for content, message in [
        (b"", "too short"),
        (b"#!/bin/sh\necho hello\n", "not a safetensors"),
        (b"\0" * 64, "not"),
    ]:
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(TraceError, match=message):
            Trace.open(tmp_path / "x.safetensors")
    with pytest.raises(TraceError, match="no trace shards"):
        Trace.open(tmp_path)
    small().save(tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    (tmp_path / "t.safetensors").write_bytes(data[:-4])
    with pytest.raises(TraceError, match="cut short"):
        Trace.open(tmp_path / "t.safetensors")


def write_two_shards(folder: Path) -> None:
    with TraceWriter(folder, num_experts=4, layer_ids=np.arange(2, dtype=np.int32), shard_bytes=1) as writer:
        for index in range(2):
            writer.add_sequence(IDS, phase=np.zeros(3, np.uint8), source=str(index))


def test_shards_must_be_complete_and_of_one_recording(tmp_path: Path) -> None:
    write_two_shards(tmp_path / "a")
    assert Trace.open(tmp_path / "a").num_tokens == 6
    rewrite(tmp_path / "a" / "trace-00001.safetensors", lambda a, m: m.update(num_experts="5"))
    with pytest.raises(TraceError, match="another recording"):
        Trace.open(tmp_path / "a")
    write_two_shards(tmp_path / "b")
    (tmp_path / "b" / "trace-00000.safetensors").unlink()
    with pytest.raises(TraceError, match=r"shard trace-00000.safetensors is missing"):
        Trace.open(tmp_path / "b")


def test_an_earlier_trace_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    with pytest.raises(TraceError, match="already holds a trace"):
        write_two_shards(tmp_path)
    TraceWriter(tmp_path, num_experts=4, layer_ids=np.arange(2, dtype=np.int32), overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_write_names_what_is_safe_and_leaves_a_valid_trace(tmp_path: Path) -> None:
    big = np.tile(IDS, (1, 20_000, 1))
    writer = TraceWriter(tmp_path, num_experts=4, layer_ids=np.arange(2, dtype=np.int32), shard_bytes=1000)
    writer.add_sequence(np.tile(IDS, (1, 100, 1)), phase=np.zeros(300, np.uint8), source="small")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # stands for a full disk
    try:
        with pytest.raises(TraceError, match=r"1 of 2 sequences are safe"), writer:
            writer.add_sequence(big, phase=np.zeros(60_000, np.uint8), source="big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Trace.open(tmp_path).metadata["sequence_source"] == ["small"]
    assert [p.name for p in tmp_path.iterdir()] == ["trace-00000.safetensors"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.numpy

    path = tmp_path / "t.safetensors"
    small().save(path)
    before = path.read_bytes()

    def interrupt(_arrays: Any, target: Path, **_: Any) -> None:
        Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small(phase=[1, 1, 1]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_real_traces_read_as_their_readme_says(real_trace: Any) -> None:
    trace = real_trace("gpt-oss-20b-decode")
    assert trace.expert_ids.shape == (24, 189_976, 4)
    assert (trace.num_sequences, trace.num_experts) == (615, 32)
    assert (trace.phase == 1).all()
    esft = real_trace("esft-law-prefill")
    assert esft.expert_ids.shape == (26, 8_327, 6)
    assert esft.layer_ids.tolist() == list(range(1, 27))  # layer 0 is dense
    assert esft.weights is not None
    assert (esft.phase == 0).all()
