"""When the silence of a server is a stall."""

from __future__ import annotations

from ryzanstein.worker.engines.remote.silence import Silence
from ryzanstein.worker.supervision.watchdog import StallBounds

EVERY_S = 0.1


def stalls_after(silence: Silence, prompts: list[int], limit_s: float = 1000.0) -> float:
    """How long nothing may come while something is due, in steps of the watch."""
    now, parts = 0.0, 7
    silence.observe(now, parts, prompts, pending=False)
    while now < limit_s:
        now += EVERY_S
        if silence.observe(now, parts, prompts, pending=True):
            return now
    return limit_s


def watched(prefill_s: float = 10.0) -> Silence:
    return Silence(StallBounds(), prefill_s, EVERY_S)


def test_an_answer_may_be_silent_for_two_seconds_or_ten_of_its_slow_tokens() -> None:
    assert 2.0 <= stalls_after(watched(), []) < 2.3
    slow = watched()
    for _ in range(200):
        slow.token(0.5)
    assert 5.0 <= stalls_after(slow, []) < 5.3


def test_one_slow_token_does_not_hide_a_stall() -> None:
    silence = watched()
    for _ in range(300):
        silence.token(0.02)
    silence.token(30.0)
    assert stalls_after(silence, []) < 2.3


def test_prompts_get_time_by_their_length_and_the_measured_pace() -> None:
    silence = watched()
    assert 10.0 <= stalls_after(silence, [1_000]) < 10.3
    silence.prompt(20.0, 1_000)
    silence.prompt(0.1, 1_000)  # it was cached
    assert 80.0 <= stalls_after(silence, [1_000, 3]) < 80.3


def test_a_short_prompt_hangs_like_an_answer_once_the_pace_is_known() -> None:
    silence = watched()
    for _ in range(3):
        silence.prompt(0.05, 100)
    assert 2.0 <= stalls_after(silence, [100]) < 2.3
    assert 60.0 <= stalls_after(silence, [30_000]) < 60.3, "they may have been cached"


def test_idleness_and_progress_are_no_silence() -> None:
    silence = watched()
    for step in range(1_000):
        assert not silence.observe(step * EVERY_S, 5, [], pending=False)
    for step in range(1_000):
        assert not silence.observe(100 + step * EVERY_S, step, [], pending=True)


def test_time_in_which_nobody_watched_does_not_count() -> None:
    silence = watched()
    silence.observe(0.0, 1, [], pending=True)
    silence.observe(0.1, 1, [], pending=True)
    assert not silence.observe(60.0, 1, [], pending=True)
