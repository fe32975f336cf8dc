"""Remapping routed expert ids to arena slots, and shedding: one contract, several implementations.

    slots, mix, miss_ids, miss_scores = hotset.ops.route_shed(indices, scores, slot_table)

`contract` states what every implementation computes, bit for bit; `dispatch` chooses one and says why; `shed` has the
keep-mass policy, the ledger of what was dropped and the order of fetches. Works on arrays alone: it knows nothing of
residency, models or bytes.
"""

from hotset.ops.contract import MAX_PICKS, ShedRouting, SplitRouting
from hotset.ops.dispatch import (
    BACKENDS,
    Backend,
    Choice,
    available_backends,
    choose_backend,
    route_shed,
    split_by_residency,
)
from hotset.ops.shed import PolicyRouting, ShedLedger, ShedPolicy, ShedTotals, order_fetches

__all__ = [
    "BACKENDS",
    "MAX_PICKS",
    "Backend",
    "Choice",
    "PolicyRouting",
    "ShedLedger",
    "ShedPolicy",
    "ShedRouting",
    "ShedTotals",
    "SplitRouting",
    "available_backends",
    "choose_backend",
    "order_fetches",
    "route_shed",
    "split_by_residency",
]
