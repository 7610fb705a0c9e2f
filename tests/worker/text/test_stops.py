from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.text.choice import StopScanner

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def before_first_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """By the definition: the first to be complete, of those the longest."""
    for end in range(len(text) + 1):
        ended = [len(s) for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(ended)], True
    return text, False


@given(parts=st.lists(letters, max_size=8), stop=stops)
@settings(max_examples=500, deadline=None)
def test_the_text_ends_before_the_first_stop_string_wherever_it_was_cut(parts, stop) -> None:
    scanner = StopScanner(stop)
    message = "".join([scanner.push(part) for part in parts])
    held = scanner.flush()
    assert (message + held, scanner.stopped) == before_first_stop("".join(parts), stop)


def before_first_counting_stop(text: str, num_early: int, stop: list[str]) -> tuple[str, bool]:
    """By the definition: the first to be complete behind so many characters."""
    for end in range(num_early + 1, len(text) + 1):
        ended = [len(s) for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(ended)], True
    return text, False


@given(early=st.lists(letters, max_size=4), late=st.lists(letters, max_size=4), stop=stops, skips=st.booleans())
@settings(max_examples=500, deadline=None)
def test_what_is_complete_too_early_ends_nothing_but_may_begin_what_does(early, late, stop, skips) -> None:
    scanner, message = StopScanner(stop), ""
    for part in early:
        if skips:
            scanner.skip(part, counts=False)
        else:
            message += scanner.push(part, counts=False)
    message += "".join([scanner.push(part) for part in late]) + scanner.flush()
    known, stopped = before_first_counting_stop("".join((*early, *late)), len("".join(early)), stop)
    assert scanner.stopped == stopped
    assert known.endswith(message) if skips else message == known


@given(parts=st.lists(letters, max_size=8), stop=stops)
@settings(max_examples=500, deadline=None)
def test_only_what_may_begin_a_stop_string_is_held_back(parts, stop) -> None:
    scanner = StopScanner(stop)
    text = ""
    message = ""
    for part in parts:
        text += part
        message += scanner.push(part)
        if scanner.stopped:
            return
        held = text[len(message) :]
        assert not held or any(s.startswith(held) for s in stop)
        assert not any(text.endswith(s[:k]) for s in stop for k in range(len(held) + 1, len(s)))


def test_without_stop_strings_all_text_passes_at_once() -> None:
    scanner = StopScanner([])
    assert [scanner.push(part) for part in ("a", "", "b")] == ["a", "", "b"]
    assert not scanner.stopped


def test_nothing_is_said_after_a_stop_string() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.push("a\n") == "a"
    assert scanner.push("\nb") == ""
    assert (scanner.push("c"), scanner.flush(), scanner.stopped) == ("", "", True)
