"""pydantic-ai: agents with tools and typed output in each of its ways, streams, and histories with thinking."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from loops import HUGE, MODEL, RESULTS, URL, City, refused, run
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.usage import UsageLimits

EVENTS = asyncio.new_event_loop()
MOST = UsageLimits(request_limit=8)
HISTORY = [
    ModelRequest([SystemPromptPart("Be brief."), UserPromptPart("Hello.")]),
    ModelResponse([ThinkingPart("They greet."), TextPart("Hello.")]),
    ModelRequest([UserPromptPart("The weather?")]),
    ModelResponse([ThinkingPart("Both."), ToolCallPart("weather", {"city": "Rome"}, "a"), ToolCallPart("read", None, "b")]),
    ModelRequest([ToolReturnPart("weather", {"sky": "größer 🌞"}, "a"), ToolReturnPart("read", HUGE, "b")]),
]


async def _two_steps(context: RunContext[None], offered: ToolDefinition) -> ToolDefinition | None:
    return offered if context.run_step <= 2 else None


async def _after_two_steps(context: RunContext[None], offered: list[ToolDefinition]) -> list[ToolDefinition]:
    return offered if context.run_step > 2 else []


def agent(kind: type[Any], output: Any, **settings: Any) -> Agent[None, Any]:
    http = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=100)
    asks: Agent[None, Any] = Agent(
        kind(MODEL, provider=OpenAIProvider(openai_client=http)),
        output_type=output,
        instructions="Be brief.",
        model_settings={"max_tokens": 150, "temperature": 0, "parallel_tool_calls": False, **settings},
        capabilities=[PrepareOutputTools(_after_two_steps)],
    )

    @asks.tool_plain(prepare=_two_steps)
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        return RESULTS[city]

    return asks


def names(history: list[Any]) -> list[str]:
    return [type(part).__name__ for message in history for part in message.parts]


async def turns(kind: type[Any], output: Any, streamed: bool, **settings: Any) -> list[str]:
    """Two turns, the second with what was said in the first; with tools each has three steps."""
    asks, history = agent(kind, output, **settings), None
    for _ in range(2):
        if streamed:
            async with asks.run_stream("Rome?", message_history=history, usage_limits=MOST) as result:
                found = await result.get_output()
                history, usage = result.all_messages(), result.usage
        else:
            whole = await asks.run("Rome?", message_history=history, usage_limits=MOST)
            found, history, usage = whole.output, whole.all_messages(), whole.usage
        assert isinstance(found, str if output is str else City)
        assert usage.output_tokens > 0
    return names(history or [])


def same(kind: type[Any], output: Any, calls: int, **settings: Any) -> list[str]:
    whole, streamed = (EVENTS.run_until_complete(turns(kind, output, each, **settings)) for each in (False, True))
    assert whole == streamed, (whole, streamed)
    assert whole.count("ToolCallPart") >= calls, whole
    return whole


async def after_thinking(kind: type[Any]) -> list[str]:
    result = await agent(kind, NativeOutput(City)).run("Go.", message_history=HISTORY, usage_limits=MOST)
    assert isinstance(result.output, City)
    return names(result.all_messages())


async def only_asked_for(kind: type[Any]) -> str:
    """The schema is in the prompt alone: whether these models keep to it is up to them."""
    try:
        return str((await agent(kind, PromptedOutput(City)).run("Rome?", usage_limits=MOST)).output)
    except UnexpectedModelBehavior as error:
        return type(error).__name__


async def cancelled(kind: type[Any]) -> int:
    async with agent(kind, str).run_stream("Count.", model_settings={"max_tokens": 400}) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            break
    return len(result.all_messages())


async def picture(kind: type[Any]) -> Any:
    return await agent(kind, str).run([BinaryContent(data=b"x", media_type="image/png")])


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    name = "chat" if kind is OpenAIChatModel else "responses"
    run(f"{name}, by a tool", same, kind, ToolOutput(City), 6)
    run(f"{name}, native", same, kind, NativeOutput(City), 0)
    run(f"{name}, text", lambda kind: same(kind, str, 0, max_tokens=16), kind)
    run(f"{name}, after thinking", lambda kind: EVENTS.run_until_complete(after_thinking(kind)), kind)
    run(f"{name}, only asked for", lambda kind: EVENTS.run_until_complete(only_asked_for(kind)), kind)
    run(f"{name}, cancelled", lambda kind: EVENTS.run_until_complete(cancelled(kind)), kind)
    refused(f"{name}, image", lambda kind=kind: EVENTS.run_until_complete(picture(kind)), "only text parts are supported")
run(
    "responses, previous",
    lambda: same(OpenAIResponsesModel, ToolOutput(City), 6, openai_previous_response_id="auto"),
)
