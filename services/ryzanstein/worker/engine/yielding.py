"""Who gives way when there are not places or blocks enough for all that run.

The lowest priority, always. Within it the one that was admitted last, so that the oldest always gets on; unless another
tenant is ahead of that one's by more than it costs to compute the sequence again, which keeps two tenants from pausing each
other in turn.
"""

from __future__ import annotations

from itertools import takewhile

from ryzanstein.worker.engine.accounts import PREFILL_WEIGHT
from ryzanstein.worker.engine.ordered import OrderedSequences
from ryzanstein.worker.engine.sequence import Sequence


def first_to_yield(running: OrderedSequences) -> Sequence:
    """`running` is not empty."""
    last = running[-1]
    lowest = takewhile(lambda other: other.group.priority == last.group.priority, reversed(running))
    # `max` keeps the first of equals: of a tenant the one that was admitted last.
    ahead = max(lowest, key=lambda other: other.group.account.counter)
    lead = ahead.group.account.counter - last.group.account.counter
    return ahead if lead > PREFILL_WEIGHT * ahead.num_tokens else last
