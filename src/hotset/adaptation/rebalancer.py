"""`Rebalancer`: turns hotness into moves. The same object decides in replay and in the runtime.

Knows tracker, residency and the machine's prices; does not move bytes: it proposes swaps, and the caller evicts,
claims, copies and publishes. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotset.adaptation.loops import ABSENT, FREE, KEEP, propose, replay_ema
from hotset.adaptation.tracker import EmaHotnessTracker, as_picks
from hotset.core import Machine, as_expert_bytes
from hotset.errors import PolicyError
from hotset.machines.cost import CostModel
from hotset.residency import Residency, Swap

# Chosen on the ESFT traces together with the tracker's; see LOG.md.
DEFAULT_HYSTERESIS = 0.01
DEFAULT_MAX_MOVES = 1
DEFAULT_PROMPT_WEIGHT = 0.25

UNLIMITED = int(np.iinfo(np.int64).max)


class RebalancerArrays(NamedTuple):
    """State and settings, as arrays that compiled code can work on."""

    loaded_at: NDArray[np.int64]
    """[L, E] the row's clock when the expert was last loaded."""
    clock: NDArray[np.int64]
    """[L] tokens that each row has finished."""
    expert_bytes: NDArray[np.int64]
    """[L, E] bytes, or 1 everywhere where sizes are not known."""
    min_dwell: NDArray[np.int64]
    """[1] tokens."""
    threshold: NDArray[np.float64]
    """[1] rise in activation probability from which a swap is proposed."""


