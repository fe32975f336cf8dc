"""The bytes of all experts: an arena of slots on the device, host buffers, and behind them the checkpoint.

One copy: an expert has a slot or a host buffer, never both, unless the copy policy keeps the host copies. Which of the
two is `Residency`'s to say; this module keeps the bytes where it says, and moves them in two phases so that a reader in
another thread always finds one valid copy. Compute comes through `acquire` and `release`; asking for a host buffer that
does not exist raises ExpertNotOnHost.

With a `HostCache` host memory is bounded: experts away from the arena live in the checkpoint and pass through it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core import Tier
from hotset.errors import ExpertNotOnHost, ResidencyError
from hotset.models.experts import ExpertLayer
from hotset.residency import ABSENT, Residency, Swap
from hotset.runtime.copy_policy import CopyPolicy, RestoreSource, resolve_copy_policy
from hotset.runtime.expert_formats.contract import ExpertFormat, ExpertTensors, plain_formats
from hotset.runtime.host_cache import HostCache
from hotset.runtime.memory import allocate_host

ReadExpert = Callable[[int, int, ExpertTensors], None]
"""(row, expert, target): read that expert into tensors of its format's `host_shapes`."""
CopyWeights = Callable[[ExpertTensors, ExpertTensors], None]
"""(source, target): copy every tensor; returns when the bytes have landed."""


_WINDOW = 16
"""More than most models' top-k, so that a decoded token's experts are all read at once."""
_LOADERS = 4
"""Threads that read experts at load: packing keeps a core busy while another reads."""


