"""langchain: bound tools, structured output by each method, agents, streams and batches, over chats and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from loops import HUGE, MODEL, PIXEL, RESULTS, URL, City, refused, run
from openai import LengthFinishReasonError

MOST = {"recursion_limit": 12}


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return RESULTS[city]


@tool
def read() -> str:
    """A long file."""
    return HUGE


def model(**options: Any) -> ChatOpenAI:
    fixed: dict[str, Any] = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0, "timeout": 100}
    return ChatOpenAI(**fixed, **{"temperature": 0, "max_tokens": 150, **options})


def bound(api: dict[str, Any], **choice: Any) -> list[str]:
    """Three steps of bound tools, each streamed and whole; the whole ones make the conversation."""
    asks = model(**api, stream_usage=True).bind_tools([weather, read], parallel_tool_calls=False, **choice)
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("How is the weather in Rome?")]
    message = []
    for _ in range(3):
        whole = asks.invoke(messages)
        first, *rest = asks.stream(messages)
        streamed: Any = sum(rest, first)
        (call,) = whole.tool_calls
        assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [(call["name"], call["args"])]
        assert whole.usage_metadata["total_tokens"] == streamed.usage_metadata["total_tokens"] > 0
        messages += [streamed if len(message) % 2 else whole, (weather if call["name"] == "weather" else read).invoke(call)]
        message.append(call["name"])
    free = model(**api, max_tokens=16).bind_tools([weather, read]).invoke(messages)
    assert free.usage_metadata["output_tokens"] > 0
    return message


def structured(api: dict[str, Any], method: str) -> list[Any]:
    asks = model(**api).with_structured_output(City, method=method)
    try:
        whole, *_, last = asks.invoke("Rome for two days, as JSON."), *asks.stream("Rome for two days, as JSON.")
    except (OutputParserException, LengthFinishReasonError):
        assert method == "json_mode", "only there the schema is not enforced"
        return []
    assert isinstance(whole, City)
    assert whole == last
    return [whole, last]


@wrap_model_call
def steered(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """Small models decide nothing: two calls, then one more or the answer, and at last the answer."""
    after = [each for each in request.messages if not isinstance(each, AIMessage)]
    results = next((i for i, each in enumerate(reversed(after)) if not isinstance(each, ToolMessage)), 0)
    if results < 2:
        request = request.override(tool_choice="weather", response_format=None)
    elif results > 2:
        request = request.override(tools=[])
    return handler(request)


def agent(api: dict[str, Any], streamed: bool) -> list[str]:
    """Two turns of an agent that calls a tool twice and answers typed."""
    asks = create_agent(
        model(**api, model_kwargs={"parallel_tool_calls": False}),
        [weather],
        system_prompt="Be brief.",
        middleware=[steered],
        response_format=ProviderStrategy(City),
    )
    messages: list[Any] = [HumanMessage("How is the weather in Rome?")]
    for _ in range(2):
        if streamed:
            *_, (_, state) = (each for each in asks.stream({"messages": messages}, MOST, stream_mode=["messages", "values"]))
        else:
            state = asks.invoke({"messages": messages}, MOST)
        assert isinstance(state["structured_response"], City)
        messages = [*state["messages"], HumanMessage("And in Oslo?")]
    kinds = [type(each).__name__ for each in messages]
    assert kinds.count("ToolMessage") >= 4, kinds
    return kinds


def typed_by_tool(api: dict[str, Any]) -> City:
    asks = create_agent(model(**api, model_kwargs={"parallel_tool_calls": False}), [], response_format=ToolStrategy(City))
    messages: list[Any] = [HumanMessage("Rome for two days.")]
    for _ in range(3):
        state = asks.invoke({"messages": messages}, MOST)
        messages = [*state["messages"], HumanMessage("Another.")]
        assert isinstance(state["structured_response"], City)
    found: City = state["structured_response"]
    return found


def cancelled() -> int:
    stream = model(max_tokens=400).stream("Count to 100.")
    seen = [next(stream) for _ in range(3)]
    stream.close()
    return len(seen)


def picture(api: dict[str, Any]) -> Any:
    return model(**api).invoke([HumanMessage([{"type": "image_url", "image_url": {"url": PIXEL}}])])


for api in ({}, {"use_responses_api": True}):
    name = "responses" if api else "chat"
    run(f"{name}, required", lambda api: bound(api, tool_choice="any", strict=True), api)
    run(f"{name}, named", lambda api: bound(api, tool_choice="weather"), api)
    for method in ("function_calling", "json_schema", "json_mode"):
        run(f"{name}, {method}", structured, api, method)
    for streamed in (True,) if api else (False, True):
        run(f"{name}, agent, {streamed=}", agent, api, streamed)
    run(f"{name}, typed by a tool", typed_by_tool, api)
    refused(f"{name}, image", lambda api=api: picture(api), "only text parts are supported")
run("batch", lambda: [each.usage_metadata["output_tokens"] for each in model(max_tokens=8).batch(["a", "b", "c", "d"])])
run("cancelled", cancelled)
