from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ryzanstein.worker.engine.memory.blocks import BlockPool

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Random holders allocate, share, publish and free; a model of plain dictionaries says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.contents: dict[bytes, int] = {}
        self.num_keys = 0

    @precondition(lambda self: self.pool.num_available)
    @rule(data=st.data())
    def allocate(self, data) -> None:
        num = data.draw(st.integers(1, self.pool.num_available))
        after = data.draw(st.none() | st.integers(0, NUM_BLOCKS - 1))
        blocks = self.pool.allocate(num, after)
        assert len(set(blocks)) == num
        assert not set(blocks) & {block for holder in self.holders for block in holder}, "allocated twice"
        self.contents = {key: block for key, block in self.contents.items() if block not in blocks}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def publish(self, data) -> None:
        block = data.draw(st.sampled_from([block for holder in self.holders for block in holder]))
        self.num_keys += 1
        key = self.num_keys.to_bytes(2, "big")
        if block not in self.contents.values():
            self.contents[key] = block
        self.pool.publish(block, key)

    @rule(data=st.data())
    def find_and_share(self, data) -> None:
        known = {key: block for key, block in self.contents.items() if self.pool.find([key])}
        if known:
            key = data.draw(st.sampled_from(sorted(known)))
            assert self.pool.find([key]) == [known[key]], "a key finds other contents"
            self.pool.share(known[key])
            self.holders.append([known[key]])

    @invariant()
    def every_block_is_counted_once(self) -> None:
        held = [block for holder in self.holders for block in holder]
        assert self.pool.num_held == len(set(held))
        assert self.pool.num_held + self.pool.num_available == NUM_BLOCKS
        for block in range(NUM_BLOCKS):
            assert self.pool.references(block) == held.count(block)

    @invariant()
    def held_contents_are_never_forgotten(self) -> None:
        for key, block in self.contents.items():
            if self.pool.is_held(block):
                assert self.pool.find([key]) == [block]


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_neighbours_leave_each_other_room_to_grow() -> None:
    pool = BlockPool(64)
    sequences = [pool.allocate(2) for _ in range(4)]
    for _ in range(8):
        for blocks in sequences:
            blocks.extend(pool.allocate(1, blocks[-1]))
    for blocks in sequences:
        assert blocks == list(range(blocks[0], blocks[0] + 10))


def test_scattered_blocks_serve_when_no_run_is_left() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(6)
    pool.free([blocks[0], blocks[2], blocks[4]])
    assert sorted(pool.allocate(3)) == [blocks[0], blocks[2], blocks[4]]


def test_the_block_unused_for_longest_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate(old + new):
        pool.publish(block, bytes([i]))
    pool.free(old)
    pool.free(new)
    pool.allocate(1)
    assert [bool(pool.find([bytes([i])])) for i in range(4)] == [True, False, True, True]
    pool.allocate(1)
    assert [bool(pool.find([bytes([i])])) for i in range(4)] == [False, False, True, True]


def test_a_shared_idle_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.free(blocks)
    pool.share(blocks[0])
    assert pool.num_available == 1
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find([b"a"]) == [blocks[0]]


def test_the_first_block_under_a_key_stays() -> None:
    pool = BlockPool(3)
    first, twin = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(twin, b"a")
    pool.free([twin])
    assert pool.find([b"a"]) == [first]
    assert pool.num_idle == 0
