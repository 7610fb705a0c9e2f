"""The grammar of the setting."""

import pytest

from ryzanstein.worker.settings.sparse import SparseAttention, SparseRule, parse_sparse_attention


def test_what_is_said_is_read() -> None:
    assert parse_sparse_attention("") is parse_sparse_attention("  ") is None
    assert parse_sparse_attention("window=1024,sinks=64") == SparseAttention(SparseRule(1024, sinks=64))
    assert parse_sparse_attention(" stride = 16 , window = 256 ") == SparseAttention(SparseRule(256, stride=16))
    found = parse_sparse_attention("quest=64,window=256,sinks=16,layers=3+5-7+6")
    assert found == SparseAttention(SparseRule(256, 16, 0, 64), (3, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sinks=4", "window is missing"),
        ("window=15", "window must be from 16"),
        ("window=16,stride=1", "stride must be from 2"),
        ("window=16,quest=0", "quest must be from 1"),
        ("window=16,quest=4,stride=2", "exclude each other"),
        ("window=16,window=17", "twice"),
        ("window=1e3", "window must be"),
        ("window=٣٢", "window must be"),
        ("window=99999999999999999999", "window must be"),
        ("window", "'window' is not one of"),
        ("window=16,pages=3", "'pages=3' is not one of"),
        ("window=16,layers=x", "layers must be numbers"),
        ("window=16,layers=99999", "layers must be numbers"),
        ("window=16,", "'' is not one of"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sparse_attention(text)
