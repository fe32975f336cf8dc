"""Experts move while the model generates: the text never changes, whatever moves, fails, or runs beside it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset.errors import CheckpointError, ModelError, PolicyError, ResidencyError  # noqa: E402
from hotset.runtime.adapting import Adaptation  # noqa: E402
from hotset.runtime.copy_policy import resolve_copy_policy  # noqa: E402
from hotset.runtime.expert_formats.choice import choose_formats  # noqa: E402
from hotset.runtime.loading import load_skeleton  # noqa: E402
from hotset.runtime.runtime import Runtime  # noqa: E402
from hotset.runtime.store import Copier, ExpertStore  # noqa: E402
from tests.threads import guarded  # noqa: E402
from tests.tiny_models import make_checkpoint  # noqa: E402

SHAPE = (3, 8)
MASK = np.zeros(SHAPE, bool)
MASK[:, :4] = True
PROMPT = torch.arange(3, 13)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


def generate(model: Any, prompt: Any = PROMPT, tokens: int = 40) -> list[int]:
    out = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0].tolist()


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[int, list[int]]:
    """What a model without plan or moves says, by first token of the prompt."""
    model = hotset.load(folder)
    return {start: generate(model, PROMPT + start) for start in (0, 50)}


class Flaky:
    """Wraps a reader or a copier; raises every n-th time while on."""

    def __init__(self, call: Any, kind: type[Exception]) -> None:
        self.call, self.kind, self.every, self.calls, self.raised = call, kind, 0, 0, 0

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        if self.every and self.calls % self.every == 0:
            self.raised += 1
            raise self.kind("injected")
        self.call(*arguments)


def load_with_failures(folder: Path, restore: Any) -> tuple[Any, Flaky, Flaky]:
    """What `hotset.load` builds, with a reader and a copier that can fail."""
    skeleton = load_skeleton(folder, dtype="auto", device=torch.device("cpu"))
    read, move = Flaky(skeleton.reader.read_into, CheckpointError), Flaky(Copier(torch.device("cpu")), OSError)
    copies = resolve_copy_policy("auto", dynamic=True, restore=restore)
    store = ExpertStore(skeleton.layers, MASK, torch.device("cpu"), read, copies=copies, restore=restore, copy=move)
    runtime = Runtime(
        skeleton.model,
        store,
        skeleton.non_expert_bytes,
        choose_formats(skeleton.layers, [None] * len(skeleton.layers)),
        Adaptation(restore=restore, automatic=False),
    )
    store.load()
    skeleton.model.set_experts_implementation("hotset")
    runtime.attach()
    return skeleton.model, read, move


@pytest.mark.parametrize("restore", ["slot", "checkpoint"])
def test_a_thousand_random_moves_under_generate_leave_text_and_memory(
    folder: Path, texts: dict[int, list[int]], restore: str
) -> None:
    model, read, move = load_with_failures(folder, restore)
    store, rng, outcomes = model.hotset.store, np.random.default_rng(1234), {"made": 0, "refused": 0, "failed": 0}
    all_bytes = store.host_bytes + store.arena_bytes

    def move_at_random(*_: Any) -> None:
        before = store.residency.slot_table()
        for _ in range(30):
            row, expert, victim = int(rng.integers(3)), int(rng.integers(8)), int(rng.integers(-1, 8))
            try:
                if rng.random() < 0.3:
                    store.demote(row, expert)
                else:
                    store.promote(row, expert, victim)
                outcomes["made"] += 1
                before = store.residency.slot_table()
            except ResidencyError:  # a full arena, an expert that is there already, a victim that is not
                outcomes["refused"] += 1
            except (CheckpointError, OSError):
                outcomes["failed"] += 1
            assert (store.residency.mask() == (before != -1)).all()
        store.check_integrity()

    model.register_forward_hook(move_at_random)
    read.every, move.every = (9, 0) if restore == "checkpoint" else (0, 9)
    rounds = 0
    while outcomes["made"] < 1000:
        assert generate(model) == texts[0]
        rounds += 1
        assert rounds < 20
    assert outcomes["refused"] > 100
    assert outcomes["failed"] > 50
    read.every = move.every = 0
    for row, expert in np.argwhere(store.residency.mask()):
        store.demote(int(row), int(expert))
    for row, expert in np.argwhere(MASK):
        store.promote(int(row), int(expert))
    assert store.host_bytes + store.arena_bytes == all_bytes
    assert generate(model) == texts[0]


def test_automatic_moves_change_the_hit_rate_and_not_the_text(folder: Path, texts: dict[int, list[int]]) -> None:
    model = hotset.load(folder, plan=MASK, adapt=Adaptation(decay=0.9, hysteresis=0.0))
    for _ in range(2):
        assert generate(model) == texts[0]
    report = model.hotset_report()
    assert report["moves"]["promotions"] == report["moves"]["demotions"] > 10
    assert report["moves"]["failed"] == 0
    assert report["experts"] == {"total": 24, "gpu": 12, "host": 12}
    size = model.hotset.store.layers[0].bytes_per_expert
    assert report["moves"]["bytes"] == 2 * size * report["moves"]["promotions"]
    assert report["skip_gpu_expert_cpu_copy"]["reason"] == "dynamic: a demoted expert is copied back from its slot"
    model.hotset.store.check_integrity()


def test_bytes_per_token_bound_every_forward_pass(folder: Path, texts: dict[int, list[int]]) -> None:
    size = 2 * hotset.load(folder).hotset.store.layers[0].bytes_per_expert
    settings = Adaptation(decay=0.9, hysteresis=0.0, max_moves=2, max_bytes_per_token=size)
    model = hotset.load(folder, plan=MASK, adapt=settings)
    moved = [0]
    model.register_forward_hook(lambda *_: moved.append(model.hotset_report()["moves"]["bytes"]))
    assert generate(model) == texts[0]
    per_token = np.diff(moved)[1:]  # without the prompt's
    assert per_token.max() == size
    assert model.hotset_report()["moves"]["deferred"] > 0
    with pytest.raises(PolicyError, match="nothing could ever move"):
        hotset.load(folder, plan=MASK, adapt=Adaptation(max_bytes_per_token=size - 1))


def test_rebalance_needs_adapt_and_then_follows_the_workload(folder: Path, texts: dict[int, list[int]]) -> None:
    static = hotset.load(folder, plan=MASK)
    with pytest.raises(PolicyError, match="load with adapt=True"):
        static.hotset.rebalance()
    model = hotset.load(folder, plan=MASK, adapt=Adaptation(automatic=False, hysteresis=0.0))
    generate(model)
    assert model.hotset_report()["moves"]["promotions"] == 0
    before = model.hotset_report()["decode"]["hit_rate"]
    assert model.hotset.rebalance(max_moves=2) == 2
    assert model.hotset.rebalance() > 0
    assert model.hotset.rebalance() == 0
    model.hotset.reset_statistics()
    assert generate(model) == texts[0]
    assert model.hotset_report()["decode"]["hit_rate"] > before


def test_two_threads_generate_while_a_third_rebalances(folder: Path, texts: dict[int, list[int]]) -> None:
    model = hotset.load(folder, plan=MASK, adapt=Adaptation(decay=0.9, hysteresis=0.0))
    answers: dict[int, list[list[int]]] = {0: [], 50: []}
    problems: list[BaseException] = []
    done = threading.Event()

    def talk(start: int) -> None:
        for _ in range(4):
            answers[start].append(generate(model, PROMPT + start))

    def shuffle() -> None:
        rng = np.random.default_rng(7)
        while not done.wait(0.001):
            model.hotset.adapter.tracker.set_hotness(rng.random(SHAPE))
            model.hotset.rebalance()

    talkers = [guarded(lambda start=start: talk(start), problems) for start in answers]
    mover = guarded(shuffle, problems)
    for thread in [*talkers, mover]:
        thread.start()
    for thread in talkers:
        thread.join()
    done.set()
    mover.join()
    assert problems == []
    assert answers == {start: [texts[start]] * 4 for start in answers}
    assert model.hotset_report()["moves"]["promotions"] > 100
    # 10 prompt tokens, then 39 steps; 8 answers
    assert model.hotset_report()["prefill"]["tokens"] == 80
    assert model.hotset_report()["decode"]["tokens"] == 8 * 39
    assert not model.hotset.store.residency.arrays.users.any()
    model.hotset.store.check_integrity()


@pytest.mark.parametrize("tokens", [1, 7])
def test_skip_on_and_off_give_the_same_bits_and_differ_by_the_residents_bytes(folder: Path, tokens: int) -> None:
    torch.manual_seed(1234)
    ids = torch.randint(3, 128, (1, tokens))
    on = hotset.load(folder, plan=MASK, skip_gpu_expert_cpu_copy="on")
    off = hotset.load(folder, plan=MASK, skip_gpu_expert_cpu_copy="off")
    with torch.no_grad():
        assert torch.equal(on(ids).logits, off(ids).logits)
    stores = on.hotset.store, off.hotset.store
    assert stores[1].host_bytes - stores[0].host_bytes == MASK.sum() * stores[0].layers[0].bytes_per_expert
    assert stores[0].arena_bytes == stores[1].arena_bytes
    on.hotset.store.check_integrity()
    off.hotset.store.check_integrity()


def test_on_without_a_restore_source_keeps_copies_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, texts: dict[int, list[int]]
) -> None:
    settings = Adaptation(decay=0.9, hysteresis=0.0, restore="none")
    model = hotset.load(folder, plan=MASK, adapt=settings, skip_gpu_expert_cpu_copy="on")
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "host copies are kept" in warning.message
    assert model.hotset_report()["skip_gpu_expert_cpu_copy"]["skip"] is False
    assert generate(model) == texts[0]
    assert model.hotset_report()["moves"]["promotions"] > 10
    model.hotset.store.check_integrity()


def test_training_is_refused_where_copies_are_skipped(folder: Path) -> None:
    model = hotset.load(folder, plan=MASK)
    shallow, deep = copy.copy(model), copy.deepcopy(model.model.layers[1])
    for part in (model, model.model, model.model.layers[2], shallow, deep):
        with pytest.raises(ModelError, match="training is refused"):
            part.train()
        assert part.eval() is part
    assert not any(module.training for module in model.modules())
    with pytest.raises(ModelError, match="exclude each other"):
        hotset.load(folder, plan=MASK, training=True, skip_gpu_expert_cpu_copy="on")
    trained = hotset.load(folder, plan=MASK, training=True)
    assert trained.hotset_report()["skip_gpu_expert_cpu_copy"]["skip"] is False
    trained.train()
