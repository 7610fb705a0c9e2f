"""Which orchestrators and which of their answers a node may obey.

A leader that was stopped and runs again does not know yet that another leads. What it answered before
may lie in a socket meanwhile, so the age of an answer counts from the beat that it answers, by the
node's own clock, which includes the time in which the node did not run.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import structlog

from ryzanstein.clock import boot_s
from ryzanstein.files.private_files import opener, private_folder
from ryzanstein.leaders.epochs import KnownLeader, LeaderEpoch

log = structlog.get_logger(__name__)

VOID_AFTER_S = 3.0
_MOST_OPEN = 1024
_DISK_S = 2.0
"""How long a node waits for its disk before it follows a new leader."""
_MOST_BYTES = 4096


class KeptLeader:
    """The latest leader that a node has met, in a file, so that a restarted node obeys no earlier one.

    A disk that cannot be read or written is logged, and stops nothing: the node then knows what this process has met.
    """

    def __init__(self, folder: Path | None = None, *whose: str) -> None:
        """Without a folder, it is in memory alone. Nodes share one: `whose` are the node's id and its orchestrators."""
        name = blake2b("\0".join(whose).encode(), digest_size=8).hexdigest()
        self._path = None if folder is None else folder / f"leader-{name}.json"
        self._known = KnownLeader()
        self._read = self._path is None

    @property
    def latest(self) -> LeaderEpoch:
        return self._known.latest

    async def load(self) -> None:
        """Reads the file, once."""
        if self._read:
            return
        self._read = True
        kept = await self._on_disk(self._load)
        if kept is not None:
            self._known.latest = max(self._known.latest, kept)

    async def follow(self, leader: LeaderEpoch) -> None:
        """Records who says something; returns when a new leader is kept. Raises StaleLeaderError; see `KnownLeader`."""
        before = self._known.latest
        self._known.follow(leader)
        if self._path is not None and self._known.latest != before:
            await self._on_disk(lambda: self._save(leader))

    async def _on_disk(self, access: Callable[[], LeaderEpoch | None]) -> LeaderEpoch | None:
        try:
            async with asyncio.timeout(_DISK_S):
                return await asyncio.to_thread(access)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("latest leader not kept", path=str(self._path), error=f"{type(error).__name__}: {error}")
            return None

    def _load(self) -> LeaderEpoch | None:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                kept = json.loads(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return None
        return LeaderEpoch(int(kept["epoch"]), str(kept["leader_id"]))

    def _save(self, leader: LeaderEpoch) -> None:
        assert self._path is not None
        private_folder(self._path.parent)
        new = self._path.with_suffix(".new")
        with open(new, "w", encoding="utf-8", opener=opener) as file:
            json.dump({"epoch": leader.epoch, "leader_id": leader.leader_id}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


class LateAnswers:
    """The beats of one stream that are not answered yet, and when each was made."""

    def __init__(self, now: Callable[[], float] = boot_s) -> None:
        self._now = now
        self._last = 0
        self._sent: OrderedDict[int, float] = OrderedDict()

    def sent(self) -> int:
        """Records a beat and returns its number, from 1."""
        self._last += 1
        self._sent[self._last] = self._now()
        if len(self._sent) > _MOST_OPEN:
            self._sent.popitem(last=False)
        return self._last

    def are_void(self, sequence: int) -> bool:
        """Returns whether an answer comes too late, or answers nothing. 0: an older orchestrator, which does not say."""
        if not sequence:
            return False
        sent_at = self._sent.get(sequence)
        while self._sent and next(iter(self._sent)) <= sequence:
            self._sent.popitem(last=False)
        return sent_at is None or self._now() - sent_at > VOID_AFTER_S
