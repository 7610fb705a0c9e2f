"""The open vocabulary of the demo dialogues: invented words, some ordinary words, and numbers.

No model can memorize the invented words. Each invented word belongs to exactly one split by a
checksum of its letters, so a held-out answer was never seen in training.
"""

# ruff: noqa: SIM905 - lists of words read best as text

import zlib
from enum import StrEnum
from random import Random

ONSETS = (
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr "
    "tw v vl w wh x y z zh " + 3 * "b c d f g h j k l m n p r s t v w z "
).split()
VOWELS = "a e i o u a e i o u a e i o u a e i o u a e i o ai au ea ee ei ia ie io oa oo ou ue y".split()
CODAS = "b ck d f g k l ld ll lm m n nd ng nn nt p r rd rk rn rt s sh ss st t th v x z".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"

NAMES = (
    "Ada Adam Aisha Alan Alice Amir Ana Anna Ben Bob Boris Carla Carlos Chen Clara Daniel David Diego Edsger Elena Ella "
    "Emil Emma Eva Fatima Felix Finn Frank Grace Hana Hans Hugo Ida Igor Ines Ivan Jack Jana Jane Jim John Julia Karl "
    "Kate Kenji Lars Laura Lea Leo Lily Linus Lisa Lucas Luna Maria Mark Marta Max Maya Mia Miguel Mina Mohamed Nadia "
    "Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Petra Priya Rosa Ruth Sam Sara Sofia Tim Tom Uma Vera Wei Yuki Zoe"
).split()
CITIES = (
    "Accra Amsterdam Athens Austin Berlin Bern Bogota Boston Cairo Chicago Delhi Dublin Florence Geneva Hamburg Helsinki "
    "Istanbul Kyoto Lagos Lima Lisbon London Madrid Milan Moscow Mumbai Munich Nairobi Oslo Paris Prague Quito Rome Seoul "
    "Seville Sofia Tallinn Tokyo Toronto Tunis Vienna Warsaw Zurich"
).split()
PETS = (
    "Bella Biscuit Buddy Charlie Coco Daisy Felix Fido Ginger Kitty Lucky Max Milo Molly Oreo Pepper Rex Rocky Shadow Simba "
    "Snowy Spot Tiger Toby Whiskers"
).split()
COLOURS = (
    "red green blue yellow orange purple pink brown black white grey violet turquoise crimson indigo teal gold silver beige "
    "magenta"
).split()
FOODS = "pizza pasta rice soup bread cheese sushi curry salad cake apples noodles dumplings chocolate tacos stew".split()
COMMON = (
    "the a one two three and or if then over under with without river mountain house tree sun moon star night day light dark "
    "quick slow small big red blue green old new cat dog bird fish fox bear runs jumps sleeps sings walks talks is was will "
    "can must never always today tomorrow water fire stone wood table chair window door book letter word song road bridge "
    "hello world good morning code server node cluster model token copy test data"
).split()


class Split(StrEnum):
    """The two disjoint parts of the vocabulary."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def split_of(word: str) -> Split:
    """Returns the split that a word belongs to, whatever its case."""
    return Split.HELD_OUT if zlib.crc32(word.lower().encode()) % 8 == 0 else Split.TRAIN


class Words:
    """A source of random words of one split."""

    def __init__(self, rng: Random, split: Split) -> None:
        self._rng = rng
        self._split = split

    def invented(self) -> str:
        """Returns an invented lower-case word of 2 to 12 letters."""
        while True:
            word = self._letters() if self._rng.random() < 0.12 else self._syllables()
            if 2 <= len(word) <= 12 and split_of(word) is self._split:
                return word

    def proper(self, ordinary: list[str]) -> str:
        """Returns a capitalized name, sometimes of two words, sometimes from the list."""
        first = self._proper_word(ordinary)
        return f"{first} {self._proper_word(ordinary)}" if self._rng.random() < 0.08 else first

    def value(self, ordinary: list[str]) -> str:
        """Returns a lower-case word, ordinary (these are few, and in both splits) or invented."""
        return self._rng.choice(ordinary) if self._rng.random() < 0.4 else self.invented()

    def number(self) -> str:
        """Returns a number of one to five digits, more often a small one."""
        top = self._rng.choice((20, 100, 200, 1000, 1000, 100_000))
        return str(self._rng.randrange(top))

    def text(self, num_words: int) -> str:
        """Returns a line to repeat: invented and common words, a few capitals and numbers."""
        return " ".join(self._text_word() for _ in range(num_words))

    def _text_word(self) -> str:
        draw = self._rng.random()
        if draw < 0.25:
            return self._rng.choice(COMMON)
        if draw < 0.32:
            return self.number()
        return self.invented() if draw < 0.75 else self.invented().capitalize()

    def _proper_word(self, ordinary: list[str]) -> str:
        if self._rng.random() < 0.2:
            word = self._rng.choice(ordinary)
            if split_of(word) is self._split:
                return word
        return self.invented().capitalize()

    def _syllables(self) -> str:
        num_syllables = self._rng.choice((1, 2, 2, 2, 3, 3, 4))
        return "".join(self._syllable() for _ in range(num_syllables))

    def _syllable(self) -> str:
        choice, chance = self._rng.choice, self._rng.random
        onset = choice(ONSETS) if chance() < 0.9 else ""
        coda = choice(CODAS) if chance() < 0.35 else ""
        return onset + choice(VOWELS) + coda

    def _letters(self) -> str:
        return "".join(self._rng.choices(LETTERS, k=self._rng.randint(3, 10)))
