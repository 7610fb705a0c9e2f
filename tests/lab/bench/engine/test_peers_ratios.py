from __future__ import annotations

from ryzanstein.lab.bench.engine.peers.contenders import Label
from ryzanstein.lab.bench.engine.peers.ratios import Spread, first_tokens_equal, ratios
from ryzanstein.lab.bench.engine.peers.timing import Timing, prompts

OURS = Label("ryzanstein", "none", 1)
PEER = Label("peer", "int8", 1)


def timing(tokens_per_s: float, ttft_s: float = 1.0, first_tokens: tuple[int, ...] = (7, 8)) -> Timing:
    return Timing(tokens_per_s, tokens_per_s, ttft_s, 1, first_tokens)


def test_a_ratio_is_the_median_of_the_rounds_that_both_were_in() -> None:
    ours = {0: timing(100, 1.0), 1: timing(300, 2.0), 2: timing(50, 1.0), 3: timing(999)}
    peer = {0: timing(50, 3.0), 1: timing(100, 2.0), 2: timing(100, 4.0)}
    [ratio] = ratios({(OURS, 8): ours, (PEER, 8): peer})
    assert (ratio.own, ratio.peer, ratio.batch, ratio.rounds) == (OURS, PEER, 8, 3)
    assert ratio.total_tokens_per_s == Spread(2.0, 0.5, 3.0)
    assert ratio.ttft == Spread(3.0, 1.0, 4.0)


def test_rounds_and_batches_that_only_one_was_in_give_no_ratio() -> None:
    assert ratios({(OURS, 8): {0: timing(1)}, (PEER, 1): {0: timing(1)}}) == []
    assert ratios({(OURS, 8): {0: timing(1)}, (PEER, 8): {1: timing(1)}}) == []


def test_first_tokens_are_held_against_our_full_precision() -> None:
    timings = {(OURS, 2): {0: timing(1)}, (PEER, 2): {0: timing(1, first_tokens=(7, 9))}}
    assert first_tokens_equal(timings) == {(OURS, 2): 1.0, (PEER, 2): 0.5}


def test_without_our_full_precision_first_tokens_are_held_against_nothing() -> None:
    assert first_tokens_equal({(PEER, 2): {0: timing(1)}}) == {}


def test_prompts_are_the_same_for_all_and_new_in_each_round() -> None:
    assert prompts("round 0", 2, 5, 100) == prompts("round 0", 2, 5, 100)
    assert prompts("round 0", 2, 5, 100) != prompts("round 1", 2, 5, 100)
    assert prompts("round 0", 1, 5, 100)[0] != prompts("round 0", 2, 5, 100)[0]
