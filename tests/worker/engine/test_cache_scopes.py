"""Pages are shared within a cache scope, and never between two: computed, moved, or brought back after a pause."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.engine.memory.prefix import KEY_BYTES, chain_key, chain_keys, scope_root
from ryzanstein.worker.engine.memory.travel import name_of

SIZE = 4
PROMPT = range(33)
A, B, GROUP = map(scope_root, ("a", "b", "group:x"))


def computed(it: Any, message: Any) -> int:
    """Runs a group; returns how many of its prompt's tokens were computed, as counted apart from what its usage says."""

    def num_fed() -> int:
        stats = it.engine.stats()
        return int(stats.prefill_tokens + stats.decode_tokens)

    before = num_fed()
    it.engine.submit(message)
    it.drain()
    num = num_fed() - before
    assert it.ended[message.group, 0].cached_tokens == len(message.prompt_ids) - num
    return num


def test_a_prompt_of_another_scope_is_computed_whole(run: Any, group: Any) -> None:
    it = run(num_blocks=256, block_size=SIZE, max_sequences=8, token_budget=64)
    roots = (A, B, b"", GROUP, A, B, b"", GROUP)
    nums = [computed(it, group(number, PROMPT, 1, cache_root=root)) for number, root in enumerate(roots)]
    assert nums == [33] * 4 + [1] * 4


def test_requests_of_two_scopes_in_one_step_share_nothing(run: Any, group: Any, answer: Any) -> None:
    it = run(num_blocks=256, block_size=SIZE, max_sequences=8, token_budget=512)
    messages = [group(number, PROMPT, cache_root=root, n=2) for number, root in enumerate((A, B, b"", A))]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    assert [it.ended[number, 0].cached_tokens for number in range(3)] == [0, 0, 0]
    assert [it.ended[number, 1].cached_tokens for number in range(3)] == [32, 32, 32], "choices of one request share"
    assert it.tokens == {(m.group, c): answer(m, c)[0] for m in messages for c in range(2)}


def test_pages_that_moved_are_found_within_their_scope_alone(run: Any, group: Any) -> None:
    source, target = (run(num_blocks=256, block_size=SIZE, max_sequences=8, token_budget=64) for _ in range(2))
    assert computed(source, group(1, PROMPT, 1, cache_root=A)) == 33
    names = [name_of(key, 0) for key in chain_keys(PROMPT, SIZE, A)]
    assert len(source.engine.export_pages(1, names)) == 8
    assert source.engine.find_pages([name_of(key, 0) for key in chain_keys(PROMPT, SIZE)]) == list(range(8))
    target.ranks.slab = source.ranks.slab
    assert len(target.engine.import_pages(1, names, b"")) == 8
    assert [computed(target, group(n, PROMPT, 1, cache_root=root)) for n, root in enumerate((B, b"", A))] == [33, 33, 1]


def test_a_paused_answer_goes_on_within_its_scope(run: Any, group: Any, answer: Any) -> None:
    it = run(num_blocks=24, block_size=SIZE, max_sequences=8, token_budget=128)
    messages = [group(number, range(20), 24, cache_root=root) for number, root in enumerate((A, B, A, B))]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    assert it.engine.stats().preemptions > 0, "the test tries nothing"
    assert it.tokens == {(m.group, 0): answer(m, 0)[0] for m in messages}


def test_vectors_are_made_from_the_prefixes_of_their_scope(run: Any, group: Any) -> None:
    it = run(num_blocks=256, block_size=SIZE, max_sequences=8, token_budget=64)
    for number, root in enumerate((A, B, A)):
        it.engine.submit(group(number, PROMPT, 1, cache_root=root, pooling="last"))
        it.drain()
    assert [it.ended[number, 0].cached_tokens for number in range(3)] == [0, 0, 32]


def test_the_empty_scope_has_the_keys_of_earlier_versions() -> None:
    assert scope_root("") == b""
    assert chain_keys(range(8), SIZE, scope_root("")) == chain_keys(range(8), SIZE)
    assert chain_keys(range(4), SIZE)[0].hex() == chain_key(b"", range(4)).hex() == "61abbbbadcb5a29f38974c1405255595"


@given(
    scopes=st.lists(st.text(max_size=40), min_size=2, max_size=6, unique=True), tokens=st.lists(st.integers(0, 9), max_size=24)
)
@settings(max_examples=50)
def test_no_two_scopes_have_a_key_in_common(scopes: list[str], tokens: list[int]) -> None:
    roots = [scope_root(scope) for scope in scopes]
    assert {len(root) for root in roots} <= {0, KEY_BYTES}
    keys = [key for root in roots for key in chain_keys(tokens, SIZE, root)]
    assert len({*keys, *roots}) == len(keys) + len(roots)


def test_an_adapter_has_pages_of_its_own_in_each_scope() -> None:
    roots = [scope_root(scope, adapter) for scope in ("", "a") for adapter in (b"", b"1" * 32, b"2" * 32)]
    keys = [key for root in roots for key in chain_keys(range(8), SIZE, root)]
    assert len({*keys, *roots}) == len(keys) + len(roots)
    assert roots[0] == b""
    assert roots[3] == scope_root("a"), "as in earlier versions"


def test_a_scope_that_looks_like_a_page_has_not_its_key() -> None:
    """The key of a first page is the digest of its tokens: a scope of the same bytes must not begin with it."""
    page = (97,) * SIZE
    scope = b"".join(token.to_bytes(8, "little") for token in page).decode()
    assert scope_root(scope) not in chain_keys(page, SIZE)
