"""Every domain error becomes the status of the table in docs/reference/errors.md, with exactly one ErrorInfo."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2

from ryzanstein import errors
from ryzanstein.rpc import status

CASES = [
    (errors.queue_full(10, 10), 8, "QUEUE_FULL", {"ErrorInfo", "RetryInfo"}),
    (
        errors.RyzansteinError("slow down", errors.Code.RESOURCE_EXHAUSTED, "RATE_LIMITED", retry_after_s=2.0),
        8,
        "RATE_LIMITED",
        {"ErrorInfo", "QuotaFailure", "RetryInfo"},
    ),
    (errors.draining("node-0"), 14, "DRAINING", {"ErrorInfo", "RetryInfo"}),
    (errors.no_nodes("demo", "none joined"), 14, "NO_NODES", {"ErrorInfo", "RetryInfo"}),
    (errors.not_found("session", "s"), 5, "SESSION_NOT_FOUND", {"ErrorInfo", "ResourceInfo"}),
    (errors.already_exists("session", "s"), 6, "SESSION_EXISTS", {"ErrorInfo", "ResourceInfo"}),
    (errors.context_too_long(100, 50, 128), 3, "CONTEXT_TOO_LONG", {"ErrorInfo", "BadRequest"}),
    (errors.invalid("sampling.top_p", "must be in [0, 1]", 2), 3, "INVALID_ARGUMENT", {"ErrorInfo", "BadRequest"}),
    (errors.too_busy(2.0, 1.0, 1.0), 8, "QUEUE_FULL", {"ErrorInfo", "RetryInfo"}),
    (errors.deadline_unreachable(2.0, 1.0, 1.0), 4, "DEADLINE_UNREACHABLE", {"ErrorInfo", "RetryInfo"}),
    (errors.deadline_exceeded(), 4, "DEADLINE_EXCEEDED", {"ErrorInfo"}),
    (errors.cancelled(), 1, "CANCELLED", {"ErrorInfo"}),
    (errors.failed_precondition("BUSY", "generations run"), 9, "BUSY", {"ErrorInfo"}),
    (errors.unavailable("RANK_LOST", "rank 1 died"), 14, "RANK_LOST", {"ErrorInfo", "RetryInfo"}),
    (errors.internal("oops"), 13, "INTERNAL", {"ErrorInfo"}),
]


@pytest.mark.parametrize(("error", "code", "reason", "kinds"), CASES, ids=lambda case: getattr(case, "reason", ""))
def test_an_error_becomes_its_status_with_one_error_info(
    error: errors.RyzansteinError, code: int, reason: str, kinds: set[str]
) -> None:
    made = status.status_from_error(error)
    names = [detail.TypeName().rsplit(".", 1)[1] for detail in made.details]
    info = error_details_pb2.ErrorInfo()
    assert isinstance(made.details[0], Any)
    assert made.details[0].Unpack(info)
    assert (made.code, info.reason, info.domain) == (code, reason, errors.DOMAIN)
    assert set(names) == kinds
    assert names.count("ErrorInfo") == 1


def test_context_too_long_names_both_numbers() -> None:
    assert "100" in errors.context_too_long(100, 50, 128).message
    assert "128" in errors.context_too_long(100, 50, 128).message
