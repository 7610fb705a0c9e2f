"""Stacks and found requests as messages of `debug.proto`."""

from __future__ import annotations

from ryzanstein.observe.requests import FoundRequest, RequestQuery
from ryzanstein.observe.stacks import NamedStack
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.wire.timestamps import duration


def query_from_wire(request: pb.FindRequestsRequest) -> RequestQuery:
    return RequestQuery(request.id, request.older_than.ToNanoseconds() / 1e9)


def found_to_wire(found: FoundRequest) -> pb.FoundRequest:
    return pb.FoundRequest(
        request_id=found.request_id,
        generation_id=found.generation_id,
        model=found.model,
        stage=pb.RequestStage.ValueType(found.stage.value),
        age=duration(found.age_s),
        silent=duration(found.silent_s),
        attempt=found.attempt,
        node_id=found.node_id,
        tokens=found.tokens,
        prompt_tokens=found.prompt_tokens,
        prefilled=found.prefilled,
        ahead=found.ahead,
        step=found.step,
    )


def task_to_wire(task: NamedStack) -> pb.TaskStack:
    return pb.TaskStack(name=task.name, stack=task.stack)
