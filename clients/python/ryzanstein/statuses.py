"""Reads the error of a failed call: `google.rpc.Status` with the details of AIP-193.

Its messages are loaded with the first error: a program that imports the client need not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from ryzanstein.errors import Code, FieldViolation, RyzansteinError

if TYPE_CHECKING:
    from google.protobuf import any_pb2
    from google.rpc import status_pb2


def error_of_call(failure: grpc.RpcError) -> RyzansteinError:
    """Returns the server's error. Its reason is empty where there is no ErrorInfo: then the transport failed."""
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    except ValueError:  # the details are of another failure: an intermediary changed the status
        status = None
    if status is not None:
        return error_of_status(status)
    call: Any = failure  # what is raised has these of `grpc.Call`
    code = call.code()
    return RyzansteinError(str(call.details() or code.name), _code(code.value[0]), "")


def error_of_status(status: status_pb2.Status) -> RyzansteinError:
    """Returns the error that a status carries. Its reason is empty where there is no ErrorInfo."""
    error = RyzansteinError(status.message, _code(status.code), "")
    for detail in status.details:
        _read_detail(detail, error)
    return error


def _code(number: int) -> Code:
    """Returns the code of a number; unknown numbers are UNKNOWN."""
    try:
        return Code(number)
    except ValueError:
        return Code.UNKNOWN


def _read_detail(detail: any_pb2.Any, error: RyzansteinError) -> None:
    from google.rpc import error_details_pb2

    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    resource, retry = error_details_pb2.ResourceInfo(), error_details_pb2.RetryInfo()
    if detail.Unpack(info):
        error.reason, error.metadata = info.reason, dict(info.metadata)
    elif detail.Unpack(bad):
        error.violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
    elif detail.Unpack(resource):
        error.resource = (resource.resource_type, resource.resource_name)
    elif detail.Unpack(retry):
        error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
