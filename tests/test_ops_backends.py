"""Choosing a backend, and what only one of them can be asked: no synchronisation, no fused arithmetic."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.errors import BackendError, OpsError
from hotset.ops import (
    BACKENDS,
    ShedLedger,
    ShedPolicy,
    ShedRouting,
    available_backends,
    choose_backend,
    dispatch,
    route_shed,
    split_by_residency,
)
from hotset.ops.metal_source import METAL_BODY
from tests.test_ops_route_shed import Case, bits, make_case, same_bits

GPU_CHECK = Path(__file__).parents[1] / "tools" / "gpu_check.py"


@pytest.fixture
def _forget_choices() -> Iterator[None]:
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


def small_case() -> Case:
    return make_case(np.random.default_rng(0), 4, 4, 8, 0.5, np.int32)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_arrays_in_host_memory_go_to_the_compiled_kernel_and_the_choice_says_so() -> None:
    assert str(choose_backend("numpy")) == "numba: compiled, numpy arrays in host memory"
    assert str(choose_backend("torch", "cpu")) == "numba: compiled, torch arrays in host memory"


@pytest.mark.usefixtures("_forget_choices")
def test_without_numba_numpy_is_taken_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = dispatch.Backend("numba", "x", "numpy", True, lambda: "numba is not installed")
    monkeypatch.setitem(BACKENDS, "numba", lacking)
    assert str(choose_backend("numpy")) == "numpy: numpy arrays in host memory, and numba is not installed"
    with pytest.raises(BackendError, match="backend 'numba' was asked for, but numba is not installed"):
        route_shed(*small_case(), backend="numba")


@pytest.mark.usefixtures("_forget_choices")
def test_tensors_on_a_gpu_go_to_triton_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def triton(missing: str | None) -> dispatch.Backend:
        return dispatch.Backend("triton", "x", "torch", False, lambda: missing)

    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    monkeypatch.setitem(BACKENDS, "triton", triton(None))
    assert str(choose_backend("torch", "cuda:1")) == "triton: one launch per call, tensors on cuda:1"
    dispatch._choose.cache_clear()
    monkeypatch.setitem(BACKENDS, "triton", triton("triton is not installed"))
    assert str(choose_backend("torch", "cuda:1")) == "torch: tensors on cuda:1, and triton is not installed"
    assert choose_backend("torch", "mps:0").name == "torch"


@pytest.mark.usefixtures("_forget_choices")
def test_a_backend_that_cannot_take_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reference", "numpy", "numba"):
        with pytest.raises(BackendError, match=f"backend '{name}' works in host memory, but the tensors are on cuda:0"):
            choose_backend("torch", "cuda:0", name)
    monkeypatch.setitem(BACKENDS, "triton", dispatch.Backend("triton", "x", "torch", False, lambda: None))
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    with pytest.raises(BackendError, match="backend 'triton' needs tensors on a CUDA device"):
        choose_backend("numpy", "cpu", "triton")
    dispatch._choose.cache_clear()
    monkeypatch.setattr(dispatch, "_interpreting", lambda: True)
    with pytest.raises(BackendError, match=r"in its interpreter .* but the tensors are on cuda:0"):
        choose_backend("torch", "cuda:0", "triton")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match="backend 'cuda' is not known: wanted auto, reference, numpy, numba, torch"):
        route_shed(*small_case(), backend="cuda")


def test_every_backend_says_whether_it_can_run_here() -> None:
    assert list(available_backends()) == list(BACKENDS)
    assert available_backends()["reference"] is None


def test_every_backend_that_can_run_takes_numpy_and_gives_numpy() -> None:
    case = small_case()
    for name, missing in available_backends().items():
        if missing:
            continue
        routed = route_shed(*case, backend=name)
        assert all(type(a) is np.ndarray for a in routed), name
        same_bits(routed, route_shed(*case, backend="reference"))


def test_numpy_arrays_never_import_torch() -> None:
    code = """
