"""What a person does with the page, and what they see there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.client import AsyncClient
from ryzanstein.lab.pages.chromium import Chromium, Page
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.v1.router_pb2 import GetRouterStatusRequest
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub
from ryzanstein.v1.worker_pb2 import GetStatusRequest
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

PICTURES = os.environ.get("RYZANSTEIN_PICTURES", "")
"""A folder in which the pictures of the documentation are written."""
QUESTION = "Count from 1 to 150."
ENDED = "document.querySelector('.answer:last-of-type') && !document.querySelector('.answer.streaming')"
STEPS = 20
"""After so many tokens something is killed."""
LAST = "[...document.querySelectorAll('.answer .body')].at(-1)"
TEXT = f"import('{{base}}static/answer.js').then((answer) => answer.textOf({LAST}))"
ROWS = "[...document.querySelectorAll('.parts tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
FOREIGN = ".answer :is(img, svg, script, style, iframe, form, input, base)"
STORES = "JSON.stringify([localStorage, sessionStorage, document.cookie])"


async def entered(browser: Chromium, link: str) -> Page:
    """A page that is logged in."""
    page = await browser.page()
    await page.size(1100, 760)
    await page.go(link)
    await page.until("document.getElementById('connection').textContent == 'connected'")
    return page


async def ask(page: Page, text: str) -> None:
    await page.until("document.activeElement.id == 'question'")
    await page.type(text)
    await page.press("Enter")
    await page.until("document.querySelector('#question').value == ''")


async def text_of(page: Page, console: ConsoleProcess) -> str:
    """The text of the last answer, without labels."""
    return str(await page.see(TEXT.format(base=console.url)))


async def nodes_of(page: Page) -> list[str]:
    return await page.see("[...document.querySelectorAll('.answer:last-of-type .chip')].map((each) => each.textContent)")


async def assert_calm(page: Page, console: ConsoleProcess) -> None:
    """No violation of the policy, no failed script, no request to another host."""
    await assert_calm_at(page, console.url)


async def assert_calm_at(page: Page, url: str) -> None:
    assert await page.violations == []
    own = urlsplit(url).netloc
    assert [each for each in page.requests if urlsplit(each).netloc != own and each != "about:blank"] == []


def words(text: str) -> list[str]:
    return text.split()


async def undisturbed(cluster: LocalCluster, question: str, **options: Any) -> str:
    async with AsyncClient(cluster.router_address) as client:
        return (await client.chat(question, temperature=0, **options)).text


async def serving(cluster: LocalCluster) -> tuple[str, str]:
    """The router and the node of the answer that runs, as soon as there is one: the page would say it too late."""
    addresses = {name: cluster.services[name].grpc_address for name in cluster.router_names}
    channels = {name: grpc.aio.insecure_channel(address) for name, address in addresses.items()}
    try:
        async with asyncio.timeout(20):
            while True:
                for name, channel in channels.items():
                    status = await RouterServiceStub(channel).GetRouterStatus(GetRouterStatusRequest(), timeout=10)
                    if busy := [link.node_id for link in status.links if link.inflight]:
                        await _steps(cluster.services[busy[0]].grpc_address)
                        return name, busy[0]
    finally:
        for channel in channels.values():
            await channel.close()


async def _steps(address: str) -> None:
    """Waits until a node has made some steps more."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub, first = WorkerServiceStub(channel), -1
        while True:
            step = (await stub.GetStatus(GetStatusRequest(), timeout=10)).ranks[0].step
            first = step if first < 0 else first
            if step >= first + STEPS:
                return


async def set_long(page: Page, max_tokens: int = 500) -> None:
    """Asks for the likeliest tokens, and for many of them."""
    await page.see(
        f"document.getElementById('max-tokens').value = {max_tokens}; document.getElementById('temperature').value = 0"
    )


async def picture(page: Page, name: str) -> None:
    """Writes a picture of the documentation, where one is asked for."""
    if PICTURES:
        await page.see("document.activeElement.blur()")
        await asyncio.sleep(0.3)
        Path(PICTURES, name).write_bytes(await page.picture())  # noqa: ASYNC240
