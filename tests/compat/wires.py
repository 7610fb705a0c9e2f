"""Other versions of the protocol, each with messages of its own: the earlier one, and one that is newer than today's.

A wire has a descriptor pool of its own. Nothing of it is shared with `ryzanstein.v1`, so a process that imports only this
speaks only that version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tests.compat.proto_reader import read_protos

EARLIER = Path(__file__).parent / "protos"
TODAY = Path(__file__).parents[2] / "protos"
PACKAGE = "ryzanstein.v1"
LATER_NUMBER = 900
LATER = "from_later"


class Wire:
    """The messages and methods of one version: "earlier", or "newer".

    The newer one is today's with one more field in every message, which it always sends, and one more
    kind of frame from routers and from nodes.
    """

    def __init__(self, version: str) -> None:
        self._newer = version == "newer"
        self._pool = DescriptorPool()
        for known in (duration_pb2, timestamp_pb2):
            self._pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        for file in read_protos(TODAY if self._newer else EARLIER).values():
            if self._newer:
                _grow(file)
            self._pool.AddSerializedFile(file.SerializeToString())

    def message(self, name: str) -> Any:
        """Returns the class of a message."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def method(self, service: str, name: str) -> MethodDescriptor:
        found: MethodDescriptor = self._pool.FindServiceByName(f"{PACKAGE}.{service}").methods_by_name[name]
        return found

    def parse(self, kind: Any, fields: dict[str, Any]) -> Message:
        """Returns the message with these fields. Raises ParseError for one that this version does not have."""
        message: Message = ParseDict(fields, kind())
        self.complete(message)
        return message

    def complete(self, message: Message) -> None:
        """Sets what this version always sends."""
        if self._newer and message.DESCRIPTOR.full_name.startswith(PACKAGE):
            for inner in _inner(message):
                self.complete(inner)
            setattr(message, LATER, "a field of a later version")


def visible(message: Message) -> dict[str, Any]:
    """Returns the message as JSON, with the paths of the fields that its version does not know as `unknown`."""
    fields: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return fields | {"unknown": sorted(set(_unknown(message)))}


def _grow(file: FileDescriptorProto) -> None:
    optional, text = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.TYPE_STRING
    for message in file.message_type:
        message.field.add(name=LATER, number=LATER_NUMBER, label=optional, type=text)
        if message.name in ("ConnectRequest", "ConnectResponse"):
            message.field.add(name="later_frame", number=LATER_NUMBER + 1, label=optional, type=text, oneof_index=0)


def _inner(message: Message) -> Iterator[Message]:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from value if field.is_repeated else (value,)


def _unknown(message: Message, path: str = "") -> Iterator[str]:
    fields: Any = UnknownFieldSet(message)
    yield from (f"{path}{field.field_number}" for field in fields)
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else (value,):
                yield from _unknown(inner, f"{path}{field.name}.")
