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


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    assert [tp.heads(8, 2) for tp in ranks(4)] == [
        HeadShare(2, 1, 0, 0),
        HeadShare(2, 1, 2, 0),
        HeadShare(2, 1, 4, 1),
        HeadShare(2, 1, 6, 1),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_every_query_head_lives_with_its_key_value_head_or_is_refused(size: int) -> None:
    for num_kv_heads, group in product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 8)):
        num_heads = num_kv_heads * group
        try:
            shares = [tp.heads(num_heads, num_kv_heads) for tp in ranks(size)]
        except UnevenSplit:
            assert num_heads % size or (num_kv_heads % size and size % num_kv_heads)
            continue
        assert [head for share in shares for head in heads_of(share)] == list(range(num_heads))
        for share in shares:
            local_group = share.num_heads // share.num_kv_heads
            for local, head in enumerate(heads_of(share)):
                assert head // group == share.first_kv_head + local // local_group


def heads_of(share: HeadShare) -> range:
    return range(share.first_head, share.first_head + share.num_heads)


@pytest.mark.parametrize(
    ("heads", "message"),
    [((9, 9), "9 attention heads do not divide over 2 ranks"), ((6, 3), "3 key-value heads do not divide over 2 ranks")],
)
def test_an_uneven_split_names_the_numbers(heads: tuple[int, int], message: str) -> None:
    with pytest.raises(UnevenSplit, match=message):
        ranks(2)[0].heads(*heads)


def test_any_dimension_can_be_named() -> None:
    assert ranks(2)[1].split(10, "MLP columns") == 5
    with pytest.raises(UnevenSplit, match="11 MLP columns do not divide over 2 ranks"):
        ranks(2)[1].split(11, "MLP columns")
