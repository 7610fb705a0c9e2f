"""Enums of the wire are open: a number that only a newer peer knows is read as UNSPECIFIED, wherever it stands.

The messages and their fields come from the protos' descriptors, the readers of `ryzanstein.wire` from its modules, so that
a new field or a new reader is tried without a line here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein import wire
from ryzanstein.client.following.reading import AnswerReader
from ryzanstein.cluster import NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import Attempt, GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.router.faces.openai.answers.dialect import ChatDialect, CompletionDialect
from ryzanstein.router.journal import encoding
from ryzanstein.router.membership.view import View
from ryzanstein.router.nodes.links.frames import deliver
from ryzanstein.rpc.status import error_from_rpc, error_from_status
from ryzanstein.survey import look as survey
from ryzanstein.v1 import inference_pb2, journal_pb2, orchestrator_pb2, peer_pb2, router_pb2, worker_pb2
from ryzanstein.wire.attempts import attempt_from_wire, attempt_to_wire
from ryzanstein.wire.events import event_from_wire, event_to_wire
from ryzanstein.wire.membership import beat_from_wire, beat_to_wire, node_from_wire, node_to_wire

_FILES = (inference_pb2, journal_pb2, orchestrator_pb2, peer_pb2, router_pb2, worker_pb2)
Path = tuple[FieldDescriptor, ...]
Reader = Callable[[Any], object]


class Sink:
    """An attempt that remembers how its choices ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, FinishReason, int]] = []

    def finished(self, choice: int, reason: FinishReason, cached_prompt_tokens: int) -> None:
        self.ends.append((choice, reason, cached_prompt_tokens))


class Log:
    """What `encoding.restore` restores into, as far as it needs it for ends."""

    complete = False

    def __init__(self) -> None:
        self.log = self
        self.ends: list[FinishReason] = []

    def restore_end(self, choice: int, num_tokens: int, reason: FinishReason) -> bool:
        self.ends.append(reason)
        return False


def _restored(batch: journal_pb2.JournalBatch) -> object:
    log = Log()
    encoding.restore(log, (batch.SerializeToString(),))  # type: ignore[arg-type]
    return log.ends


def _delivered(output: worker_pb2.StepOutput) -> object:
    sink = Sink()
    deliver(output, {0: sink})  # type: ignore[dict-item]
    return sink.ends


def _viewed(message: orchestrator_pb2.WatchClusterResponse) -> object:
    view = View(epoch="e", version=message.delta.version - 1)
    view.apply(message)
    return view.nodes


def _answered(event: inference_pb2.GenerationEvent) -> object:
    reader = AnswerReader(1, 0.0)
    reader.read(event, 0.0)
    return reader.answer.finish_reason


def _wire_functions() -> Iterator[tuple[str, Reader]]:
    for info in pkgutil.iter_modules(wire.__path__, f"{wire.__name__}."):
        module = importlib.import_module(info.name)
        functions = inspect.getmembers(module, inspect.isfunction)
        yield from ((name, function) for name, function in functions if function.__module__ == module.__name__)


def _readers() -> list[tuple[type[Message], Reader]]:
    found: list[tuple[type[Message], Reader]] = [
        (journal_pb2.JournalBatch, _restored),
        (journal_pb2.JournalRequest, lambda wire: encoding.decode_request(wire.SerializeToString())),
        (worker_pb2.StepOutput, _delivered),
        (orchestrator_pb2.WatchClusterResponse, _viewed),
        (router_pb2.LinkStatus, survey._link),
        (inference_pb2.GenerationEvent, _answered),
    ]
    for name, reader in _wire_functions():
        if name.endswith("_from_wire"):
            kind = next(iter(typing.get_type_hints(reader).values()))
            if isinstance(kind, type) and issubclass(kind, Message):
                named = "field" in inspect.signature(reader).parameters
                found.append((kind, (lambda wire, reader=reader: reader(wire, "field")) if named else reader))
    return found


