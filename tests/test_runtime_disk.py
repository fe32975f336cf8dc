"""A model larger than its host memory: the same bits, at every budget and in every phase, never above the budget."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import BudgetError, CheckpointError, PolicyError, UnsupportedModelError  # noqa: E402
from hotset.kernels import backend  # noqa: E402
from hotset.runtime import loading as loading_module  # noqa: E402
from hotset.runtime import runtime as runtime_module  # noqa: E402
from hotset.runtime.adapting import Adaptation  # noqa: E402
from hotset.runtime.expert_formats.contract import parameter_shapes  # noqa: E402
from hotset.runtime.memory import buffer_bytes, cgroup_limit_bytes  # noqa: E402
from tests.tiny_models import FAMILIES, make_checkpoint  # noqa: E402


@pytest.fixture
def only_experts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of experts alone: what else the process takes counts as nothing."""
    monkeypatch.setattr(runtime_module, "resident_bytes", lambda: 0)
    monkeypatch.setattr(runtime_module, "RESERVE_BYTES", 0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def generate(model: Any, tokens: int = 12) -> list[int]:
    prompt = torch.arange(3, 13)[None]
    out = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0].tolist()


def buffers(folder: Path, count: int) -> int:
    """Bytes of `count` host buffers."""
    return count * buffer_bytes(parameter_shapes(hotset.load(folder).hotset.layers[0]))


@pytest.mark.usefixtures("only_experts_count")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_disk_are_those_from_memory(checkpoints: dict[str, Path], family: str) -> None:
    folder = checkpoints[family]
    torch.manual_seed(1234)
    ids = torch.randint(1, 128, (2, 7))
    whole, bounded = hotset.load(folder), hotset.load(folder, host_memory_bytes=buffers(folder, 9))
    with torch.no_grad():
        for call in (ids, ids[:1, :1]):
            assert torch.equal(bounded(call).logits, whole(call).logits)
    report = bounded.hotset_report()
    assert report["disk"]["buffers"] == 9
    assert report["disk"]["loads"] > 9  # something was evicted and read again
    total = report["experts"]["total"]
    assert report["experts"] == {"total": total, "gpu": 0, "host": 9, "disk": total - 9}
    bounded.hotset.store.check_integrity()


@pytest.mark.usefixtures("only_experts_count")
@pytest.mark.parametrize("kernels", ["torch", "compiled"] if backend().name == "compiled" else ["torch"])
def test_a_prompt_reads_each_expert_once_however_few_fit(tmp_path: Path, kernels: Any) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", num_experts=24, dtype="bfloat16")
    whole = hotset.load(folder, kernels=kernels)
    size = buffer_bytes(whole.hotset.store.formats[0].host_shapes)
    bounded = hotset.load(folder, kernels=kernels, host_memory_bytes=8 * size)
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        assert torch.equal(bounded(ids).logits, whole(ids).logits)
    disk = bounded.hotset_report()["disk"]
    assert disk["buffers"] == 8
    assert disk["hits"] + disk["misses"] > 3 * 8
    assert disk["loads"] == disk["misses"]


