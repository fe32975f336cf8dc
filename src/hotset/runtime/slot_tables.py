"""The slot table that kernels read: a copy of `Residency`'s at a constant address, and the order in which it may
change.

Knows which slots are being written and on which stream; moves no bytes. A kernel reads the table long after the host
decided, so two things must never happen, and both are a matter of order:

1. A slot is written while the table still maps an expert to it. An evicted expert must be gone from the table, and
   every kernel launched with the older table must be done, before the first byte of the next expert is copied in:
   `before_copy` refreshes the table and returns an event for the copying stream to wait on.
2. The table maps an expert to a slot whose bytes are still under way. `publish` makes the computing stream wait for
   the copy, and only then shows the expert.

    out, move = residency.begin(swap)              # evict, claim
    copy_stream.wait_event(tables.before_copy())
    ... copy the bytes into move.slot on copy_stream, then landed.record(copy_stream)
    tables.publish([move], landed)

Without CUDA the events are None and the order of the calls is the whole fence. The constant address lets a captured
CUDA graph read the table of the moment at every replay.

Does not know: who decides on moves (policies, `prestage`), nor how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hotset.core import Move
from hotset.errors import ResidencyError
from hotset.residency import ABSENT, Residency


class SlotTables:
    """[L, E] int32 slot of each expert, -1 = absent, as `hotset.ops` takes it.

    device: None keeps a NumPy array; a torch device keeps a tensor there. Nothing here waits for the device: uploads go
    from page-locked memory on the current stream.
    """

    def __init__(self, residency: Residency, device: Any = None) -> None:
        self.residency = residency
        self._version = -1
        self._is_cuda = False
        shape = (residency.num_layers, residency.num_experts)
        self._shown = np.full(shape, ABSENT, np.int32)
        if device is None:
            self._tables: Any = self._shown
        else:
            import torch

            self._tables = torch.full(shape, ABSENT, dtype=torch.int32, device=device)
            self._is_cuda = self._tables.is_cuda
        self.refresh()

    @property
    def tables(self) -> Any:
        """[L, E] the live table: kernels read it, nobody else writes it."""
        return self._tables

    def row(self, row: int) -> Any:
        """[E] the live table of one layer, a view: take it once, it stays valid."""
        return self._tables[row]

    def refresh(self) -> bool:
        """Bring the table up to residency's present state, in place, on the current stream. False = it was already."""
        with self.residency.lock:
            if self.residency.version == self._version:
                return False
            np.copyto(self._shown, self.residency.arrays.table)
            self._version = self.residency.version
        if self._tables is self._shown:
            return True
        import torch

        # a fresh page-locked buffer each time: torch's allocator keeps it until the copy is done
        source = torch.from_numpy(self._shown.copy())
        self._tables.copy_(source.pin_memory() if self._is_cuda else source, non_blocking=True)
        return True

    def before_copy(self) -> Any:
        """Call after `begin` (or `evict` and `claim`) and before the first byte goes to a claimed slot.

        Takes evicted experts out of the table and returns the event, recorded on the current (computing) stream, that
        the copying stream has to wait for; None without CUDA. Raises ResidencyError where a claimed slot is still
        visible.
        """
        self.refresh()
        self._check_claims()
        if not self._is_cuda:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._tables.device))
        return event

    def publish(self, moves: Iterable[Move], landed: Any = None) -> None:
        """Show experts whose bytes were copied. landed: the event recorded on the copying stream after the last byte,
        for which the current stream waits (the host does not); None where the copy is done already.

        Raises ResidencyError: a move that holds no claim.
        """
        if landed is not None:
            import torch

            torch.cuda.current_stream(self._tables.device).wait_event(landed)
        for move in moves:
            self.residency.publish(move)
        self.refresh()

    def check_integrity(self) -> None:
        """Assert that the table, up to date or older, maps no expert to a slot that another has or is getting."""
        self._check_claims()
        with self.residency.lock:
            for row in range(self.residency.num_layers):
                experts = np.flatnonzero(self._shown[row] != ABSENT)
                holders = self.residency.holders(row)[self._shown[row, experts]]
                # ABSENT = evicted since: the old bytes are still there until somebody claims the slot
                assert ((holders == experts) | (holders == ABSENT)).all(), f"row {row} shows somebody in another's slot"
        if self._tables is not self._shown:
            assert (self._tables.cpu().numpy() == self._shown).all(), "the device's table is not what was uploaded"

    def _check_claims(self) -> None:
        with self.residency.lock:
            arrays = self.residency.arrays
            for row, expert in np.argwhere(arrays.claims != ABSENT):
                slot = arrays.claims[row, expert]
                rows = arrays.group == arrays.group[row]
                if (self._shown[rows] == slot).any():
                    raise ResidencyError(
                        f"slot {slot} is claimed for expert {expert} of row {row} but the device's table still shows "
                        "an expert there: call before_copy() between evict and the copy"
                    )
