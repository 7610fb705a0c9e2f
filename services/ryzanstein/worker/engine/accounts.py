"""Counts how much each tenant has been served: the virtual token counters that make tenants equal.

Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every
tenant has a counter of the tokens that were computed for it, weighted by what they cost. The
waiting tenant with the least counter is next. A tenant whose queue was empty is lifted to the least
counter of those that wait, so that no tenant saves up service by staying away.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import nsmallest
from operator import attrgetter

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2  # a generated token occupies a place in the batch for a whole step; the weights of the paper
_by_counter = attrgetter("counter")


class Account:
    """A tenant's counter in one priority class, in weighted tokens.

    `num_groups` have not ended.
    """

    __slots__ = ("counter", "num_groups", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.counter = 0
        self.num_groups = 0


class Accounts:
    """The accounts of one priority class.

    At most `max_idle` accounts of idle tenants are kept. The ones with the least counters are
    dropped first: they would be lifted anyway when they come back.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}
        self._last_counter = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, tenant: str, waiting: Collection[Account]) -> Account:
        """Returns the account that a new group is charged to. Pair with `close`.

        `waiting` are the accounts that have a queue.
        """
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant)
        self._idle.pop(tenant, None)
        account.num_groups += 1
        if account not in waiting:
            account.counter = max(account.counter, min(map(_by_counter, waiting), default=self._last_counter))
        return account

    def close(self, account: Account) -> None:
        """Records that one of its groups has ended."""
        account.num_groups -= 1
        if account.num_groups == 0:
            self._idle[account.tenant] = account
            if len(self._idle) > self._max_idle:
                self._forget(len(self._idle) - self._max_idle // 2)

    def left_line(self, account: Account) -> None:
        """Records that nothing of the account waits any more.

        A tenant that joins an empty queue starts at the counter of the last one that left it.
        """
        self._last_counter = account.counter

    def _forget(self, num: int) -> None:
        for account in nsmallest(num, self._idle.values(), key=_by_counter):
            del self._idle[account.tenant], self._accounts[account.tenant]
