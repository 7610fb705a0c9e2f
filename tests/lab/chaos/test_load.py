"""What clients ask next."""

from __future__ import annotations

import random
from collections import Counter

from ryzanstein.lab.chaos.client_load import next_question
from ryzanstein.lab.chaos.questions import QUESTIONS
from ryzanstein.lab.clients.reading import AnswerReading

ASKED = [question for question in QUESTIONS if question.face == "grpc"]


def test_without_an_aim_all_kinds_are_asked() -> None:
    rng = random.Random(1)
    kinds = Counter(next_question(ASKED, rng, "", []).kind for _ in range(200))
    assert kinds.keys() == {question.kind for question in ASKED}


def test_what_is_aimed_at_is_asked_by_one_and_the_rest_of_the_schedule_stays() -> None:
    aimed, free = random.Random(1), random.Random(1)
    assert next_question(ASKED, aimed, "n3", [AnswerReading("stop")]).kind == "n3"
    next_question(ASKED, free, "", [])
    for _ in range(20):
        assert next_question(ASKED, aimed, "n3", [AnswerReading("n3")]) == next_question(ASKED, free, "", [])


def test_a_client_does_not_ask_what_its_protocol_lacks() -> None:
    assert next_question(ASKED, random.Random(1), "sse", []) in ASKED