def _enum_paths(message: Descriptor, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    for field in message.fields:
        if field.enum_type is not None:
            yield (field,)
        elif field.message_type is not None and field.message_type.full_name not in above:
            yield from ((field, *path) for path in _enum_paths(field.message_type, above | {message.full_name}))


def _set(message: Any, path: Path, number: int) -> Any:
    """Sets the enum at the end of the path, in the only element of each list on its way."""
    field, *rest = path
    if rest:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner = inner.add()
        inner.SetInParent()
        _set(inner, tuple(rest), number)
    elif field.is_repeated:
        getattr(message, field.name).append(number)
    else:
        setattr(message, field.name, number)
    return message


def _outcome(reader: Reader, message: Any) -> object:
    try:
        return reader(message)
    except RyzansteinError as error:
        return error.code, error.violations


CASES = [(kind, path, reader) for kind, reader in _readers() for path in _enum_paths(kind.DESCRIPTOR)]


@pytest.mark.parametrize(
    ("kind", "path", "reader"), CASES, ids=[".".join((k.DESCRIPTOR.name, *(f.name for f in p))) for k, p, _ in CASES]
)
@given(unknown=st.integers(-(2**31), 2**31 - 1).filter(lambda number: not 0 <= number < 16))
def test_an_unknown_number_is_read_as_unspecified(kind: type[Message], path: Path, reader: Reader, unknown: int) -> None:
    sent = _set(kind(), path, unknown).SerializeToString()
    outcome = _outcome(reader, kind.FromString(sent))
    assert outcome == _outcome(reader, _set(kind(), path, 0))
    # A client's own mistake is refused by name. All else is what a peer says of itself, and is taken as it is.
    refused = isinstance(outcome, tuple) and outcome[0] is Code.INVALID_ARGUMENT
    assert refused is (path[-1].enum_type.name in ("Role", "ToolMode"))


def test_every_enum_of_the_protos_is_read_by_one_of_them() -> None:
    read = {path[-1].full_name for _, path, _ in CASES}
    fields = {
        field.full_name
        for file in _FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.enum_type is not None
    }
    # In a whole answer, which only clients read.
    assert fields - read == {"ryzanstein.v1.Choice.finish_reason"}
    assert GetMessageClass(inference_pb2.Choice.DESCRIPTOR) is inference_pb2.Choice


def test_what_is_unspecified_goes_on_to_others_as_unspecified() -> None:
    """An older router or orchestrator between newer ones passes on what it has understood."""
    beat = beat_from_wire(worker_pb2.Beat(state=17))  # type: ignore[arg-type]
    assert beat.state is NodeState.UNSPECIFIED
    assert beat_to_wire(beat).state == 0
    node = node_from_wire(orchestrator_pb2.Node(state=17))  # type: ignore[arg-type]
    assert node_to_wire(node).state == 0
    event = inference_pb2.GenerationEvent(finished=inference_pb2.GenerationFinished(finish_reason=17))  # type: ignore[arg-type]
    assert event_to_wire(event_from_wire(event)).finished.finish_reason == 0


@pytest.mark.parametrize("dialect", [ChatDialect(), CompletionDialect()])
def test_an_end_for_a_reason_of_a_newer_node_is_an_end_over_http(dialect: Any) -> None:
    for reason in FinishReason:
        assert isinstance(dialect.ending(0, reason, ())["finish_reason"], str)


def test_a_code_that_is_none_of_ours_is_unknown() -> None:
    for code in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE):
        failure = AioRpcError(code, Metadata(), Metadata(), "lost")
        assert error_from_rpc(failure).code is (Code.UNKNOWN if code is grpc.StatusCode.DATA_LOSS else Code.OUT_OF_RANGE)
    for number in (0, 15, 99):
        error = error_from_status(status_pb2.Status(code=number, message="what"))
        assert (error.code, error.message) == (Code.UNKNOWN, "what")


def test_a_status_that_contradicts_its_call_does_not_hide_the_failure() -> None:
    """A proxy that rewrites the code but not the details."""
    details = status_pb2.Status(code=5, message="there is none").SerializeToString()
    trailing = Metadata(("grpc-status-details-bin", details))
    error = error_from_rpc(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), trailing, "gone"))
    assert (error.code, error.message) == (Code.UNAVAILABLE, "gone")


def test_a_request_needs_nothing_that_only_newer_peers_know() -> None:
    request = GenerationRequest("m", TextPrompt("x"), SamplingParams())
    assert attempt_from_wire(attempt_to_wire(Attempt("g", 0, request, ()), 1)).request == request
