"""The kernels that people use today, each behind one call, for bench_kernels.py. Only those that are installed.

Knows: how to hand one layer's experts to torch, Transformers, kt-kernel and ggml (llama.cpp). Every expert has the same
values in its own memory, so a peer's result can be checked against one reference expert while it reads as much as it
would. Does not know: hotset.

A peer is made for a format; calls return [T, H], or, for ggml, the picks' outputs before the weighted sum: that sum is
left out of its time, in its favour.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Experts:
    """One expert in float32 and as stored, to be repeated num_experts times."""

    num_experts: int
    gate_up: Array
    """[2F, H], gates first"""
    down: Array
    """[H, F]"""
    stored: Any
    """hotset.kernels.ExpertWeights of the format"""
    top_k: int
    threads: int

    @property
    def hidden(self) -> int:
        return int(self.down.shape[0])

    @property
    def intermediate(self) -> int:
        return int(self.down.shape[1])


@dataclass(frozen=True)
class Inputs:
    tokens: Array
    """[T, H] float32, of values that bfloat16 holds exactly"""
    weights: Array
    """[T, K] float32"""


Run = Callable[[Array], Any]
"""run(ids [T, K] int64) -> output; only this is timed"""


class Peer:
    """`variants(format)`: (label, maker) of everything to try; the best one counts."""

    name: str
    prefills: bool = True

    def variants(self, weight_format: str) -> list[tuple[str, Callable[[Experts], Callable[[Inputs], Run]]]]:
        raise NotImplementedError


def installed(threads: int) -> list[Peer]:
    """The peers that are here."""
    peers: list[Peer] = []
    if importlib.util.find_spec("torch"):
        peers += [TorchMv(), TorchPacked()]
    if importlib.util.find_spec("transformers"):
        peers.append(Transformers())
    if importlib.util.find_spec("kt_kernel"):
        peers.append(KtKernel(threads))
    if Ggml.folder() is not None:
        peers.append(Ggml())
    return peers


def _bf16(values: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16()


class TorchMv(Peer):
    """A loop of torch.mv in bfloat16: what a straightforward runtime does for a miss."""

    name = "torch.mv"
    prefills = False

    def variants(self, weight_format: str) -> list[Any]:
        return [("", self._make)] if weight_format == "bf16" else []

    def _make(self, experts: Experts) -> Callable[[Inputs], Run]:
        import torch

        gate_up = [_bf16(experts.gate_up) for _ in range(experts.num_experts)]
        down = [_bf16(experts.down) for _ in range(experts.num_experts)]

        def prepare(inputs: Inputs) -> Run:
            tokens, weights = _bf16(inputs.tokens), torch.from_numpy(inputs.weights)

            def run(ids: Array) -> Any:
                out = torch.zeros(tokens.shape)
                for t, row in enumerate(ids.tolist()):
                    for k, expert in enumerate(row):
                        gate, up = torch.mv(gate_up[expert], tokens[t]).chunk(2)
                        inner = torch.nn.functional.silu(gate) * up
                        out[t] += weights[t, k] * torch.mv(down[expert], inner)
                return out

            return run

        return prepare


class TorchPacked(Peer):
    """torch's own weight-only kernels: int8 per row and int4 in groups of 32."""

    name = "torch packed"

    def variants(self, weight_format: str) -> list[Any]:
        made = {"int8": self._int8, "int4_g32": self._int4}.get(weight_format)
        return [("", made)] if made else []

    def _int8(self, experts: Experts) -> Callable[[Inputs], Run]:
        import torch

        def one(data: Array, scale: Array) -> Any:
            return torch.from_numpy(data.copy()), torch.from_numpy(scale).bfloat16()

        w = experts.stored
        first = [one(w.gate_up, w.gate_up_scale) for _ in range(experts.num_experts)]
        second = [one(w.down, w.down_scale) for _ in range(experts.num_experts)]
        return self._loop(first, second, torch._weight_int8pack_mm)

    def _int4(self, experts: Experts) -> Callable[[Inputs], Run]:
        import torch

        def one(data: Array, scale: Array) -> Any:
            codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
            packed = torch._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
            scales = torch.from_numpy(scale.astype(np.float32).T.copy()).bfloat16()
            return packed, torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()

        w = experts.stored
        first = [one(w.gate_up, w.gate_up_scale)]
        second = [one(w.down, w.down_scale)]
        for rows in (first, second):
            rows += [(rows[0][0].clone(), rows[0][1].clone()) for _ in range(experts.num_experts - 1)]

        def multiply(x: Any, packed: Any, scales: Any) -> Any:
            return torch._weight_int4pack_mm_for_cpu(x, packed, 32, scales)

        return self._loop(first, second, multiply)

    def _loop(self, first: list[Any], second: list[Any], multiply: Callable[..., Any]) -> Callable[[Inputs], Run]:
        import torch

        def prepare(inputs: Inputs) -> Run:
            tokens, weights = _bf16(inputs.tokens), torch.from_numpy(inputs.weights)

            def run(ids: Array) -> Any:
                out = torch.zeros(tokens.shape)
                flat = torch.from_numpy(ids).reshape(-1)
                for expert in np.unique(ids).tolist():
                    picks = (flat == expert).nonzero()[:, 0]
                    rows = picks // ids.shape[1]
                    gate, up = multiply(tokens[rows], *first[expert]).chunk(2, -1)
                    y = multiply(torch.nn.functional.silu(gate) * up, *second[expert])
                    out.index_add_(0, rows, weights.reshape(-1)[picks, None] * y)
                return out

            return run

        return prepare


