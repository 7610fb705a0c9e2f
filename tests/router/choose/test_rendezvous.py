"""Rendezvous hashing: the same everywhere, few keys move, every node gets its share."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.router.choose import ranked

NODES = st.sets(st.text("abcdef0123456789-", min_size=1, max_size=12), min_size=2, max_size=12)
KEYS = [f"session:{i}".encode() for i in range(2000)]


@given(key=st.binary(max_size=64), nodes=NODES, seed=st.randoms())
def test_the_order_of_members_does_not_matter(key: bytes, nodes: set[str], seed: object) -> None:
    shuffled = list(nodes)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranked(key, shuffled) == ranked(key, sorted(nodes))


def test_every_router_process_comes_to_the_same_order() -> None:
    code = (
        "from ryzanstein.router.choose import ranked;"
        "print([ranked(f'session:{i}'.encode(), ['a', 'b', 'c', 'd']) for i in range(50)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == str([ranked(f"session:{i}".encode(), ["d", "c", "b", "a"]) for i in range(50)])


@given(key=st.binary(max_size=64), nodes=NODES)
def test_a_key_whose_node_leaves_goes_to_its_backup_and_no_other_key_moves(key: bytes, nodes: set[str]) -> None:
    order = ranked(key, nodes)
    for gone in nodes:
        assert ranked(key, nodes - {gone}) == [node for node in order if node != gone]


def test_a_node_that_joins_takes_its_share_of_keys_and_no_other_key_moves() -> None:
    before = {key: ranked(key, ["a", "b", "c"])[0] for key in KEYS}
    after = {key: ranked(key, ["a", "b", "c", "d"])[0] for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {"d"}
    assert 0.2 < len(moved) / len(KEYS) < 0.3


def test_primaries_and_backups_are_balanced() -> None:
    nodes = [f"node-{i}" for i in range(8)]
    for position in (0, 1):
        shares = Counter(ranked(key, nodes)[position] for key in KEYS)
        assert all(abs(count - len(KEYS) / 8) < 0.2 * len(KEYS) / 8 for count in shares.values())
        assert len(shares) == 8
