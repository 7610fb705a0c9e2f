"""The gRPC services, from the comments of the proto files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ryzanstein.lab.reference.markdown import GENERATED, table

_PROTOS = Path(__file__).resolve().parents[4] / "protos" / "ryzanstein" / "v1"
_METHOD = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\)")
_INTRODUCTION = f"""# gRPC

{GENERATED}

The package is `ryzanstein.v1`. The messages, and all that the comments say of methods and fields, are in
`protos/ryzanstein/v1/`. Every service has reflection and `grpc.health.v1`. Errors are in [errors](errors.md).
"""


def grpc_page() -> str:
    """Returns the page with a section for each service."""
    lines = [_INTRODUCTION]
    for path in sorted(_PROTOS.glob("*.proto")):
        for name, comment, body in _services(path.read_text()):
            lines += [f"## {name}", "", f"`{path.name}`. {comment}", ""]
            lines += [*table(("method", "request", "answer", "meaning"), _methods(body))]
    return "\n".join(lines)


def _services(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the comment and the body of each service."""
    for match in re.finditer(r"((?:^//[^\n]*\n)*)^service (\w+) \{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL):
        yield match[2], _joined(match[1]), match[3]


def _methods(body: str) -> Iterator[tuple[str, str, str, str]]:
    for match in re.finditer(r"((?:^ *//[^\n]*\n)*)^ *(rpc .*?[;{])", body, flags=re.MULTILINE | re.DOTALL):
        method = _METHOD.search(" ".join(match[2].split()))
        assert method is not None, match[2]
        name, asks, request, answers, answer = method.groups()
        meaning = re.split(r"(?<=\.) (?=[A-Z\"])", _joined(match[1]))[0]
        yield f"`{name}`", f"{asks or ''}`{request}`", f"{answers or ''}`{answer}`", meaning


def _joined(comment: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
