"""Several faults strike the same answer: which of them it counts with."""

from __future__ import annotations

from ryzanstein.lab.chaos.catalog import CATALOG
from ryzanstein.lab.chaos.trial.evidence import Moment
from ryzanstein.lab.chaos.trial.findings import Strike
from ryzanstein.lab.chaos.trial.series import Struck, answers_of
from ryzanstein.lab.clients.reading import AnswerReading


def struck(*readings: AnswerReading) -> Struck:
    moment = Moment(100.0, 50.0, dict.fromkeys(readings, 1))
    return Struck(CATALOG[0], Strike("long-greedy", moment, [], 0, {}), [], {}, 1.0)


def test_an_answer_counts_with_every_fault_that_hit_it() -> None:
    first, second = AnswerReading("long-greedy"), AnswerReading("long-sse")
    seen = [struck(first), struck(first, second)]
    assert answers_of(seen, 0, [first, second]) == [first]
    assert answers_of(seen, 1, [first, second]) == [first, second]


def test_one_that_failed_counts_with_the_last_that_hit_it_and_one_that_none_hit_with_the_last_of_all() -> None:
    failed, alone = AnswerReading("long-greedy", failure="UNAVAILABLE"), AnswerReading("long-sse")
    seen = [struck(failed), struck(failed), struck()]
    assert [answers_of(seen, which, [failed, alone]) for which in range(3)] == [[], [failed], [alone]]