class Transformers(Peer):
    """Qwen3-MoE's experts module with Transformers' default implementation (grouped_mm)."""

    name = "transformers"

    def variants(self, weight_format: str) -> list[Any]:
        return [("grouped_mm", self._make)] if weight_format == "bf16" else []

    def _make(self, experts: Experts) -> Callable[[Inputs], Run]:
        import torch
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=experts.hidden, moe_intermediate_size=experts.intermediate, num_experts=experts.num_experts
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module = module.to_empty(device="cpu").bfloat16().eval().requires_grad_(False)
        module.gate_up_proj.copy_(_bf16(experts.gate_up))
        module.down_proj.copy_(_bf16(experts.down))

        def prepare(inputs: Inputs) -> Run:
            tokens, weights = _bf16(inputs.tokens), torch.from_numpy(inputs.weights).bfloat16()

            def run(ids: Array) -> Any:
                with torch.no_grad():
                    return module(tokens, torch.from_numpy(ids), weights)

            return run

        return prepare


class KtKernel(Peer):
    """kt-kernel's CPU experts, every class that has the format, 1 to all workers."""

    name = "kt-kernel"
    # class -> (bits, group, what its scales are)
    CLASSES: ClassVar[dict[str, dict[str, tuple[int, int, str]]]] = {
        "bf16": {"AMXBF16_MOE": (16, 0, ""), "AVX2BF16_MOE": (16, 0, "")},
        "int8": {"AMXInt8_MOE": (8, 0, "own")},
        "int4_g32": {"AMXInt4_MOE": (4, 0, "own"), "AMXInt4_KGroup_MOE": (4, 32, "bf16")},
        "fp8_block128": {"AMXFP8_MOE": (8, 128, "block"), "AVX2FP8_MOE": (8, 128, "block")},
        "mxfp4": {"AMXFP4_KGroup_MOE": (4, 32, "exponent as bf16"), "AVX2MXFP4_MOE": (4, 32, "exponent as bf16")},
        "mxfp8": {"AMXMXFP8_KGroup_MOE": (8, 32, "exponent"), "AVX2MXFP8_MOE": (8, 32, "exponent")},
    }

    def __init__(self, threads: int) -> None:
        import kt_kernel  # noqa: F401  (chooses the extension for this CPU)
        from kt_kernel import kt_kernel_ext

        self._ext = kt_kernel_ext
        self._threads = threads

    def variants(self, weight_format: str) -> list[Any]:
        return [
            (f"{name}, {workers} workers", partial(self._make, name, stored, workers))
            for name, stored in self.CLASSES.get(weight_format, {}).items()
            if hasattr(self._ext.moe, name)
            for workers in range(1, self._threads + 1)
        ]

    def _make(self, name: str, stored: tuple[int, int, str], workers: int, experts: Experts) -> Callable[[Inputs], Run]:
        import torch

        ext = self._ext
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [workers]
        infer = ext.CPUInfer(pool)
        count, f = experts.num_experts, experts.intermediate
        mask = torch.zeros(count, dtype=torch.bool)
        config = ext.moe.MOEConfig(count, experts.top_k, experts.hidden, f, mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, infer.backend_, 1024
        kept: list[Any] = [mask, infer]
        matrices = {"gate": slice(0, f), "up": slice(f, 2 * f)}
        bits, group, scale_kind = stored
        if scale_kind == "own":  # quantises bfloat16 itself
            for part, rows in matrices.items():
                kept.append(_bf16(experts.gate_up[rows]).expand(count, -1, -1).contiguous())
                setattr(config, f"{part}_proj", kept[-1].data_ptr())
            kept.append(_bf16(experts.down).expand(count, -1, -1).contiguous())
            config.down_proj = kept[-1].data_ptr()
        else:
            w = experts.stored
            for part, rows in (*matrices.items(), ("down", slice(None))):
                source, scale = (w.down, w.down_scale) if part == "down" else (w.gate_up, w.gate_up_scale)
                if bits == 16:
                    data = _bf16((experts.down if part == "down" else experts.gate_up)[rows])
                else:
                    data = torch.from_numpy(np.ascontiguousarray(source[rows]))
                pointers = [[data.data_ptr()] * count]  # every class packs a copy of its own
                kept.append(data)
                setattr(config, f"{part}_projs", pointers)
                pointer = 0
                if scale is not None:
                    if scale_kind == "block" and part != "down":
                        rows = slice(rows.start // 128, rows.stop // 128)
                    scales = torch.from_numpy(np.ascontiguousarray(scale[rows]))
                    if scale_kind == "exponent as bf16":
                        scales = torch.exp2(scales.float() - 127).bfloat16()
                    elif scale_kind == "bf16":
                        scales = scales.bfloat16()
                    kept.append(scales)
                    pointer = scales.data_ptr()
                setattr(config, f"{part}_scales", [[pointer] * count])
            if group:
                config.quant_config.bits, config.quant_config.group_size = bits, group
                config.quant_config.zero_point = False
        layer = getattr(ext.moe, name)(config)
        order = torch.arange(count)
        infer.submit(layer.load_weights_task(order.data_ptr()))
        infer.sync()
        if scale_kind == "own":
            del kept[2:]

        def prepare(inputs: Inputs) -> Run:
            tokens, weights = _bf16(inputs.tokens), torch.from_numpy(inputs.weights)
            out = torch.zeros_like(tokens)
            length = torch.tensor([len(tokens)], dtype=torch.int32)

            def run(ids: Array) -> Any:
                picked = torch.from_numpy(ids)
                infer.submit(
                    layer.forward_task(
                        length.data_ptr(), ids.shape[1], picked.data_ptr(), weights.data_ptr(), tokens.data_ptr(),
                        out.data_ptr(), False,
                    )
                )  # fmt: skip
                infer.sync()
                return out

            run.kept = (kept, layer)  # type: ignore[attr-defined]
            return run

        return prepare


class Ggml(Peer):
    """llama.cpp's mul_mat_id (up, gate, SwiGLU, down) through ggml's C interface, from llama-cpp-python or HOTSET_GGML
    (a folder)."""

    name = "llama.cpp"
    TYPES: ClassVar[dict[str, int]] = {"bf16": 30, "fp16": 1, "int8": 8, "int4_g32": 2, "mxfp4": 39}
    """GGML_TYPE_*: q8_0 stands beside int8, q4_0 beside int4 in groups of 32"""

    @staticmethod
    def folder() -> Path | None:
        named = os.environ.get("HOTSET_GGML")
        if named:
            return Path(named)
        found = importlib.util.find_spec("llama_cpp")
        if found is None or found.origin is None:
            return None
        return Path(found.origin).parent / "lib"

    def variants(self, weight_format: str) -> list[Any]:
        number = self.TYPES.get(weight_format)
        return [] if number is None else [("", lambda experts: self._make(number, experts))]

    def _make(self, number: int, experts: Experts) -> Callable[[Inputs], Run]:
        folder = self.folder()
        assert folder is not None
        base, cpu = (
            ctypes.CDLL(str(next(folder.rglob(f"lib{n}.so"))), ctypes.RTLD_GLOBAL) for n in ("ggml-base", "ggml-cpu")
        )
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64

        class Parameters(ctypes.Structure):
            _fields_ = (("mem_size", size), ("mem_buffer", pointer), ("no_alloc", ctypes.c_bool))

        def bind(library: Any, name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
            return function

        init = bind(base, "ggml_init", pointer, Parameters)
        free = bind(base, "ggml_free", None, pointer)
        tensor2 = bind(base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, integer, integer)
        tensor3 = bind(base, "ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, integer, integer, integer)
        data_of = bind(base, "ggml_get_data", pointer, pointer)
        bytes_of = bind(base, "ggml_nbytes", size, pointer)
        quantize = bind(
            base, "ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, integer, integer, integer, pointer
        )
        mul_mat_id = bind(base, "ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        silu = bind(base, "ggml_silu", pointer, pointer, pointer)
        mul = bind(base, "ggml_mul", pointer, pointer, pointer, pointer)
        new_graph = bind(base, "ggml_new_graph", pointer, pointer)
        expand = bind(base, "ggml_build_forward_expand", None, pointer, pointer)
        compute = bind(cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, pointer, pointer, ctypes.c_int)
        bind(cpu, "ggml_cpu_init", None)()

        h, f, count = experts.hidden, experts.intermediate, experts.num_experts
        room = 3 * h * f * count * 2 + (64 << 20)
        weights_context = init(Parameters(room, None, False))

        def filled(values: Array) -> Any:
            rows, k = values.shape
            made = tensor3(weights_context, number, k, rows, count)
            one = bytes_of(made) // count
            source = np.ascontiguousarray(values, np.float32)
            quantize(number, source.ctypes.data, data_of(made), 0, rows, k, None)
            for expert in range(1, count):
                ctypes.memmove(data_of(made) + expert * one, data_of(made), one)
            return made

        gate, up, down = filled(experts.gate_up[:f]), filled(experts.gate_up[f:]), filled(experts.down)

        def prepare(inputs: Inputs) -> Run:
            num_tokens = len(inputs.tokens)
            k = experts.top_k
            context = init(Parameters((64 << 20) + num_tokens * k * (h + 4 * f) * 8 * 4, None, False))
            tokens = tensor3(context, 0, h, 1, num_tokens)
            ctypes.memmove(data_of(tokens), np.ascontiguousarray(inputs.tokens).ctypes.data, inputs.tokens.nbytes)
            picked = tensor2(context, 26, k, num_tokens)
            inner = mul(
                context,
                silu(context, mul_mat_id(context, gate, tokens, picked)),
                mul_mat_id(context, up, tokens, picked),
            )
            out = mul_mat_id(context, down, inner, picked)
            graph = new_graph(context)
            expand(graph, out)
            # every compute takes its work buffer from the context: a context of its own, renewed before it is full
            work = [init(Parameters(256 << 20, None, False)), 0]

            def run(ids: Array) -> Any:
                narrow = ids.astype(np.int32)
                ctypes.memmove(data_of(picked), narrow.ctypes.data, narrow.nbytes)
                work[1] += 1
                if work[1] % 32 == 0:
                    free(work[0])
                    work[0] = init(Parameters(256 << 20, None, False))
                assert compute(work[0], graph, experts.threads) == 0
                return None

            def output() -> Array:
                shape = (num_tokens, k, h)
                flat = np.ctypeslib.as_array((ctypes.c_float * math.prod(shape)).from_address(data_of(out)))
                return np.asarray((flat.reshape(shape) * inputs.weights[:, :, None]).sum(1))

            run.output = output  # type: ignore[attr-defined]
            return run

        return prepare
