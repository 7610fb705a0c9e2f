"""A follower counts the tokens of reasoning, however they arrive."""

from __future__ import annotations

import pytest

from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import Delta, Started, Token
from ryzanstein.replies.follower import ReplyFollower

ANSWER = ["<think>", "\n", "so", " it", " is", "\n", "</think>", "\n\n", "Yes", "."]


def follower(*, opened: bool, seen: int = 0) -> ReplyFollower:
    started = Started("g", "m", "n", 3, reply=ReplyFormat(thinking=True, opened=opened))
    return ReplyFollower(started, {0: seen})


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize("seen", [0, 4, 9])
@pytest.mark.parametrize(("opened", "tokens", "num"), [(False, ANSWER, 6), (True, ANSWER[1:], 5), (False, ["a", "b"], 0)])
def test_tokens_of_reasoning_are_counted(size: int, seen: int, opened: bool, tokens: list[str], num: int) -> None:
    follows = follower(opened=opened, seen=seen)
    part = ""
    for start in range(0, len(tokens), size):
        delta = Delta(0, start, [Token(i, text) for i, text in enumerate(tokens[start : start + size])], "n")
        part += follows.read(delta).content
    assert follows.num_reasoning == num
    assert "Yes." not in "".join(tokens) or seen or part == "Yes."
