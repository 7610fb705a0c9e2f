"""docs/build/asyncapi.yaml is AsyncAPI 3, and what it says of messages is what the code has.

Every message that a test of this folder receives is validated against it as well (`SocketClient.receive`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import typing

import msgspec
import pytest
from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError
from tests.router.faces.websocket.asyncapi import checked, document, validator

from ryzanstein.router.faces.openai.answers.failures import HttpRefused
from ryzanstein.router.faces.websocket.frames import ClientFrame, ServerFrame
from ryzanstein.router.faces.websocket.handshake import SUBPROTOCOL
from ryzanstein.router.faces.websocket.requests import SocketRequests

CLIENT = {struct.__struct_config__.tag: struct for struct in typing.get_args(ClientFrame)}
SERVER = {struct.__struct_config__.tag: struct for struct in typing.get_args(ServerFrame)}
VALID = [
    {"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": {"messages": []}},
    {"type": "submit", "id": "a", "url": "/v1/completions", "body": {}, "headers": {"X-Session-Id": "s"}, "credit": 0},
    {"type": "attach", "id": "a", "generation": "chatcmpl-1", "from_index": {"0": 5, "15": 0}, "ended": [1], "credit": None},
    {"type": "attach", "id": "a", "generation": "chatcmpl-1", "include_usage": True},
    {"type": "cancel", "id": "a"},
    {"type": "cancel", "generation": "chatcmpl-1"},
    {"type": "credit", "id": "a", "chunks": 1},
]
INVALID = [
    {"type": "submit", "id": "a", "url": "/v1/completions"},
    {"type": "submit", "id": "", "url": "/v1/completions", "body": {}},
    {"type": "submit", "id": "a" * 65, "url": "/v1/completions", "body": {}},
    {"type": "submit", "id": "a", "url": "/v1/completions", "body": {}, "headers": {"X-Session-Id": "a\nb"}},
    {"type": "submit", "id": "a", "url": "/v1/completions", "body": {}, "credit": -1},
    {"type": "submit", "id": "a", "url": "/v1/completions", "body": {}, "more": 1},
    {"type": "attach", "id": "a", "generation": ""},
    {"type": "attach", "id": "a", "generation": "g", "from_index": {"16": 0}},
    {"type": "attach", "id": "a", "generation": "g", "from_index": {"0": -1}},
    {"type": "attach", "id": "a", "generation": "g", "ended": [16]},
    {"type": "credit", "id": "a", "chunks": 0},
    {"type": "credit", "id": "a", "chunks": 1_000_001},
]


def test_the_document_is_async_api_3(tmp_path):
    """By the schema that the specification's authors publish."""
    assert shutil.which("npm"), "npm (Node.js) is needed to fetch AsyncAPI's schema"
    command = ["npm", "pack", "--silent", "@asyncapi/specs@6.11.1"]
    packed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100).stdout.strip()
    with tarfile.open(tmp_path / packed.splitlines()[-1]) as archive:
        member = archive.extractfile("package/schemas/3.0.0-without-$id.json")
        assert member is not None
        schema = json.load(member)
    errors = [f"{list(error.path)}: {error.message[:200]}" for error in Draft7Validator(schema).iter_errors(document())]
    assert errors == []


def test_each_kind_of_message_is_in_the_channel_and_in_one_operation():
    messages = document()["channels"]["socket"]["messages"]
    assert messages.keys() == CLIENT.keys() | SERVER.keys() == document()["components"]["messages"].keys()
    for operation, kinds in (("ask", CLIENT), ("tell", SERVER)):
        refs = [ref["$ref"].rsplit("/", 1)[1] for ref in document()["operations"][operation]["messages"]]
        assert refs == list(kinds)


def test_the_subprotocol_is_that_of_the_code():
    headers = document()["channels"]["socket"]["bindings"]["ws"]["headers"]
    assert headers["properties"]["Sec-WebSocket-Protocol"]["const"] == SUBPROTOCOL


@pytest.mark.parametrize("kind", [*CLIENT, *SERVER])
def test_a_message_has_the_fields_of_its_struct(kind):
    fields = msgspec.structs.fields((CLIENT | SERVER)[kind])
    schema = document()["components"]["schemas"][kind]
    assert schema["properties"].keys() == {"type", *(field.encode_name for field in fields)}
    required = {field.encode_name for field in fields if field.required}
    assert set(schema["required"]) == {"type"} | required
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("message", VALID, ids=str)
async def test_what_the_document_allows_the_router_reads(message):
    checked(message)
    frame = await SocketRequests(10).frame(json.dumps(message).encode())
    assert frame.__struct_config__.tag == message["type"]


@pytest.mark.parametrize("message", INVALID, ids=str)
async def test_what_the_document_forbids_the_router_refuses(message):
    with pytest.raises(ValidationError):
        checked(message)
    with pytest.raises(HttpRefused):
        await SocketRequests(10).frame(json.dumps(message).encode())


def test_the_validator_can_fail():
    assert not validator("done").is_valid({"type": "done", "id": "a"})
