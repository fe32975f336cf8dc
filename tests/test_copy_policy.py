"""skip_gpu_expert_cpu_copy: each cell of the table, and that the refusal of training outlives copying."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

pytest.importorskip("torch")

from hotset.errors import ModelError
from hotset.runtime.copy_policy import CopyPolicy, resolve_copy_policy

STATIC = {"dynamic": False, "restore": None}
FROM_SLOT = {"dynamic": True, "restore": "slot"}
FROM_CHECKPOINT = {"dynamic": True, "restore": "checkpoint"}
NO_SOURCE = {"dynamic": True, "restore": None}
TRAINING = {"dynamic": False, "restore": None, "training": True}


@pytest.mark.parametrize(
    ("requested", "situation", "skip", "reason"),
    [
        ("auto", STATIC, True, "static plan"),
        ("on", STATIC, True, "static plan"),
        ("off", STATIC, False, "asked for"),
        ("auto", FROM_SLOT, True, "copied back from its slot"),
        ("on", FROM_SLOT, True, "copied back from its slot"),
        ("off", FROM_SLOT, False, "asked for"),
        ("auto", FROM_CHECKPOINT, True, "read again from the checkpoint"),
        ("on", FROM_CHECKPOINT, True, "read again from the checkpoint"),
        ("off", FROM_CHECKPOINT, False, "asked for"),
        ("auto", NO_SOURCE, False, "without a restore source"),
        ("on", NO_SOURCE, False, "without a restore source"),
        ("off", NO_SOURCE, False, "asked for"),
        ("auto", TRAINING, False, "training"),
        ("off", TRAINING, False, "asked for"),
    ],
)
def test_each_cell_of_the_table(requested: str, situation: dict, skip: bool, reason: str) -> None:
    policy = resolve_copy_policy(requested, **situation)
    assert policy.skip is skip
    assert reason in policy.reason
    assert policy.requested == requested


def test_only_a_request_that_cannot_be_met_warns() -> None:
    assert "host copies are kept" in str(resolve_copy_policy("on", **NO_SOURCE).warning)
    assert resolve_copy_policy("auto", **NO_SOURCE).warning is None
    assert resolve_copy_policy("on", **STATIC).warning is None


def test_training_with_a_skipped_copy_is_refused() -> None:
    with pytest.raises(ModelError, match="exclude each other"):
        resolve_copy_policy("on", **TRAINING)
    with pytest.raises(ModelError, match="wanted 'auto', 'on' or 'off'"):
        resolve_copy_policy("yes", **STATIC)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda policy: pickle.loads(pickle.dumps(policy)),
        lambda policy: dataclasses.replace(policy, reason="another"),
        lambda policy: CopyPolicy(**dataclasses.asdict(policy)),
    ],
)
def test_a_copied_policy_keeps_the_refusal(copied) -> None:
    with pytest.raises(ModelError, match="training is refused"):
        copied(resolve_copy_policy("auto", **STATIC)).check_training()
    copied(resolve_copy_policy("off", **STATIC)).check_training()
