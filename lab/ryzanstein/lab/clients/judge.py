"""Compares an answer with the one without a fault.

A laboratory that misses a lost token is worthless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ryzanstein.lab.clients.forms import AnswerForm
from ryzanstein.lab.clients.reading import AnswerReading, CallRead, ChoiceRead

LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison.

    `lost` and `repeated` count tokens; `differences` are in words, empty if the answer equals the
    undisturbed one. `flaws` are in words what breaks the form that the answer has to have; `formed`:
    it was looked at.
    """

    lost: int = 0
    repeated: int = 0
    failed: bool = False
    differences: tuple[str, ...] = ()
    formed: bool = False
    flaws: tuple[str, ...] = ()

    @property
    def flawless(self) -> bool:
        return not (self.lost or self.repeated or self.failed or self.differences or self.flaws)


def judge(undisturbed: AnswerReading, seen: AnswerReading, form: AnswerForm | None = None) -> Verdict:
    """Returns the verdict on `seen`.

    Of an answer that failed, only the part that arrived is judged: the rest is a failure, not a
    loss. One that finished has to have its form, whatever the undisturbed one looks like.
    """
    failed = bool(seen.failure) or not seen.complete
    lost, differences = seen.num_lost, list[str]()
    for choice, expected in undisturbed.choices.items():
        read = seen.choices.get(choice, ChoiceRead())
        if not failed and not seen.num_lost:
            lost += max(0, len(expected.tokens) - len(read.tokens))
        differences += [f"choice {choice}: {what}" for what in _differences(expected, read, whole=not failed)]
    if not failed:
        differences += _usage(undisturbed, seen)
    if failed or form is None:
        return Verdict(lost, seen.num_repeated, failed, tuple(differences))
    flaws = (f"choice {number}: {flaw}" for number, read in seen.choices.items() if (flaw := form.flaw(read)))
    return Verdict(lost, seen.num_repeated, failed, tuple(differences), formed=True, flaws=tuple(flaws))


def _differences(expected: ChoiceRead, read: ChoiceRead, *, whole: bool) -> list[str]:
    """Returns what differs; a partial answer is compared only as far as it goes."""
    found = []
    length = min(len(expected.tokens), len(read.tokens))
    if (index := _first_difference(expected.tokens, read.tokens)) is not None:
        found.append(f"token {index} is {read.tokens[index]!r}, not {expected.tokens[index]!r}")
    if len(read.tokens) > len(expected.tokens):
        found.append(f"{len(read.tokens)} tokens, not {len(expected.tokens)}")
    if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(expected.logprobs[:length], read.logprobs, strict=False)):
        found.append("log probabilities differ")
    if whole and len(expected.logprobs) != len(read.logprobs):
        found.append(f"{len(read.logprobs)} log probabilities, not {len(expected.logprobs)}")
    if read.text != expected.text if whole else not expected.text.startswith(read.text):
        found.append("the text differs")
    if _called(read.calls) != _called(expected.calls) if whole else not _begins(expected.calls, read.calls):
        found.append("the calls differ")
    if whole and read.reason != expected.reason:
        found.append(f"finished by {read.reason or 'nothing'}, not {expected.reason}")
    return found


def _first_difference(expected: list[int | str], read: list[int | str]) -> int | None:
    pairs = zip(expected, read, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), None)


def _called(calls: Mapping[int, CallRead]) -> dict[int, tuple[str, str]]:
    """Returns the calls without their ids, which each generation has of its own."""
    return {number: (call.name, call.arguments) for number, call in calls.items()}


def _begins(expected: Mapping[int, CallRead], read: Mapping[int, CallRead]) -> bool:
    """Returns whether the calls are those expected, as far as they go."""
    return all(
        number in expected and call.name == expected[number].name and expected[number].arguments.startswith(call.arguments)
        for number, call in read.items()
    )


def _usage(undisturbed: AnswerReading, seen: AnswerReading) -> list[str]:
    """Compares usage, except cached prompt tokens: they depend on where an answer was computed."""
    expected = (undisturbed.prompt_tokens, undisturbed.completion_tokens)
    counted = (seen.prompt_tokens, seen.completion_tokens)
    return [] if counted == expected else [f"usage is {counted}, not {expected} (prompt, completion)"]
