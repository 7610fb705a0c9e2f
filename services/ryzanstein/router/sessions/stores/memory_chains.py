"""Kept responses in a dictionary: each may continue another, which then stays as long as it does."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ryzanstein.router.sessions.store import OBJECT_MARK, Session, is_object

_STALE_ENTRIES = 64


class ResponseChains:
    """The responses with their objects. Those that no other one continues can be evicted: they are `leaves`."""

    def __init__(self) -> None:
        self.kept: dict[str, Session] = {}
        self._num_children: Counter[str] = Counter()
        # In the order of use, whatever the clock says. Entries of responses that are gone, or are no leaves any
        # more, are skipped.
        self._leaves: list[tuple[int, str]] = []
        self._used: dict[str, int] = {}
        self._uses = itertools.count()

    def add(self, session: Session) -> None:
        """Adds a response or an object. A response's parent, which must be there, is used by that."""
        self.kept[session.session_id] = session
        if is_object(session.session_id):
            return
        if session.parent:
            self._num_children[session.parent] += 1
            self.kept[session.parent] = replace(self.kept[session.parent], update_time=time.time())
            self._used[session.parent] = next(self._uses)
        self._used[session.session_id] = next(self._uses)
        self._is_leaf(session.session_id)

    def continuable(self, session_id: str) -> bool:
        return session_id in self.kept and not self.kept[session_id].deleted

    def oldest(self) -> Session | None:
        """Returns the leaf that was used least recently."""
        while self._leaves:
            used, session_id = self._leaves[0]
            if self._used.get(session_id) == used and not self._num_children[session_id]:
                return self.kept[session_id]
            heapq.heappop(self._leaves)
        return None

    def delete(self, session_id: str) -> list[Session]:
        """Deletes a response or an object. Returns what is gone: a response that others continue stays for those."""
        if self._num_children[session_id]:
            self.kept[session_id] = replace(self.kept[session_id], deleted=True)
            return []
        return list(self.removed(session_id))

    def removed(self, session_id: str) -> Iterator[Session]:
        """Removes a leaf with its object, and the deleted responses that only it continued. Yields them."""
        while session_id:
            session = self.kept.pop(session_id)
            self._used.pop(session_id, None)
            yield session
            if (beside := self.kept.pop(session_id + OBJECT_MARK, None)) is not None:
                yield beside
            session_id = self._unneeded(session.parent)

    def _unneeded(self, parent: str) -> str:
        """Counts one child less. Returns the parent if it was deleted and nothing continues it."""
        if parent not in self.kept:
            return ""
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return ""
        del self._num_children[parent]
        if self.kept[parent].deleted:
            return parent
        self._is_leaf(parent)
        return ""

    def _is_leaf(self, session_id: str) -> None:
        heapq.heappush(self._leaves, (self._used[session_id], session_id))
        if len(self._leaves) > 2 * len(self.kept) + _STALE_ENTRIES:
            self._leaves = [(used, each) for each, used in self._used.items() if not self._num_children[each]]
            heapq.heapify(self._leaves)
