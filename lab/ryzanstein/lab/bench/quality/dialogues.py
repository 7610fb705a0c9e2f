"""The demo model's held-out dialogues as a text: the tokens of its answers are scored.

It was trained on answers only, and has never seen prose: on other texts its loss says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count

from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.quality.texts import TextWindow, digest_of
from ryzanstein.lab.demo.encoding import Encoded, encode
from ryzanstein.lab.demo.evaluate import held_out
from ryzanstein.lab.demo.tokenizer import ASSISTANT, END, SYSTEM, USER

DIALOGUES = "dialogues"


@dataclass(frozen=True, slots=True)
class DialogueText:
    """Whole dialogues, each a window of its own."""

    dialogues: tuple[Encoded, ...]
    name: str = DIALOGUES
    source: str = "held out from the demo model, tokens of answers"

    @property
    def digest(self) -> str:
        return digest_of([one.ids for one in self.dialogues])

    def windows(self, length: int) -> list[TextWindow]:
        """A dialogue that is longer is cut."""
        windows = []
        for one in self.dialogues:
            places = chain.from_iterable(range(*answer) for answer in one.answers)
            windows.append(TextWindow(tuple(one.ids[:length]), [place for place in places if 0 < place < length]))
        return [window for window in windows if window.scored]

    def prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Returns dialogues up to their last answer, from its end back at most `length` tokens."""
        chosen = self.dialogues[: len(self.dialogues) // count * count : len(self.dialogues) // count]
        return [tuple(one.ids[max(0, one.answers[-1][0] - length) : one.answers[-1][0]]) for one in chosen]

    def beginning(self, length: int) -> tuple[int, ...]:
        return tuple(chain.from_iterable(one.ids for one in self.dialogues))[:length]


def dialogue_text(tokenizer: Tokenizer, num_tokens: int, prompts: int) -> DialogueText:
    """Returns as many dialogues as have so many tokens in answers, and at least one for each prompt.

    Raises INVALID_ARGUMENT if the tokenizer is not the demo model's.
    """
    lacking = [token for token in (SYSTEM, USER, ASSISTANT, END) if tokenizer.token_to_id(token) is None]
    if lacking:
        raise errors.invalid("text", f"{DIALOGUES} are the demo model's: this tokenizer has no {lacking[0]}", DIALOGUES)
    dialogues: list[Encoded] = []
    scored = 0
    for seed in count():
        if scored >= num_tokens and len(dialogues) >= prompts:
            break
        one = encode(tokenizer, held_out(1, first=seed)[0])
        dialogues.append(one)
        scored += sum(stop - start for start, stop in one.answers)
    return DialogueText(tuple(dialogues))
