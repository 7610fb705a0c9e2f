"""Converts domain errors to and from `google.rpc.Status`, with the details of AIP-193.

There is always exactly one ErrorInfo.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ryzanstein.errors import DOMAIN, RyzansteinError
from ryzanstein.statuses import error_of_call, error_of_status

T = TypeVar("T")

_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_from_error(error: RyzansteinError) -> status_pb2.Status:
    """Returns the status with ErrorInfo and, where they apply, other details.

    They are BadRequest, ResourceInfo, QuotaFailure and RetryInfo.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=dict(error.metadata))]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if error.resource is not None:
        kind, name = error.resource
        details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name))
    if error.reason in ("RATE_LIMITED", "QUOTA_EXHAUSTED"):
        limit = error.metadata.get("limit", "")
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(
            subject=error.metadata.get("subject", ""),
            description=error.message,
            quota_metric=error.metadata.get("quota", ""),
            quota_value=int(limit) if limit.isdecimal() and len(limit) < 19 else 0,
        )
        details.append(quota)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    return status_pb2.Status(code=error.code, message=error.message, details=[_packed(d) for d in details])


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def error_from_rpc(failure: grpc.RpcError) -> RyzansteinError:
    """Returns the server's error from a failed call. An unknown error keeps code and message; its reason is the code's name."""
    return _with_reason(error_of_call(failure))


NOT_LEADER = "NOT_LEADER"


def leader_named_by(failure: grpc.RpcError) -> str:
    """Returns the address of the leader that an orchestrator names which stands by; empty: it names none."""
    error = error_from_rpc(failure)
    return str(error.metadata.get("leader", "")) if error.reason == NOT_LEADER else ""


async def answered(call: Awaitable[T]) -> T:
    """Returns the result of a call. Raises its failure as the server's error."""
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from failure


def error_from_status(status: status_pb2.Status) -> RyzansteinError:
    """Returns the error that `status_from_error` converted."""
    return _with_reason(error_of_status(status))


def _with_reason(error: RyzansteinError) -> RyzansteinError:
    error.reason = error.reason or error.code.name
    return error


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RyzansteinError) -> None:
    """Ends the call with the error's status and the trailing metadata that it has. Raises, like `context.abort`."""
    last = rpc_status.to_status(status_from_error(error))
    # gRPC would send the metadata of the status instead of that of the call.
    await context.abort(last.code, last.details, (*(context.trailing_metadata() or ()), *last.trailing_metadata))


def grpc_code(error: RyzansteinError) -> grpc.StatusCode:
    return _GRPC_CODES[int(error.code)]
