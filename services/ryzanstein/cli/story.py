"""What is said in `ryzanstein demo`, in words that the embedded model understands. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoryTurn:
    """What the user says, and what the answer has to contain, each part as it stands."""

    says: str
    expects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A conversation in one session. While `long_turn` is answered, after `kill_after_tokens`, its node is killed."""

    before: tuple[StoryTurn, ...]
    long_turn: StoryTurn
    kill_after_tokens: int
    after: tuple[StoryTurn, ...]


STORY = Story(
    before=(
        StoryTurn("Hello, my name is Zorvia.", ("Zorvia",)),
        StoryTurn("I live in Quenlo.", ("Quenlo",)),
        StoryTurn("I have a dog called Biscuit.", ("Biscuit",)),
        StoryTurn("Where do I live?", ("Quenlo",)),
    ),
    long_turn=StoryTurn("Count from 1 to 100.", (" ".join(map(str, range(1, 101))),)),
    kill_after_tokens=20,
    after=(
        StoryTurn("What is my name?", ("Zorvia",)),
        StoryTurn("What is my dog called?", ("Biscuit",)),
    ),
)
