"""Asks for an answer in the form of a type. `structured.py [ROUTERS]`. Needs `ryzanstein-client[pydantic]`."""

import sys
from typing import Literal

from pydantic import BaseModel

from ryzanstein.client import Client
from ryzanstein.client.errors import Incomplete


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    rains: bool


with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    try:
        parsed = client.chat_as(Weather, "How is the weather in Oslo?", max_tokens=200, temperature=0)
    except Incomplete as error:
        sys.exit(f"{error.message}; it had said {error.partial.text if error.partial else ''!r}")
    print(parsed.value.city, parsed.value.rains)
