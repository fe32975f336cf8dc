"""Prefill streaming: long chunks bring their missing experts to the device, in order, once, and change no bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.core import Machine, Tier  # noqa: E402
from hotset.errors import CheckpointError, ModelError  # noqa: E402
from hotset.models.experts import experts_per_token  # noqa: E402
from hotset.reports.prometheus import prometheus_text  # noqa: E402
from hotset.runtime.expert_formats.contract import ExpertTensors  # noqa: E402
from hotset.runtime.prefill import (  # noqa: E402
    PrefillStreamer,
    Threshold,
    _Buffer,
    buffer_size,
    expert_flops,
    resolve_threshold,
)
from hotset.runtime.store import ExpertStore  # noqa: E402
from tests.test_cost import machine as round_machine  # noqa: E402
from tests.threads import guarded  # noqa: E402
from tests.tiny_models import FAMILIES, make_checkpoint  # noqa: E402
from tests.tiny_store import make_store  # noqa: E402

PROMPT = torch.arange(3, 23)[None]
HALF = np.zeros((3, 8), np.bool_)
HALF[:, ::2] = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


def logits(model: Any, prompt: Any = PROMPT) -> Any:
    with torch.inference_mode():
        return model(input_ids=prompt).logits


class Watch:
    """Copies, and notes what was computed with which values; fails at the copies whose numbers are in `fails`."""

    def __init__(self) -> None:
        self.copies = 0
        self.fails: set[int] = set()
        self.computed: list[tuple[int, float]] = []

    def copy(self, source: Any, target: Any) -> None:
        self.copies += 1
        if self.copies in self.fails:
            target.fill_(99)
            raise OSError(f"copy {self.copies} failed")
        target.copy_(source)

    def compute(self, expert: int, weights: ExpertTensors) -> None:
        values = {float(value) for tensor in weights.values() for value in tensor.flatten()}
        assert len(values) == 1, f"expert {expert} is a mixture: {values}"
        self.computed.append((expert, values.pop()))


def streamer(store: ExpertStore, watch: Watch) -> PrefillStreamer:
    return PrefillStreamer(store, Threshold(1, "test"), copy=watch.copy)


def assert_nothing_locked(store: ExpertStore) -> None:
    assert not store.residency.arrays.users.any()
    assert store.cache is None or not store.cache.residency.arrays.users.any()
    store.check_integrity()


# -- the double buffer alone: two layers of four experts, layer 0 has 0 and 1 in the arena --------------------------


@pytest.mark.parametrize("cached", [None, 2])
def test_experts_come_in_the_order_named_and_residents_are_never_copied(cached: int | None) -> None:
    store, read, _ = make_store(cached=cached)
    read.reads.clear()
    watch = Watch()
    stream = streamer(store, watch)
    stream.run(0, [0, 1, 2, 3], watch.compute)
    stream.run(1, [0, 1, 3], watch.compute)
    assert watch.computed == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 10), (1, 11), (3, 13)]
    assert watch.copies == 2 * 5  # two tensors each of (0: 2, 3) and (1: 0, 1, 3); 2 of layer 1 was not picked
    report = stream.report()
    assert (report["experts_streamed"], report["chunks"]) == (5, 1)
    assert report["bytes"] == 5 * store.formats[0].expert_bytes
    assert sorted(read.reads) == ([] if cached is None else [(0, 2), (0, 3), (1, 0), (1, 1), (1, 3)])
    assert_nothing_locked(store)


def test_a_copy_begins_one_expert_ahead_and_never_into_the_buffer_being_read() -> None:
    store, _, _ = make_store()
    watch, events = Watch(), []

    def copy(source: Any, target: Any) -> None:
        if source.dtype == torch.float32:
            events.append(f"copy {int(source[0, 0])} to {target.untyped_storage().data_ptr()}")
        target.copy_(source)

    def compute(expert: int, weights: ExpertTensors) -> None:
        events.append(f"compute {expert} in {weights['w'].untyped_storage().data_ptr()}")
        watch.compute(expert, weights)

    stream = PrefillStreamer(store, Threshold(1, "test"), copy=copy)
    stream.run(1, [0, 1, 2, 3], compute)  # 2 is in the arena
    first, second = (buffer.on_device.untyped_storage().data_ptr() for buffer in stream._buffers)
    arena = store.arena[1]["w"].untyped_storage().data_ptr()
    assert events == [
        f"copy 10 to {first}",
        f"copy 11 to {second}",
        f"compute 0 in {first}",
        f"copy 13 to {first}",
        f"compute 1 in {second}",
        f"compute 2 in {arena}",
        f"compute 3 in {first}",
    ]


def test_nothing_is_allocated_before_something_is_missing_and_then_once() -> None:
    store, _, _ = make_store()
    watch = Watch()
    stream = streamer(store, watch)
    stream.run(0, [0, 1], watch.compute)
    assert stream.buffer_bytes == 0
    stream.run(0, [2], watch.compute)
    assert stream.buffer_bytes == 2 * 512  # w: 48 bytes, b: 6 bytes, each rounded up to 256
    buffers = list(stream._buffers)
    stream.run(1, [0, 1, 2, 3], watch.compute)
    assert stream._buffers == buffers
    assert stream.staging_bytes == 0


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 6])
def test_a_copy_that_fails_leaves_no_lock_and_the_next_chunk_is_right(failing: int) -> None:
    store, _, _ = make_store()
    watch = Watch()
    stream = streamer(store, watch)
    watch.fails = {failing}
    with pytest.raises(OSError, match="failed"):
        stream.run(1, [0, 1, 2, 3], watch.compute)
    assert_nothing_locked(store)
    watch.computed.clear()
    stream.run(1, [0, 1, 2, 3], watch.compute)
    assert watch.computed == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert_nothing_locked(store)


def test_a_read_that_fails_and_a_computation_that_fails_leave_no_lock() -> None:
    store, read, _ = make_store(cached=2)
    watch = Watch()
    stream = streamer(store, watch)
    read.broken = {(1, 1)}
    with pytest.raises(CheckpointError, match=r"\(1, 1\)"):
        stream.run(1, [0, 1, 2, 3], watch.compute)
    assert_nothing_locked(store)
    read.broken = set()

    def broken(_expert: int, _weights: ExpertTensors) -> None:
        raise RuntimeError("kernel failed")

    with pytest.raises(RuntimeError, match="kernel failed"):
        stream.run(1, [2, 3], broken)
    assert_nothing_locked(store)
    watch.computed.clear()
    stream.run(1, [0, 1, 2, 3], watch.compute)
    assert watch.computed == [(0, 10), (1, 11), (2, 12), (3, 13)]


def test_an_expert_promoted_after_it_was_found_missing_is_used_in_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, _ = make_store()
    store.demote(0, 1)  # a free slot
    watch = Watch()
    stream = streamer(store, watch)
    acquire = store.acquire

    def promote_first(row: int, expert: int) -> tuple[ExpertTensors, Tier]:
        if expert == 2 and store.residency.slot(0, 2) == -1:
            monkeypatch.setattr(store, "acquire", acquire)
            store.promote(0, 2)
        return acquire(row, expert)

    monkeypatch.setattr(store, "acquire", promote_first)
    stream.run(0, [0, 1, 2, 3], watch.compute)
    assert watch.computed == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert stream.report()["experts_streamed"] == 2  # 1 and 3
    assert_nothing_locked(store)


@pytest.mark.parametrize("cached", [None, 2])
def test_two_threads_streaming_and_a_third_moving_experts_meet_only_their_own_bytes(cached: int | None) -> None:
    store, _, _ = make_store(cached=cached, size=200)
    watches = [Watch(), Watch()]
    stream = streamer(store, watches[0])
    problems: list[BaseException] = []

    def prefill(watch: Watch) -> None:
        for turn in range(60):
            stream.run(turn % 2, [0, 1, 2, 3], watch.compute)

    def move() -> None:
        rng = np.random.default_rng(0)
        for _ in range(100):
            row, (expert, victim) = int(rng.integers(2)), rng.permutation(4)[:2].tolist()
            try:
                store.promote(row, expert, victim)
            except hotset.errors.ResidencyError:
                continue  # resident already, or in use

    threads = [guarded(lambda w=w: prefill(w), problems) for w in watches] + [guarded(move, problems)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    expected = [(e, 10 * row + e) for turn in range(60) for row in [turn % 2] for e in range(4)]
    assert watches[0].computed == watches[1].computed == expected
    assert_nothing_locked(store)


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_streaming_changes_no_bit_of_a_float32_model(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    plain = hotset.load(folder)
    wanted, layers = logits(plain), len(plain.hotset.layers)
    for share in (0, 4, 8):
        mask = np.zeros((layers, 8), np.bool_)
        mask[:, :share] = True
        model = hotset.load(folder, plan=mask, gpu_prefill_token_threshold=20)
        assert torch.equal(logits(model), wanted)
        report = model.hotset_report()
        assert report["gpu_prefill"]["chunks"] == 1
        assert (report["gpu_prefill"]["experts_streamed"] == 0) == (share == 8)
        assert (report["bytes"]["prefill_buffers"] == 0) == (share == 8)


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"expert_format": "int8"}, {"dtype": "bfloat16", "kernels": "torch"}]
)
def test_streaming_changes_no_bit_of_packed_and_stored_experts(
    folder: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = logits(hotset.load(folder, **settings))
    model = hotset.load(folder, plan=HALF, gpu_prefill_token_threshold=20, **settings)
    assert torch.equal(logits(model), wanted)
    assert model.hotset_report()["gpu_prefill"]["experts_streamed"] > 0


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"expert_format": "int8"}])
def test_what_a_device_would_get_is_the_expert(
    folder: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = hotset.load(folder, **settings)
    store, fmt, module = model.hotset.store, model.hotset.store.formats[1], model.hotset.layers[1].module
    shapes, cpu = fmt.slot_shapes(torch.device("cuda")), torch.device("cpu")
    buffer = _Buffer(buffer_size([fmt], torch.device("cuda")), cpu)
    host = store.on_host(1, 3)
    buffer.fill(fmt.to_device(host), shapes, lambda source, target: target.copy_(source), None)
    tensors = buffer.tensors(shapes)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == dict(shapes)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors.values())
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    got, wanted = fmt.device_rows(module, rows, tensors).float(), fmt.expert_rows(module, rows, host).float()
    assert torch.allclose(got, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


def test_only_picked_experts_stream_each_once_and_shorter_chunks_none(folder: Path) -> None:
    model = hotset.load(folder, plan=HALF, gpu_prefill_token_threshold=20)
    with model.hotset.recording(folder.parent / "trace", overwrite=True):
        logits(model)
    trace = hotset.Trace.open(folder.parent / "trace")
    missing = sum(len(set(trace.expert_ids[row].ravel().tolist()) - {0, 2, 4, 6}) for row in range(3))
    report = model.hotset_report()["gpu_prefill"]
    assert report["experts_streamed"] == missing
    logits(model, PROMPT[:, :19])
    model.generate(PROMPT[:, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
    again = model.hotset_report()["gpu_prefill"]
    assert {**again, "seconds": 0} == {**report, "seconds": 0}


def test_text_after_a_streamed_prompt_is_that_without(folder: Path) -> None:
    def text(**settings: Any) -> list[int]:
        model = hotset.load(folder, plan=HALF, **settings)
        return model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()

    assert text(gpu_prefill_token_threshold=8) == text() == text(gpu_prefill_token_threshold=8, adapt=True)


def test_two_threads_with_prompts_of_their_own_get_their_own_logits(folder: Path) -> None:
    plain, model = hotset.load(folder), hotset.load(folder, plan=HALF, gpu_prefill_token_threshold=8)
    prompts = [PROMPT, PROMPT.flip(1) + 40]
    wanted = [logits(plain, prompt) for prompt in prompts]
    found: list[list[Any]] = [[], []]

    def run(index: int) -> None:
        for _ in range(5):
            found[index].append(logits(model, prompts[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(len(of) == 5 and all(torch.equal(one, wanted[i]) for one in of) for i, of in enumerate(found))


def test_gradients_around_the_experts_are_those_without_streaming(folder: Path) -> None:
    def gradient(**settings: Any) -> Any:
        model = hotset.load(folder, training=True, **settings)
        model(input_ids=PROMPT).logits.sum().backward()
        return model.get_input_embeddings().weight.grad

    assert torch.equal(gradient(gpu_prefill_token_threshold=1), gradient())


def test_the_report_says_it_to_people_and_to_prometheus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from hotset.reports.run import print_run

    model = hotset.load(folder, gpu_prefill_token_threshold=20)
    print_run(Console(), model.hotset_report())
    assert "from 20 tokens on (asked for)" in capsys.readouterr().out
    logits(model)
    report = model.hotset_report()
    print_run(Console(), report)
    out = capsys.readouterr().out
    assert f"{report['gpu_prefill']['experts_streamed']} experts" in out
    assert "1 chunks of 20 tokens or more" in out
    assert f"hotset_prefill_streamed_bytes_total {report['gpu_prefill']['bytes']}" in prometheus_text(report)
    assert "prefill_chunks" not in prometheus_text(hotset.load(folder).hotset_report())


# -- the threshold ---------------------------------------------------------------------------------------------------


def resolve(requested: Any, *, device: str = "cuda", machine: Machine | None = None, **changes: Any) -> Threshold:
    store, _, _ = make_store()
    given = {"formats": store.formats, "top_k": 2, "missing_per_layer": 4.0, **changes}
    return resolve_threshold(requested, device=torch.device(device), machine=machine, **given)


def test_auto_is_never_without_a_gpu_a_machine_or_a_host_rate() -> None:
    measured = round_machine(host_flops_per_second=1.0)
    assert "host memory" in resolve("auto", device="cpu", machine=measured).reason
    assert "hotset probe" in resolve("auto").reason
    assert "host_flops_per_second" in resolve("auto", machine=Machine.open("rtx-4090")).reason
    assert "how many experts" in resolve("auto", machine=measured, top_k=None).reason
    for never in (resolve("auto"), resolve("auto", machine=Machine.open("l4")), resolve(None)):
        assert never.tokens is None


def test_auto_with_a_measured_machine_is_the_cost_models_number() -> None:
    # w [6, 2] float32 and b [3] bfloat16: 54 bytes; no matrix of 3 dimensions but w: 24 FLOP
    store, _, _ = make_store()
    assert (store.formats[0].expert_bytes, expert_flops(store.formats[0])) == (54, 24)
    # host 12 s a row at 2 FLOP/s; copy 54 B at 5 B/s = 10.8 s each: by far faster with one token already
    fast = resolve("auto", machine=round_machine(host_flops_per_second=2.0))
    assert fast.tokens == 1
    slow = resolve("auto", machine=round_machine(host_flops_per_second=1e9))
    assert slow.tokens is None
    assert "every length" in slow.reason


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "many"])
def test_a_threshold_without_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match="gpu_prefill_token_threshold"):
        resolve(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_top_k_of_each_family_is_found(family: str) -> None:
    from transformers import AutoConfig

    model_type, settings = FAMILIES[family]
    assert experts_per_token(AutoConfig.for_model(model_type, num_hidden_layers=3, **settings)) == 2
