"""Lends KV cache memory between the models of a node: guaranteed shares, and borrowing beyond them.

Plain logic: the agent reports what each engine uses, calls `round` about as often as beats, and
sends the limits that it returns. A model that needs its own memory gets it back before anybody
borrows. What the others do not need goes to those whose sequences wait for blocks, in shares by
weight. Memory is first given back by one engine, as its reports show, and only then lent to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

# Need is the most of so many rounds, so that memory does not follow each single sequence.
ROUNDS_REMEMBERED = 8
# Of its own blocks a model keeps this part free for the next request, and limits move by this part.
PARTS = 16


@dataclass(frozen=True, slots=True)
class KvMember:
    """The KV cache of a model: its own blocks, the most it may use, and a block's size on the node.

    `weight` is its share of what can be borrowed, relative to the others. Raises ValueError.
    """

    own_blocks: int
    max_blocks: int
    block_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.own_blocks <= self.max_blocks:
            raise ValueError(f"own_blocks {self.own_blocks} must be from 1 to max_blocks ({self.max_blocks})")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1: {self.block_bytes}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be positive and finite: {self.weight}")

    @property
    def own_bytes(self) -> int:
        return self.own_blocks * self.block_bytes

    @property
    def part(self) -> int:
        """The number of blocks by which its limit moves."""
        return -(-self.own_blocks // PARTS)


@dataclass(frozen=True, slots=True)
class KvUse:
    """What an engine last reported, see `EngineStats`: blocks with memory, held, and lacking."""

    limit: int
    held: int
    wanted: int


@dataclass(slots=True)
class _Share:
    """The share of one model.

    `sent` and `confirmed` are limits in blocks; both are 0 once its ranks have ended. `present`: its
    engine takes limits.
    """

    member: KvMember
    sent: int = 0
    confirmed: int = 0
    present: bool = False
    wants: bool = False
    needs: deque[int] = field(default_factory=lambda: deque(maxlen=ROUNDS_REMEMBERED))

    @property
    def committed_bytes(self) -> int:
        """The memory that its engine may use now, or that its lost ranks may still hold."""
        return max(self.sent, self.confirmed) * self.member.block_bytes

    @property
    def need(self) -> int:
        """The blocks that it needs, with a reserve, in whole parts. Without ranks: its own."""
        member = self.member
        if not self.present:
            return member.own_blocks
        parts = -(-max(self.needs, default=0) // member.part) + 1
        return min(parts * member.part, member.max_blocks)

    @property
    def base_bytes(self) -> int:
        """What it needs of its own memory."""
        return min(self.need, self.member.own_blocks) * self.member.block_bytes

    @property
    def lack_bytes(self) -> int:
        """What it would borrow."""
        return max(0, self.need - self.member.own_blocks) * self.member.block_bytes


class KvShares:
    """The ledger of a node. Members are the models whose ranks can lend and borrow, by any key.

    The limits that engines have or were sent never exceed the sum of the members' own memory,
    except after `leave`, until the others have given back what they borrowed of it. An engine always
    has at least one block.
    """

    def __init__(self) -> None:
        self._shares: dict[Hashable, _Share] = {}
        self.num_takebacks = 0
        """How often an engine was told to use fewer blocks than before."""

    @property
    def overdrawn_bytes(self) -> int:
        """The memory that is still lent although its owner has left."""
        return max(0, self._committed() - self._total())

    def join(self, key: Hashable, member: KvMember) -> int:
        """Adds a model whose ranks are ready, or are ready again.

        Returns the limit to send to its engine before any work: its own blocks, less what is still
        lent.
        """
        self._shares.pop(key, None)
        free = self._total() + member.own_bytes - self._committed()
        limit = max(1, min(member.own_blocks, free // member.block_bytes))
        self._shares[key] = _Share(member, limit, limit, present=True)
        return limit

    def lose(self, key: Hashable) -> None:
        """Records that a model's ranks are lost. What they may use is theirs until `free`."""
        if (share := self._shares.get(key)) is not None:
            share.present = share.wants = False
            share.needs.clear()

    def free(self, key: Hashable) -> None:
        """Records that the lost ranks have ended. The model's own memory is kept for their return."""
        if (share := self._shares.get(key)) is not None and not share.present:
            share.sent = share.confirmed = 0

    def leave(self, key: Hashable) -> None:
        """Removes a model whose ranks have ended and will not return."""
        self._shares.pop(key, None)

    def report(self, key: Hashable, use: KvUse) -> None:
        """Records what the engine uses. Reports of unknown members are ignored."""
        share = self._shares.get(key)
        if share is not None and share.present and use.limit > 0:
            share.confirmed = use.limit
            share.wants = use.wanted > 0
            share.needs.append(use.held + use.wanted)

    def limit(self, key: Hashable) -> int:
        """Returns the limit that was last sent, in blocks; 0 once a model's ranks have ended."""
        share = self._shares.get(key)
        return share.sent if share is not None else 0

    def borrowed_bytes(self, key: Hashable) -> int:
        """Returns what the model uses or may use beyond its own memory."""
        share = self._shares.get(key)
        return max(0, share.committed_bytes - share.member.own_bytes) if share is not None else 0

    def lent_bytes(self, key: Hashable) -> int:
        """Returns the part of its own memory that the model may not use now."""
        share = self._shares.get(key)
        return max(0, share.member.own_bytes - share.committed_bytes) if share is not None and share.present else 0

    def round(self) -> Mapping[Hashable, int]:
        """Returns the new limits to send, in blocks, by key: lower ones, and what is free already."""
        targets = self._targets()
        changed = self._lower(targets)
        return changed | self._raise(targets)

    def _total(self) -> int:
        return sum(share.member.own_bytes for share in self._shares.values())

    def _committed(self) -> int:
        return sum(share.committed_bytes for share in self._shares.values())

    def _present(self) -> dict[Hashable, _Share]:
        return {key: share for key, share in self._shares.items() if share.present}

    def _targets(self) -> dict[Hashable, int]:
        """Returns the limit that each model should have, in blocks.

        What nobody lacks stays with its owner.
        """
        shares = list(self._shares.values())
        lent = _shared(self._total() - sum(share.base_bytes for share in shares), shares)
        spare = self._total() - sum(share.base_bytes for share in shares) - sum(lent)
        targets = {}
        for (key, share), extra in zip(self._shares.items(), lent, strict=True):
            own = share.member.own_bytes - share.base_bytes
            kept = min(own, spare)
            spare -= kept
            targets[key] = max(1, (share.base_bytes + extra + kept) // share.member.block_bytes)
        return targets

    def _lower(self, targets: Mapping[Hashable, int]) -> dict[Hashable, int]:
        lowered = {key: targets[key] for key, share in self._present().items() if targets[key] < share.sent}
        for key, limit in lowered.items():
            self._shares[key].sent = limit
        self.num_takebacks += len(lowered)
        return lowered

    def _raise(self, targets: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Raises limits by what nobody has: first those below their own blocks that want more."""
        free = self._total() - self._committed()
        raised = {}
        waiting = [(key, share) for key, share in self._present().items() if targets[key] > share.sent]
        waiting.sort(key=lambda each: (each[1].sent >= each[1].member.own_blocks, not each[1].wants, -each[1].member.weight))
        for key, share in waiting:
            # Up to what is confirmed costs nothing: its engine has not given that back.
            room = max(0, free) + share.committed_bytes
            limit = min(targets[key], max(share.sent, room // share.member.block_bytes))
            if limit > share.sent:
                free -= max(0, limit * share.member.block_bytes - share.committed_bytes)
                raised[key] = share.sent = limit
        return raised


def _shared(free: int, shares: Sequence[_Share]) -> list[int]:
    """Returns how many of the free bytes each borrows: by weight, but none more than it lacks."""
    lent = [0] * len(shares)
    open_ = [i for i, share in enumerate(shares) if share.lack_bytes]
    while open_ and free > 0:
        weight = sum(shares[i].member.weight for i in open_)
        filled = [i for i in open_ if shares[i].lack_bytes <= free * shares[i].member.weight / weight]
        if not filled:
            for i in open_:
                lent[i] = int(free * shares[i].member.weight / weight)
            break
        for i in filled:
            lent[i] = shares[i].lack_bytes
            free -= lent[i]
        open_ = [i for i in open_ if i not in filled]
    return lent
