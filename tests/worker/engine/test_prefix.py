from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.prefix import KEY_BYTES, PageGroup, PrefixCache, chain_key, chain_keys
from ryzanstein.worker.engine.sequence import Account, BlockTable, Sequence, SequenceGroup

SIZE = 4
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def computed(pool: BlockPool, sequence: Sequence) -> None:
    """As if every token of the sequence were in the cache."""
    sequence.tables = [BlockTable(0, pool.allocate(-(-sequence.num_tokens // SIZE)))]
    sequence.num_computed = sequence.num_tokens


@given(first=tokens, second=tokens)
def test_a_match_is_the_longest_common_run_of_full_blocks_but_never_the_last_token(group, first, second) -> None:
    pool = BlockPool(32)
    cache = PrefixCache([PageGroup(0, None, pool)], Extents(block_size=SIZE))
    one = Sequence(SequenceGroup(group(1, first), 0, 0.0, Account("")), 0)
    computed(pool, one)
    cache.publish(one)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    expected = min(common, len(second) - 1) // SIZE
    matched = cache.match(Sequence(SequenceGroup(group(2, second), 1, 0.0, Account("")), 0))
    assert matched.tables[0].blocks == one.tables[0].blocks[:expected]


@given(prompt=tokens, generated=tokens, more=st.integers(0, 8))
def test_generated_tokens_are_found_by_the_next_turns_prompt(group, prompt, generated, more) -> None:
    pool = BlockPool(32)
    cache = PrefixCache([PageGroup(0, None, pool)], Extents(block_size=SIZE))
    one = Sequence(SequenceGroup(group(1, prompt, max_tokens=99, generated=[generated]), 0, 0.0, Account("")), 0)
    computed(pool, one)
    cache.publish(one)
    turn = Sequence(SequenceGroup(group(2, prompt + generated + [7] * more), 1, 0.0, Account("")), 0)
    full = len(prompt + generated) // SIZE
    assert cache.match(turn).tables[0].blocks == one.tables[0].blocks[: min(full, (turn.num_tokens - 1) // SIZE)]


def test_a_key_depends_on_every_token_before_it() -> None:
    first, other = chain_key(b"", [1, 2]), chain_key(b"", [1, 3])
    assert len({first, other, chain_key(first, [1, 2]), chain_key(other, [1, 2]), chain_key(b"", [1, 2, 0])}) == 5
    assert len(first) == KEY_BYTES >= 16


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 8, 13]), min_size=1, max_size=4),
    there=st.lists(st.integers(0, 15), min_size=12, max_size=12),
    num_tokens=st.integers(1, 12 * SIZE),
)
def test_a_match_ends_at_the_last_page_after_which_every_group_finds_what_is_seen(group, windows, there, num_tokens) -> None:
    """`there` says for each page which of the groups have it."""
    pool, extents = BlockPool(64), Extents(tuple(windows), SIZE)
    cache = PrefixCache([PageGroup(number, window, pool) for number, window in enumerate(windows)], extents)
    sequence = Sequence(SequenceGroup(group(1, range(num_tokens)), 0, 0.0, Account("")), 0)
    keys = chain_keys(range(12 * SIZE), SIZE)
    for page, groups in enumerate(there):
        for number in range(len(windows)):
            if groups >> number & 1:
                pool.publish(pool.allocate(1)[0], (keys[page], number))

    def resumes(num_pages: int) -> bool:
        seen = [range(extents.first_seen(window, num_pages * SIZE), num_pages) for window in windows]
        return all(there[page] >> number & 1 for number, pages in enumerate(seen) for page in pages)

    match = cache.match(sequence)
    assert match.num_pages == max(filter(resumes, range((num_tokens - 1) // SIZE + 1)))
    assert all(len(table.blocks) == match.num_pages - table.first for table in match.tables)
