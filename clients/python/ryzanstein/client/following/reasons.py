"""What a client does at each error: the table that `docs/reference/errors.md` is for machines.

An error without ErrorInfo is one of the transport. A reason that this version does not know goes by its RetryInfo and code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from ryzanstein.client import errors
from ryzanstein.client.errors import ClientError
from ryzanstein.errors import ALL_DRAIN, Code, RyzansteinError


class Action(Enum):
    """What comes after an error.

    Before a generation's id is known the request is sent again, under its key; later the generation is attached to.
    """

    RAISE = "raise it"
    SAME = "try the same router again"
    NEXT = "try the next router"
    LOST = "try the next router, and give this one up until it names the generation again"
    BUSY = "try again while the client waits for a session"
    ONCE = "try again once, if the answer still comes in time"


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do at a reason before and after the generation's id is known, and what is raised in the end."""

    error: type[ClientError]
    begin: Action = Action.RAISE
    attach: Action = Action.RAISE


def _rules() -> dict[str, Rule]:
    next_ = (Action.NEXT, Action.NEXT)
    found = {
        "GENERATION_PAUSED": Rule(errors.Unavailable, Action.NEXT, Action.SAME),
        "ROUTER_TOO_OLD": Rule(errors.VersionError, Action.LOST, Action.LOST),
        "QUEUE_FULL": Rule(errors.Overloaded, Action.SAME, Action.SAME),
        "ADAPTER_NO_ROOM": Rule(errors.Overloaded, Action.SAME, Action.SAME),
        "TOO_MANY_ADAPTERS": Rule(errors.Overloaded),
        "OUT_OF_MEMORY": Rule(errors.Overloaded, Action.SAME, Action.SAME),
        "RATE_LIMITED": Rule(errors.RateLimited, Action.SAME, Action.SAME),
        "QUOTA_EXHAUSTED": Rule(errors.RateLimited),
        "SESSION_BUSY": Rule(errors.SessionBusy, Action.BUSY, Action.BUSY),
        "DEADLINE_UNREACHABLE": Rule(errors.DeadlineExceeded, Action.ONCE),
        "GENERATION_NOT_FOUND": Rule(errors.NotFound, Action.RAISE, Action.LOST),
        "CANCELLED": Rule(errors.AnswerCancelled),
        "DEADLINE_EXCEEDED": Rule(errors.DeadlineExceeded),
        "CONTEXT_TOO_LONG": Rule(errors.ContextTooLong),
        "SESSION_FULL": Rule(errors.SessionFull),
        "SESSION_DAMAGED": Rule(errors.SessionDamaged),
        **{f"{kind}_EXISTS": Rule(errors.Conflict) for kind in ("SESSION", "DEPLOYMENT", "ADAPTER", "MODEL")},
    }
    unavailable = (
        *("GENERATION_MOVED", "DRAINING", "NO_NODES", "LINK_DOWN", "SESSION_STORE_UNAVAILABLE", "JOURNAL_UNAVAILABLE"),
        *("KEYS_UNAVAILABLE", "USAGE_UNAVAILABLE"),
    )
    found |= {reason: Rule(errors.Unavailable, *next_) for reason in unavailable}
    plain: dict[type[ClientError], tuple[str, ...]] = {
        errors.AnswerFailed: ("ATTEMPTS_EXHAUSTED", "LOGITS_NOT_FINITE", "CONSTRAINT_FAILED", "INTERNAL"),
        errors.InvalidRequest: (
            *("INVALID_ARGUMENT", "MALFORMED_MESSAGE", "TOO_MANY_RECORDS", "INVALID_CONSTRAINT", "TEMPLATE_LIMIT"),
            *("IDEMPOTENCY_MISMATCH", "NO_CHAT_TEMPLATE", "NO_EMBEDDINGS", "EMBEDDINGS_ONLY", "NO_INFILL"),
            *("ENGINE_LACKS", "ENGINE_REFUSED", "ADAPTER_UNFIT"),
        ),
        errors.NotFound: (
            *("MODEL_NOT_FOUND", "SESSION_NOT_FOUND", "RESPONSE_NOT_FOUND", "ITEM_NOT_FOUND", "NODE_NOT_FOUND"),
            *("DEPLOYMENT_NOT_FOUND", "LEASE_NOT_FOUND", "ADAPTER_NOT_FOUND", "ADAPTER_REMOVED"),
        ),
        errors.VersionError: ("NODES_TOO_OLD", "CONSTRAINTS_UNSUPPORTED"),
        errors.KeyRefused: (
            *("KEY_MISSING", "KEY_AMBIGUOUS", "KEY_INVALID", "KEY_EXPIRED", "KEY_REVOKED", "SCOPE_MISSING"),
            *("TENANT_NOT_YOURS", "PRIORITY_NOT_ALLOWED", "NOT_ALLOWED"),
        ),
        errors.OperatorError: (
            *("FOREIGN_PAGES", "PAGES_OFF", "TOO_MANY_TRANSFERS", "TOO_MANY_OFFERS", "ROLE_NOT_ALLOWED", "NOT_YOUR_NAME"),
            *("PEER_DENIED", "AUDIT_UNAVAILABLE"),
        ),
    }
    return found | {reason: Rule(error) for error, reasons in plain.items() for reason in reasons}


REASONS: Mapping[str, Rule] = MappingProxyType(_rules())

_TRANSPORT = Rule(errors.RouterUnreachable, Action.NEXT, Action.NEXT)
_BY_CODE: Mapping[Code, type[ClientError]] = MappingProxyType(
    {
        Code.CANCELLED: errors.AnswerCancelled,
        Code.INVALID_ARGUMENT: errors.InvalidRequest,
        Code.FAILED_PRECONDITION: errors.InvalidRequest,
        Code.OUT_OF_RANGE: errors.InvalidRequest,
        Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
        Code.NOT_FOUND: errors.NotFound,
        Code.ALREADY_EXISTS: errors.Conflict,
        Code.PERMISSION_DENIED: errors.KeyRefused,
        Code.UNAUTHENTICATED: errors.KeyRefused,
        Code.UNIMPLEMENTED: errors.VersionError,
        Code.RESOURCE_EXHAUSTED: errors.Overloaded,
        Code.UNAVAILABLE: errors.Unavailable,
    }
)
_LOST_CONNECTION = (Code.UNAVAILABLE, Code.UNKNOWN, Code.CANCELLED, Code.INTERNAL)


def rule_of(error: RyzansteinError) -> Rule:
    """Returns what to do at an error, whose reason is empty where it has no ErrorInfo."""
    if error.reason == "NO_NODES" and error.metadata.get("cause") == ALL_DRAIN:
        return Rule(errors.Unavailable)  # somebody wanted it so: nothing changes while the client waits
    if error.reason in REASONS:
        return REASONS[error.reason]
    if not error.reason and error.code in _LOST_CONNECTION:
        return _TRANSPORT
    if not error.reason and error.code is Code.RESOURCE_EXHAUSTED:
        return Rule(errors.RequestTooLarge)
    raised = _BY_CODE.get(error.code, errors.AnswerFailed)
    return Rule(raised) if error.retry_after_s is None else Rule(raised, Action.SAME, Action.SAME)
