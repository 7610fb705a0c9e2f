"""The order in which idle blocks are evicted, compared with lists that say the same slowly."""

from __future__ import annotations

import random
import time

from ryzanstein.worker.engine.memory.idle_blocks import IdleBlocks


class Slow:
    """The same order as lists: of chains, each a list of blocks; a block alone is a list of one, with number None."""

    def __init__(self) -> None:
        self.order: list[tuple[int | None, list[int]]] = []

    def entry(self, block: int) -> tuple[int | None, list[int]]:
        return next(entry for entry in self.order if block in entry[1])

    def add(self, block: int, *, first: bool = False) -> None:
        self.order.insert(0 if first else len(self.order), (None, [block]))

    def remove(self, block: int) -> None:
        entry = self.entry(block)
        entry[1].remove(block)
        if not entry[1]:
            self.order.remove(entry)

    def join(self, block: int, chain: int) -> None:
        self.remove(block)
        entry = next((entry for entry in self.order if entry[0] == chain), (chain, []))
        entry[1].append(block)
        self.order = [other for other in self.order if other is not entry] + [entry]

    def touch(self, block: int) -> None:
        entry = self.entry(block)
        self.order = [other for other in self.order if other is not entry] + [entry]

    def renumber(self, moves: dict[int, int]) -> None:
        self.order = [(chain, [moves.get(block, block) for block in blocks]) for chain, blocks in self.order]


def assert_same(fast: IdleBlocks, slow: Slow) -> None:
    chains = [entry for entry in slow.order if entry[0] is not None]
    assert len(fast) == sum(len(blocks) for _, blocks in slow.order)
    assert fast.num_in_chains == sum(len(blocks) for _, blocks in chains)
    assert {chain: fast.num_of(chain or 0) for chain, _ in chains} == {chain: len(blocks) for chain, blocks in chains}
    assert fast.end_of_oldest_chain(excluding=2) == next((blocks[-1] for chain, blocks in chains if chain != 2), None)
    assert not slow.order or fast.next_evicted() == slow.order[0][1][-1]


def test_whatever_is_done_the_order_is_that_of_lists() -> None:
    rng = random.Random(5)
    fast, slow, free = IdleBlocks(), Slow(), set(range(40))

    def both(do: str, block: int, *given: object, **named: bool) -> None:
        for order in (fast, slow):
            getattr(order, do)(block, *given, **named)
        (free.add if do == "remove" else free.discard)(block)

    for _ in range(4000):
        here = sorted(set(range(40)) - free)
        if free and rng.random() < 0.4:
            both("add", free.pop(), first=rng.random() < 0.3)
        elif here and (do := rng.choice(("join", "remove", "touch"))) != "join":
            both(do, fast.next_evicted() if rng.random() < 0.3 else rng.choice(here))
        elif here and fast.chain_of(block := rng.choice(here)) is None:
            both("join", block, rng.randint(1, 4))
        elif here and free:
            moves = {rng.choice(here): rng.choice(sorted(free))}
            fast.renumber(moves)
            slow.renumber(moves)
            free = free - set(moves.values()) | set(moves)
        assert_same(fast, slow)


def test_a_long_chain_is_evicted_in_a_time_that_grows_with_its_length_alone() -> None:
    idle = IdleBlocks()
    for block in range(30_000):
        idle.add(block)
        idle.join(block, 1)
    began = time.process_time()
    for block in reversed(range(30_000)):
        assert idle.next_evicted() == block
        idle.remove(block)
    assert time.process_time() - began < 1.0, "each in constant time"
