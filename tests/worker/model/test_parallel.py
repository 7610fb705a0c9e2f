"""How dimensions divide over ranks, told in numbers where they do not."""

from itertools import product

import pytest

from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import HeadShare, TensorParallel
from ryzanstein.worker.refusal import UnevenSplit


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank, size, LocalCollectives()) for rank in range(size)]


def test_heads_are_dealt_in_order() -> None:
    assert [tp.heads(8, 4) for tp in ranks(2)] == [HeadShare(4, 2, 0, 0), HeadShare(4, 2, 4, 2)]


def test_key_value_heads_are_dealt_whole() -> None:
    assert [tp.heads(9, 3) for tp in ranks(2)] == [HeadShare(6, 2, 0, 0), HeadShare(3, 1, 6, 2)]


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    assert [tp.heads(8, 2) for tp in ranks(4)] == [
        HeadShare(2, 1, 0, 0),
        HeadShare(2, 1, 2, 0, owns=False),
        HeadShare(2, 1, 4, 1),
        HeadShare(2, 1, 6, 1, owns=False),
    ]


def test_ranks_are_dealt_to_fewer_key_value_heads() -> None:
    assert [tp.heads(8, 2) for tp in ranks(3)] == [
        HeadShare(2, 1, 0, 0),
        HeadShare(2, 1, 2, 0, owns=False),
        HeadShare(4, 1, 4, 1),
    ]
    assert [tp.heads(16, 1).num_heads for tp in ranks(3)] == [6, 5, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_query_head_lives_with_its_key_value_head_or_is_refused(size: int) -> None:
    for num_kv_heads, group in product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 8)):
        num_heads = num_kv_heads * group
        try:
            shares = [tp.heads(num_heads, num_kv_heads) for tp in ranks(size)]
        except UnevenSplit:
            assert size > num_kv_heads
            assert -(-size // num_kv_heads) > group
            continue
        assert [head for share in shares for head in heads_of(share)] == list(range(num_heads))
        assert shares[0].num_kv_heads == max(share.num_kv_heads for share in shares)
        owned = [share.first_kv_head + head for share in shares if share.owns for head in range(share.num_kv_heads)]
        assert owned == list(range(num_kv_heads))
        for share in shares:
            local_group, rest = divmod(share.num_heads, share.num_kv_heads)
            assert rest == 0
            assert local_group > 0
            for local, head in enumerate(heads_of(share)):
                assert head // group == share.first_kv_head + local // local_group


def heads_of(share: HeadShare) -> range:
    return range(share.first_head, share.first_head + share.num_heads)


def test_more_ranks_than_attention_heads_are_refused_in_numbers() -> None:
    with pytest.raises(UnevenSplit, match="2 attention heads of 1 key-value heads for 3 ranks: each needs"):
        ranks(3)[0].heads(2, 1)


def test_heads_that_must_be_apart_are_not_replicated() -> None:
    assert ranks(2)[1].heads(8, 2, apart="with short convolutions") == HeadShare(4, 1, 4, 1)
    with pytest.raises(UnevenSplit, match="2 key-value heads for 3 ranks: with short convolutions"):
        ranks(3)[0].heads(8, 2, apart="with short convolutions")


@pytest.mark.parametrize(
    ("total", "size", "parts"),
    [
        (10, 2, [(0, 5), (5, 5)]),
        (11, 2, [(0, 5), (5, 6)]),
        (1536, 2, [(0, 768), (768, 768)]),
        (96, 2, [(0, 48), (48, 48)]),
        (13696, 8, [(rank * 1712, 1712) for rank in range(8)]),
        (8192, 3, [(0, 2720), (2720, 2720), (5440, 2752)]),
        (64, 3, [(0, 21), (21, 21), (42, 22)]),
    ],
)
def test_columns_are_equal_or_whole_blocks_where_there_are_enough(total: int, size: int, parts: list[tuple[int, int]]) -> None:
    assert [tp.columns(total) for tp in ranks(size)] == parts


def test_fewer_columns_than_ranks_are_refused() -> None:
    with pytest.raises(UnevenSplit, match="2 MLP columns for 3 ranks: each needs one"):
        ranks(3)[0].columns(2)
