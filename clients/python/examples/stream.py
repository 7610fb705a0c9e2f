"""Prints an answer as it comes, then which node wrote which part of it. `stream.py [ROUTERS]`."""

import sys

from ryzanstein.client import Client, Moved

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    with client.stream("Count from 1 to 40.", temperature=0) as stream:
        for event in stream:
            match event:
                case Moved(move):
                    print(f"[{move.from_node} -> {move.to_node} after {move.silence_s * 1e3:.0f} ms]", file=sys.stderr)
                case _:
                    print(getattr(event, "text", ""), end="", flush=True)
    print()
    for part in stream.answer.parts:
        print(f"{part.node}: {part.tokens} tokens", file=sys.stderr)
