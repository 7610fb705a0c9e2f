"""Groups of layers with windows: what sequences hold, and what is found again. The fake ranks judge what a layer would read."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.engine.extents import EngineSettings, Extents, Lasting
from ryzanstein.worker.engine.memory.prefix import chain_keys

SIZE = 4
extents = st.builds(
    Extents,
    st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4).map(tuple),
    st.integers(1, 8),
    st.integers(1, 50),
)
lasting = st.one_of(st.none(), st.builds(Lasting, st.integers(0, 60), st.sampled_from([0, 2, 3, 7])))


@st.composite
def sparse(draw: st.DrawFn) -> Extents:
    """Extents of which some groups with a window keep lasting pages."""
    plain = draw(extents)
    return replace(plain, lasting=tuple(None if window is None else draw(lasting) for window in plain.windows))


def prefilled(it: Any, message: Any) -> int:
    """The prompt tokens that are computed for a message, alone."""
    before = it.engine.stats().prefill_tokens
    it.engine.submit(message)
    it.drain()
    assert message.group not in it.failed
    return int(it.engine.stats().prefill_tokens - before)


@given(extents=st.one_of(extents, sparse()), num_blocks=st.integers(4, 400))
def test_the_longest_sequence_that_fits_is_the_longest_whose_blocks_fit(extents: Extents, num_blocks: int) -> None:
    longest = extents.tokens_in(num_blocks)
    if longest < sys.maxsize:
        assert extents.blocks_for(longest) <= num_blocks < extents.blocks_for(longest + 1)
    else:
        assert extents.blocks_for(1 << 40) <= num_blocks


@given(extents=extents, window=st.integers(1, 40), num_computed=st.integers(0, 300))
def test_what_is_kept_is_what_any_later_token_sees(extents: Extents, window: int, num_computed: int) -> None:
    kept = extents.first_kept(window, num_computed)
    assert kept <= max(0, num_computed - window + 1) // extents.block_size
    last = extents.pages(num_computed + extents.token_budget)
    assert last - kept <= extents.most(window)


@settings(max_examples=60, deadline=None)
@given(
    made=st.builds(
        EngineSettings,
        num_blocks=st.just(1000),
        block_size=st.just(SIZE),
        max_sequences=st.just(4),
        token_budget=st.integers(4, 40),
        windows=st.lists(st.sampled_from([None, 1, 3, 8, 13, 30]), min_size=1, max_size=4).map(tuple),
        hot_tokens=st.integers(0, 20),
        hot_pages=st.sampled_from([0, 50, 90]),
    ),
    drawn=st.tuples(st.integers(0, 1 << 30), st.integers(1, 3), lasting),
)
def test_answers_are_right_and_holdings_bounded_whatever_the_windows(
    run: Callable[..., Any],
    group: Callable[..., Any],
    answer: Callable[..., Any],
    made: EngineSettings,
    drawn: tuple[int, int, Lasting | None],
) -> None:
    rng, room, kept = random.Random(drawn[0]), drawn[1], drawn[2]
    made = replace(made, lasting=tuple(None if window is None else kept for window in made.windows))
    num_blocks = made.extents.blocks_for(120) * room
    given = {name: value for name, value in asdict(made).items() if name != "queue"}
    it = run(**{**given, "num_blocks": num_blocks})
    texts = [[rng.randrange(90) for _ in range(rng.randint(1, 80))] for _ in range(3)]
    messages = []
    for i in range(14):
        text = rng.choice(texts)
        prompt = text[: rng.randint(1, len(text))] + [rng.randrange(90) for _ in range(rng.randint(0, 10))]
        messages.append(group(i, prompt, max_tokens=rng.randint(1, 25), priority=rng.randint(0, 1), n=rng.choice([1, 1, 2])))
    for message in messages:
        it.engine.submit(message)
        for _ in range(rng.randint(0, 6)):
            it.step()
            for sequence in it.engine._scheduler.running:
                assert it.engine._scheduler.pages.num_held(sequence) <= made.extents.blocks_for(sequence.num_tokens)
        if rng.random() < 0.2:
            it.engine.cancel(rng.choice(messages[: message.group + 1]).group)
        if rng.random() < 0.2:
            it.engine.limit_blocks(rng.randint(num_blocks // 2, num_blocks))
    it.engine.limit_blocks(num_blocks)
    it.drain()
    assert not it.failed
    for (index, choice), tokens in it.tokens.items():
        expected = answer(messages[index], choice)[0]
        assert tokens == expected[: len(tokens)]
        assert (index, choice) not in it.ended or tokens == expected
    assert it.engine.stats().blocks_held == 0


def test_a_sequence_as_long_as_the_pool_holds_is_never_paused(
    run: Callable[..., Any], group: Callable[..., Any], answer: Callable[..., Any]
) -> None:
    made = EngineSettings(1000, SIZE, 4, 8, windows=(None, 16, 16))
    num_blocks = made.extents.blocks_for(200)
    assert num_blocks < 3 * 200 // SIZE
    it = run(num_blocks=num_blocks, block_size=SIZE, max_sequences=4, token_budget=8, windows=(None, 16, 16))
    message = group(1, [i % 7 for i in range(170)], max_tokens=31)
    it.engine.submit(message)
    it.drain()
    assert it.tokens[1, 0] == answer(message, 0)[0]
    assert it.engine.stats().preemptions == 0
    it.engine.submit(group(2, [3] * 170, max_tokens=32))
    it.drain()
    assert it.failed[2].reason == "CONTEXT_TOO_LONG"


def test_the_next_turn_of_a_conversation_longer_than_the_window_computes_only_what_is_new(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    it = run(num_blocks=400, block_size=SIZE, max_sequences=4, token_budget=16, windows=(None, 12, 12))
    prompt = [i % 11 for i in range(100)]
    assert prefilled(it, group(1, prompt, max_tokens=60)) == 100
    turn = prompt + it.tokens[1, 0] + [5] * 10
    assert prefilled(it, group(2, turn, max_tokens=1)) <= 10 + SIZE
    # The client writes the last tokens of the answer otherwise.
    other = prompt + it.tokens[1, 0][:-3] + [6] * 10
    assert prefilled(it, group(3, other, max_tokens=1)) <= 10 + 3 * SIZE


def test_a_conversation_resumes_at_its_prompt_if_its_answer_is_left_out(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """Also once the answer's pages and a long prompt of others have come after it."""
    it = run(num_blocks=150, block_size=SIZE, max_sequences=4, token_budget=16, windows=(None, 12, 12))
    prompt = [i % 11 for i in range(100)]
    prefilled(it, group(1, prompt, max_tokens=60))
    prefilled(it, group(2, [i % 5 for i in range(150)], max_tokens=1))
    assert prefilled(it, group(3, [*prompt, 7, 7, 7, 7], max_tokens=1)) <= 4 + 2 * SIZE


