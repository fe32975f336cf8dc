"""Look-ahead: what a token picked in one layer says what it will pick in the next, so load that before its turn.

A table of transitions, learned online: of the tokens that picked e in a layer, the share that picked e' in the next.
The prediction for the next layer is the mean of these shares over the K picks. Below it lies the `ema` policy, which
says what is worth keeping; a predicted expert displaces the resident that is worth least, prediction and hotness
together.

Prefetches must land while the current layer computes. Replay takes them to do so and charges their bytes to the link.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from hotset.adaptation.loops import ABSENT, FREE, KEEP, commit, hotness, observe, propose, serve
from hotset.adaptation.rebalancer import Rebalancer
from hotset.errors import PolicyError
from hotset.policies import Setting, ema
from hotset.residency import Swap

# Chosen on the ESFT traces; see LOG.md.
DEFAULT_MARGIN = 0.1
DEFAULT_MAX_PREFETCH = 1
DEFAULT_HOTNESS_WEIGHT = 2.0

FORGET_AFTER = 2048.0
"""Tokens of one expert after which its transitions are halved: old enough to be precise, young enough to drift."""


class TransitionArrays(NamedTuple):
    followers: NDArray[np.float32]
    """[L, E, E] of the tokens that picked e in the row above: how often they picked e' in this row. Row 0 unused."""
    seen: NDArray[np.float32]
    """[L, E] tokens that picked e in the row above."""
    previous: NDArray[np.int64]
    """[K] the latest token's picks in the row above; previous_row says of which row."""
    previous_row: NDArray[np.int64]
    """[1]"""
    prediction: NDArray[np.float64]
    """[E] scratch: predicted probability for the next row."""
    margin: NDArray[np.float64]
    """[1] gain in worth from which a prefetch is proposed."""
    hotness_weight: NDArray[np.float64]
    """[1] worth = prediction + hotness_weight * hotness."""


@njit(cache=True, nogil=True)
def _learn_and_predict(p, row, num_layers, picks):
    """Count the step from the row above to this one; fill `prediction` for the row below. False where there is none."""
    if row > 0 and p.previous_row[0] == row - 1:
        for j in range(len(p.previous)):
            before = p.previous[j]
            if before < 0:
                continue
            p.seen[row, before] += 1
            for k in range(len(picks)):
                if picks[k] >= 0:
                    p.followers[row, before, picks[k]] += 1
            if p.seen[row, before] >= FORGET_AFTER:
                p.seen[row, before] *= 0.5
                p.followers[row, before, :] *= np.float32(0.5)
    p.previous_row[0] = row
    p.previous[:] = -1
    for k in range(len(picks)):
        p.previous[k] = picks[k]
    if row + 1 == num_layers:
        return False
    prediction = p.prediction
    prediction[:] = 0.0
    known = 0
    for k in range(len(picks)):
        if picks[k] >= 0 and p.seen[row + 1, picks[k]] > 0:
            known += 1
            share = 1.0 / p.seen[row + 1, picks[k]]
            followers = p.followers[row + 1, picks[k]]
            for expert in range(len(prediction)):
                prediction[expert] += share * followers[expert]
    if known == 0:
        return False
    for expert in range(len(prediction)):
        prediction[expert] /= known
    return True


@njit(cache=True, nogil=True)
def _propose_prefetch(a, h, p, row):
    """(expert, verdict) for the row that was predicted: the worthiest that is away, if the worth gained exceeds it."""
    weight, fast_weight = p.hotness_weight[0], h.fast_weight[0]
    slow_factor, fast_factor = (1.0 - fast_weight) / h.scale[row, 0], fast_weight / h.scale[row, 1]
    prediction, sums, table, claims = p.prediction, h.sums[row], a.table[row], a.claims[row]
    best, best_worth = ABSENT, -1.0
    for expert in range(len(prediction)):
        if prediction[expert] > 0.0 and table[expert] == ABSENT and claims[expert] == ABSENT:
            heat = slow_factor * sums[expert, 0] + fast_factor * sums[expert, 1]
            worth = prediction[expert] + weight * heat
            if worth > best_worth:
                best, best_worth = expert, worth
    if best == ABSENT:
        return ABSENT, KEEP
    group = a.group[row]
    if a.free_count[group] > 0:
        return best, FREE
    num_experts = len(prediction)
    victim, least = ABSENT, 0.0
    for slot in range(a.slots[group]):
        key = a.holder[group, slot]
        if key == ABSENT:
            continue
        its_row, expert = row, key - row * num_experts
        if 0 <= expert < num_experts:
            heat = slow_factor * sums[expert, 0] + fast_factor * sums[expert, 1]
            worth = prediction[expert] + weight * heat
        else:
            its_row, expert = key // num_experts, key % num_experts
            worth = weight * hotness(h, its_row, expert)
        if (victim == ABSENT or worth < least) and a.users[its_row, expert] == 0:
            victim, least = key, worth
    if victim == ABSENT or best_worth - least <= p.margin[0]:
        return ABSENT, KEEP
    return best, victim


