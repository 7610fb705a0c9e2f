"""What is said in `ryzanstein demo`, phrased for the embedded model. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoryTurn:
    """What the user says, and the parts that the answer must contain verbatim."""

    says: str
    expects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A conversation in one session.

    The node that answers `long_turn` is killed after `kill_after_tokens`.
    """

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
