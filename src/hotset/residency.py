"""Who is where: the one owner of residency, used alike by replay and by the runtime.

Knows slots, locks and tiers; knows nothing of bytes, tensors or time. A promotion is two-phase: `claim` reserves a
free slot, the caller moves the bytes, `publish` makes the slot visible (or `abort` gives it back). A slot table
never maps an expert to a slot whose bytes have not landed.

The methods that change or copy state take `lock`, so several threads may use one Residency. The compiled loops of
replay work on the same arrays (`arrays`) through the same functions at the end of this file, without the lock and with
both phases at once: nobody else may hold the Residency meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotset.core import Move, Tier
from hotset.errors import ResidencyError

ABSENT = -1


@dataclass(frozen=True)
class Swap:
    """What a policy proposes: load an expert, into a free slot or in place of a victim.

    `victim_row` differs from `row` only where layers share one pool of slots; both are -1 for a free slot.
    """

    row: int
    expert: int
    victim_row: int = ABSENT
    victim: int = ABSENT


class ResidencyArrays(NamedTuple):
    """The state itself, as arrays that compiled code can work on. G groups of slots: one per layer, or one pool."""

    table: NDArray[np.int32]
    """[L, E] slot of each resident expert, ABSENT elsewhere."""
    users: NDArray[np.int32]
    """[L, E] locks held on each expert."""
    claims: NDArray[np.int32]
    """[L, E] slot reserved for an expert on its way, ABSENT elsewhere."""
    holder: NDArray[np.int64]
    """[G, S] key row * E + expert held by each slot, ABSENT = free or claimed."""
    slots: NDArray[np.int64]
    """[G] slots of each group; holder and free are used up to there."""
    free: NDArray[np.int32]
    """[G, S] stack of free slots."""
    free_count: NDArray[np.int64]
    """[G] height of that stack."""
    group: NDArray[np.int64]
    """[L] group of each layer."""


class Residency:
    """Slot table and free lists of L layers with E experts each.

    slots_per_layer: [L] arena slots that belong to each layer. initial_mask: [L, E] bool, experts resident from
    the start, in ascending slot order. home: tier of the experts that are not on the GPU.

    Raises ResidencyError: a negative number of slots, or more residents than slots.
    """

    def __init__(
        self,
        num_experts: int,
        slots_per_layer: Sequence[int] | NDArray[np.int64],
        *,
        initial_mask: NDArray[np.bool_] | None = None,
        home: Tier = Tier.HOST,
    ) -> None:
        slots = np.asarray(slots_per_layer, np.int64)
        self._build(int(num_experts), slots, np.arange(len(slots), dtype=np.int64), initial_mask, home)

    @classmethod
    def pooled(
        cls,
        num_experts: int,
        num_layers: int,
        num_slots: int,
        *,
        initial_mask: NDArray[np.bool_] | None = None,
        home: Tier = Tier.HOST,
    ) -> Residency:
        """A Residency whose layers share `num_slots` slots of one size, so that a budget may shift between layers."""
        made = cls.__new__(cls)
        group = np.zeros(num_layers, np.int64)
        made._build(int(num_experts), np.asarray([num_slots], np.int64), group, initial_mask, home)
        return made

    def _build(
        self,
        num_experts: int,
        slots: NDArray[np.int64],
        group: NDArray[np.int64],
        initial_mask: NDArray[np.bool_] | None,
        home: Tier,
    ) -> None:
        if slots.ndim != 1 or (slots < 0).any():
            raise ResidencyError(f"slots {slots.tolist()}: wanted one number per layer, none negative")
        self.num_experts = num_experts
        self.num_layers = len(group)
        self.is_pooled = len(slots) == 1 and len(group) != 1
        self.home = home
        self.lock = threading.RLock()
        self.version = 0
        """Raised by every change that readers of the table can see."""
        shape, widest = (len(group), num_experts), int(slots.max(initial=0))
        self.arrays = ResidencyArrays(
            table=np.full(shape, ABSENT, np.int32),
            users=np.zeros(shape, np.int32),
            claims=np.full(shape, ABSENT, np.int32),
            holder=np.full((len(slots), widest), ABSENT, np.int64),
            slots=slots,
            free=np.empty((len(slots), widest), np.int32),
            free_count=np.zeros(len(slots), np.int64),
            group=group,
        )
        self.restart(np.zeros(shape, np.bool_) if initial_mask is None else initial_mask)

    def restart(self, mask: NDArray[np.bool_]) -> None:
        """Forget everything and hold exactly the experts of `mask` [L, E], in ascending slot order.

        Raises ResidencyError: a mask of another shape or with more experts than slots, or a lock or claim is held.
        """
        with self.lock:
            a = self.arrays
            if mask.shape != a.table.shape:
                raise ResidencyError(f"mask has shape {mask.shape}: wanted {a.table.shape}")
            wanted = np.bincount(a.group, weights=mask.sum(axis=1), minlength=len(a.slots)).astype(np.int64)
            if (wanted > a.slots).any():
                worst = int(np.argmax(wanted - a.slots))
                where = "the pool" if self.is_pooled else f"row {worst}"
                raise ResidencyError(f"{where} has {a.slots[worst]} slots for {wanted[worst]} experts of the mask")
            if a.users.any() or (a.claims != ABSENT).any():
                raise ResidencyError("residency cannot restart while experts are in use or on their way")
            a.table.fill(ABSENT)
            a.holder.fill(ABSENT)
            for group, count in enumerate(a.slots):
                a.free[group, :count] = np.arange(count - 1, -1, -1)
            a.free_count[:] = a.slots
            for row, expert in np.argwhere(mask):
                show(a, int(row), int(expert), take_free(a, int(row)))
            self.version += 1

    # -- reading -------------------------------------------------------------------------------------------

    @property
    def slots_per_layer(self) -> NDArray[np.int64]:
        """[L] slots that each layer may use; of a pool, all of them for every layer."""
        return self.arrays.slots[self.arrays.group]

    def slot_table(self) -> NDArray[np.int32]:
        """[L, E] slot of each resident expert, -1 = absent. A copy: later moves do not change it."""
        with self.lock:
            return self.arrays.table.copy()

    def mask(self) -> NDArray[np.bool_]:
        """[L, E] True = resident now."""
        with self.lock:
            resident: NDArray[np.bool_] = self.arrays.table != ABSENT
            return resident

    def slot(self, row: int, expert: int) -> int:
        """Slot of the expert, or -1."""
        return int(self.arrays.table[row, expert])

    def slots_of(self, row: int, experts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slot of each of the given experts of one layer, -1 = absent; same shape."""
        slots: NDArray[np.int32] = self.arrays.table[row, experts]
        return slots

    def free_slots(self, row: int) -> int:
        """Slots that the layer could fill now: they hold nothing and are not claimed."""
        return int(self.arrays.free_count[self.arrays.group[row]])

    def holders(self, row: int) -> NDArray[np.int32]:
        """[S] expert of this layer in each slot, -1 = free, claimed, or (of a pool) another layer's. A copy."""
        with self.lock:
            group = self.arrays.group[row]
            keys = self.arrays.holder[group, : self.arrays.slots[group]]
            mine = (keys != ABSENT) & (keys // self.num_experts == row)
            return np.where(mine, keys % self.num_experts, ABSENT).astype(np.int32)

    # -- moving --------------------------------------------------------------------------------------------

    def claim(self, row: int, expert: int) -> Move:
        """Reserve a free slot for the expert; nobody sees it there yet.

        Raises ResidencyError: already resident, already on its way, or no free slot.
        """
        with self.lock:
            a = self.arrays
            if a.table[row, expert] != ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is resident already")
            if a.claims[row, expert] != ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is on its way already")
            if not a.free_count[a.group[row]]:
                raise ResidencyError(f"row {row} has no free slot of {a.slots[a.group[row]]}: evict one first")
            slot = take_free(a, row)
            a.claims[row, expert] = slot
            return Move(row, expert, self.home, Tier.GPU, slot)

    def publish(self, move: Move) -> None:
        """The bytes have landed: from now on the table shows the expert in its slot."""
        with self.lock:
            show(self.arrays, move.row, move.expert, self._end_claim(move))
            self.version += 1

    def abort(self, move: Move) -> None:
        """The bytes did not land: the slot is free again and residency is what it was before `claim`."""
        with self.lock:
            give_free(self.arrays, move.row, self._end_claim(move))

    def evict(self, row: int, expert: int) -> Move:
        """Take a resident expert out; its slot is free afterwards. Raises ResidencyError: absent, or in use."""
        with self.lock:
            a = self.arrays
            if a.table[row, expert] == ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is not resident")
            if a.users[row, expert]:
                raise ResidencyError(f"expert {expert} of row {row} is in use: evict it after the token is done")
            slot = hide(a, row, expert)
            self.version += 1
            return Move(row, expert, Tier.GPU, self.home, slot)

    def begin(self, swap: Swap) -> tuple[Move | None, Move]:
        """First phase of a proposal: evict its victim, claim a slot. Returns (move out or None, move in).

        The caller moves the bytes and then calls `publish` or `abort` with the move in.
        Raises ResidencyError where the proposal is impossible; residency is then unchanged.
        """
        with self.lock:
            if swap.victim == ABSENT:
                return None, self.claim(swap.row, swap.expert)
            a = self.arrays
            if a.group[swap.row] != a.group[swap.victim_row]:
                raise ResidencyError(f"rows {swap.row} and {swap.victim_row} share no slots: evict within one row")
            if a.table[swap.row, swap.expert] != ABSENT or a.claims[swap.row, swap.expert] != ABSENT:
                raise ResidencyError(f"expert {swap.expert} of row {swap.row} is resident or on its way already")
            out = self.evict(swap.victim_row, swap.victim)
            return out, self.claim(swap.row, swap.expert)

    def _end_claim(self, move: Move) -> int:
        slot = int(self.arrays.claims[move.row, move.expert])
        if slot == ABSENT or slot != move.slot:
            raise ResidencyError(f"expert {move.expert} of row {move.row} holds no claim on slot {move.slot}")
        self.arrays.claims[move.row, move.expert] = ABSENT
        return slot

    # -- locks ---------------------------------------------------------------------------------------------

    def acquire(self, row: int, expert: int) -> int:
        """Lock a resident expert against eviction and return its slot, or -1 where it is absent (nothing locked)."""
        with self.lock:
            slot = int(self.arrays.table[row, expert])
            if slot != ABSENT:
                self.arrays.users[row, expert] += 1
            return slot

    def release(self, row: int, expert: int) -> None:
        """Undo one `acquire` that returned a slot."""
        with self.lock:
            assert self.arrays.users[row, expert] > 0, f"expert {expert} of row {row} released more often than acquired"
            self.arrays.users[row, expert] -= 1

    # -- invariants ----------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that table, holders, free lists, claims and locks tell one story: free + held + claimed = slots."""
        with self.lock:
            a = self.arrays
            for group, count in enumerate(a.slots):
                rows = np.flatnonzero(a.group == group)
                holder = a.holder[group, :count]
                held = np.flatnonzero(holder != ABSENT)
                free = a.free[group, : a.free_count[group]]
                claimed = a.claims[rows][a.claims[rows] != ABSENT]
                assert len(free) + len(held) + len(claimed) == count, f"group {group} lost or gained a slot"
                states = np.bincount(np.concatenate([free, held, claimed]), minlength=int(count))
                assert (states == 1).all(), f"group {group} has a slot in two states"
                assert (a.table.ravel()[holder[held]] == held).all(), f"group {group}: table and holders disagree"
                assert (a.table[rows] != ABSENT).sum() == len(held), f"group {group}: table shows an empty slot"
            assert not ((a.claims != ABSENT) & (a.table != ABSENT)).any(), "an expert on its way is visible"
            assert not ((a.users > 0) & (a.table == ABSENT)).any(), "an expert in use is absent"
            assert (a.users >= 0).all(), "a lock was released twice"


# The state changes themselves. Plain functions on the arrays, called by the methods above and compiled as they stand by
# the loops of replay, so that there is one definition of what a move does.


def take_free(a: ResidencyArrays, row: int) -> int:
    """Pop a free slot of the row's group; there must be one."""
    group = a.group[row]
    a.free_count[group] -= 1
    return int(a.free[group, a.free_count[group]])


def give_free(a: ResidencyArrays, row: int, slot: int) -> None:
    """Push a slot back."""
    group = a.group[row]
    a.free[group, a.free_count[group]] = slot
    a.free_count[group] += 1


def show(a: ResidencyArrays, row: int, expert: int, slot: int) -> None:
    """Make the expert visible in the slot."""
    a.holder[a.group[row], slot] = row * a.table.shape[1] + expert
    a.table[row, expert] = slot


def hide(a: ResidencyArrays, row: int, expert: int) -> int:
    """Take the expert out and free its slot."""
    slot = int(a.table[row, expert])
    a.table[row, expert] = ABSENT
    a.holder[a.group[row], slot] = ABSENT
    group = a.group[row]
    a.free[group, a.free_count[group]] = slot
    a.free_count[group] += 1
    return slot
