"""The official client for Python: chats with its stream helper and `parse`, and the Responses API."""

from __future__ import annotations

from typing import Any

import openai
from loops import HUGE, MODEL, PIXEL, RESULTS, URL, City, refused, run

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=100)
CITY = openai.pydantic_function_tool(City)
NOW = {"type": "function", "function": {"name": "now"}}  # neither parameters nor a description
QUESTION: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Plan a trip to Rome."}]
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "seed": 1}
NAMED = {"type": "function", "function": {"name": "City"}}


def chat_loop(streamed: bool, choice: Any) -> list[Any]:
    messages = list(QUESTION)
    asked = {**OPTIONS, "tools": [CITY], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 150}
    for result in (RESULTS["Rome"], RESULTS["Oslo"], HUGE):
        if streamed:
            with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **asked) as stream:
                answer: Any = stream.get_final_completion()
        else:
            answer = client.chat.completions.parse(messages=messages, **asked)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, City)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    typed = client.chat.completions.parse(messages=messages, response_format=City, max_tokens=150, **OPTIONS)
    assert isinstance(typed.choices[0].message.parsed, City)
    free = client.chat.completions.create(messages=messages, tools=[CITY, NOW], max_tokens=16, **OPTIONS)
    assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")
    return [*((each.tool_calls[0].function.arguments) for each in messages[2::2]), typed.choices[0].message.parsed]


def same_streamed_and_whole() -> list[Any]:
    for choice in ("required", NAMED):
        whole, streamed = chat_loop(False, choice), chat_loop(True, choice)
        assert whole == streamed, (whole, streamed)
    return whole


def responses_loop(stored: bool, streamed: bool) -> list[Any]:
    tool: Any = {"type": "function", "name": "City", "parameters": City.model_json_schema(), "strict": True}
    items: list[Any] = list(QUESTION)
    items += [] if stored else [{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}]
    items += [] if stored else [{"role": "assistant", "content": "<think>so</think>Yes."}, {"role": "user", "content": "Go."}]
    kinds, last = [], None
    asked = {"model": MODEL, "temperature": 0, "tools": [tool], "parallel_tool_calls": False, "max_output_tokens": 150}
    for step in range(3):
        asked |= {"tool_choice": "required" if step < 2 else "none", "store": stored, "input": items}
        asked |= {"previous_response_id": last} if stored else {"include": ["reasoning.encrypted_content"]}
        if step == 2:
            asked["text_format"] = City
        if streamed:
            with client.responses.stream(**asked) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.parse(**asked)
        last = response.id
        assert response.status == "completed", response
        assert response.usage.total_tokens > 0
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": RESULTS["Rome"]}
            for item in response.output
            if item.type == "function_call"
        ]
        items = results if stored else [*items, *response.output, *results]
        kinds.append([item.type for item in response.output])
    assert isinstance(response.output_parsed, City)
    assert kinds == [["function_call"], ["function_call"], ["message"]], kinds
    return kinds


def cancelled() -> int:
    asked = {**OPTIONS, "max_tokens": 400, "temperature": 1}
    stream = client.chat.completions.create(messages=QUESTION, stream=True, **asked)
    seen = [next(stream) for _ in range(3)]
    stream.close()
    return len(seen)


def with_hints() -> str:
    answer = client.chat.completions.create(
        messages=[*QUESTION, {"role": "assistant", "content": "<think>hm</think>Well."}, QUESTION[-1]],
        max_completion_tokens=8,
        reasoning_effort="low",
        verbosity="low",
        service_tier="auto",
        store=False,
        metadata={"a": "b"},
        prediction={"type": "content", "content": "Well."},
        prompt_cache_key="key",
        safety_identifier="somebody",
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 40},
        **OPTIONS,
    )
    assert answer.choices[0].logprobs is not None
    return str(answer.choices[0].message.content)


PICTURE: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
run("chat, streamed and whole", same_streamed_and_whole)
for stored in (True, False):
    for streamed in (True, False):
        run(f"responses, {stored=}, {streamed=}", responses_loop, stored, streamed)
run("cancelled", cancelled)
run("hints", with_hints)
refused("image", lambda: client.chat.completions.create(messages=PICTURE, **OPTIONS), "only text parts are supported")
