"""Lets the assistant call a function, and shows each call. `tools.py [ROUTERS]`."""

import sys
from typing import Literal

from ryzanstein.client import Client


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Returns the weather in a city."""
    print(f"called: weather({city!r})", file=sys.stderr)
    return f"It rains in {city}."


with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    answer = client.run("What is the weather in Rome?", [weather], tool_choice="required", temperature=0, max_tokens=200)
    print(answer.text or answer.finish_reason)
