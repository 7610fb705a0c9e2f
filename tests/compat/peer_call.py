"""`python -m tests.compat.peer_call VERSION ADDRESS SERVICE METHOD`: a client of another version, as a process.

Each line of standard input is a request as JSON, each line of standard output a response. A failed
call writes its code and message as the last line. The end of the input ends the requests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from tests.compat.wires import PACKAGE, Wire, visible


def write(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    version, address, service, name = sys.argv[1:]
    wire = Wire(version)
    method = wire.method(service, name)
    request, response = wire.message(method.input_type.name), wire.message(method.output_type.name)

    def requests() -> Iterator[Any]:
        for line in sys.stdin:
            yield wire.parse(request, json.loads(line))

    with grpc.insecure_channel(address) as channel:
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(channel, kind)(
            f"/{PACKAGE}.{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        try:
            answer = call(requests() if method.client_streaming else next(requests()))
            for each in answer if method.server_streaming else (answer,):
                write(visible(each))
        except grpc.RpcError as error:
            write({"code": error.code().name, "details": error.details()})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
