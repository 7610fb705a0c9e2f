"""Reads the project's own protos without protoc: as much of proto3 as they use, into file descriptors.

The compiler is no dependency of the tests, as its package and the runtime's cannot be installed together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

_TOKEN = re.compile(r'//[^\n]*|\s+|"[^"]*"|-?[\w.]+|[{}()<>=;,]')
_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "uint64", "int32", "bool", "string", "bytes", "uint32", "fixed32")
}


def read_protos(root: Path) -> dict[str, FileDescriptorProto]:
    """Returns the files below `root` by their import path, each after those that it imports."""
    read = {str(path.relative_to(root)): _Reader(path.read_text()).file() for path in sorted(root.rglob("*.proto"))}
    enums = {f".{file.package}.{enum.name}" for file in read.values() for enum in file.enum_type}
    ordered: dict[str, FileDescriptorProto] = {}
    while len(ordered) < len(read):
        for name, file in read.items():
            if name not in ordered and all(other in ordered or other not in read for other in file.dependency):
                file.name = name
                for message in file.message_type:
                    _resolve(message, enums)
                ordered[name] = file
    return ordered


def _resolve(message: DescriptorProto, enums: set[str]) -> None:
    for nested in message.nested_type:
        _resolve(nested, enums)
    for field in message.field:
        if field.type_name in enums:
            field.type = FieldDescriptorProto.TYPE_ENUM


class _Reader:
    """Reads one file."""

    def __init__(self, text: str) -> None:
        self._tokens = self._split(text)
        self._next = next(self._tokens, "")
        self._file = FileDescriptorProto(syntax="proto3")

    @staticmethod
    def _split(text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"not understood: {text[at : at + 40]!r}")
            at = found.end()
            if not found[0].isspace() and not found[0].startswith("//"):
                yield found[0]

    def file(self) -> FileDescriptorProto:
        """Returns the file without its name; enums still count as messages."""
        while self._next:
            match self._take():
                case "syntax":
                    self._expect("=", '"proto3"', ";")
                case "package":
                    self._file.package = self._take()
                    self._expect(";")
                case "import":
                    self._file.dependency.append(self._take().strip('"'))
                    self._expect(";")
                case "message":
                    self._message(self._file.message_type.add())
                case "enum":
                    self._enum(self._file.enum_type.add())
                case "service":
                    self._service(self._file.service.add())
                case other:
                    raise ValueError(f"not understood: {other!r}")
        return self._file

    def _take(self) -> str:
        taken, self._next = self._next, next(self._tokens, "")
        return taken

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            if (found := self._take()) != token:
                raise ValueError(f"{token!r} expected, not {found!r}")

    def _full_name(self, name: str) -> str:
        return f".{name}" if "." in name else f".{self._file.package}.{name}"

    def _message(self, message: DescriptorProto) -> None:
        message.name = self._take()
        self._expect("{")
        while self._next != "}":
            if self._next == "oneof":
                self._oneof(message)
            else:
                self._field(message)
        self._expect("}")
        for field in message.field:  # after the oneofs that are written out
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def _oneof(self, message: DescriptorProto) -> None:
        self._expect("oneof")
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._take())
        self._expect("{")
        while self._next != "}":
            self._field(message).oneof_index = index
        self._expect("}")

    def _field(self, message: DescriptorProto) -> FieldDescriptorProto:
        field = message.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
        if self._next == "repeated":
            self._take()
            field.label = FieldDescriptorProto.LABEL_REPEATED
        elif self._next == "optional":
            self._take()
            field.proto3_optional = True
        kind = self._take()
        key, value = self._map_types() if kind == "map" else ("", "")
        field.name = self._take()
        if key:
            self._entry(message, field, key, value)
        else:
            self._set_type(field, kind)
        self._expect("=")
        field.number = int(self._take())
        self._expect(";")
        return field

    def _map_types(self) -> tuple[str, str]:
        self._expect("<")
        key = self._take()
        self._expect(",")
        value = self._take()
        self._expect(">")
        return key, value

    def _entry(self, message: DescriptorProto, field: FieldDescriptorProto, key: str, value: str) -> None:
        entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
            part = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            self._set_type(part, kind)
        field.label, field.type = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{self._file.package}.{message.name}.{entry.name}"

    def _set_type(self, field: FieldDescriptorProto, kind: str) -> None:
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, self._full_name(kind)

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._take()
        self._expect("{")
        while self._next != "}":
            name = self._take()
            self._expect("=")
            enum.value.add(name=name, number=int(self._take()))
            self._expect(";")
        self._expect("}")

    def _service(self, service: ServiceDescriptorProto) -> None:
        service.name = self._take()
        self._expect("{")
        while self._next != "}":
            self._expect("rpc")
            method = service.method.add(name=self._take())
            method.input_type, method.client_streaming = self._message_of_method()
            self._expect("returns")
            method.output_type, method.server_streaming = self._message_of_method()
            if self._next == "{":
                self._expect("{", "}")
            else:
                self._expect(";")
            if not method.client_streaming:
                method.ClearField("client_streaming")
            if not method.server_streaming:
                method.ClearField("server_streaming")
        self._expect("}")

    def _message_of_method(self) -> tuple[str, bool]:
        self._expect("(")
        streaming = self._next == "stream"
        if streaming:
            self._take()
        name = self._full_name(self._take())
        self._expect(")")
        return name, streaming