@njit(cache=True, nogil=True)
def _replay(a, h, r, p, first_row, ids, served, loads, load_bytes, max_moves, max_bytes, max_prefetch):
    for t in range(ids.shape[1]):
        for i in range(ids.shape[0]):
            row = first_row + i
            picks = ids[i, t]
            serve(a, row, picks, served[i, t])
            observe(h, row, ids[i, t : t + 1])
            r.clock[row] += 1
            bytes_left = max_bytes
            for _ in range(max_moves):
                expert, verdict = propose(a, h, r, row, picks, bytes_left)
                if expert == ABSENT:
                    break
                commit(a, row, expert, verdict)
                r.loaded_at[row, expert] = r.clock[row]
                bytes_left -= r.expert_bytes[row, expert]
                loads[i, t] += 1
                load_bytes[i, t] += r.expert_bytes[row, expert]
            if _learn_and_predict(p, row, a.table.shape[0], picks):
                for _ in range(max_prefetch):
                    expert, verdict = _propose_prefetch(a, h, p, row + 1)
                    if expert == ABSENT:
                        break
                    commit(a, row + 1, expert, verdict)
                    loads[i, t] += 1
                    load_bytes[i, t] += r.expert_bytes[row + 1, expert]


class LookaheadPolicy:
    """`ema` plus prefetch for the next layer. Raises PolicyError on a negative cap, margin or weight."""

    name = "look-ahead"

    def __init__(
        self,
        rebalancer: Rebalancer,
        top_k: int,
        *,
        margin: float = DEFAULT_MARGIN,
        max_prefetch: int = DEFAULT_MAX_PREFETCH,
        hotness_weight: float = DEFAULT_HOTNESS_WEIGHT,
    ) -> None:
        if margin < 0 or max_prefetch < 0 or hotness_weight < 0:
            raise PolicyError(
                f"margin {margin}, max_prefetch {max_prefetch}, hotness_weight {hotness_weight}: none may be negative"
            )
        self.rebalancer, self.residency, self.max_prefetch = rebalancer, rebalancer.residency, int(max_prefetch)
        num_layers, num_experts = self.residency.num_layers, self.residency.num_experts
        self.arrays = TransitionArrays(
            followers=np.zeros((num_layers, num_experts, num_experts), np.float32),
            seen=np.zeros((num_layers, num_experts), np.float32),
            previous=np.full(top_k, -1, np.int64),
            previous_row=np.full(1, -1, np.int64),
            prediction=np.zeros(num_experts),
            margin=np.array([margin], np.float64),
            hotness_weight=np.array([hotness_weight], np.float64),
        )

    def request(self, row: int, expert: int) -> Swap | None:  # noqa: ARG002
        return None

    def finish(self, row: int, picks: ArrayLike) -> Iterator[Swap]:
        """The rebalancer's proposals for this row, then prefetches for the next."""
        ids = np.asarray(picks)
        yield from self.rebalancer.finish(row, ids)
        if not _learn_and_predict(self.arrays, row, self.residency.num_layers, ids):
            return
        tracked, num_experts = self.rebalancer.tracker.arrays, self.residency.num_experts
        for _ in range(self.max_prefetch):
            expert, verdict = _propose_prefetch(self.residency.arrays, tracked, self.arrays, row + 1)
            if expert == ABSENT:
                return
            if verdict == FREE:
                yield Swap(row + 1, int(expert))
            else:
                yield Swap(row + 1, int(expert), int(verdict) // num_experts, int(verdict) % num_experts)

    def replay(
        self,
        first_row: int,
        ids: NDArray[np.int16],
        served: NDArray[np.uint8],
        loads: NDArray[np.int32],
        load_bytes: NDArray[np.int64],
    ) -> None:
        _replay(
            self.residency.arrays,
            self.rebalancer.tracker.arrays,
            self.rebalancer.arrays,
            self.arrays,
            first_row,
            ids,
            served,
            loads,
            load_bytes,
            self.rebalancer.max_moves,
            self.rebalancer.max_bytes,
            self.max_prefetch,
        )
        self.residency.version += int(loads.sum())


def make(
    _name: str,
    setting: Setting,
    margin: float = DEFAULT_MARGIN,
    max_prefetch: int = DEFAULT_MAX_PREFETCH,
    hotness_weight: float = DEFAULT_HOTNESS_WEIGHT,
    **options: Any,
) -> LookaheadPolicy:
    """Options: margin, max_prefetch, hotness_weight, and those of `ema`."""
    return LookaheadPolicy(
        ema.make("ema", setting, **options),
        setting.top_k,
        margin=margin,
        max_prefetch=max_prefetch,
        hotness_weight=hotness_weight,
    )
