"""Who is where: the one owner of residency, used alike by replay and by the runtime.

Knows slots, locks and tiers; knows nothing of bytes, tensors or time. A promotion is two-phase: `claim` reserves a
free slot, the caller moves the bytes, `publish` makes the slot visible (or `abort` gives it back). A slot table
never maps an expert to a slot whose bytes have not landed. Not thread-safe by itself except where said: the
methods that change state take `lock`, readers copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.core import Move, Tier
from hotset.errors import ResidencyError

ABSENT = -1


class Residency:
    """Slot table and free lists of L layers with E experts each.

    slots_per_layer: [L] arena slots that belong to each layer. initial_mask: [L, E] bool, experts resident from
    the start, in ascending slot order. home: tier of the experts that are not on the GPU.
    """

    def __init__(
        self,
        num_experts: int,
        slots_per_layer: Sequence[int] | NDArray[np.int64],
        *,
        initial_mask: NDArray[np.bool_] | None = None,
        home: Tier = Tier.HOST,
    ) -> None:
        self.num_experts = int(num_experts)
        self.slots_per_layer = np.asarray(slots_per_layer, np.int64)
        self.num_layers = len(self.slots_per_layer)
        self.home = home
        self.lock = threading.RLock()
        if (self.slots_per_layer < 0).any():
            raise ResidencyError(f"slots per layer {self.slots_per_layer.tolist()}: none may be negative")
        self._table = np.full((self.num_layers, self.num_experts), ABSENT, np.int32)
        # expert held by each slot (ABSENT = free), and the slots claimed by a move under way
        self._holder = [np.full(int(s), ABSENT, np.int32) for s in self.slots_per_layer]
        self._free = [list(range(int(s) - 1, -1, -1)) for s in self.slots_per_layer]
        self._claimed: dict[tuple[int, int], int] = {}
        self._users: dict[tuple[int, int], int] = {}
        self.version = 0
        if initial_mask is not None:
            for row, expert in np.argwhere(initial_mask):
                self.publish(self.claim(int(row), int(expert)))

    # -- reading -------------------------------------------------------------------------------------------

    def slot_table(self) -> NDArray[np.int32]:
        """[L, E] slot of each resident expert, -1 = absent. A copy: later moves do not change it."""
        with self.lock:
            return self._table.copy()

    def mask(self) -> NDArray[np.bool_]:
        """[L, E] True = resident now."""
        with self.lock:
            resident: NDArray[np.bool_] = self._table != ABSENT
            return resident

    def slot(self, row: int, expert: int) -> int:
        """Slot of the expert, or -1."""
        return int(self._table[row, expert])

    def slots_of(self, row: int, experts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slot of each of the given experts of one layer, -1 = absent; same shape."""
        slots: NDArray[np.int32] = self._table[row, experts]
        return slots

    def free_slots(self, row: int) -> int:
        """Slots of the layer that hold nothing and are not claimed."""
        return len(self._free[row])

    def holders(self, row: int) -> NDArray[np.int32]:
        """[S] expert in each slot of the layer, -1 = free or claimed. A copy."""
        with self.lock:
            return self._holder[row].copy()

    # -- moving --------------------------------------------------------------------------------------------

    def claim(self, row: int, expert: int) -> Move:
        """Reserve a free slot for the expert; nobody sees it there yet.

        Raises ResidencyError: already resident, already on its way, or no free slot.
        """
        with self.lock:
            if self._table[row, expert] != ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is resident already")
            if (row, expert) in self._claimed:
                raise ResidencyError(f"expert {expert} of row {row} is on its way already")
            if not self._free[row]:
                raise ResidencyError(f"row {row} has no free slot of {self.slots_per_layer[row]}: evict one first")
            slot = self._free[row].pop()
            self._claimed[row, expert] = slot
            return Move(row, expert, self.home, Tier.GPU, slot)

    def publish(self, move: Move) -> None:
        """The bytes have landed: from now on the table shows the expert in its slot."""
        with self.lock:
            slot = self._claimed.pop((move.row, move.expert), None)
            if slot is None or slot != move.slot:
                raise ResidencyError(f"expert {move.expert} of row {move.row} holds no claim on slot {move.slot}")
            self._holder[move.row][slot] = move.expert
            self._table[move.row, move.expert] = slot
            self.version += 1

    def abort(self, move: Move) -> None:
        """The bytes did not land: the slot is free again and residency is what it was before `claim`."""
        with self.lock:
            slot = self._claimed.pop((move.row, move.expert), None)
            if slot is None or slot != move.slot:
                raise ResidencyError(f"expert {move.expert} of row {move.row} holds no claim on slot {move.slot}")
            self._free[move.row].append(slot)

    def evict(self, row: int, expert: int) -> Move:
        """Take a resident expert out; its slot is free afterwards. Raises ResidencyError: absent, or in use."""
        with self.lock:
            slot = int(self._table[row, expert])
            if slot == ABSENT:
                raise ResidencyError(f"expert {expert} of row {row} is not resident")
            if self._users.get((row, expert), 0):
                raise ResidencyError(f"expert {expert} of row {row} is in use: evict it after the token is done")
            self._table[row, expert] = ABSENT
            self._holder[row][slot] = ABSENT
            self._free[row].append(slot)
            self.version += 1
            return Move(row, expert, Tier.GPU, self.home, slot)

    # -- locks ---------------------------------------------------------------------------------------------

    def acquire(self, row: int, expert: int) -> int:
        """Lock a resident expert against eviction and return its slot, or -1 where it is absent (nothing locked)."""
        with self.lock:
            slot = int(self._table[row, expert])
            if slot != ABSENT:
                self._users[row, expert] = self._users.get((row, expert), 0) + 1
            return slot

    def release(self, row: int, expert: int) -> None:
        """Undo one `acquire` that returned a slot."""
        with self.lock:
            users = self._users.get((row, expert), 0)
            assert users > 0, f"expert {expert} of row {row} released more often than acquired"
            if users == 1:
                del self._users[row, expert]
            else:
                self._users[row, expert] = users - 1

    # -- invariants ----------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that table, holders, free lists, claims and locks tell one story: free + held + claimed = slots."""
        with self.lock:
            for row in range(self.num_layers):
                holder, table = self._holder[row], self._table[row]
                held = np.flatnonzero(holder != ABSENT)
                claimed = [slot for (r, _), slot in self._claimed.items() if r == row]
                free = self._free[row]
                assert len(free) + len(held) + len(claimed) == len(holder), f"row {row} lost or gained a slot"
                assert len({*free, *held.tolist(), *claimed}) == len(holder), f"row {row} has a slot in two states"
                assert (table[holder[held]] == held).all(), f"row {row}: table and holders disagree"
                assert (table != ABSENT).sum() == len(held), f"row {row}: table shows a slot that holds nothing"
            for row, expert in self._claimed:
                assert self._table[row, expert] == ABSENT, "an expert on its way is visible"
            for row, expert in self._users:
                assert self._table[row, expert] != ABSENT, "an expert in use is absent"
