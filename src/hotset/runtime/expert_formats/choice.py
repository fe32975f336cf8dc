"""Which format a model's experts get, resolved once with its reason.

Knows: what was asked for, what the checkpoint holds, which kernels this machine has. The compiled kernels were faster
than torch in every case that `benchmarks/bench_decode.py` measures; which of torch's operators stand in for them where
they cannot be had is measured, once (`operators.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from hotset.errors import BackendError, ModelError, OpsError
from hotset.kernels import LayerSpec, backend
from hotset.kernels.modules import spec_of
from hotset.models.experts import ExpertLayer
from hotset.runtime.expert_formats.contract import ExpertFormat
from hotset.runtime.expert_formats.packed import PackedFormat, measured_crossover
from hotset.runtime.expert_formats.plain import PlainFormat, measured_plain
from hotset.runtime.expert_formats.torch_packed import held_for_torch

FormatRequest = Literal["auto", "float", "int8", "int4_g32", "int4_g128"]
"""auto: as the checkpoint has them. float: in the model's dtype. The others: quantised at load."""
PACK_FROM_SHARE = 0.6
"""Of the experts on the host. With random picks and half of them in memory (hit rate .90) both ways were as fast; with
three quarters (.95) packing was 1.37 times as fast, with a quarter (.68) .81 times."""
KernelRequest = Literal["auto", "compiled", "torch", "kt-kernel"]


@dataclass(frozen=True)
class FormatChoice:
    """One format per row, and why."""

    formats: list[ExpertFormat]
    kernels: str
    """"compiled", "torch", both where rows differ, or "kt-kernel"."""
    reason: str

    @property
    def name(self) -> str:
        """Of the rows' formats, without repetition."""
        return " and ".join(dict.fromkeys(fmt.name for fmt in self.formats))


def choose_formats(
    layers: Sequence[ExpertLayer],
    quantised: Sequence[LayerSpec | None],
    *,
    kernels: KernelRequest = "auto",
    training: bool = False,
    cached_share: float | None = None,
    moves: bool = False,
) -> FormatChoice:
    """quantised: a row's spec where its experts are held quantised, None where they are float. training: gradients go
    through. cached_share: where experts come from disk through a host cache, how many of them it holds. moves: experts
    may move while serving.

    Raises ModelError (unknown request, kernels that know no gradients asked for with training, or kt-kernel with what
    it cannot do), OpsError (a module that the kernels do not compute, and they were asked for, or its experts are
    quantised), BackendError (forced kernels that are not to be had).
    """
    if kernels not in get_args(KernelRequest):
        raise ModelError(f"kernels is {kernels!r}: wanted {', '.join(get_args(KernelRequest))}")
    pairs = [(layer, spec) for layer, spec in zip(layers, quantised, strict=True) if spec is not None]
    if training:
        if pairs:
            raise ModelError(
                "training is refused: quantised experts know no gradients: load with expert_format='float'"
            )
        if kernels not in ("auto", "torch"):
            raise ModelError(f"kernels={kernels!r} and training exclude each other: they know no gradients")
        return _plain(layers, "training: gradients go through torch's operators")
    if kernels == "kt-kernel":
        if moves or cached_share is not None:
            what = "moves between tiers" if moves else "a tier on disk"
            raise ModelError(f"kernels='kt-kernel' and {what} exclude each other: it keeps what it is given")
        return _in_kt_kernel(layers, quantised)
    if not pairs:
        return _float(layers, kernels, cached_share)
    stored = _quantised(pairs, kernels)
    if len(pairs) == len(layers):
        return stored
    floats = [layer for layer, spec in zip(layers, quantised, strict=True) if spec is None]
    return _merged(quantised, stored, _float(floats, kernels, cached_share))


def _merged(quantised: Sequence[LayerSpec | None], stored: FormatChoice, plain: FormatChoice) -> FormatChoice:
    """Some layers' experts quantised, the others float."""
    formats = {True: iter(stored.formats), False: iter(plain.formats)}
    same = (stored.kernels, stored.reason) == (plain.kernels, plain.reason)
    return FormatChoice(
        [next(formats[spec is not None]) for spec in quantised],
        " and ".join(dict.fromkeys((stored.kernels, plain.kernels))),
        stored.reason if same else f"{stored.name}: {stored.reason}; {plain.name}: {plain.reason}",
    )


