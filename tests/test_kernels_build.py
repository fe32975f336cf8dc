"""Compiling the kernels: one build for many processes, killed builds, and what happens where there is no compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotset.errors import BackendError
from hotset.kernels import CompiledLayer, LayerSpec, build, expert_layer, native
from hotset.kernels import backend as choose
from hotset.kernels.torch_layer import TorchLayer

try:
    BUILT = native.library().path
except BackendError as problem:  # pragma: no cover
    pytest.skip(f"no compiled kernels here: {problem}", allow_module_level=True)

LOAD = "from hotset.kernels import build; library = build.load(); print(library.build_seconds > 0)"


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    """The choice of an implementation is made once per process: not in these tests."""
    choose.cache_clear()
    native.library.cache_clear()
    yield
    choose.cache_clear()
    native.library.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`compiler(...)` puts a stand-in for the compiler in place, which writes a line to the file that is returned for
    every build, waits, and copies the library that the real compiler made (or does `instead`)."""

    def make(seconds: float = 0.0, instead: str = "") -> Path:
        log = tmp_path / "builds"
        script = tmp_path / "fake-c++"
        act = instead or f'cp "{BUILT}" "$out"'
        script.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
            "for out; do :; done\n"
            f'echo build >> "{log}"\n'
            'echo half > "$out"\n'
            f"sleep {seconds}\n"
            f"{act}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("HOTSET_CXX", str(script))
        monkeypatch.setenv("HOTSET_CACHE", str(tmp_path / "cache"))
        return log

    return make


def builds(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_library_is_built_once_and_then_found(compiler: Callable[..., Path]) -> None:
    log = compiler()
    first, second = build.load(), build.load()
    assert builds(log) == 1
    assert first.path == second.path
    assert (first.build_seconds > 0, second.build_seconds) == (True, 0.0)
    assert first.path.with_suffix(".json").exists()


def test_two_processes_at_once_share_one_build(compiler: Callable[..., Path]) -> None:
    log = compiler(seconds=1.0)
    running = [subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(said) == ["False", "True"]
    assert builds(log) == 1


def test_a_killed_build_leaves_nothing_in_the_way(compiler: Callable[..., Path]) -> None:
    log = compiler(seconds=60.0)
    process = subprocess.Popen([sys.executable, "-c", LOAD], start_new_session=True)
    for _ in range(600):
        if builds(log):
            break
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folder = build.cache_directory()
    assert list(folder.glob(".*.tmp")) != []
    assert list(folder.glob("*.so")) == []
    script = Path(os.environ["HOTSET_CXX"])
    script.write_text(script.read_text().replace("sleep 60.0", "sleep 0"))
    library = build.load()
    assert library.build_seconds > 0
    # the stand-in changed, so the library has another name: what the killed build left is not its to remove
    assert library.handle.hotset_abi() == build.ABI


def test_what_a_killed_build_of_the_same_library_left_is_removed(compiler: Callable[..., Path]) -> None:
    compiler()
    target = build.cache_directory() / f"{build.digest(build.Compiler.find(), build.flags())}.so"
    target.parent.mkdir(parents=True)
    stale = target.with_name(f".{target.name}.12345.tmp")
    stale.write_bytes(b"half")
    assert build.load().path == target
    assert not stale.exists()


def test_a_cached_file_that_is_no_library_is_built_again(compiler: Callable[..., Path]) -> None:
    log = compiler()
    target = build.cache_directory() / f"{build.digest(build.Compiler.find(), build.flags())}.so"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"not a library")
    assert build.load().build_seconds > 0
    assert builds(log) == 1


def test_flags_compiler_and_cpu_name_the_library(
    compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    found = build.Compiler.find()
    one = build.digest(found, build.flags())
    monkeypatch.setenv("HOTSET_KERNEL_FLAGS", "-fsanitize=address -O1")
    assert build.flags()[-2:] == ("-fsanitize=address", "-O1")
    assert build.digest(found, build.flags()) != one
    monkeypatch.delenv("HOTSET_KERNEL_FLAGS")
    assert build.digest(build.Compiler("c++", "another"), build.flags()) != one
    monkeypatch.setattr(build, "cpu", lambda: "another")
    assert build.digest(found, build.flags()) != one


def test_a_failed_build_shows_the_compilers_complaint(compiler: Callable[..., Path]) -> None:
    compiler(instead='echo "moe.cpp:1: error: unknown -march" >&2; exit 3')
    with pytest.raises(BackendError, match=r"failed on the kernels with 3: moe\.cpp:1: error: unknown -march"):
        build.load()
    assert list(build.cache_directory().glob("*.so")) == []


def test_a_library_that_does_not_load_is_not_published(compiler: Callable[..., Path]) -> None:
    compiler(instead="true")
    with pytest.raises(BackendError, match="does not load"):
        build.load()
    assert list(build.cache_directory().glob("*.so")) == []


def test_a_cache_that_cannot_be_written_is_an_error_with_a_way_out(
    compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTSET_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackendError, match="set HOTSET_CACHE"):
        build.load()


def test_the_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/hotset/kernels")
    monkeypatch.setenv("HOTSET_CACHE", "/elsewhere")
    assert build.cache_directory() == Path("/elsewhere/kernels")


class TestChoice:
    @pytest.fixture(autouse=True)
    def _no_choice_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOTSET_KERNELS", raising=False)

    def test_compiled_kernels_are_the_default(self) -> None:
        assert choose().name == "compiled"
        assert native.instructions() in choose().reason
        assert isinstance(expert_layer(LayerSpec("bf16", 1, 8, 8)), CompiledLayer)

    def test_torch_stands_in_and_says_why_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        monkeypatch.setenv("HOTSET_CXX", "no-such-compiler")
        with pytest.warns(RuntimeWarning, match="slower: HOTSET_CXX names 'no-such-compiler'") as said:
            made = expert_layer(LayerSpec("bf16", 1, 8, 8))
        assert len(said) == 1
        assert isinstance(made, TorchLayer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose().name == "torch"

    def test_a_forced_one_that_is_missing_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTSET_KERNELS", "compiled")
        monkeypatch.setenv("HOTSET_CXX", "no-such-compiler")
        with pytest.raises(BackendError, match="no-such-compiler"):
            choose()
        monkeypatch.setenv("HOTSET_KERNELS", "torch")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(BackendError, match="torch is not installed"):
            choose()

    def test_torch_can_be_forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        monkeypatch.setenv("HOTSET_KERNELS", "torch")
        assert choose().name == "torch"

    def test_neither_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTSET_CXX", "no-such-compiler")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(BackendError, match=r"no-such-compiler.*torch, which could stand in, is not installed"):
            choose()

    def test_an_unknown_name_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTSET_KERNELS", "cuda")
        with pytest.raises(BackendError, match="'cuda': wanted compiled or torch"):
            choose()


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    code = """
import os, sys, numpy as np
from hotset.kernels import CompiledLayer, LayerSpec, quantise
spec = LayerSpec("fp32", 2, 64, 64)
layer = CompiledLayer(spec)
for e in range(2):
    layer.put(e, quantise(spec, np.full((128, 64), 0.01), np.full((64, 64), 0.01)))
call = (np.ones((4, 64), np.float32), np.array([[0, 1]] * 4), np.ones((4, 2), np.float32))
wanted = layer.moe(*call, threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(layer.moe(*call, threads=2), wanted) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_importing_the_kernels_compiles_nothing_and_loads_no_torch() -> None:
    code = """
import sys
import hotset.kernels
from hotset.kernels import native
sys.exit("torch" in sys.modules or native.library.cache_info().currsize)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
