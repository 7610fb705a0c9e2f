"""Messages that nobody means, for every method of every service: named ones, each made to hurt in its own way, and random.

Methods and their types come from the descriptors that the services publish: a new method is attacked without a word here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ryzanstein.v1 import inference_pb2, orchestrator_pb2, router_pb2, worker_pb2

EVERYWHERE = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
FILES = {
    "router": (inference_pb2.DESCRIPTOR, router_pb2.DESCRIPTOR, *EVERYWHERE),
    "orchestrator": (orchestrator_pb2.DESCRIPTOR, *EVERYWHERE),
    "worker": (worker_pb2.DESCRIPTOR, *EVERYWHERE),
}
MAX_BYTES = {"router": 4 * 2**20, "orchestrator": 4 * 2**20, "worker": 16 * 2**20}
_DELIMITED = 2
_MAX_RANDOM_BYTES = 200


@dataclass(frozen=True, slots=True)
class Method:
    """One method; `path` as in `:path`."""

    service: str
    path: str
    request: Descriptor
    request_streaming: bool
    response_streaming: bool


def methods(service: str) -> list[Method]:
    """All that a process of this service answers: `router`, `orchestrator` or `worker`."""
    return [
        _method(service, method)
        for file in FILES[service]
        for described in file.services_by_name.values()
        for method in described.methods
    ]


def _method(service: str, method: MethodDescriptor) -> Method:
    path = f"/{method.containing_service.full_name}/{method.name}"
    return Method(service, path, method.input_type, method.client_streaming, method.server_streaming)


def named(method: Method) -> dict[str, bytes]:
    """By what is wrong with them. They are not larger than the service's bound, but for `over_the_bound`."""
    size = MAX_BYTES[method.service]
    tag = _tag(_first_of_messages(method.request), _DELIMITED)
    valid = sample(method.request, Random(1)).SerializeToString() or b"\x0a\x01a"
    return {
        "millions_of_empty_messages": (tag + b"\0") * ((size - 64) // (len(tag) + 1)),
        "millions_of_numbers": _tag(1, 0) + b"\x01" + (_tag(1000, 0) + b"\x01") * ((size - 64) // 4),
        "over_the_bound": bytes(size + 1),
        "deep": _deep(500),
        "deep_groups": b"\x0b" * 100_000,
        "cut": valid[:-1],
        "length_beyond_the_end": b"\x0a\xff\xff\xff\xff\x07",
        "endless_varint": b"\x08" + b"\xff" * 1000,
        "largest_varint": b"".join(_tag(number, 0) + b"\xff" * 9 + b"\x01" for number in range(1, 20)),
        "wrong_wire_types": b"".join(_tag(number, 5) + b"abcd" for number in range(1, 20)),
        "unknown_wire_type": b"\x0f",
        "field_zero": b"\x02\x00",
        "invalid_utf8": b"".join(_tag(number, _DELIMITED) + b"\x02\xff\xfe" for number in range(1, 20)),
        "packed_floats": b"".join(_tag(number, _DELIMITED) + b"\x04\x00\x00\xc0\x3f" for number in range(1, 20)),
    }


def random_messages(method: Method, count: int, seed: int) -> Iterator[bytes]:
    """Noise, and messages of the type with a few bytes changed, cut out or put in."""
    random = Random(f"{method.path} {seed}")
    for _ in range(count):
        if random.random() < 0.4:
            yield random.randbytes(random.randrange(_MAX_RANDOM_BYTES))
        else:
            yield _damaged(sample(method.request, random).SerializeToString(), random)


def sample(descriptor: Descriptor, random: Random) -> Message:
    """A message with some of its fields, at every depth."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if random.random() < 0.6:
            _fill(message, field, random)
    return message


def _fill(message: Message, field: FieldDescriptor, random: Random) -> None:
    made = field.message_type
    if made is not None and made.GetOptions().map_entry:
        return
    if made is not None:
        target = getattr(message, field.name)
        (target.add() if field.is_repeated else target).CopyFrom(sample(made, random))
        return
    value = _VALUES[field.cpp_type](random)
    if field.type == FieldDescriptor.TYPE_BYTES:
        value = str(value).encode()
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _text(random: Random) -> str:
    return "".join(random.choices("ab/.:0 é\u2028\U0001f600\0", k=random.randrange(20)))


_VALUES: dict[int, Callable[[Random], object]] = {
    FieldDescriptor.CPPTYPE_INT32: lambda random: random.randrange(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: lambda random: random.randrange(-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: lambda random: random.choice((0, 1, 5, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: lambda random: random.choice((0, 1, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_FLOAT: lambda random: random.choice((0.0, 1.0, float("nan"), float("inf"), -1e30)),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda random: random.choice((0.0, float("nan"), -1e300)),
    FieldDescriptor.CPPTYPE_BOOL: lambda random: random.random() < 0.5,
    FieldDescriptor.CPPTYPE_STRING: _text,
    FieldDescriptor.CPPTYPE_ENUM: lambda random: random.choice((0, 1, 2, 77)),
}


def _damaged(data: bytes, random: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(damaged) + 1)
        match random.randrange(4):
            case 0 if at < len(damaged):
                damaged[at] ^= 1 << random.randrange(8)
            case 1:
                del damaged[at : at + random.randrange(8)]
            case 2:
                damaged[at:at] = random.randbytes(random.randrange(8))
            case _:
                damaged[at:at] = damaged[: random.randrange(16)]
    return bytes(damaged)


def _first_of_messages(descriptor: Descriptor) -> int:
    """The number of a field that repeats messages, or else of any."""
    numbers = [field.number for field in descriptor.fields if field.is_repeated and field.message_type is not None]
    return (numbers or [1])[0]


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _deep(levels: int) -> bytes:
    data = b""
    for _ in range(levels):
        data = b"\x0a" + _varint(len(data)) + data
    return data
