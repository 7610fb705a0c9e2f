"""The protos of the earlier version: read correctly, and still a part of today's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tests.compat.proto_reader import read_protos
from tests.compat.wires import EARLIER

from ryzanstein.v1 import (
    adapter_pb2,
    debug_pb2,
    embedding_pb2,
    inference_pb2,
    journal_pb2,
    orchestrator_pb2,
    pages_pb2,
    peer_pb2,
    router_pb2,
    text_pb2,
    usage_pb2,
    worker_pb2,
)

TODAY = Path(__file__).parents[2] / "protos"
FILES = (debug_pb2, embedding_pb2, inference_pb2, journal_pb2, orchestrator_pb2, pages_pb2, peer_pb2)
FILES = (*FILES, adapter_pb2, router_pb2, text_pb2, usage_pb2, worker_pb2)
BY_PATH = {file.DESCRIPTOR.name: FileDescriptorProto.FromString(file.DESCRIPTOR.serialized_pb) for file in FILES}


def test_the_reader_reads_what_the_compiler_reads() -> None:
    read = read_protos(TODAY)
    assert set(read) == set(BY_PATH)
    for path, file in read.items():
        assert file == BY_PATH[path]


def facts(file: FileDescriptorProto) -> Iterator[str]:
    """What a peer relies on, one line each; numbers and types, as names are not on the wire, but those of methods are."""
    for message in (*file.message_type, *(nested for outer in file.message_type for nested in outer.nested_type)):
        for field in message.field:
            yield f"{message.name}.{field.number}: {field.name} {field.type} {field.label} {field.type_name}"
            yield f"{message.name}.{field.name} {'has' if field.HasField('oneof_index') else 'has no'} oneof"
    for enum in file.enum_type:
        yield from (f"{enum.name}.{value.number}: {value.name}" for value in enum.value)
    for service in file.service:
        yield from (f"{service.name}.{method}" for method in service.method)


@pytest.mark.parametrize("path", sorted(read_protos(EARLIER)))
def test_all_of_the_earlier_wire_is_there_today(path: str) -> None:
    earlier, today = read_protos(EARLIER)[path], BY_PATH[path]
    assert set(facts(earlier)) <= set(facts(today))


def test_it_is_the_wire_from_before_nodes_had_several_models() -> None:
    fields = {line for file in read_protos(EARLIER).values() for line in facts(file)}
    for absent in ("RouterHello.model", "Beat.other_models", "HeartbeatResponse.plural", "HeartbeatRequest.models"):
        assert not [line for line in fields if line.startswith(f"{absent} ")]
        assert [line for file in BY_PATH.values() for line in facts(file) if line.startswith(f"{absent} ")]
