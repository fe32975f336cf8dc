"""One layer's experts on the host, and the one contract by which they are computed.

Knows: what a call looks like (shapes, types, refusals), which experts are present, and the compiled implementation.
Does not know: residency policy, where bytes come from, models. Other implementations (`torch_layer.py`) subclass
`ExpertLayer`.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.errors import ExpertNotOnHost, OpsError
from hotset.kernels import native
from hotset.kernels.call import Call, bad_id, check_out, empty_like
from hotset.kernels.formats import Buffer, ExpertWeights, LayerSpec, as_array, as_buffer
from hotset.kernels.packed import PackedKernel

_NEVER_LOADED = "none was loaded"


class ExpertLayer(abc.ABC):
    """The routed experts of one layer, some of them perhaps absent.

    `moe` computes; `put`, `drop`, `unpack` move experts in and out while other threads compute: a call sees the experts
    that were there when it began, and their bytes stay alive until it ends.
    """

    def __init__(self, spec: LayerSpec, layer: int = 0) -> None:
        self.spec = spec
        self.layer = layer
        """The model's own number of this layer, for messages."""
        self._why: dict[int, str] = {}
        self._change = threading.Lock()

    # -- experts ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def has(self, expert: int) -> bool:
        """Whether this expert can be computed here."""

    @abc.abstractmethod
    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Checks and takes a copy of an expert, replacing one that was there.

        Raises OpsError: shapes or types that the spec does not say, scales that are NaN or infinite, zero points above
        15, NaN among FP8 weights.
        """

    @abc.abstractmethod
    def unpack(self, expert: int) -> ExpertWeights:
        """The expert as it was put, byte for byte: NumPy arrays of the shapes in `ExpertWeights`, transposed ones
        transposed again.

        Raises ExpertNotOnHost.
        """

    @abc.abstractmethod
    def _take(self, expert: int) -> None:
        """Forgets an expert that is present."""

    def drop(self, expert: int, why: str) -> None:
        """Forgets an expert's bytes; `why` ("lives in GPU slot 3") goes into the error of who asks for it. Raises
        ExpertNotOnHost if absent."""
        with self._change:
            self._require(expert)
            self._why[expert] = why
            self._take(expert)

    @property
    def experts(self) -> list[int]:
        """Those present, ascending."""
        return [e for e in range(self.spec.num_experts) if self.has(e)]

    def _require(self, expert: int) -> None:
        self._require_known(expert)
        if not self.has(expert):
            raise self._absent(expert)

    def _require_known(self, expert: int) -> None:
        if not 0 <= expert < self.spec.num_experts:
            raise OpsError(f"layer {self.layer} has no expert {expert}: wanted 0 to {self.spec.num_experts - 1}")

    def _absent(self, expert: int) -> ExpertNotOnHost:
        return ExpertNotOnHost(self.layer, expert, self._why.get(expert, _NEVER_LOADED))

    # -- computing -------------------------------------------------------------------------------------------------

    def moe(self, tokens: Any, ids: Any, weights: Any, *, out: Any = None, threads: int | None = None) -> Any:
        """The layer's output: [T, H] sum over each token's picks, in the router's order, of weight times expert(token).

        tokens: [T, H] float32, float16 or bfloat16 (np.uint16 bits, or a torch tensor). ids: [T, K] int64, int32 or
        int16; -1 and num_experts are no pick and add nothing. weights: [T, K] float32, float16 or bfloat16. out: [T, H]
        in the tokens' type, contiguous, written and returned; default a new one. A torch tensor in gives a torch tensor
        out. threads: default `available_threads()`. Sums are float32; only the result is rounded to the tokens' type.

        Raises OpsError for wrong arguments, ExpertNotOnHost where a pick's expert is absent (nothing is computed then).
        """
        call = Call.of(self.spec, self.layer, tokens, ids, weights, threads)
        result = empty_like(tokens, call.tokens.shape) if out is None else out
        self._run(call, check_out(call, result))
        return result

    def picks(self, tokens: Any, ids: Any, *, threads: int | None = None) -> Any:
        """Each pick's own output, unweighted: [T, K, H] float32, zero where there is no pick. Arguments and errors as
        for `moe`.

        For whoever combines picks of several tiers in one order.
        """
        call = Call.of(self.spec, self.layer, tokens, ids, None, threads)
        rows = empty_like(tokens, (*call.ids.shape, self.spec.hidden), "float32")
        self._run(call, as_buffer("picks", rows))
        return rows

    @abc.abstractmethod
    def _run(self, call: Call, out: Buffer) -> None:
        """Fills `out`: [T, H] in the tokens' type, or [T, K, H] float32 where the call has no weights. Raises as `moe`
        does."""

    def _check_ids(self, call: Call, has: Callable[[int], bool]) -> None:
        """Raises for the first id, in order, that is out of range or whose expert is absent."""
        ids = as_array("ids", call.ids.owner)[0]
        for expert in ids.reshape(-1)[np.sort(np.unique(ids, return_index=True)[1])].tolist():
            if expert in (-1, self.spec.num_experts):
                continue
            if not 0 <= expert < self.spec.num_experts:
                raise bad_id(self.spec, self.layer, expert)
            if not has(expert):
                raise self._absent(expert)


class CompiledLayer(ExpertLayer):
    """Experts packed for, and computed by, the compiled kernels.

    Bits depend on neither the number of threads nor the other tokens of a call. Integer and 4-bit formats quantise
    activations to 8 bits per token and 32 k's (a relative error of about 0.5 % of a dot product, tested); bfloat16 and
    FP8 weights meet bfloat16 activations, float16 and float32 weights float32 ones.

    torch_from_tokens: calls of that many tokens or more are computed by torch from unpacked experts, where that wins (a
    machine with AMX: see `hotset.kernels.measure_crossover`). Raises BackendError where the kernels cannot be compiled.
    """

    def __init__(self, spec: LayerSpec, layer: int = 0, *, torch_from_tokens: int | None = None) -> None:
        super().__init__(spec, layer)
        self.torch_from_tokens = torch_from_tokens
        self.kernel = PackedKernel(spec, layer, self._absent)
        # replaced, never changed: a call keeps the one that it began with
        self._present: tuple[NDArray[np.uint64], tuple[NDArray[np.uint8] | None, ...]] = (
            np.zeros(spec.num_experts, np.uint64),
            (None,) * spec.num_experts,
        )

    def has(self, expert: int) -> bool:
        return self._present[1][expert] is not None

    def put(self, expert: int, weights: ExpertWeights) -> None:
        packed = native.buffer(self.spec.layout.expert_bytes)
        self.kernel.pack(weights, packed)
        self.put_packed(expert, packed)

    def put_packed(self, expert: int, packed: NDArray[np.uint8]) -> None:
        """Takes a packed expert without copying: the bytes must stay as they are until it is dropped."""
        self.kernel.check(packed)
        self._require_known(expert)
        with self._change:
            self._set(expert, packed)

    def packed(self, expert: int) -> NDArray[np.uint8]:
        """The packed bytes of an expert that is present. Raises ExpertNotOnHost."""
        self._require(expert)
        found = self._present[1][expert]
        if found is None:
            raise self._absent(expert)
        return found

    def unpack(self, expert: int) -> ExpertWeights:
        return self.kernel.unpack(self.packed(expert))

    def _take(self, expert: int) -> None:
        self._set(expert, None)

    def _set(self, expert: int, packed: NDArray[np.uint8] | None) -> None:
        addresses, buffers = self._present  # held until the call ends: another thread may drop an expert meanwhile
        addresses = addresses.copy()
        addresses[expert] = 0 if packed is None else packed.ctypes.data
        self._present = (addresses, (*buffers[:expert], packed, *buffers[expert + 1 :]))

    def _run(self, call: Call, out: Buffer) -> None:
        addresses, buffers = self._present  # held until the call ends: another thread may drop an expert meanwhile
        if self.torch_from_tokens is not None and call.ids.shape[0] >= self.torch_from_tokens:
            from hotset.kernels.torch_layer import compute

            def weights_of(expert: int) -> ExpertWeights:
                packed = buffers[expert]
                assert packed is not None, "ids are checked before experts are unpacked"
                return self.kernel.unpack(packed)

            self._check_ids(call, lambda expert: buffers[expert] is not None)
            compute(self.spec, weights_of, call, out)
            return
        self.kernel.run(addresses, call, out)
