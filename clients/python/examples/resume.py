"""Reads a part of an answer, and lets another client read the rest. `resume.py [ROUTERS]`.

A position is all that the other one needs: it may be another process, on another machine.
"""

import json
import sys

from ryzanstein.client import Client, Position, Text

routers = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(routers) as first:
    stream = first.stream("Count from 1 to 40.", temperature=0)
    for event in stream:
        print(getattr(event, "text", ""), end="", flush=True)
        if isinstance(event, Text) and event.first_index >= 10:
            break
    position = stream.detach()
    saved = json.dumps([position.generation_id, position.next_index])

generation_id, next_index = json.loads(saved)
with Client(routers) as second:
    rest = second.attach(Position(generation_id, tuple(next_index)))
    print("|" + "".join(rest.text()))
