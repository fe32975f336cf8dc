"""`hotset run` with moves, a host memory limit, recording and Prometheus: flags reach the runtime, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import Trace
from hotset.runtime import runtime as runtime_module
from tests.test_cli_model import Cli, cli  # noqa: F401  (a fixture)
from tests.tiny_models import add_tokenizer, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model")))


def test_run_adapts_records_and_writes_counters(cli: Cli, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["run", folder, "--prompt", "w5 w6", "--max-new-tokens", 5, "--json"]
    code, out, err = cli(
        *arguments, "--adapt", "--record", tmp_path / "trace", "--prometheus", tmp_path / "counters.prom"
    )
    assert code == 0, err
    adapted = json.loads(out)
    assert adapted["report"]["moves"]["failed"] == 0
    assert Trace.open(tmp_path / "trace").num_tokens == 2 + 4
    assert 'hotset_tokens_total{phase="decode"} 4' in (tmp_path / "counters.prom").read_text().splitlines()
    code, out, err = cli(*arguments, "--skip-gpu-expert-cpu-copy", "off")
    assert json.loads(out)["answers"] == adapted["answers"]
    assert json.loads(out)["report"]["skip_gpu_expert_cpu_copy"]["skip"] is False


def test_run_within_host_memory_shows_the_disk_tier(
    cli: Cli,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "resident_bytes", lambda: 0)
    monkeypatch.setattr(runtime_module, "RESERVE_BYTES", 0)
    arguments = ["run", folder, "--prompt", "w5 w6", "--max-new-tokens", 5]
    code, out, err = cli(*arguments, "--host-memory", "150KB", "--host-cache-policy", "lfu")
    assert code == 0, err
    assert "on disk" in err
    assert "host cache (lfu" in err
    assert out == cli(*arguments)[1]


def test_run_streams_long_prompts_and_says_why_auto_does_not(cli: Cli, folder: Path) -> None:  # noqa: F811
    arguments = ["run", folder, "--prompt", "w5 w6 w7", "--max-new-tokens", 3, "--json"]
    code, out, err = cli(*arguments, "--gpu-prefill-token-threshold", 3)
    assert code == 0, err
    streamed = json.loads(out)
    assert streamed["report"]["gpu_prefill"]["chunks"] == 1
    for extra, reason in [
        (["--machine", "rtx-4090"], "host memory"),
        (["--gpu-prefill-token-threshold", "off"], "switched off"),
    ]:
        code, out, err = cli(*arguments, *extra)
        assert code == 0, err
        assert json.loads(out)["answers"] == streamed["answers"]
        assert reason in json.loads(out)["report"]["gpu_prefill"]["reason"]


def test_run_refuses_what_cannot_be(cli: Cli, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["run", folder, "--prompt", "w5 w6"]
    for extra, code, message in [
        (["--host-memory", "1MiB"], 1, "or more"),
        (["--host-memory", "lots"], 1, "is not a number of bytes"),
        (["--machine", "rtx-9999"], 1, "'rtx-9999' is unknown"),
        (["--gpu-prefill-token-threshold", "0"], 2, "wanted 1 or more, auto, off"),
        (["--gpu-prefill-token-threshold", "some"], 2, "wanted 1 or more, auto, off"),
        (["--skip-gpu-expert-cpu-copy", "yes"], 1, "wanted 'auto', 'on' or 'off'"),
        (["--adapt", "--max-bytes-per-token", "1"], 1, "nothing could ever move"),
        (["--max-bytes-per-token", "1GiB"], 2, "needs --adapt"),
    ]:
        got, out, err = cli(*arguments, *extra)
        assert (got, out) == (code, "")
        assert message in err
