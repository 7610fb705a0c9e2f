"""The table of a large vocabulary is read before the ranks start; see also tests/worker/ranks/test_constrained.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ryzanstein import errors
from ryzanstein.worker.agent.versions.early_tokens import LARGE_VOCABULARY, early_tokens


class Judge:
    def __init__(self, able: bool = True, error: Exception | None = None) -> None:
        self.able, self._error = able, error

    async def tokens(self, model: Any) -> bytes:
        if self._error is not None:
            raise self._error
        return b"table"


def text(vocab_size: int = LARGE_VOCABULARY + 1, embedding: object = None) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, embedding=embedding, name="m")


@pytest.mark.parametrize(
    ("judge", "model", "table"),
    [
        (Judge(), text(), b"table"),
        (Judge(), text(LARGE_VOCABULARY), b""),
        (Judge(), text(embedding=object()), b""),
        (Judge(able=False), text(), b""),
        (Judge(error=errors.unavailable("GRAMMAR_PROCESS_LOST", "gone")), text(), b""),
    ],
)
async def test_only_large_vocabularies_are_read_and_a_failure_is_left_to_the_first_constraint(
    judge: Any, model: Any, table: bytes
) -> None:
    assert await early_tokens(judge, model) == table