def test_a_second_prompt_resumes_where_it_leaves_the_first(run: Callable[..., Any], group: Callable[..., Any]) -> None:
    it = run(num_blocks=800, block_size=SIZE, max_sequences=4, token_budget=16, windows=(None, 12, 12))
    common = [i % 13 for i in range(120)]
    prefilled(it, group(1, common + [1] * 90, max_tokens=1))
    assert prefilled(it, group(2, common + [2] * 90, max_tokens=1)) <= 90 + SIZE


def test_where_two_prompts_parted_a_third_resumes_although_memory_is_short(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """What left a window is evicted first, except where it was seen to be of use."""
    it = run(num_blocks=220, block_size=SIZE, max_sequences=4, token_budget=16, windows=(None, 12, 12))
    common = [i % 13 for i in range(120)]
    computed = []
    for turn in range(3):
        computed.append(prefilled(it, group(10 * turn, common + [50 + turn] * 90, max_tokens=1)))
        for other in range(1, 9 if turn == 0 else 4):
            prefilled(it, group(10 * turn + other, [60 + 9 * turn + other] * 30, max_tokens=1))
    assert computed[2] <= 90 + SIZE
    assert computed[1] > 90 + 4 * SIZE, "the second prompt found pages that should have been evicted: the test shows nothing"


def test_a_long_prompt_does_not_push_out_other_conversations_with_what_left_its_windows(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    it = run(num_blocks=240, block_size=SIZE, max_sequences=4, token_budget=16, windows=(None, 12, 12, 12, 12))
    prompt = [i % 11 for i in range(60)]
    prefilled(it, group(1, prompt, max_tokens=1))
    prefilled(it, group(2, [i % 5 for i in range(400)], max_tokens=1))  # whose window groups alone fill 400 blocks
    assert prefilled(it, group(3, [*prompt, 7, 7], max_tokens=1)) <= 2 + SIZE


@pytest.mark.parametrize("windows", [(None,), (None, 8, 8)])
def test_all_choices_of_a_prompt_share_its_pages(
    run: Callable[..., Any], group: Callable[..., Any], answer: Callable[..., Any], windows: tuple[int | None, ...]
) -> None:
    it = run(num_blocks=400, block_size=SIZE, max_sequences=8, token_budget=16, windows=windows)
    message = group(1, [i % 9 for i in range(62)], max_tokens=40, n=6)
    assert prefilled(it, message) <= 62 + 5 * 2 * SIZE
    for choice in range(6):
        assert it.tokens[1, choice] == answer(message, choice)[0]


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks 2 must be at least 3"):
        EngineSettings(2, windows=(None, 8, 8))


def test_a_conversation_with_compressed_blocks_resumes_while_its_hot_pages_are_there(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """Without them its blocks are of no use: the first tokens would read other numbers than in an unbroken run."""
    least = EngineSettings(400, SIZE, 2, 16).extents.hot_pages_for(2)
    made = {"num_blocks": 900, "block_size": SIZE, "max_sequences": 2, "token_budget": 16, "hot_tokens": SIZE}
    it = run(**made, hot_pages=least + 4)
    prompt = [i % 11 for i in range(100)]
    assert prefilled(it, group(1, prompt, max_tokens=60)) == 100
    turn = prompt + it.tokens[1, 0] + [5] * 10
    assert prefilled(it, group(2, turn, max_tokens=1)) <= 10 + SIZE
    stats = it.engine.stats().hot
    assert stats.held == 0
    assert stats.sealed == (100 + 60) // SIZE - 1 + 3
    for other in range(40):
        prefilled(it, group(10 + other, [20 + other] * 30, max_tokens=1))
    assert it.engine.stats().hot.evicted > 0
    assert prefilled(it, group(90, [*turn, 6, 6, 6], max_tokens=1)) == len(turn) + 3


def test_too_few_hot_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="hot_pages 9 must be at least"):
        EngineSettings(100, max_sequences=8, hot_tokens=16, hot_pages=9)


@given(found=lasting, page=st.integers(0, 300))
def test_lasting_pages_are_counted_as_they_are_listed(found: Lasting | None, page: int) -> None:
    extents = Extents((8,), SIZE, 8)
    expected = [number for number in range(page) if extents.lasts(found, number)]
    assert list(extents.lasting_pages(found, page)) == expected
    assert extents.num_lasting(found, page) == len(expected)


def test_a_conversation_of_sinks_resumes_and_one_whose_sinks_are_gone_does_not(
    run: Callable[..., Any], group: Callable[..., Any]
) -> None:
    sparse = {"windows": (12, 12), "lasting": (Lasting(6, 0), Lasting(0, 5))}
    it = run(num_blocks=400, block_size=SIZE, max_sequences=4, token_budget=16, **sparse)
    prompt = [i % 11 for i in range(100)]
    assert prefilled(it, group(1, prompt, max_tokens=60)) == 100
    turn = prompt + it.tokens[1, 0] + [5] * 10
    assert prefilled(it, group(2, turn, max_tokens=1)) <= 10 + SIZE
    pool, keys = it.engine._scheduler.pool, chain_keys(prompt, SIZE)
    pool._evict_one(pool.block_of((keys[10], 1)))
    assert prefilled(it, group(3, [*turn, 7], max_tokens=1)) >= len(turn) - 10 * SIZE