def _float(layers: Sequence[ExpertLayer], kernels: KernelRequest, cached_share: float | None) -> FormatChoice:
    forced = kernels == "compiled" or (kernels == "auto" and os.environ.get("HOTSET_KERNELS") == "compiled")
    if kernels == "torch":
        return _plain(layers, "asked for: torch's operators, with the bits of Transformers' eager loops")
    dtypes = {p.dtype for layer in layers for p in layer.parameters.values()}
    if torch.float32 in dtypes and not forced:
        return _plain(layers, "float32 stays with torch's operators, for the bits of Transformers' eager loops")
    if cached_share is not None and cached_share < PACK_FROM_SHARE and not forced:
        why = "packing each for few uses would cost more than it saves"
        return _plain(layers, f"experts read from disk, {cached_share:.0%} of them in memory: {why}")
    if not forced and backend().name == "torch":
        return _measured(layers, backend().reason)
    _require_compiled()
    try:
        specs = [spec_of(module, layer.parameters) for layer in layers for module in layer.modules]
    except OpsError as problem:
        if forced:
            raise
        return _plain(layers, f"torch's operators: {problem}")
    by_row = iter(specs)
    formats: list[ExpertFormat] = []
    for layer in layers:
        first, *others = (next(by_row) for _ in layer.modules)
        if any(other != first for other in others):
            return _plain(layers, f"torch's operators: modules that share the experts of {layer.name} differ")
        alone = None if forced else measured_crossover(layer, first)
        formats.append(PackedFormat(layer, first, alone_from_rows=alone))
    handed = [f"torch from {f.alone_from_rows} rows of an expert on (measured)" for f in formats if f.alone_from_rows]
    return FormatChoice(formats, "compiled", _joined([backend().reason, *handed]))


def quantised_specs(layers: Sequence[ExpertLayer], request: FormatRequest) -> list[LayerSpec] | None:
    """The rows' specs where the request is to quantise at load, never transposed; else None.

    Raises ModelError (unknown request), OpsError (a module that the kernels do not compute).
    """
    if request not in get_args(FormatRequest):
        raise ModelError(f"expert_format is {request!r}: wanted {', '.join(get_args(FormatRequest))}")
    if request in ("auto", "float"):
        return None
    scales = {"int8": "fp32"}.get(request, "fp16")
    specs = [spec_of(layer.module, layer.parameters) for layer in layers]
    return [replace(spec, format=request, transposed=False, scale_number=scales) for spec in specs]


def _quantised(pairs: Sequence[tuple[ExpertLayer, LayerSpec]], kernels: KernelRequest) -> FormatChoice:
    if kernels == "torch" or (kernels == "auto" and backend().name == "torch"):
        why = "asked for" if kernels == "torch" else backend().reason
        formats, reasons = zip(*(held_for_torch(*pair) for pair in pairs), strict=True)
        return FormatChoice(list(formats), "torch", f"{why}: {_joined(reasons)}")
    _require_compiled()
    return FormatChoice([PackedFormat(*pair) for pair in pairs], "compiled", backend().reason)


def _in_kt_kernel(layers: Sequence[ExpertLayer], quantised: Sequence[LayerSpec | None]) -> FormatChoice:
    from hotset.runtime.expert_formats.kt_kernel import KtKernelFormat

    specs = [spec or spec_of(layer.module, layer.parameters) for layer, spec in zip(layers, quantised, strict=True)]
    formats: list[ExpertFormat] = [KtKernelFormat(*pair) for pair in zip(layers, specs, strict=True)]
    return FormatChoice(formats, "kt-kernel", "asked for: experts on the host are handed to kt-kernel, others are not")


def _measured(layers: Sequence[ExpertLayer], reason: str) -> FormatChoice:
    """Float experts where there is nothing but torch, and the bits of the eager loops are not promised."""
    formats = [measured_plain(layer) or PlainFormat(layer) for layer in layers]
    ways = [f"{fmt.choice} (measured)" for fmt in formats if fmt.choice is not None]
    return FormatChoice(list(formats), "torch", f"{reason}: {_joined(ways)}" if ways else reason)


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def _plain(layers: Sequence[ExpertLayer], reason: str) -> FormatChoice:
    return FormatChoice([PlainFormat(layer) for layer in layers], "torch", reason)


def _require_compiled() -> None:
    if backend().name != "compiled":
        raise BackendError(f"the compiled kernels were asked for, but: {backend().reason}")
