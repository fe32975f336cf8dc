"""Recording: what is written is what the model routed, token by token, and padding never counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import TraceError, UnsupportedModelError  # noqa: E402
from hotset.models.checkpoint import Checkpoint  # noqa: E402
from hotset.traces.documents import Document, read_documents  # noqa: E402
from hotset.traces.recorder import Generation, load_plain, record  # noqa: E402
from tests.tiny_models import add_tokenizer, make_checkpoint  # noqa: E402

TEXTS = ["w3 w4 w5 w6 w7", "w8 w9", "w10 w11 w12"]
DOCUMENTS = [Document(f"d{i}", text=text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    config = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 2, "pad_token_id": 0}))
    return add_tokenizer(made)


def routing_by_hooks(model: Any, tokens: list[int]) -> np.ndarray:
    """[L, t, K] by the independent way: a hook on each experts module, one sequence, no padding."""
    from hotset.models.experts import find_expert_layers

    seen: list[Any] = []
    hooks = [
        layer.module.register_forward_pre_hook(lambda _m, args: seen.append(args[1]))
        for layer in find_expert_layers(model)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.stack([ids.numpy() for ids in seen])


def test_a_padded_batch_records_what_each_sequence_alone_routes(folder: Path, tmp_path: Path) -> None:
    model, _ = load_plain(folder)
    trace = record(folder, DOCUMENTS, tmp_path / "t", batch_size=3, keep_tokens=True)
    assert trace.num_tokens == 5 + 2 + 3
    assert trace.sequence_start.tolist() == [0, 5, 7]
    assert trace.metadata["sequence_source"] == ["d0", "d1", "d2"]
    assert trace.phase.tolist() == [0] * 10
    assert trace.token_ids is not None
    for span in trace.sequence_slices():
        tokens = trace.token_ids[span].tolist()
        np.testing.assert_array_equal(trace.expert_ids[:, span], routing_by_hooks(model, tokens))
    assert trace.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_sizes_fingerprint_and_layer_numbers_come_from_the_model(folder: Path, tmp_path: Path) -> None:
    trace = record(folder, DOCUMENTS, tmp_path / "t")
    checkpoint = Checkpoint.open(folder)
    assert trace.model_fingerprint == checkpoint.fingerprint
    assert trace.expert_bytes is not None
    assert trace.expert_bytes.sum() + trace.metadata["non_expert_bytes"] == checkpoint.total_bytes
    model_type = trace.metadata["model_type"]
    assert trace.layer_ids.tolist() == ([0, 2] if model_type == "qwen3_moe" else [0, 1, 2])
    # float32 keys and values of 2 heads of 8 in 3 layers
    assert trace.metadata["kv_bytes_per_token"] == 2 * 2 * 8 * 4 * 3


def test_gate_weights_are_kept_as_the_model_used_them_unless_told_not_to(folder: Path, tmp_path: Path) -> None:
    with_weights = record(folder, DOCUMENTS, tmp_path / "with")
    assert with_weights.weights is not None
    assert with_weights.weights.shape == with_weights.expert_ids.shape
    assert (with_weights.weights > 0).all()
    without = record(folder, DOCUMENTS, tmp_path / "without", keep_weights=False)
    assert without.weights is None
    assert without.fingerprint == with_weights.fingerprint
    assert without.token_ids is None


def test_windows_of_a_long_text_are_sequences_of_their_own(folder: Path, tmp_path: Path) -> None:
    trace = record(folder, TEXTS[:1], tmp_path / "t", max_tokens=2)
    assert trace.sequence_start.tolist() == [0, 2, 4]
    assert trace.metadata["sequence_source"] == ["text"] * 3


def test_decoding_records_prompt_and_steps_and_no_padding(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_plain(folder)
    trace = record(folder, DOCUMENTS, tmp_path / "t", generate=Generation(6), batch_size=3, keep_tokens=True)
    assert trace.token_ids is not None
    for text, span in zip(TEXTS, trace.sequence_slices(), strict=True):
        prompt = tokenizer(text)["input_ids"]
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
        fed = alone[:-1]  # the last new token never goes through the model
        assert trace.token_ids[span].tolist() == fed
        assert trace.phase[span].tolist() == [0] * len(prompt) + [1] * (len(fed) - len(prompt))
        np.testing.assert_array_equal(trace.expert_ids[:, span], routing_by_hooks(model, fed))


def test_tokens_after_the_end_of_a_sequence_are_not_counted(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_plain(folder)
    first = model.generate(torch.tensor([[3, 4, 5, 6, 7]]), max_new_tokens=1, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = first  # the first sequence ends at once, the others go on
    trace = record(
        model, DOCUMENTS, tmp_path / "t", tokenizer=tokenizer, generate=Generation(4), batch_size=3, keep_tokens=True
    )
    assert trace.sequence_start[1] == 5
    assert trace.token_ids is not None
    assert first not in trace.token_ids[trace.phase == 1]


def test_sampling_is_seeded(folder: Path, tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int) -> str:
        generate = Generation(5, temperature=2.0, seed=seed)
        return record(folder, DOCUMENTS, tmp_path / name, generate=generate).fingerprint

    assert fingerprint("a", 1) == fingerprint("b", 1) != fingerprint("c", 2)


def test_recording_leaves_the_model_as_it_was(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_plain(folder)
    before = model(torch.tensor([[3, 4]])).logits
    record(model, DOCUMENTS, tmp_path / "t", tokenizer=tokenizer)
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(model(torch.tensor([[3, 4]])).logits, before)


def test_a_model_that_hotset_runs_can_be_recorded(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = hotset.load(folder)
    plain = record(folder, DOCUMENTS, tmp_path / "a")
    split = record(model, DOCUMENTS, tmp_path / "b", tokenizer=AutoTokenizer.from_pretrained(folder))
    np.testing.assert_array_equal(plain.expert_ids, split.expert_ids)


def test_chat_messages_go_through_the_chat_template(folder: Path, tmp_path: Path) -> None:
    document = Document("chat", messages=({"role": "user", "content": "w3 w4"},))
    trace = record(folder, [document], tmp_path / "t", keep_tokens=True)
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == [9, 3, 4]


def test_an_interrupt_keeps_the_complete_sequences(folder: Path, tmp_path: Path) -> None:
    def stop_after_two(progress: Any) -> None:
        if progress.sequences == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(folder, DOCUMENTS, tmp_path / "t", batch_size=1, progress=stop_after_two)
    assert hotset.Trace.open(tmp_path / "t").metadata["sequence_source"] == ["d0", "d1"]


def test_an_interrupt_while_decoding_keeps_the_tokens_so_far(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotset.traces import recorder

    calls = []
    see = recorder._Steps.see

    def interrupt_third(self: Any, ids: Any, scores: Any, **rest: Any) -> Any:
        calls.append(ids.shape[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return see(self, ids, scores, **rest)

    monkeypatch.setattr(recorder._Steps, "see", interrupt_third)
    with pytest.raises(KeyboardInterrupt):
        record(folder, DOCUMENTS[:1], tmp_path / "t", generate=Generation(10))
    trace = hotset.Trace.open(tmp_path / "t")
    assert trace.phase.tolist() == [0] * 5 + [1] * 2  # prompt, and the two tokens that had gone through the model


def test_a_dense_model_is_refused_by_class_name(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    add_tokenizer(tmp_path / "dense")
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no layer"):
        record(tmp_path / "dense", DOCUMENTS, tmp_path / "t")


def test_documents_come_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    lines = ['{"prompt": "p"}', '"plain"', "", '{"messages": [{"role": "user", "content": "c"}], "source": "s"}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    found = list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"]))
    assert [(d.source, d.text) for d in found] == [("a", "hello"), ("b", "p"), ("b", "plain"), ("s", None)]
    assert found[3].messages == ({"role": "user", "content": "c"},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("3", "wanted an object"),
        ('{"text": "a", "prompt": "b"}', "wanted exactly one"),
        ('{"other": 1}', "wanted exactly one"),
        ('{"text": ""}', "non-empty string"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
    ],
)
def test_bad_json_lines_are_refused_with_their_line_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(TraceError, match=rf"a.jsonl:2: .*{message}"):
        list(read_documents([path]))


def test_unreadable_and_empty_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_documents([tmp_path / "absent.txt"]))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TraceError, match="the file is empty"):
        list(read_documents([tmp_path / "empty.txt"]))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        list(read_documents([tmp_path / "binary.txt"]))