class Rebalancer:
    """Proposes a swap when a picked expert that is away is hotter, by a margin, than the coldest resident.

    hysteresis: that margin, in activation probability (the tracker's unit). With a `machine`, the margin is at least
    the gain that pays for the transfer within the slow average's memory of 1 / (1 - decay) tokens
    (`CostModel.break_even_gain`). max_moves, max_bytes: caps on loads per step, a step being one call of `finish` (one
    layer of one token, or of one prompt). min_dwell: tokens for which a newly loaded expert is safe.

    A pooled Residency lets the budget shift between layers: the coldest resident of any layer gives way.

    Raises PolicyError on settings outside their range or shapes that disagree.
    """

    name = "ema"

    def __init__(
        self,
        tracker: EmaHotnessTracker,
        residency: Residency,
        *,
        hysteresis: float = DEFAULT_HYSTERESIS,
        max_moves: int = DEFAULT_MAX_MOVES,
        max_bytes: int | None = None,
        min_dwell: int = 0,
        expert_bytes: ArrayLike | None = None,
        machine: Machine | None = None,
    ) -> None:
        shape = (tracker.num_layers, tracker.num_experts)
        if (residency.num_layers, residency.num_experts) != shape:
            raise PolicyError(
                f"tracker has {shape[0]} layers of {shape[1]} experts, residency {residency.num_layers} of "
                f"{residency.num_experts}"
            )
        if not 0.0 <= hysteresis <= 1.0:
            raise PolicyError(f"hysteresis is {hysteresis}: wanted a probability between 0 and 1")
        if max_moves < 0 or min_dwell < 0 or (max_bytes is not None and max_bytes < 0):
            raise PolicyError(
                f"max_moves {max_moves}, max_bytes {max_bytes}, min_dwell {min_dwell}: none may be negative"
            )
        if max_bytes is not None and expert_bytes is None:
            raise PolicyError("max_bytes needs expert_bytes: sizes are not known")
        self.tracker, self.residency = tracker, residency
        self.max_moves = int(max_moves)
        self.max_bytes = UNLIMITED if max_bytes is None else int(max_bytes)
        sizes = as_expert_bytes(expert_bytes, *shape)
        pays = 0.0
        if machine is not None:
            pays = CostModel(machine).break_even_gain(1.0 / (1.0 - float(tracker.arrays.decay[0])))
        self.arrays = RebalancerArrays(
            loaded_at=np.full(shape, -min_dwell, np.int64),
            clock=np.zeros(shape[0], np.int64),
            expert_bytes=np.ones(shape, np.int64) if sizes is None else sizes,
            min_dwell=np.array([min_dwell], np.int64),
            threshold=np.array([max(hysteresis, pays)], np.float64),
        )

    # -- one step ------------------------------------------------------------------------------------------

    def request(self, row: int, expert: int) -> Swap | None:  # noqa: ARG002
        """Nothing: this policy decides when the token is done."""
        return None

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:
        """A layer has served its picks [K], or a prompt's [T, K]: observe them and propose swaps, best first.

        Begin each swap (`Residency.begin`) before asking for the next. A swap may be dropped instead: the same expert
        is then not proposed again in this step.
        """
        ids = as_picks(picks)
        self.tracker.observe_row(row, ids)
        self.arrays.clock[row] += len(ids)
        candidates = ids.reshape(-1)
        bytes_left = self.max_bytes
        for _ in range(self.max_moves):
            expert, verdict = propose(
                self.residency.arrays, self.tracker.arrays, self.arrays, row, candidates, bytes_left
            )
            if expert == ABSENT:
                return
            self.arrays.loaded_at[row, expert] = self.arrays.clock[row]
            bytes_left -= int(self.arrays.expert_bytes[row, expert])
            yield self._swap(row, int(expert), int(verdict))
            if self.residency.slot(row, expert) == ABSENT and self.residency.arrays.claims[row, expert] == ABSENT:
                candidates = candidates[candidates != expert]

    def replay(
        self,
        first_row: int,
        ids: NDArray[np.int16],
        served: NDArray[np.uint8],
        loads: NDArray[np.int32],
        load_bytes: NDArray[np.int64],
    ) -> None:
        """The same as driving `finish` over ids [R, T, K] token by token and publishing every swap at once, compiled.

        served [R, T, K], loads [R, T], load_bytes [R, T]: filled in, see `adaptation.loops`.
        """
        replay_ema(
            self.residency.arrays,
            self.tracker.arrays,
            self.arrays,
            first_row,
            ids,
            served,
            loads,
            load_bytes,
            self.max_moves,
            self.max_bytes,
        )
        self.residency.version += int(loads.sum())

    # -- whole residency -----------------------------------------------------------------------------------

    def rebalance(self, *, max_moves: int | None = None, max_bytes: int | None = None) -> Iterator[Swap]:
        """Propose swaps until no expert that is away is hotter, by the margin, than a resident of its slots.

        Largest gain per byte first, within the caps. For the times when a pause is worth it: after a prompt, at a
        change of workload. O(L E log E). The rows' dwell times are not asked.
        """
        heat = self.tracker.hotness()
        a = self.residency.arrays
        swaps: list[tuple[float, Swap]] = []
        for group in range(len(a.slots)):
            rows = np.flatnonzero(a.group == group)
            resident = [(heat[r, e], r, e) for r in rows for e in np.flatnonzero(a.table[r] != ABSENT)]
            leaving = sorted((c for c in resident if a.users[c[1], c[2]] == 0), key=lambda c: c[0])
            away = (a.table[rows] == ABSENT) & (a.claims[rows] == ABSENT)
            coming = sorted(
                ((heat[rows[i], e], int(rows[i]), int(e)) for i, e in np.argwhere(away)), key=lambda c: (-c[0], c[1:])
            )
            free = int(a.free_count[group])
            for index, (value, row, expert) in enumerate(coming):
                size = int(self.arrays.expert_bytes[row, expert])
                if index < free:
                    if value <= 0.0:
                        break
                    swaps.append((value / size, Swap(row, expert)))
                    continue
                if index - free >= len(leaving):
                    break
                cold, victim_row, victim = leaving[index - free]
                if value <= cold + self.arrays.threshold[0]:
                    break
                swaps.append(((value - cold) / size, Swap(row, expert, int(victim_row), int(victim))))
        bytes_left = UNLIMITED if max_bytes is None else max_bytes
        moves_left = UNLIMITED if max_moves is None else max_moves
        for _, swap in sorted(swaps, key=lambda s: -s[0]):
            size = int(self.arrays.expert_bytes[swap.row, swap.expert])
            if moves_left == 0:
                return
            if size > bytes_left:
                continue
            moves_left, bytes_left = moves_left - 1, bytes_left - size
            self.arrays.loaded_at[swap.row, swap.expert] = self.arrays.clock[swap.row]
            yield swap

    def start_decode(
        self, prompt_counts: NDArray[np.int64], prompt_tokens: int, *, weight: float = DEFAULT_PROMPT_WEIGHT
    ) -> None:
        """Let a prompt's routing inform the decode that follows it; then call `rebalance`.

        prompt_counts: [L, E] activations of the prompt. weight: share of the prompt in the new hotness, the rest is
        what the tracker knew. Raises PolicyError on an empty prompt or a weight outside 0 to 1.
        """
        if prompt_tokens < 1 or not 0.0 <= weight <= 1.0:
            raise PolicyError(f"prompt of {prompt_tokens} tokens with weight {weight}: wanted a prompt, and 0 to 1")
        self.tracker.set_hotness((1.0 - weight) * self.tracker.hotness() + weight * prompt_counts / prompt_tokens)

    def _swap(self, row: int, expert: int, verdict: int) -> Swap:
        assert verdict != KEEP
        if verdict == FREE:
            return Swap(row, expert)
        return Swap(row, expert, verdict // self.tracker.num_experts, verdict % self.tracker.num_experts)
