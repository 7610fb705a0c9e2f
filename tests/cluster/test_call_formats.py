"""A model's own format of calls, from its template to the official client and back.

The demo model writes what a constraint makes it write: the golden answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.worker.text.golden import CALLS, GOLDEN, SCHEMA

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.demo import MODEL_DIR

from .conftest import _harness

pytestmark = pytest.mark.long

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: dict[str, Any] = {"role": "user", "content": "Is it sunny in Rome?"}


@pytest.fixture(scope="module", params=["qwen_xml", "lfm2", "harmony"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(GOLDEN[request.param].template)
    flags = ("--chat-template", str(template))
    for harness in _harness(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, worker_flags=flags)):
        yield request.param, harness


def test_calls_are_streamed_and_told_back(served: tuple[str, Any]) -> None:
    name, harness = served
    answer = GOLDEN[name].answer.split("</think>")[-1]  # a constraint leaves no room for reasoning in tags
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [QUESTION],
        "tools": TOOLS,
        "max_tokens": 700,
        "extra_body": {"guided_choice": [answer]},
    }
    calls: dict[int, dict[str, Any]] = {}
    content, reasons, pieces = "", [], 0
    with openai.OpenAI(base_url=f"{harness.cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                reasons += [choice.finish_reason] if choice.finish_reason else []
                content += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    pieces += 1
                    call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
                    call["arguments"] += piece.function.arguments or ""
        assert content.strip() == "I look."
        assert reasons == ["tool_calls"]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == CALLS
        assert pieces > 3 * len(CALLS), "arguments arrive while they are written"
        told: Any = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls.values()]
        messages = [QUESTION, {"role": "assistant", "content": content, "tool_calls": told}, *results]
        forced = client.chat.completions.create(
            model="demo", messages=messages, tools=TOOLS, tool_choice="required", max_tokens=600
        )
    (first, *_) = forced.choices[0].message.tool_calls or ()
    assert first.function.name in ("weather", "now")
    assert not forced.choices[0].message.content
