"""What people write becomes messages: conversations, options, tools, structured answers."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ryzanstein.client import Client, clean
from ryzanstein.client.core import schema_of
from ryzanstein.client.requests import chat_request, complete_request
from ryzanstein.client.tools import call_tool, result_of, tool_of
from ryzanstein.v1 import inference_pb2 as pb


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Says what the weather will be."""
    return f"{city} {days} {unit} {tags}"


def test_a_conversation_as_openais_clients_write_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    request = chat_request(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ],
        {"temperature": 0.0, "stop": ["x"], "session": "s", "logit_bias": {5: 1.0}, "priority": 2},
    )
    assert [message.role for message in request.messages] == [1, 2, 3, 4]
    assert request.messages[1].content == "Hi"
    assert request.messages[2].tool_calls[0].arguments == '{"city": "Oslo"}'
    assert (request.sampling.temperature, list(request.sampling.stop), request.session_id) == (0.0, ["x"], "s")
    assert request.sampling.HasField("temperature")
    assert dict(request.sampling.logit_bias) == {5: 1.0}
    assert len(request.request_id) == 32
    assert chat_request("x", {"request_id": None}).request_id == ""
    assert chat_request("x", {"request_id": "mine"}).request_id == "mine"


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="temprature: no such option"):
        chat_request("x", {"temprature": 1})
    with pytest.raises(ValueError, match="role must be system, user, assistant or tool, got 'robot'"):
        chat_request([{"role": "robot", "content": ""}], {})
    for named, value in (("max_tokens", -1), ("temperature", "hot"), ("model", 5)):
        with pytest.raises(ValueError, match=f"^{named}: "):
            chat_request("x", {named: value})
    with pytest.raises(ValueError, match="'image_url' is not text"):
        chat_request([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {})
    assert list(chat_request("x", {"stop": "end"}).sampling.stop) == ["end"]
    with pytest.raises(TypeError, match="session: is an option of chat"):
        complete_request("x", {"session": "s"})


def test_a_function_is_a_tool() -> None:
    tool = tool_of(weather)
    schema = json.loads(tool.parameters)
    assert (tool.name, tool.description) == ("weather", "Says what the weather will be.")
    assert schema["required"] == ["city"]
    assert schema["properties"] == {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    described = tool_of({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
    assert (described.name, described.parameters) == ("f", '{"type": "object"}')

    def anything(*values: int) -> None: ...

    with pytest.raises(TypeError, match="any number of arguments"):
        tool_of(anything)


def test_a_call_that_fails_is_a_result() -> None:
    functions = {"weather": weather}
    assert call_tool(functions, pb.ToolCall(name="weather", arguments='{"city": "Oslo"}')) == "Oslo 1 C None"
    assert "there is no function 'missing'" in call_tool(functions, pb.ToolCall(name="missing"))
    assert call_tool(functions, pb.ToolCall(name="weather", arguments="{")).startswith("error: JSONDecodeError")
    assert call_tool(functions, pb.ToolCall(name="weather", arguments='{"town": 1}')).startswith("error: TypeError")
    assert result_of(pb.ToolCall(id="c"), {"a": 1}).content == '{"a": 1}'


def test_a_type_has_a_schema() -> None:
    class City(BaseModel):
        name: str
        people: int

    assert schema_of(City)["required"] == ["name", "people"]
    assert schema_of(list[int]) == {"items": {"type": "integer"}, "type": "array"}


@given(st.text(alphabet=st.characters()))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    cleaned: Any = clean(text)
    for character in cleaned:
        number = ord(character)
        assert number in (9, 10) or 32 <= number < 127 or number > 159
        assert not 0x202A <= number <= 0x202E
        assert not 0x2066 <= number <= 0x2069
        assert not 0xD800 <= number <= 0xDFFF
    assert clean(cleaned) == cleaned


def test_what_is_harmless_stays() -> None:
    assert clean("Grüße, 世界 🙂\tx\r\ny") == "Grüße, 世界 🙂\tx\ny"
    assert clean("a\x1b]52;c;aGk=\x07b\x1b[2Jc") == "a]52;c;aGk=b[2Jc"


@pytest.mark.parametrize("routers", ["127.0.0.1", "http://127.0.0.1:8000", "a:50051,b", "a:0", "::1:50051", ["a:b"]])
def test_an_address_that_is_none_is_refused_at_once(routers: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"^routers: must "):
        Client(routers)


@pytest.mark.parametrize(
    "routers", ["dns:///routers:50051", "ipv4:127.0.0.1:50051", "unix:/tmp/a", "[::1]:50051", " a:1 , b:2 "]
)
def test_what_grpc_connects_to_is_an_address(routers: str) -> None:
    with Client(routers) as client:
        assert sorted(client._core.routers.addresses) == sorted(each.strip() for each in routers.split(","))
