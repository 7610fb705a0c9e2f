"""The queue: by priority class, within each class by tenant, within each tenant by arrival.

The scheduler admits `first`; the accounts determine whose turn it is. The queue knows nothing of
blocks, steps or time.

When there are not enough places or blocks for all that run, one sequence yields. It always has the
lowest priority. Within that priority it is the one admitted last, so that the oldest always makes
progress. The exception: if another tenant is ahead of that one's tenant by more than it costs to
compute its sequence again, that tenant's sequence yields. The margin keeps two tenants from pausing
each other in turn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import takewhile
from operator import attrgetter
from typing import Any

from ryzanstein.worker.engine.sequence import PREFILL_WEIGHT, Account, Accounts, Order, Sequence, SequenceGroup


def first_to_yield(running: OrderedSequences) -> Sequence:
    """Returns the sequence that yields. `running` must not be empty."""
    last = running[-1]
    lowest = takewhile(lambda other: other.group.priority == last.group.priority, reversed(running))
    # `max` keeps the first of equals: within a tenant, the one that was admitted last.
    ahead = max(lowest, key=lambda other: other.group.account.counter)
    lead = ahead.group.account.counter - last.group.account.counter
    return ahead if lead > PREFILL_WEIGHT * ahead.num_tokens else last


class OrderedSequences:
    """A list sorted by an attribute that is unique and constant while the sequence is in the list.

    It has some hundred entries at most: shifting pointers is cheaper than a tree or lazy deletion.
    """

    def __init__(self, attribute: str) -> None:
        self._items: list[Sequence] = []
        self._key: Any = attrgetter(attribute)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, i: int) -> Sequence:
        return self._items[i]

    def __contains__(self, sequence: Sequence) -> bool:
        i = bisect_left(self._items, self._key(sequence), key=self._key)
        return i < len(self._items) and self._items[i] is sequence

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def insert(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which must be in the list."""
        del self._items[bisect_left(self._items, self._key(sequence), key=self._key)]


_Lines = dict[Account, OrderedSequences]


class _PriorityClass:
    """The accounts of a priority class and the queues of those that wait; no queue is empty."""

    def __init__(self, max_idle_tenants: int) -> None:
        self.accounts = Accounts(max_idle_tenants)
        self.lines: _Lines = {}
        self.num_waiting = 0

    def insert(self, sequence: Sequence) -> None:
        self.lines.setdefault(sequence.group.account, OrderedSequences("order")).insert(sequence)
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        account = sequence.group.account
        self.lines[account].remove(sequence)
        self.num_waiting -= 1
        if not self.lines[account]:
            del self.lines[account]
            self.accounts.left_line(account)

    @property
    def next(self) -> Sequence:
        """Returns the first sequence of the tenant with the least counter.

        Ties are resolved in order of arrival.
        """
        return min(((account.counter, line[0].order, line) for account, line in self.lines.items()))[2][0]

    @property
    def longest(self) -> Account:
        return max(self.lines, key=lambda account: len(self.lines[account]))


class WaitingLine:
    """All sequences that wait for a place in the batch."""

    def __init__(self, max_idle_tenants: int) -> None:
        self._classes: defaultdict[int, _PriorityClass] = defaultdict(lambda: _PriorityClass(max_idle_tenants))
        self._num = 0
        self.num_tokens = 0
        """The tokens that the waiting sequences have so far."""

    def __len__(self) -> int:
        return self._num

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._classes[sequence.group.priority].lines.get(sequence.group.account)
        return line is not None and sequence in line

    @property
    def first(self) -> Sequence | None:
        """Returns the sequence that is next.

        It is the oldest of the tenant with the least counter, in the highest priority that waits.
        """
        return self._classes[max(self._priorities())].next if self._num else None

    @property
    def num_waiting(self) -> Mapping[int, int]:
        """Returns the number of waiting sequences by priority, for every priority ever seen."""
        return {priority: members.num_waiting for priority, members in self._classes.items()}

    def open(self, priority: int, tenant: str) -> Account:
        """Returns the account of a group that arrives. Pair with `close`."""
        members = self._classes[priority]
        return members.accounts.open(tenant, members.lines.keys())

    def close(self, group: SequenceGroup) -> None:
        """Closes a group that has ended and of which nothing waits."""
        self._classes[group.priority].accounts.close(group.account)

    def insert(self, sequence: Sequence) -> None:
        self._classes[sequence.group.priority].insert(sequence)
        self._num += 1
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which must be waiting."""
        self._classes[sequence.group.priority].remove(sequence)
        self._num -= 1
        self.num_tokens -= sequence.num_tokens

    def in_turn(self, charge: float) -> Iterator[Sequence]:
        """Yields all waiting sequences in the order of admission.

        The order assumes that each admission costs its tenant `charge`. The queue must not change
        meanwhile.
        """
        for priority in sorted(self._priorities(), reverse=True):
            yield from _in_turn(self._classes[priority].lines, charge)

    def displaceable(self, group: SequenceGroup) -> Sequence | None:
        """Returns the sequence that gives up its place in a full queue to a group that arrives.

        It is the youngest in the longest queue of a lower priority, or of a tenant of the same
        priority that has more places than this one; never one for which work was already done. A
        continuation, whose client is reading, also takes the place of its equals. Returns None if
        there is no such sequence: the arriving group must be refused.
        """
        for priority in sorted(p for p in self._priorities() if p <= group.priority):
            lines, longest = self._classes[priority].lines, self._classes[priority].longest
            if priority == group.priority and group.fresh and not _has_more(lines, longest, group.account):
                return None
            youngest = next((sequence for sequence in reversed(lines[longest]) if sequence.group.fresh), None)
            if youngest is not None:
                return youngest
        return None

    def _priorities(self) -> list[int]:
        return [priority for priority, members in self._classes.items() if members.num_waiting]


def _has_more(lines: _Lines, longest: Account, account: Account) -> bool:
    return len(lines[longest]) > len(lines.get(account, ())) + 1


def _in_turn(lines: _Lines, charge: float) -> Iterator[Sequence]:
    heap: list[tuple[float, Order, int, OrderedSequences]]
    heap = [(account.counter, line[0].order, 0, line) for account, line in lines.items()]
    heapify(heap)
    while heap:
        counter, _, i, line = heap[0]
        yield line[i]
        if i + 1 < len(line):
            heapreplace(heap, (counter + charge, line[i + 1].order, i + 1, line))
        else:
            heappop(heap)
