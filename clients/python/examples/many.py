"""Asks many questions at once, some at a time, and goes on where one of them fails. `many.py [ROUTERS]`."""

import asyncio
import sys

from ryzanstein.client import AsyncClient, ClientError

QUESTIONS = [f"Count from 1 to {number}." for number in range(3, 23)]
AT_ONCE = 8


async def main(routers: str) -> None:
    places = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(routers, timeout_s=60) as client:

        async def ask(question: str) -> str:
            async with places:
                try:
                    return (await client.chat(question, temperature=0)).text
                except ClientError as error:
                    had = error.partial.text if error.partial is not None else ""
                    return f"{type(error).__name__}: {error.message}; it had said {had!r}"

        for question, answer in zip(QUESTIONS, await asyncio.gather(*map(ask, QUESTIONS)), strict=True):
            print(f"{question} {answer}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
