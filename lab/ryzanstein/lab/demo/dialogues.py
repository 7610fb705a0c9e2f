"""Generated dialogues of what failover can break: earlier facts, long counts, exact copies.

A dialogue is a function of its split, its seed and the mix of topics only. Nothing here depends on tokens or tensors.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ryzanstein.lab.demo import phrases
from ryzanstein.lab.demo.phrases import ANIMALS, NUMBER, SLOTS, Slot
from ryzanstein.lab.demo.words import Split, Words

MAX_COUNT = 200
"""The largest number that is one token, and so the largest number in a count."""


@dataclass(frozen=True)
class DialogueTurn:
    """A user's message, the only right answer, and the kind under which the turn is counted."""

    kind: str
    user: str
    assistant: str


@dataclass(frozen=True)
class Dialogue:
    """A conversation and, sometimes, a system message before it."""

    turns: tuple[DialogueTurn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Returns the messages in the form that a chat template expects."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return messages


@dataclass(frozen=True)
class Mix:
    """The frequency of each kind of turn, and the lengths of dialogues and counts."""

    max_turns: int = 10
    tell: float = 0.32
    ask: float = 0.34
    repeat: float = 0.14
    count: float = 0.08
    talk: float = 0.12
    long_counts: float = 0.2
    """The share of counts that are longer than 15 numbers."""


def dialogue(split: Split, seed: int, mix: Mix | None = None) -> Dialogue:
    """Returns the dialogue of this split, seed and mix; it is always the same."""
    mix = mix or Mix()
    rng = Random(f"{split}-{seed}")
    speaker = _Speaker(rng, Words(rng, split), mix)
    system = rng.choice(phrases.SYSTEMS) if rng.random() < 0.15 else None
    turns = tuple(speaker.turn() for _ in range(rng.randint(1, mix.max_turns)))
    return Dialogue(turns, system)


class _Speaker:
    """A generator of both sides of a dialogue that remembers the stated facts."""

    def __init__(self, rng: Random, words: Words, mix: Mix) -> None:
        self._rng = rng
        self._words = words
        self._mix = mix
        self._facts: dict[Slot, str] = {}

    def turn(self) -> DialogueTurn:
        mix = self._mix
        kinds: list[Callable[[], DialogueTurn]] = [self._tell, self._ask, self._repeat, self._count, self._talk]
        weights = (mix.tell, mix.ask, mix.repeat, mix.count, mix.talk)
        return self._rng.choices(kinds, weights)[0]()

    def _tell(self) -> DialogueTurn:
        casual = self._casual()
        slots = self._pick_slots(list(SLOTS))
        again = any(slot in self._facts for slot in slots)
        message, noted = [], []
        for slot in slots:
            value = self._value(slot, casual)
            self._facts.pop(slot, None)  # put it last: the newest animal is the pet
            self._facts[slot] = value
            message.append(self._rng.choice(slot.tells).format(value))
            noted.append(slot.noted.format(value))
        user = _join(message)
        if again and self._rng.random() < 0.6:
            user = self._rng.choice(phrases.UPDATES) + _lower_first(user)
        return DialogueTurn("tell", self._typed(user, casual), " ".join(noted))

    def _ask(self) -> DialogueTurn:
        if not self._facts and self._rng.random() < 0.5:
            return self._tell()
        stated = [slot for slot in SLOTS if slot in self._facts]
        unstated = [slot for slot in SLOTS if slot not in self._facts]
        pool = stated if stated and (not unstated or self._rng.random() < 0.65) else unstated
        slots = self._pick_slots(pool)
        if len(slots) == 2 and self._rng.random() < 0.3:
            slots[1] = self._rng.choice([slot for slot in SLOTS if slot is not slots[0]])
        answers = [self._answer(slot) for slot in slots]
        user = _join([self._rng.choice(slot.asks) for slot in slots])
        kind = self._ask_kind(slots)
        return DialogueTurn(kind, self._typed(user, self._casual()), " ".join(answers))

    def _ask_kind(self, slots: list[Slot]) -> str:
        if len(slots) > 1:
            return "two questions"
        return "not told" if self._known(slots[0]) is None else f"recall {slots[0].kind}"

    def _answer(self, slot: Slot) -> str:
        known = self._known(slot)
        return slot.unknown if known is None else known.answer.format(self._facts[known])

    def _known(self, slot: Slot) -> Slot | None:
        """Returns the stated fact that answers a question for this one: any animal is a pet."""
        if slot is ANIMALS[0]:
            return next((stated for stated in reversed(self._facts) if stated in ANIMALS), None)
        return slot if slot in self._facts else None

    def _repeat(self) -> DialogueTurn:
        text = self._words.text(self._rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8)))
        return DialogueTurn("repeat", self._rng.choice(phrases.REPEATS).format(text), text)

    def _count(self) -> DialogueTurn:
        length = self._count_length()
        first = 1 if self._rng.random() < 0.4 else self._rng.randint(0, MAX_COUNT - length)
        last = first + length - 1
        if first == 1 and self._rng.random() < 0.4:
            user = self._rng.choice(phrases.COUNTS_FROM_ONE).format(last)
        else:
            user = self._rng.choice(phrases.COUNTS).format(first, last)
        return DialogueTurn("count", self._typed(user, self._casual()), " ".join(map(str, range(first, last + 1))))

    def _count_length(self) -> int:
        if self._rng.random() >= self._mix.long_counts:
            return self._rng.randint(2, 15)
        return self._rng.choice((20, 30, 40, 50, 60, 80, 100)) if self._rng.random() < 0.2 else self._rng.randint(16, 100)

    def _talk(self) -> DialogueTurn:
        if self._rng.random() < 0.35:
            user = self._rng.choice(phrases.OFF_TOPIC).format(self._words.invented(), self._words.number())
            answer = phrases.OFF_TOPIC_ANSWER
        else:
            message, answer = self._rng.choice(phrases.TALK)
            user = self._rng.choice(message)
        return DialogueTurn("talk", self._typed(user, self._casual()), answer)

    def _value(self, slot: Slot, casual: bool) -> str:
        if slot is NUMBER:
            return self._words.number()
        ordinary = list(slot.ordinary)
        value = self._words.proper(ordinary) if slot.proper else self._words.value(ordinary)
        return value.lower() if casual and self._rng.random() < 0.5 else value

    def _pick_slots(self, pool: list[Slot]) -> list[Slot]:
        """Returns one slot, sometimes two different ones."""
        first = self._rng.choice(pool)
        second = self._rng.choice(pool)
        return [first, second] if first is not second and self._rng.random() < 0.2 else [first]

    def _casual(self) -> bool:
        return self._rng.random() < 0.2

    def _typed(self, text: str, casual: bool) -> str:
        """Returns the text as typed.

        Casual text starts in lower case, and the final mark is sometimes missing.
        """
        if casual:
            text = _lower_first(text)
            text = re.sub(r"\bI\b", "i", text) if self._rng.random() < 0.5 else text
        if self._rng.random() < (0.6 if casual else 0.15):
            text = text.rstrip(".?!")
        return text


def _join(sentences: list[str]) -> str:
    """Returns two sentences as one: "My name is X and I live in Y."."""
    if len(sentences) == 1:
        return sentences[0]
    first, second = sentences
    return f"{first.rstrip('.?!')} and {_lower_first(second)}"


def _lower_first(text: str) -> str:
    """Returns the text with its first letter in lower case, except for "I"."""
    word = text.split(" ", 1)[0].split("'", 1)[0]
    return text if word == "I" else text[:1].lower() + text[1:]
