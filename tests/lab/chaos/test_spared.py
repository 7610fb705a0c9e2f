"""What a fault of one model does to another is seen: pauses, answers that move, nodes that are suspected."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ryzanstein.lab.chaos.questions import QUESTIONS, questions_to
from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.chaos.trial import spared
from ryzanstein.lab.clients.judge import Verdict
from ryzanstein.lab.clients.reading import AnswerReading, TokenArrival


def reading(*times: float, nodes: str = "a", calls: int = 1) -> AnswerReading:
    arrivals = [TokenArrival(at, nodes[min(i, len(nodes) - 1)], 1) for i, at in enumerate(times)]
    return AnswerReading("greedy", arrivals=arrivals, calls=calls)


def line(event: str, **fields: Any) -> LogLine:
    return LogLine(1.0, "router-0", "warning", event, fields)


def test_the_longest_pause_is_within_one_answer_and_overlaps_the_span() -> None:
    early, across, short = reading(0.0, 5.0), reading(9.5, 10.5, 10.6), reading(10.1, 10.4)
    assert spared.longest_pause([early, across, short], 10.0, 11.0) == pytest.approx(1.0)
    assert spared.longest_pause([early, short], 10.0, 11.0) == pytest.approx(0.3)
    assert spared.longest_pause([early, reading(10.2)], 10.0, 11.0) is None


def test_an_answer_without_a_token_in_the_span_is_in_it_when_it_goes_on_later() -> None:
    through, before, after = reading(1.0, 20.0), reading(1.0, 9.0), reading(12.0)
    assert spared.in_span([through, before, after, reading()], 10.0, 11.0) == [through]


def test_only_what_was_not_struck_counts_as_disturbed() -> None:
    lines = [
        line("generation failed over", from_node="node-0/second"),
        line("generation failed over", from_node="node-0"),
        line("node suspected", node_id="node-1"),
        line("link down", node_id="node-0/second"),
        line("node changed", node_id="node-0"),
    ]
    assert spared.disturbances(lines, {"node-0/second"}) == {
        "generation failed over (node-0)": 1,
        "node suspected (node-1)": 1,
    }


def test_answers_that_are_wrong_moved_or_read_again_are_flawed() -> None:
    readings = [reading(1.0, 2.0), reading(1.0, 2.0, nodes="ab"), reading(1.0, calls=2), reading(1.0)]
    verdicts = [Verdict(), Verdict(), Verdict(), Verdict(lost=1)]
    assert spared.flaws(readings, verdicts) == {"answers of another model wrong": 1, "read again": 1, "moved": 1}
    assert spared.flaws(readings[:1], verdicts[:1]) == Counter()


def test_every_question_names_a_model_and_every_kind_is_of_one() -> None:
    asked = questions_to("demo", ("second", "third"))
    assert len({question.kind for question in asked}) == len(asked)
    assert {question.model for question in asked} == {"demo", "second", "third"}
    assert [question.kind for question in asked if question.model == "demo"] == [question.kind for question in QUESTIONS]
    assert not any(question.face != "grpc" or question.in_session for question in asked if question.model != "demo")
    assert spared.node_of("node-0/second") == spared.node_of("node-0") == "node-0"
    assert (spared.of_model("node-0/second"), spared.of_model("node-0")) == ("second", "")
