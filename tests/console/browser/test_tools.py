"""Tools in a real Chromium: a person gives them, sees the calls, and is the tool."""

from __future__ import annotations

import json

import pytest
from tests.console.browser.browsing import ENDED, ask, assert_calm, entered, set_long

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.client import AsyncClient
from ryzanstein.lab.pages.chromium import Chromium, Page
from ryzanstein.lab.pages.console_process import ConsoleProcess

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]

TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
]
NOTICE = "document.getElementById('notice').textContent"


async def give(page: Page, tools: str, choice: str) -> None:
    await page.see(f"document.getElementById('tools').value = {json.dumps(tools)}")
    await page.see(f"document.getElementById('tool-choice').value = {choice!r}")


async def test_calls_are_shown_and_their_results_go_back(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    page = await entered(browser, real_console.link)
    await set_long(page, 400)
    await give(page, json.dumps(TOOLS), "required")
    await ask(page, "Count from 1 to 5.")
    await page.until(f"document.querySelector('form.asked') && {ENDED}", 60)
    assert await page.see("document.querySelector('.call code').textContent") == "weather"
    arguments = json.loads(await page.see("document.querySelector('.call pre').textContent"))
    assert set(arguments) == {"city", "days"}
    assert await page.see("document.querySelectorAll('.aside.calls').length") == 0, "what streamed is replaced"
    await give(page, json.dumps(TOOLS), "none")
    await page.see("document.querySelector('.asked textarea').focus()")
    await page.type('{"sky": "<b>clear</b>"}')
    await page.see("document.querySelector('.asked button').focus()")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.answer').length == 2")
    await page.until(ENDED, 60)
    assert await page.see("document.querySelector('.question.result').textContent") == 'weather: {"sky": "<b>clear</b>"}'
    assert await page.see("document.querySelectorAll('.asked textarea, .asked button').length") == 0, "it was answered"
    session = (await page.see("location.hash")).removeprefix("#s/")
    async with AsyncClient(cluster.router_address) as client:
        kept = (await client.sessions.get(session)).messages
    asked, call, result, _ = kept
    assert asked.content == "Count from 1 to 5."
    assert json.loads(call.tool_calls[0].arguments) == arguments
    assert (result.tool_call_id, result.content) == (call.tool_calls[0].id, '{"sky": "<b>clear</b>"}')
    await page.see("document.getElementById('retry').click()")
    await page.until(f"location.hash != '#s/{session}' && document.querySelectorAll('.answer').length == 2 && {ENDED}", 60)
    assert await page.see("[...document.querySelectorAll('.question')].map((each) => each.className)") == [
        "question",
        "question result",
    ]
    await assert_calm(page, real_console)


async def test_tools_that_cannot_be_ones_are_named(browser: Chromium, real_console: ConsoleProcess) -> None:
    page = await entered(browser, real_console.link)
    for tools, why in (
        ("[{]", "are not JSON"),
        ('{"description": "x"}', "tool 1 has no name"),
        ("[1]", "tool 1 has no name"),
        ('[{"name": "a"}, {"name": "b", "parameters": [1]}]', "tool 2: its parameters must be a JSON schema"),
    ):
        await give(page, tools, "auto")
        await page.see("document.getElementById('question').value = ''; document.getElementById('question').focus()")
        await page.type("hello")
        await page.press("Enter")
        await page.until(f"{NOTICE}.includes({why!r})")
        assert await page.see("document.getElementById('question').value") == "hello", "what was written stays"
    assert await page.see("document.querySelectorAll('.answer').length") == 0
