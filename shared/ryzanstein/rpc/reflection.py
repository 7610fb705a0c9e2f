"""Server reflection, v1 and v1alpha: how grpcurl, buf and consoles learn what a server serves.

The library has v1alpha only, and newer clients ask v1 first. Both have the same messages under
another package, so one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
_SERVICE = "ServerReflection"


def enable_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Serves reflection of these services and of itself, in both versions."""
    _describe_v1()
    names = (*service_names, f"{ALPHA}.{_SERVICE}", f"{V1}.{_SERVICE}")
    servicer: Any = reflection.aio.ReflectionServicer(service_names=names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    answer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(f"{V1}.{_SERVICE}", {"ServerReflectionInfo": answer})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Adds v1's file to the descriptors, so that reflection can describe itself. A second call changes nothing."""
    file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name, file.package = file.name.replace("v1alpha", "v1"), V1
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(ALPHA, V1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(ALPHA, V1)
            method.output_type = method.output_type.replace(ALPHA, V1)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
