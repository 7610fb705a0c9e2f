"""The examples of training and of validation, and what there is to say about them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ryzanstein.tools.finetune.data.chats import Encoder, LearnedSpan, TokenizedExample
from ryzanstein.tools.finetune.data.lines import read_records
from ryzanstein.tools.finetune.data.records import DataFormat, Unfit, format_of, item_of
from ryzanstein.tools.finetune.refusal import DataRefused, refuse_lines

_MOST_FAULTS = 1000
"""Faults of a file after which it is not read further."""


@dataclass(frozen=True, slots=True)
class Example:
    """TokenizedExample that were cut to the length that is trained on. `line` is where they come from."""

    ids: array[int]
    learned: tuple[LearnedSpan, ...]
    line: int

    @property
    def num_learned(self) -> int:
        return sum(end - start for start, end in self.learned)

    @property
    def digest(self) -> bytes:
        """Identifies the tokens and which of them are learned."""
        return blake2b(self.ids.tobytes() + repr(self.learned).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The examples of a file. `cut`: those that were longer."""

    examples: Sequence[Example]
    form: str
    cut: int


@dataclass(frozen=True, slots=True)
class Examples:
    """What is trained on, and what is held out. `notes` are sentences for people."""

    training: Sequence[Example]
    validation: Sequence[Example]
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(example.ids) for example in self.training)

    @property
    def num_learned(self) -> int:
        return sum(example.num_learned for example in self.training)


def read_examples(file: Path, encoder: Encoder, max_length: int, tell: Callable[[int], None] = lambda _: None) -> ReadFile:
    """Reads a file. Raises DataRefused with all lines that cannot be used, or if there is none at all; OSError.

    `tell` gets the number of lines that were read.
    """
    unit, records = read_records(file)
    form: DataFormat | None = None
    found: list[Example] = []
    faults: list[tuple[int, str]] = []
    cut = 0
    for record in records:
        tell(record.number)
        try:
            if record.fault:
                raise Unfit(record.fault)
            form = form or format_of(record.value)
            for tokens in encoder.examples(item_of(record.value, form)):
                found.append(_cut(tokens, max_length, record.number))
                cut += len(tokens.ids) > max_length
        except Unfit as error:
            faults.append((record.number, str(error)))
            if len(faults) >= _MOST_FAULTS:
                break
    refuse_lines(file, faults, unit)
    if form is None:
        raise DataRefused(f"{file}: has no examples")
    return ReadFile(found, form.name, cut)


def _cut(tokens: TokenizedExample, max_length: int, line: int) -> Example:
    learned = tuple((start, min(end, max_length)) for start, end in tokens.learned if start < max_length)
    if not learned:
        raise Unfit(
            f"has {tokens.learned[0][0]} tokens before the first that is learned, and --max-length is {max_length}: "
            "nothing would be learned"
        )
    return Example(array("i", tokens.ids[:max_length]), learned, line)


def split(read: ReadFile, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Returns the examples to train on and about `share` to hold out, which are none of the former.

    Examples of one line, and lines that are equal, stay together. Raises DataRefused if either would be empty.
    """
    lines: dict[int, list[Example]] = {}
    for example in read.examples:
        lines.setdefault(example.line, []).append(example)
    groups: dict[bytes, list[Example]] = {}
    for examples in lines.values():
        groups.setdefault(b"".join(each.digest for each in examples), []).extend(examples)
    order = sorted(groups, key=lambda key: blake2b(key, digest_size=8, key=str(seed).encode()).digest())
    count = max(1, round(share * len(order)))
    if count >= len(order):
        raise DataRefused(f"--val: {len(order)} different lines cannot be divided, at least 2 are needed")
    held = set(order[:count])
    training = [each for key, group in groups.items() if key not in held for each in group]
    return training, [each for key in order[:count] for each in groups[key]]


def examples_of(read: ReadFile, validation: ReadFile | float | None, seed: int, notes: Sequence[str] = ()) -> Examples:
    """Returns what is trained on and what is held out: the examples of another file, or a share of these."""
    remarks = [*notes, *_cuts(read, "")]
    training, held = list(read.examples), list[Example]()
    if isinstance(validation, float):
        training, held = split(read, validation, seed)
    elif validation is not None:
        held = list(validation.examples)
        remarks += _cuts(validation, " of validation")
    counts = Counter(example.digest for example in training)
    if repeated := sum(count - 1 for count in counts.values()):
        remarks.append(f"{repeated} of {len(training)} examples are there before: they are learned more often")
    if overlap := sum(example.digest in counts for example in held):
        remarks.append(
            f"{overlap} of {len(held)} examples of validation are trained on too: their loss tells nothing of others"
        )
    return Examples(training, held, tuple(remarks))


def _cuts(read: ReadFile, what: str) -> list[str]:
    if not read.cut:
        return []
    return [f"{read.cut} of {len(read.examples)} examples{what} are longer than --max-length: their end is cut off"]