class ExpertStore:
    """Arena and host tier of L layers.

    layers: in row order. mask: [L, E] bool, True = in the arena. device: where the arena is; "cpu" is a real second
    arena in host memory. read: reads one expert from the checkpoint. formats: how each row's experts are held, default
    plain.
    copies: whether residents keep a host copy, default not. restore: whence a demoted expert gets its host copy where
    none was kept. cache: bounds the host tier; None holds every expert away from the arena in memory. copy: how bytes
    get between tiers (tests inject failures here).
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        mask: NDArray[np.bool_],
        device: torch.device,
        read: ReadExpert,
        *,
        formats: Sequence[ExpertFormat] | None = None,
        copies: CopyPolicy | None = None,
        restore: RestoreSource | None = None,
        cache: HostCache | None = None,
        copy: CopyWeights | None = None,
    ) -> None:
        self.layers = list(layers)
        self.formats = plain_formats(layers) if formats is None else list(formats)
        self.device = device
        self.copies = copies or resolve_copy_policy("auto", dynamic=restore is not None, restore=restore)
        self.restore = restore
        self.cache = cache
        self.moving = threading.RLock()
        """Held by whoever moves experts: one mover at a time. Compute never takes it."""
        self.window = _WINDOW if cache is None else min(_WINDOW, cache.num_buffers)
        """Experts of a layer that are announced before the first of them is computed."""
        self._read = read
        self._copy = copy or Copier(device)
        slots = mask.sum(axis=1)
        home = Tier.HOST if cache is None else Tier.DISK
        self.residency = Residency(mask.shape[1], slots, initial_mask=mask, home=home)
        self.arena: list[dict[str, torch.Tensor]] = [
            _slots_of(fmt, int(count), device) for fmt, count in zip(self.formats, slots, strict=True)
        ]
        self._slots: list[list[ExpertTensors]] = [
            [{name: tensor[slot] for name, tensor in arena.items()} for slot in range(int(count))]
            for arena, count in zip(self.arena, slots, strict=True)
        ]
        self._host: list[list[ExpertTensors | None]] = [[None] * layer.num_experts for layer in self.layers]

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every expert once, straight into the tier where it lives. progress(experts done, experts in all).

        With a cache only the arena is read: the other experts come when they are asked for.
        """
        wanted = list(self._to_load())
        left = Counter(row for row, _, _ in wanted if self.formats[row].takes_over)
        with ThreadPoolExecutor(_LOADERS, thread_name_prefix="hotset-load") as loaders:
            loads = [loaders.submit(self._load_one, *one) for one in wanted]
            try:
                for done, load in enumerate(as_completed(loads), start=1):
                    row = load.result()
                    left[row] -= 1
                    if left[row] == 0:
                        self._hand_over(row)
                    if progress is not None:
                        progress(done, len(wanted))
            except BaseException:  # Ctrl-C too: what has not begun need not
                loaders.shutdown(wait=False, cancel_futures=True)
                raise

    def _load_one(self, row: int, expert: int, slot: int) -> int:
        """Returns the row."""
        in_place = self.formats[row].slot_shapes(self.device) == self.formats[row].host_shapes
        if slot != ABSENT and in_place:
            self._read(row, expert, self.on_gpu(row, slot))
        if slot == ABSENT or not self.copies.skip or not in_place:
            host = self.new_host_buffer(row)
            if slot != ABSENT and in_place:
                self._copy(self.on_gpu(row, slot), host)
            else:
                self._read(row, expert, host)
            if slot != ABSENT and not in_place:
                self._to_slot(row, host, slot)
            if slot == ABSENT or not self.copies.skip:
                self._host[row][expert] = host
        return row

    def _hand_over(self, row: int) -> None:
        """All of the row are read: its format takes the host copies. Each leaves an empty one in its place."""
        self.formats[row].take_over({e: weights for e, weights in enumerate(self._host[row]) if weights is not None})
        self._host[row] = [None if weights is None else {} for weights in self._host[row]]

    def _to_load(self) -> Iterator[tuple[int, int, int]]:
        for row, layer in enumerate(self.layers):
            for expert in range(layer.num_experts):
                slot = self.residency.slot(row, expert)
                if slot != ABSENT or self.cache is None:
                    yield row, expert, slot

    # -- reading -------------------------------------------------------------------------------------------

    def on_gpu(self, row: int, slot: int) -> ExpertTensors:
        """Views of one arena slot."""
        return self._slots[row][slot]

    def on_host(self, row: int, expert: int) -> ExpertTensors:
        """The host copy of one expert. Raises ExpertNotOnHost where it has none."""
        weights = self._host[row][expert]
        if weights is None:
            slot = self.residency.slot(row, expert)
            if slot != ABSENT:
                why = f"it lives in arena slot {slot} and is kept once"
            elif self.cache is not None:
                why = "it lives in the checkpoint on disk and passes through the host cache"
            else:
                why = "it was never loaded"
            raise ExpertNotOnHost(self.layers[row].layer_id, expert, why)
        return weights

    def acquire(self, row: int, expert: int) -> tuple[ExpertTensors, Tier]:
        """(parameters where they live, that tier), safe from moves until `release`. Waits for the disk where it must.

        An arena slot and a cached copy are locked; a host buffer is kept alive by the reference that is handed out.
        """
        with self.residency.lock:
            slot = self.residency.acquire(row, expert)
            if slot != ABSENT:
                return self._slots[row][slot], Tier.GPU
            if self.cache is None:
                return self.on_host(row, expert), Tier.HOST
        return self.cache.acquire(row, expert), Tier.HOST

    def acquire_resident(self, row: int, expert: int) -> ExpertTensors | None:
        """The expert's arena slot, locked until `release(..., Tier.GPU)`, or None where it has none."""
        slot = self.residency.acquire(row, expert)
        return None if slot == ABSENT else self._slots[row][slot]

    def acquire_ready(
        self, row: int, experts: Sequence[int]
    ) -> tuple[dict[int, tuple[ExpertTensors, Tier]], list[int]]:
        """({expert: what `acquire` gives} of those in memory now, the others): waits for nothing."""
        ready: dict[int, tuple[ExpertTensors, Tier]] = {}
        waiting = []
        with self.residency.lock:
            for expert in experts:
                if self.cache is None or self.residency.slot(row, expert) != ABSENT:
                    ready[expert] = self.acquire(row, expert)
                elif (cached := self.cache.acquire_ready(row, expert)) is not None:
                    ready[expert] = cached, Tier.HOST
                else:
                    waiting.append(expert)
        return ready, waiting

    def release(self, row: int, expert: int, tier: Tier) -> None:
        """Undo one `acquire` that gave this tier."""
        if tier is Tier.GPU:
            self.residency.release(row, expert)
        elif self.cache is not None:
            self.cache.release(row, expert)

    def announce(self, row: int, experts: Sequence[int]) -> None:
        """These experts will be acquired soon: start reading from disk those that are in no memory."""
        if self.cache is not None:
            self.cache.announce(row, [expert for expert in experts if self.residency.slot(row, expert) == ABSENT])

    def must_wait(self, row: int, expert: int) -> bool:
        """Whether acquiring the expert now would wait for the disk."""
        if self.cache is None or self.residency.slot(row, expert) != ABSENT:
            return False
        return not self.cache.holds(row, expert)

    # -- moving --------------------------------------------------------------------------------------------

    def promote(self, row: int, expert: int, victim: int = ABSENT) -> int:
        """Move an expert into the arena, into a free slot or in place of `victim`. Returns bytes moved, both ways.

        Whatever fails, the old residency and all bytes are left as they were; should even putting the victim back
        fail, it stays on the host, whole. Raises ResidencyError (no free slot, in use, ...), and what the reader
        or the copy raised.
        """
        with self.moving:
            self._check_movable(row)
            if self.residency.slot(row, expert) != ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is resident already")
            restored = self._host_copy(row, victim) if victim != ABSENT else None
            source, tier = self.acquire(row, expert)
            try:
                with self.residency.lock:
                    victim_row = ABSENT if victim == ABSENT else row
                    _, move = self.residency.begin(Swap(row, expert, victim_row, victim))
                    if victim != ABSENT:
                        self._host[row][victim] = restored
                try:
                    self._to_slot(row, source, move.slot)
                except BaseException:
                    self.residency.abort(move)
                    if victim != ABSENT:
                        self._put_back(row, victim)
                    raise
                with self.residency.lock:
                    self.residency.publish(move)
                    if self.copies.skip:
                        self._host[row][expert] = None
            finally:
                self.release(row, expert, tier)
            if self.cache is not None:
                self.cache.drop(row, expert)
            return self.move_bytes(row, swaps=victim != ABSENT)

    def demote(self, row: int, expert: int) -> int:
        """Move an expert out of the arena; its slot is free afterwards. Returns bytes moved.

        Its host copy is restored first, bit for bit, from the slot or the checkpoint, so a failure leaves it where it
        was. Raises ResidencyError (absent, in use), and what the reader or the copy raised.
        """
        with self.moving:
            self._check_movable(row)
            restored = self._host_copy(row, expert)
            with self.residency.lock:
                self.residency.evict(row, expert)
                self._host[row][expert] = restored
            return self.move_bytes(row, swaps=True) - self.formats[row].expert_bytes

    def _check_movable(self, row: int) -> None:
        if self.formats[row].takes_over:
            raise ResidencyError(
                f"experts of row {row} ({self.formats[row].name}) cannot move: load with other kernels"
            )

    def move_bytes(self, row: int, *, swaps: bool) -> int:
        """Bytes that a promotion moves; with `swaps` also those that restoring its victim's host copy moves."""
        restores = swaps and self.cache is None and self.copies.skip
        return self.formats[row].expert_bytes * (2 if restores else 1)

    def _host_copy(self, row: int, expert: int) -> ExpertTensors | None:
        """What the expert's host buffer must be once it has left the arena; None where it goes back to disk."""
        if self.cache is not None or not self.copies.skip:
            return self._host[row][expert]
        slot = self.residency.slot(row, expert)
        if slot == ABSENT:
            raise ResidencyError(f"expert {expert} of row {row} is not resident")
        if self.restore is None:
            raise ResidencyError(
                f"expert {expert} of row {row} cannot leave the arena: its host copy was skipped and the plan is "
                "static: load with adapt=..., or with skip_gpu_expert_cpu_copy='off'"
            )
        host = self.new_host_buffer(row)
        if self.restore == "slot":
            self._from_slot(row, slot, host)
        else:
            self._read(row, expert, host)
        return host

    def _to_slot(self, row: int, host: ExpertTensors, slot: int) -> None:
        fmt = self.formats[row]
        self._copy(host if self.device.type == "cpu" else fmt.to_device(host), self.on_gpu(row, slot))

    def _from_slot(self, row: int, slot: int, host: ExpertTensors) -> None:
        fmt = self.formats[row]
        if fmt.slot_shapes(self.device) == fmt.host_shapes:
            self._copy(self.on_gpu(row, slot), host)
            return
        staged = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in fmt.device_shapes.items()}
        self._copy(self.on_gpu(row, slot), staged)
        fmt.to_host(staged, host)

    def _put_back(self, row: int, victim: int) -> None:
        """A promotion failed after its victim had left: the victim is copied back into the slot that is free again."""
        weights, tier = self.acquire(row, victim)
        try:
            move = self.residency.claim(row, victim)
            try:
                self._to_slot(row, weights, move.slot)
            except BaseException:
                self.residency.abort(move)
                raise
            with self.residency.lock:
                self.residency.publish(move)
                if self.copies.skip:
                    self._host[row][victim] = None
        finally:
            self.release(row, victim, tier)

    def new_host_buffer(self, row: int) -> dict[str, torch.Tensor]:
        """An uninitialised host buffer for one expert of the row."""
        return allocate_host(self.formats[row].host_shapes)

    # -- account -------------------------------------------------------------------------------------------

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arena slots."""
        return sum(t.numel() * t.element_size() for arena in self.arena for t in arena.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers of experts, those of the cache included."""
        held = sum(
            t.numel() * t.element_size() for row in self._host for weights in row if weights for t in weights.values()
        )
        for row, fmt in zip(self._host, self.formats, strict=True):
            if fmt.takes_over:  # about: in a form of its own, of which nothing is known
                held += fmt.expert_bytes * sum(weights is not None for weights in row)
        return held + (0 if self.cache is None else self.cache.held_bytes)

    def check_integrity(self) -> None:
        """Assert Residency's account, and that each expert has exactly the copies that the copy policy wants."""
        with self.moving, self.residency.lock:
            self.residency.check_integrity()
            mask = self.residency.mask()
            for row, expert in np.ndindex(mask.shape):
                has_host = self._host[row][expert] is not None
                wanted = self.cache is None and (not mask[row, expert] or not self.copies.skip)
                assert has_host == wanted, f"expert {expert} of row {row}: host copy {has_host}, wanted {wanted}"
        if self.cache is not None:
            self.cache.check_integrity()


class Copier:
    """Copies between tiers; on CUDA by a side stream, which waits for the kernels that may still read the target."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, source: ExpertTensors, target: ExpertTensors) -> None:
        """Returns when the bytes have landed."""
        if self._stream is None:
            for name, tensor in target.items():
                tensor.copy_(source[name])
            return
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in target.items():
                tensor.copy_(source[name], non_blocking=True)
        self._stream.synchronize()


def _slots_of(fmt: ExpertFormat, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`count` uninitialised slots side by side: name -> [count, ...]; on the CPU each starts at a multiple of 64."""
    shapes = fmt.slot_shapes(device)
    if device.type != "cpu":
        return {n: torch.empty((count, *shape), dtype=dtype, device=device) for n, (shape, dtype) in shapes.items()}
    return allocate_host({name: (torch.Size((count, *shape)), dtype) for name, (shape, dtype) in shapes.items()})
