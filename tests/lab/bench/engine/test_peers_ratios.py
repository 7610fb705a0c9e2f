from __future__ import annotations

from ryzanstein.lab.bench.engine.engine import Load
from ryzanstein.lab.bench.engine.peers.contenders import Label
from ryzanstein.lab.bench.engine.peers.ratios import Spread, first_tokens_equal, ratios
from ryzanstein.lab.bench.engine.peers.timing import Timing, prompts

OURS = Label("ryzanstein", "none", 1)
PEER = Label("peer", "int8", 1)
ONE, TWO, EIGHT, PREFILL = Load(1, 128, 64), Load(2, 128, 64), Load(8, 128, 64), Load(1, 2000, 1)


def timing(tokens_per_s: float, ttft_s: float = 1.0, first_tokens: tuple[int, ...] = (7, 8), peak: int = 1) -> Timing:
    return Timing(tokens_per_s, 2 * tokens_per_s, ttft_s, peak, 8.0 / tokens_per_s, first_tokens)


def test_a_ratio_is_the_median_of_the_rounds_that_both_were_in() -> None:
    ours = {0: timing(100, 1.0), 1: timing(300, 2.0), 2: timing(50, 1.0), 3: timing(999)}
    peer = {0: timing(50, 3.0), 1: timing(100, 2.0), 2: timing(100, 4.0)}
    [ratio] = ratios({(OURS, EIGHT): ours, (PEER, EIGHT): peer})
    assert (ratio.own, ratio.peer, ratio.load, ratio.rounds) == (OURS, PEER, EIGHT, 3)
    assert ratio.total_tokens_per_s == Spread(2.0, 0.5, 3.0)
    assert ratio.decode_tokens_per_s == Spread(2.0, 0.5, 3.0)
    assert ratio.ttft == Spread(3.0, 1.0, 4.0)
    assert ratio.cpu == Spread(2.0, 0.5, 3.0)


def test_less_memory_than_the_peer_is_a_ratio_above_one() -> None:
    [ratio] = ratios({(OURS, ONE): {0: timing(1, peak=100)}, (PEER, ONE): {0: timing(1, peak=250)}})
    assert ratio.peak_rss == Spread(2.5, 2.5, 2.5)


def test_a_load_that_ends_with_the_first_tokens_has_no_ratio_of_decode() -> None:
    decoded_nothing = Timing(1.0, 0.0, 1.0, 1, 1.0, (7,))
    [ratio] = ratios({(OURS, PREFILL): {0: decoded_nothing}, (PEER, PREFILL): {0: decoded_nothing}})
    assert (ratio.decode_tokens_per_s, ratio.ttft) == (None, Spread(1.0, 1.0, 1.0))


def test_rounds_and_batches_that_only_one_was_in_give_no_ratio() -> None:
    assert ratios({(OURS, EIGHT): {0: timing(1)}, (PEER, ONE): {0: timing(1)}}) == []
    assert ratios({(OURS, EIGHT): {0: timing(1)}, (PEER, EIGHT): {1: timing(1)}}) == []


def test_first_tokens_are_held_against_our_full_precision() -> None:
    timings = {(OURS, TWO): {0: timing(1)}, (PEER, TWO): {0: timing(1, first_tokens=(7, 9))}}
    assert first_tokens_equal(timings) == {(OURS, TWO): 1.0, (PEER, TWO): 0.5}


def test_first_tokens_of_a_file_are_held_against_ours_of_the_same_file() -> None:
    of_file, again = Label("ryzanstein", "gguf", 1), Label("ryzanstein", "int8", 1)
    timings = {(again, TWO): {0: timing(1, first_tokens=(7, 9))}, (of_file, TWO): {0: timing(1)}}
    assert first_tokens_equal(timings) == {(of_file, TWO): 1.0, (again, TWO): 0.5}


def test_without_our_full_precision_first_tokens_are_held_against_nothing() -> None:
    assert first_tokens_equal({(PEER, TWO): {0: timing(1)}}) == {}


def test_prompts_are_the_same_for_all_and_new_in_each_round() -> None:
    assert prompts("round 0", 2, 5, 100) == prompts("round 0", 2, 5, 100)
    assert prompts("round 0", 2, 5, 100) != prompts("round 1", 2, 5, 100)
    assert prompts("round 0", 1, 5, 100)[0] != prompts("round 0", 2, 5, 100)[0]
    assert prompts("round 0", 1, 5, 100)[0] != prompts("round 0", 1, 9, 100)[0][:5]