@pytest.mark.usefixtures("only_experts_count")
def test_moves_and_disk_together_leave_the_text(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["mixtral"]
    mask = np.zeros((3, 8), bool)
    mask[:, ::2] = True
    adapt = Adaptation(decay=0.9, hysteresis=0.0)
    model = hotset.load(folder, plan=mask, adapt=adapt, host_memory_bytes=buffers(folder, 12 + 8))
    assert model.hotset.store.cache.num_buffers == 8  # the arena is in host memory too: 12 experts
    expected = generate(hotset.load(folder), 40)
    assert generate(model, 40) == expected
    assert model.hotset_report()["moves"]["promotions"] > 5
    model.hotset.store.check_integrity()


@pytest.mark.usefixtures("only_experts_count")
def test_a_budget_that_holds_everything_makes_no_cache(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["mixtral"]
    assert hotset.load(folder, host_memory_bytes=buffers(folder, 24)).hotset_report()["disk"] is None
    assert hotset.load(folder, host_memory_bytes=buffers(folder, 23)).hotset_report()["disk"] is not None


def test_budgets_too_small_are_refused_with_the_account(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(BudgetError, match=r"the process and the model without experts take .* give .* or more"):
        hotset.load(checkpoints["mixtral"], host_memory_bytes="64MiB")
    with pytest.raises(BudgetError, match="is not a number of bytes"):
        hotset.load(checkpoints["mixtral"], host_memory_bytes="much")


@pytest.mark.usefixtures("only_experts_count")
def test_what_a_bounded_host_cannot_do_is_refused(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["mixtral"]
    mask = np.ones((3, 8), bool)
    with pytest.raises(BudgetError, match="host copies of all experts"):
        hotset.load(folder, plan=mask, skip_gpu_expert_cpu_copy="off", host_memory_bytes=buffers(folder, 30))
    with pytest.raises(PolicyError, match="host cache policy 'belady'"):
        hotset.load(folder, host_memory_bytes=buffers(folder, 10), host_cache_policy="belady")


@pytest.mark.usefixtures("only_experts_count")
def test_a_shard_that_is_cut_short_while_serving_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    model = hotset.load(folder, host_memory_bytes=buffers(folder, 8))
    shard = folder / "model.safetensors"
    data = shard.read_bytes()
    with shard.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cut short while it was read"):
        generate(model)
    with shard.open("r+b") as stream:
        stream.write(data)
    assert generate(model) == generate(hotset.load(folder))
    model.hotset.store.check_integrity()


@pytest.fixture
def past_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No memory for the page cache, and bounce buffers of two blocks, so that each matrix takes many reads."""
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except (AttributeError, OSError):
        pytest.skip("no O_DIRECT here")
    monkeypatch.setattr(runtime_module, "available_bytes", lambda: 0)
    monkeypatch.setattr(loading_module, "BOUNCE_BYTES", 2 * loading_module.DIRECT_ALIGNMENT)


@pytest.mark.usefixtures("only_experts_count", "past_the_page_cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_past_the_page_cache_bring_the_same_bits(checkpoints: dict[str, Path], family: str) -> None:
    folder = checkpoints[family]
    model = hotset.load(folder, host_memory_bytes=buffers(folder, 9))
    assert model.hotset_report()["disk"]["reads"].startswith("past the page cache (O_DIRECT): it could hold 0 B of ")
    assert generate(model) == generate(hotset.load(folder))
    model.hotset.store.check_integrity()


@pytest.mark.usefixtures("only_experts_count", "past_the_page_cache")
def test_a_shard_cut_short_is_named_past_the_page_cache_too(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    model = hotset.load(folder, host_memory_bytes=buffers(folder, 8))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cut short while it was read"):
        generate(model)


@pytest.mark.usefixtures("only_experts_count")
@pytest.mark.parametrize(
    ("room", "problem", "says"),
    [
        (2**40, None, "through the page cache: it could hold 1 TiB of "),
        (None, None, "through the page cache: how much memory it may take is unknown"),
        (0, OSError(22, "Invalid argument"), r"through the page cache: .* has no O_DIRECT \(Invalid argument\)"),
    ],
)
def test_reads_go_through_the_page_cache_where_it_has_room_or_nothing_else_works(
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    room: int | None,
    problem: OSError | None,
    says: str,
) -> None:
    folder = checkpoints["mixtral"]
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if problem is not None and flags & getattr(os, "O_DIRECT", 0):
            raise problem
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    budget = buffers(folder, 9)
    monkeypatch.setattr(runtime_module, "available_bytes", lambda: None if room is None else room + budget)
    model = hotset.load(folder, host_memory_bytes=budget)
    assert re.match(says, model.hotset_report()["disk"]["reads"])
    assert generate(model) == generate(hotset.load(folder))


def test_the_limit_of_a_cgroup_is_the_least_on_its_way_up(tmp_path: Path) -> None:
    def limits(membership: str, **files: str) -> int | None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "cgroup").write_text(membership)
        return cgroup_limit_bytes(tmp_path / "cgroup", tmp_path / "tree")

    assert limits("0::/a/b\n") is None
    assert limits("0::/a/b\n", tree__a__b__memory_dot_max="max\n") is None
    assert limits("0::/a/b\n", tree__a__memory_dot_max="700\n") == 700
    assert limits("0::/a/b\n", tree__a__b__memory_dot_max="900\n") == 700
    assert limits("5:cpu:/a\n4:memory:/x\n", tree__memory__x__memory_dot_limit_in_bytes="300\n") == 300
    assert cgroup_limit_bytes(tmp_path / "absent", tmp_path / "tree") is None


# 8 layers of 40 experts of 576 KiB in bfloat16: 184 MiB of experts
LARGE = {
    "hidden_size": 256,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_experts": 40,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [],
}

CHILD = """
import json, resource, sys
from pathlib import Path
import torch, hotset
import hotset.runtime.runtime as runtime
import transformers.models.qwen3_moe.modeling_qwen3_moe, hotset.policies.demand
from hotset.runtime.memory import peak_bytes, resident_bytes
torch.set_num_threads(1)
folder, extra = sys.argv[1], int(sys.argv[2])
budget = resident_bytes() + extra if extra else None
if extra:  # the kernel refuses what goes beyond: the limit counts private memory, used or not
    data = next(int(l.split()[1]) * 1024 for l in Path("/proc/self/status").read_text().splitlines() if "VmData" in l)
    stacks = 6 * 8 * 2**20  # of threads that reading starts: reserved, hardly used
    resource.setrlimit(resource.RLIMIT_DATA, (data + extra + stacks,) * 2)
before = peak_bytes()
model = hotset.load(folder, device="cpu", host_memory_bytes=budget)
ids = torch.arange(1, 65)[None]
out = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
print(json.dumps({"out": out[0].tolist(), "peak": peak_bytes(), "before": before, "budget": budget,
                  "report": model.hotset_report()}))
"""


def child(folder: Path, extra: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(extra)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_model_larger_than_memory_runs_within_its_budget(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16", **LARGE)
    experts = 8 * 40 * 3 * 256 * 384 * 2
    extra = runtime_module.RESERVE_BYTES + 40 * 2**20
    assert extra < experts
    bounded, whole = child(folder, extra), child(folder, 0)
    assert bounded["out"] == whole["out"]
    assert bounded["peak"] <= bounded["budget"]
    assert whole["peak"] - whole["before"] > experts  # without the budget it does take that much
    assert bounded["report"]["disk"]["loads"] > bounded["report"]["disk"]["buffers"]


@pytest.mark.usefixtures("only_experts_count")
def test_a_checkpoint_that_must_be_converted_by_layers_cannot_stay_on_disk(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints["mixtral"]
    budgets = buffers(folder, 9), buffers(folder, 24)
    monkeypatch.setattr(loading_module._Recipe, "per_expert", property(lambda _: False))
    monkeypatch.setattr(loading_module._Recipe, "plain", lambda _: None)
    with pytest.raises(UnsupportedModelError, match="a whole layer must be converted to read one"):
        hotset.load(folder, host_memory_bytes=budgets[0])
    assert hotset.load(folder, host_memory_bytes=budgets[1]).hotset_report()["disk"] is None