import sys
import numpy as np
from hotset.ops import route_shed, ShedPolicy
case = np.zeros((2, 4), np.int32), np.ones((2, 4), np.float32), np.array([3, -1], np.int32)
route_shed(*case)
ShedPolicy(0.5).apply(*case)
sys.exit(str([m for m in ("torch", "mlx", "triton") if m in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


# -- refusals that depend on the kind of array -------------------------------------------------------------------------


def test_refuses_lists_and_mixed_kinds() -> None:
    indices, scores, table = small_case()
    with pytest.raises(OpsError, match="indices is a list: wanted a NumPy array or a torch tensor"):
        route_shed(indices.tolist(), scores, table)
    torch = pytest.importorskip("torch")
    with pytest.raises(OpsError, match="slot_table is a numpy array but indices a torch one"):
        route_shed(torch.from_numpy(indices), torch.from_numpy(scores), table)


def test_refuses_arrays_that_are_not_contiguous_or_of_foreign_byte_order() -> None:
    indices, scores, table = small_case()
    with pytest.raises(OpsError, match=r"scores has strides .*: wanted C-contiguous; pass np.ascontiguousarray"):
        route_shed(indices, np.asfortranarray(scores), table)
    with pytest.raises(OpsError, match="slot_table has strides"):
        route_shed(indices, scores, np.repeat(table, 2)[::2])
    with pytest.raises(OpsError, match="indices has dtype >i4"):
        route_shed(indices.astype(">i4"), scores, table)


def test_refuses_tensors_that_are_not_contiguous_need_a_gradient_or_are_elsewhere() -> None:
    torch = pytest.importorskip("torch")
    indices, scores, table = map(torch.from_numpy, small_case())
    with pytest.raises(OpsError, match=r"indices has strides .*: wanted contiguous; pass indices.contiguous\(\)"):
        route_shed(indices.t().contiguous().t(), scores, table)
    with pytest.raises(OpsError, match=r"scores requires a gradient: .* pass scores.detach\(\)"):
        route_shed(indices, scores.requires_grad_(), table)
    with pytest.raises(OpsError, match="slot_table is on meta but indices on cpu: move them to one device"):
        route_shed(indices, scores.detach(), table.to("meta"))
    with pytest.raises(OpsError, match="scores has dtype bfloat16: wanted float32"):
        route_shed(indices, scores.detach().to(torch.bfloat16), table)


# -- torch: nothing waits for the device -------------------------------------------------------------------------------


def test_torch_never_needs_a_value_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    # a fake tensor has no values: .item(), nonzero() and boolean indexing raise
    with fake.FakeTensorMode():
        case = (
            torch.empty((5, 8), dtype=torch.uint32),
            torch.empty((5, 8)),
            torch.empty(16, dtype=torch.int32),
        )
        with pytest.raises(fake.DataDependentOutputException):
            case[1].sum().item()
        assert route_shed(*case, backend="torch").mix.shape == (5, 8)
        assert split_by_residency(*case, backend="torch").cpu_ids.shape == (5, 8)
        routing = ShedPolicy(0.5).apply(*case, backend="torch")
        ShedLedger(2, device="cpu").record(0, routing)


@pytest.mark.gpu
def test_the_gpu_gives_the_cpus_bits_and_never_waits() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: tools/gpu_check.py runs this where there is one")
    done = subprocess.run([sys.executable, GPU_CHECK, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- Triton: what the compiler makes of the kernel ---------------------------------------------------------------------


@pytest.mark.parametrize("num_picks", [8, 64])
def test_the_compiled_triton_kernel_divides_exactly_and_fuses_nothing(num_picks: int) -> None:
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # compiled for a GPU that need not be here; in a process of its own, as this one runs the interpreter
    code = f"""
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hotset.ops.triton_backend import route_shed_kernel, tile
rows, columns = tile(4096, {num_picks})
types = dict(indices="*u32", scores="*fp32", table="*i32", slots="*i32", mix="*fp32", miss_ids="*i32",
             miss_scores="*fp32", num_tokens="i32", num_experts="i32", R="constexpr", ROWS="constexpr",
             COLUMNS="constexpr")
source = ASTSource(route_shed_kernel, types, constexprs=dict(R={num_picks}, ROWS=rows, COLUMNS=columns))
options = dict(enable_fp_fusion=False)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
print(*sorted(set(re.findall("[ \\t]([a-z]+[.](?:[a-z]+[.])*f32)[ \\t]", ptx))))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    arithmetic = {op for op in done.stdout.split() if op.split(".")[0] in ("add", "sub", "mul", "div", "fma", "mad")}
    # no fma, no approximate or full-range division, nothing that flushes subnormals (.ftz)
    assert arithmetic in ({"add.f32", "mul.f32", "div.rn.f32"}, {"add.rn.f32", "mul.rn.f32", "div.rn.f32"})


# -- MLX: the Metal kernel's body, compiled as C++ ---------------------------------------------------------------------

METAL_AS_CPP = """
#include <cstdint>
#include <cstring>
typedef unsigned int uint;
struct uint3 {{ uint x, y, z; }};
template <class To, class From> To as_type(From from) {{ To to; std::memcpy(&to, &from, sizeof to); return to; }}
namespace metal {{ namespace precise {{ float divide(float a, float b) {{ return a / b; }} }} }}
static void body(uint3 thread_position_in_grid, const {index}* indices, const float* scores, const int* slot_table,
                 const int* slot_table_shape, uint* slots, float* mix, int* miss_ids, float* miss_scores) {{
    constexpr uint R = {picks};
{body}
}}
extern "C" void run(uint num_tokens, int num_experts, const {index}* indices, const float* scores, const int* table,
                    uint* slots, float* mix, int* miss_ids, float* miss_scores) {{
    for (uint t = 0; t < num_tokens; ++t)
        body({{t, 0, 0}}, indices, scores, table, &num_experts, slots, mix, miss_ids, miss_scores);
}}
"""


@pytest.mark.parametrize(("dtype", "index"), [(np.uint32, "uint"), (np.int32, "int"), (np.int64, "int64_t")])
def test_the_metal_kernels_body_gives_the_references_bits(tmp_path: Path, dtype: Any, index: str) -> None:
    import ctypes

    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to compile the Metal kernel's body with")
    source, library = tmp_path / "metal.cpp", tmp_path / "metal.so"
    source.write_text(METAL_AS_CPP.format(index=index, picks=6, body=METAL_BODY))
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, source], check=True)
    indices, scores, table = make_case(np.random.default_rng(2), 200, 6, 16, 0.5, dtype, specials=0.3)
    shape = indices.shape
    routed = ShedRouting(
        np.empty(shape, np.uint32), np.empty(shape, np.float32), np.empty(shape, np.int32), np.empty(shape, np.float32)
    )
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (indices, scores, table, *routed)]
    ctypes.CDLL(str(library)).run(ctypes.c_uint(len(indices)), ctypes.c_int(len(table)), *pointers)
    wanted = route_shed(indices, scores, table, "reference")
    assert (bits(wanted.miss_scores) == 0x7FC0_0000).any()
    same_bits(routed, wanted)


# -- the tool for machines with a GPU ----------------------------------------------------------------------------------


def test_gpu_check_says_that_it_checked_nothing_where_there_is_no_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, GPU_CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "finds no CUDA device here, so nothing was checked" in done.stderr
    assert done.stdout == ""


def test_gpu_checks_own_comparison_runs_on_the_cpu_too_and_finds_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    specification = importlib.util.spec_from_file_location("gpu_check", GPU_CHECK)
    assert specification is not None
    assert specification.loader is not None
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    shapes = {"T": (1, 33), "R": (4,), "E": (8,), "share": (0.5,)}
    assert tool.check_bits("torch", "cpu", shapes) == 2

    def one_bit_off(*case: Any, backend: str) -> ShedRouting:
        routed = route_shed(*case, backend=backend)
        if backend == "torch":
            routed.mix.view(torch.int32)[0, 0] ^= 1
        return routed

    monkeypatch.setattr(tool, "route_shed", one_bit_off)
    with pytest.raises(AssertionError, match="1 values of mix differ, the first at"):
        tool.check_bits("torch", "cpu", shapes)
