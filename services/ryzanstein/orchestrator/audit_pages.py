"""Pages of operators' acts, from the wire and to it."""

from __future__ import annotations

import json

from ryzanstein import errors
from ryzanstein.auth.audit.audit_record import AuditRecord, Facts, clipped_facts
from ryzanstein.orchestrator.state.audit_table import AuditPage, AuditQuery
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.wire.timestamps import timestamp

MAX_PAGE_SIZE = 500
DEFAULT_PAGE_SIZE = 100
_TOKEN_DIGITS = 18


def audit_query(request: pb.ListAuditRequest) -> AuditQuery:
    """Returns what is asked for. Raises INVALID_ARGUMENT."""
    if request.page_size > MAX_PAGE_SIZE:
        raise errors.invalid("page_size", f"must be in [0, {MAX_PAGE_SIZE}]", request.page_size)
    query = AuditQuery(request.page_size or DEFAULT_PAGE_SIZE, method=request.method, target_prefix=request.target_prefix)
    token = request.page_token
    if not token:
        return query
    if not (token.isascii() and token.isdecimal() and len(token) <= _TOKEN_DIGITS):
        raise errors.invalid("page_token", "must be the next_page_token of the previous page")
    return AuditQuery(query.size, int(token), query.method, query.target_prefix)


def audit_page(page: AuditPage) -> pb.ListAuditResponse:
    return pb.ListAuditResponse(acts=map(_act, page.records), next_page_token=str(page.next) if page.next else "")


def _act(record: AuditRecord) -> pb.AuditedAct:
    return pb.AuditedAct(
        id=record.id,
        time=timestamp(record.time),
        actor=record.actor,
        via=record.via,
        method=record.method,
        target=record.target,
        outcome=record.outcome,
        reason=record.reason,
        request_id=record.request_id,
        before=_json(record.before),
        after=_json(record.after),
    )


def _json(facts: Facts | None) -> str:
    return "" if facts is None else json.dumps(clipped_facts(facts))
