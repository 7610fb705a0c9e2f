"""Chooses the sequence that yields when there are not enough places or blocks for all that run.

It always has the lowest priority. Within that priority it is the one admitted last, so that the
oldest always makes progress. The exception: if another tenant is ahead of that one's tenant by more
than it costs to compute its sequence again, that tenant's sequence yields. The margin keeps two
tenants from pausing each other in turn.
"""

from __future__ import annotations

from itertools import takewhile

from ryzanstein.worker.engine.accounts import PREFILL_WEIGHT
from ryzanstein.worker.engine.scheduling.ordered import OrderedSequences
from ryzanstein.worker.engine.sequence import Sequence


def first_to_yield(running: OrderedSequences) -> Sequence:
    """Returns the sequence that yields. `running` must not be empty."""
    last = running[-1]
    lowest = takewhile(lambda other: other.group.priority == last.group.priority, reversed(running))
    # `max` keeps the first of equals: within a tenant, the one that was admitted last.
    ahead = max(lowest, key=lambda other: other.group.account.counter)
    lead = ahead.group.account.counter - last.group.account.counter
    return ahead if lead > PREFILL_WEIGHT * ahead.num_tokens else last
