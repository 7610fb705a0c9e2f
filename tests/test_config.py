"""Settings of every service: a number without an end and text that cannot be written down are refused, by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ryzanstein.config import ServiceSettings
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

KINDS = (RouterSettings, OrchestratorSettings, WorkerSettings)
NOT_NUMBERS = ("nan", "inf", "-inf", "1e400", "-3", "99999999999999999999999", "many", "")


def fields(*annotations: type) -> list[tuple[type[ServiceSettings], str]]:
    return [(kind, name) for kind in KINDS for name, field in kind.model_fields.items() if field.annotation in annotations]


def refused(kind: type[ServiceSettings], name: str, value: str) -> list[str]:
    """The settings that the refusal names; empty when it was no refusal."""
    try:
        kind(**{name: value})
    except ValidationError as error:
        return [".".join(map(str, problem["loc"])) for problem in error.errors()]
    return []


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_no_number_of_any_service_is_endless_or_none(value: str) -> None:
    numbers = fields(int, float)
    assert len(numbers) > 80
    assert [(kind, name) for kind, name in numbers if refused(kind, name, value) != [name]] == []


def test_no_text_of_any_service_is_beyond_utf_8() -> None:
    texts = fields(str)
    assert len(texts) > 10
    assert [(kind, name) for kind, name in texts if refused(kind, name, "a\udcffb") != [name]] == []
