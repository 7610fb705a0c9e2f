"""What is said in `ryzanstein demo`, in words that the embedded model understands. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and what the answer has to contain, each part as it stands."""

    says: str
    expects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A conversation in one session. While `long_turn` is answered, after `kill_after_tokens`, its node is killed."""

    before: tuple[Turn, ...]
    long_turn: Turn
    kill_after_tokens: int
    after: tuple[Turn, ...]


STORY = Story(
    before=(
        Turn("Hello, my name is Zorvia.", ("Zorvia",)),
        Turn("I live in Quenlo.", ("Quenlo",)),
        Turn("I have a dog called Biscuit.", ("Biscuit",)),
        Turn("Where do I live?", ("Quenlo",)),
    ),
    long_turn=Turn("Count from 1 to 100.", (" ".join(map(str, range(1, 101))),)),
    kill_after_tokens=20,
    after=(
        Turn("What is my name?", ("Zorvia",)),
        Turn("What is my dog called?", ("Biscuit",)),
    ),
)
